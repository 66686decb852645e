"""A loss or gradient that is not finite spends the episode that is to blame, and no other."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from transformers import AutoModelForCausalLM

from store.records import Tokens
from store.values.packing import pack_logprobs
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest, reasons
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer
from tests.support.trainer.bench import Bench
from tests.support.training import ppo_recipe, recipe, sft_recipe
from trainer.learners.learner import Learner
from trainer.recipes.recipe import Recipe

GROUPS = 3


class RealBench(Bench):
    """The loop with a real learner of a tiny model."""

    def __init__(
        self, engine: AsyncEngine, server: FakeModelServer, folder: Path, model: str, rule: Recipe
    ) -> None:
        super().__init__(engine, server, folder)
        common = {"claim": self.recipe.claim, "publish": self.recipe.publish}
        self.recipe = rule.model_copy(update=common)
        self.learner = Learner(model, self.recipe, 0, folder / ".scratch")

    async def fill_with(self, odd: Tokens | None = None, value: float = 1.0) -> None:
        """Groups of two; the second member of the first has what is `odd`."""
        async with self.engine.begin() as connection:
            await ensure_base(connection, "m")
            for task in range(GROUPS):
                for member in range(2):
                    key, is_odd = f"t{task}-{member}", (task, member) == (0, 1)
                    made = tokens([5, 6, task + 7], [20 + member, 30], -4.5)
                    record = call(key, task=f"t{task}", tokens=odd if odd and is_odd else made)
                    paid = value if is_odd else float(member)
                    await ingest(connection, [record, reward(paid, episode=key)])

    async def outcomes(self) -> list[tuple[str, int | None]]:
        return [(one.state, one.version) for one in await self.updates()]


def far_off() -> Tokens:
    """Sampled with a probability of e⁻⁵⁰⁰⁰, it says: the ratio is past any float."""
    made = tokens([5, 6, 7], [20, 30])
    return Tokens(
        prompt_ids=made.prompt_ids,
        sampled_ids=made.sampled_ids,
        sampled_logprobs=pack_logprobs([-4.5, -5000.0]),
    )


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a ratio past any float": ({"odd": far_off()}, "non_finite"),
    "an id of another vocabulary": ({"odd": tokens([5, 6, 7], [20, 97])}, "damaged"),
    "a prompt of another vocabulary": ({"odd": tokens([5, 2**31 - 1], [20])}, "damaged"),
}


def rule_of(learner: str, steps: int) -> Recipe:
    of = {"sft": sft_recipe, "ppo": ppo_recipe, "grpo": recipe}
    return of[learner](steps=steps)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("learner", ["grpo", "ppo"])
@pytest.mark.parametrize("case", CASES)
async def test_episode_with_a_non_finite_loss_is_spent_and_the_others_are_trained(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    tiny_model: str,
    case: str,
    learner: str,
) -> None:
    # Ratios are looked at in the first step alone; past it the loss cuts them.
    steps = 1 if case == "a ratio past any float" else 2
    bench = RealBench(engine, server, tmp_path, tiny_model, rule_of(learner, steps))
    odd, reason = CASES[case]
    await bench.fill_with(**odd)
    before = {n: p.detach().clone() for n, p in bench.learner._model.named_parameters()}
    assert await bench.run_once()
    spent = await reasons(engine)
    assert spent.pop("t0-1") == reason
    assert spent == {f"t{task}-{member}": None for task in (1, 2) for member in (0, 1)}
    assert await bench.outcomes() == [("expired", None), ("done", 1)]

    # What was undone left nothing: the version is that of an update without the episode.
    trained = {n: p.detach().clone() for n, p in bench.learner._model.named_parameters()}
    assert any(not torch.equal(before[n], trained[n]) for n in before)
    assert all(bool(torch.isfinite(p).all()) for p in trained.values())
    # What gives one policy no finite gradient may give another one.
    query = text("SELECT quarantined_reason FROM episodes WHERE key = 't0-1'")
    async with engine.connect() as connection:
        quarantined = await connection.scalar(query)
    assert (quarantined is None) == (reason == "non_finite")


@pytest.fixture(scope="module")
def broken_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its head is not a number."""
    folder = tmp_path_factory.mktemp("broken")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    model.save_pretrained(folder)
    for file in Path(tiny_model).glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("learner", ["grpo", "ppo", "sft"])
async def test_non_finite_update_without_a_blamed_episode_spends_no_episode(
    engine: AsyncEngine, server: FakeModelServer, tmp_path: Path, broken_model: str, learner: str
) -> None:
    bench = RealBench(engine, server, tmp_path, broken_model, rule_of(learner, 1))
    await bench.fill_with()
    async with bench.working() as loop:
        assert not await loop.update_once()
        assert await reasons(engine) == {}
        assert await bench.outcomes() == [("abandoned", None)] * 2
        # Not at once again, and not before a step on other rows is a finite one.
        for _ in range(2):
            assert not await loop.update_once()
            loop._breaker._test_at = 0.0
            await loop.test_if_due()
        assert not await loop.update_once()
        assert len(await bench.outcomes()) == 2
        assert re.search("nan|not finite|too far", loop._breaker.why or "")
    query = text("SELECT count(*) FROM episode_policies WHERE claimed_by IS NOT NULL")
    async with engine.connect() as connection:
        assert await connection.scalar(query) == 0
    assert not list(tmp_path.glob("m/[0-9]*"))
