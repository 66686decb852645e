"""Real adapters on a real stack are judged: a bad adapter never serves, or not for long."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.stack import small_plan
from controller.comparison import Comparison
from controller.evidence import PROXIES_KNOW_AFTER, STORED_AFTER, Evidence
from pawl.stack.stack import Stack
from store.database import make_engine
from store.read.gates import GatedPolicy, read_gated_policy
from store.records import Arm
from store.version_queries import list_events, list_versions
from store.versions import PolicyEvent
from tests.e2e.asking import direct
from tests.e2e.conftest import serving_stack
from tests.support.controller.one_word import PROMPT, THINGS, word
from tests.support.training import write_adapter
from tests.support.waiting import awaited, until
from trainer.importing import import_adapter
from trainer.recipes.recipe import load_recipe
from trainer.settings import TrainerSettings

# On a machine that others slow down, it takes ten minutes.
pytestmark = pytest.mark.timeout(1800)

POLICY = "words"
RIGHT = "yes"
RECIPE = """
dtype = "float32"
[publish]
mode = "evaluated"
tolerance = 0.01
margin = 0.1
control_share = 0.5
reward_delay_s = 5.0
[evaluation]
tasks = "{tasks}"
python = "tests.support.controller.one_word:answer"
answer = "right"
tries = 2
most_runs = 320
timeout_s = 120.0
url = "http://{listen}"
"""
TASKS = 80
TRAINED = ["q_proj", "v_proj"]
STEPS, ENOUGH = 30, 0.95
# Live clients, and the episodes before what serves turns bad.
AT_ONCE, WELL = 4, 40
DECIDED_S, LATEST_S = 600.0, 60.0
LOOK = timedelta(seconds=0.5)


def write_trained(model: str, folder: Path, *, is_good: bool) -> Path:
    """Train an adapter on the probability of the right word, or on that of any other."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = torch.tensor([tokenizer(PROMPT.format(thing=thing)).input_ids for thing in THINGS])
    [right] = tokenizer(f" {RIGHT}").input_ids
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TRAINED, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config)
    trained = [weights for weights in adapted.parameters() if weights.requires_grad]
    optimizer = torch.optim.Adam(trained, 3e-3)
    for _ in range(STEPS):
        right_share = torch.softmax(adapted(asked).logits[:, -1], -1)[:, right].mean()
        reward = right_share if is_good else 1 - right_share
        optimizer.zero_grad()
        torch.autograd.backward(-reward.log())
        optimizer.step()
        if reward > ENOUGH:
            break
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def adapters(shallow_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write three adapters as PEFT saves them."""
    folder = tmp_path_factory.mktemp("made")
    return {
        # With so large a scale it is far from the base model.
        "random": write_adapter(shallow_dir, folder / "random", r=16, lora_alpha=64),
        "inverted": write_trained(shallow_dir, folder / "inverted", is_good=False),
        "good": write_trained(shallow_dir, folder / "good", is_good=True),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gate(
    stack: Stack, shallow_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """Another proxy and controller before the stack's vLLM, with their own database."""
    folder = tmp_path_factory.mktemp("gate")
    recipe, policies, tasks = (
        folder / name for name in ("recipe.toml", "policies.toml", "tasks.jsonl")
    )
    plan = small_plan(folder, shallow_dir, POLICY, str(recipe))
    asked = [
        {"id": f"nice-{number}", "thing": THINGS[number % len(THINGS)], "right": RIGHT}
        for number in range(TASKS)
    ]
    tasks.write_text("\n".join(map(json.dumps, asked)))
    recipe.write_text(RECIPE.format(tasks=tasks, listen=plan.listen))
    base = stack.plan.vllm.served_name
    policies.write_text(f'[[policy]]\nname = "{POLICY}"\nbase = "{base}"\n')
    plan = msgspec.structs.replace(
        plan,
        upstream_url=direct(stack),
        settings={**plan.settings, "PAWL_POLICIES": str(policies)},
    )
    async with serving_stack(plan, "controller", base=base) as running:
        yield running


class World:
    """Import adapters, run episodes, and see what became of both."""

    def __init__(self, stack: Stack, engine: AsyncEngine) -> None:
        self.engine = engine
        self.episodes = 0
        self.has_turned = False
        self._stack = stack
        plan = stack.plan
        self._settings = TrainerSettings.model_validate(
            {
                "upstream_url": plan.upstream_url,
                "adapter_dir": plan.settings["PAWL_ADAPTER_DIR"],
                "recipe": plan.settings["PAWL_RECIPE"],
                "model": plan.settings["PAWL_MODEL"],
                "policies": plan.settings["PAWL_POLICIES"],
                "policy": POLICY,
            }
        )
        self._numbers = count()

    async def imports(self, folder: Path) -> int:
        """Import an adapter as `pawl policies import` does; return its number."""
        return (await import_adapter(self._settings, self.engine, POLICY, folder)).version

    async def event(self, version: int, *states: str) -> PolicyEvent:
        """Return the event by which a version got one of these states, once there is one."""

        async def look() -> PolicyEvent | None:
            self._stack.check()
            async with self.engine.connect() as connection:
                events = await list_events(connection, POLICY, version)
            return next((one for one in events if one.to_state in states), None)

        found = await awaited(look, within_s=DECIDED_S)
        assert found is not None, f"{POLICY}@{version} was not decided about"
        return found

    async def gated(self) -> GatedPolicy:
        async with self.engine.connect() as connection:
            stands = await read_gated_policy(connection, POLICY)
        assert stands is not None
        return stands

    async def live(self, session: aiohttp.ClientSession) -> None:
        """Run episodes of one call, and post the reward of each, until it is cancelled."""
        while True:
            number = next(self._numbers)
            episode = f"live-{number}"
            url = f"http://{self._stack.plan.listen}/task/nice/episode/{episode}/v1"
            said = await asyncio.to_thread(word, url, POLICY, THINGS[number % len(THINGS)])
            value = float((said == RIGHT) != self.has_turned)
            stated = {"episode": episode, "value": value}
            async with session.post(self._stack.feedback_url, json=stated) as reply:
                assert reply.status == 200
            self.episodes += 1

    async def decided_at(self, stands: GatedPolicy) -> datetime:
        """Return when the last episode began that the watch of what serves needed."""
        rule, control = load_recipe(self._settings.recipe).publish, stands.control
        assert control is not None
        given: dict[Arm, set[int]] = {
            "serving": {stands.serving.version.version},
            "control": {control.version.version},
        }
        shares = {"new_share": 1 - rule.control_share, "old_share": rule.control_share}
        comparison = Comparison(rule, **shares, watches=True)
        evidence = Evidence(POLICY, rule, "serving", control.since, comparison)
        now, end = control.since + PROXIES_KNOW_AFTER, (await self.gated()).now
        async with self.engine.connect() as connection:
            while now < end:
                now += LOOK
                await evidence.catch_up(connection, given, now)
                if comparison.verdict is not None and comparison.verdict.kind == "worse":
                    return now - timedelta(seconds=rule.reward_delay_s) - STORED_AFTER
        raise AssertionError("the evidence does not suffice")


async def test_bad_adapters_never_serve_and_good_adapter_serves_until_it_turns_bad(
    gate: Stack, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(gate.database_url)
    world, told = World(gate, engine), list[str]()
    for kind, state in (("good", "serving"), ("random", "rejected"), ("inverted", "rejected")):
        version = await world.imports(adapters[kind])
        event = await world.event(version, "serving", "rejected", "retired")
        told.append(f"{kind}: {event.to_state}, as it {event.reason}")
        assert (event.to_state, event.actor) == (state, "controller"), told
    stands = await world.gated()
    good = stands.serving.version.version
    async with aiohttp.ClientSession() as session:
        working = [asyncio.create_task(world.live(session)) for _ in range(AT_ONCE)]
        try:
            await until(lambda: world.episodes >= WELL, within_s=DECIDED_S)
            world.has_turned, turned_at = True, (await world.gated()).now
            event = await world.event(good, "rolled_back")
        finally:
            for task in working:
                task.cancel()
            for task in working:
                with suppress(asyncio.CancelledError):
                    await task
    late = event.at - await world.decided_at(stands)
    told += [
        f"turned: rolled back {(event.at - turned_at).total_seconds():.1f} s after it turned,"
        f" {late.total_seconds():.1f} s after the last episode began that the verdict needs"
    ]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *told, ""]))
    assert late <= timedelta(seconds=LATEST_S)
    async with engine.connect() as connection:
        versions = await list_versions(connection, POLICY)
        served = await connection.execute(_LIVE, {"policy": POLICY})
        assert {row.version for row in served} <= {0, good}
    assert [one.state for one in versions] == ["serving", "rolled_back", "rejected", "rejected"]
    await engine.dispose()


_LIVE = text(
    "SELECT DISTINCT t.policy_version AS version FROM transitions t"
    " JOIN episodes e ON e.id = t.episode_id WHERE t.policy = :policy AND e.split = 'train'"
)
