"""Before any user meets a candidate it answers recorded calls: a bad one is stopped there.

At first beside a server that computes, then beside one that is away, slow, or refuses.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import versions_of, versions_table
from pawl.controller.gate.replay import TRIES, Replayed, replay_rule_of
from pawl.controller.gating import Gating
from pawl.controller.replays import Replay
from store.ids import new_id
from store.read.gates import gated
from store.schema.tables import updates
from store.version_queries import head_of, list_events, list_versions
from store.version_states import add_version, freeze, reject_orphan
from store.versions import PolicyEvent
from tests.support.controller.trials import (
    AWAY,
    RULE,
    following,
    gating,
    next_candidate,
    states,
)
from tests.support.controller.trials import candidate as trial_candidate
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import promote, trained
from tests.support.records import ago, call, tokens
from tests.support.servers.computing_server import computing_server
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.training import write_adapter
from tests.support.waiting import eventually, until
from trainer.publishing.model_server import Replicas

TOOLS = b'{"model":"m","tools":[{"function":{"name":"add","parameters":{"required":["a"]}}}]}'
REJECTED = ["rejected", "candidate", "written"]


REPLAYED = RULE.model_copy(
    update={"replay_states": 6, "replay_tokens": 8, "most_kl_to_serving": 0.5}
)
# How long ago the recorded calls were made: before any candidate.
MADE_S = 3600.0


async def recorded(
    engine: AsyncEngine,
    held_out: int = 4,
    others: int = 4,
    *,
    run: str = "",
    ago_s: float = MADE_S,
    **changes: Any,
) -> None:
    """Calls of the policy, some of evaluation: the prompt of each begins with its number from 2."""
    made = [("eval", f"{run}e{number}") for number in range(held_out)]
    made += [("train", f"{run}t{number}") for number in range(others)]
    calls = []
    for place, (split, key) in enumerate(made):
        own = {"split": split, "tokens": tokens([2 + place, 3, 4], [5, 6])}
        calls.append(call(key, **{**own, **ago(ago_s, place), **changes}))
    async with engine.begin() as connection:
        await ingest(connection, calls)


async def candidate(engine: AsyncEngine, name: str = "m", **rule: Any) -> None:
    """Version 1 of a policy, whose rule has a replay, waits for its trial."""
    await trial_candidate(engine, 0, rule=REPLAYED.model_copy(update=rule), name=name)


async def loaded(adapter: Path, *urls: str) -> None:
    """Every replica has loaded version 1."""
    async with Replicas(urls) as replicas:
        await replicas.load("m@1", adapter)


async def rounds(judge: Gating, engine: AsyncEngine, times: int = 5) -> None:
    """Let a controller look, and go on with replays, so often."""
    for _ in range(times):
        await judge.look(engine)
        await judge.replays.go_on(engine)


async def look(engine: AsyncEngine, *urls: str, times: int = 5) -> None:
    """Let a new controller look at the policies so often."""
    async with Replicas(urls) as replicas:
        await rounds(gating(engine, replicas), engine, times)


async def events_of(engine: AsyncEngine, version: int = 1) -> list[PolicyEvent]:
    """What became of a version, the newest first."""
    async with engine.connect() as connection:
        return await list_events(connection, "m", version)


async def last_event(engine: AsyncEngine, version: int = 1) -> PolicyEvent:
    return (await events_of(engine, version))[0]


async def replay_of(engine: AsyncEngine, version: int = 1) -> dict[str, Any]:
    """What a version's last event rests on."""
    evidence = (await last_event(engine, version)).evidence
    assert evidence is not None
    found: dict[str, Any] = evidence["replay"]
    return found


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    """One that has loaded versions 1 and 2."""
    async with fake_model_server() as fake:
        fake.loaded |= {"m@1": "/m/1", "m@2": "/m/2"}
        yield fake


@pytest.fixture
async def judge(engine: AsyncEngine, server: FakeModelServer) -> AsyncIterator[Gating]:
    """The server's controller."""
    async with Replicas([server.url]) as replicas:
        yield gating(engine, replicas)


@pytest.fixture
async def _waits(engine: AsyncEngine) -> None:
    """Version 1 waits for its replay of six recorded calls."""
    await recorded(engine)
    await candidate(engine)


@pytest.fixture
async def url(tiny_model: str) -> AsyncIterator[str]:
    async with computing_server("m", tiny_model) as found:
        yield found


@pytest.fixture(scope="module")
def random_adapter(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the last layer, as what the tiny model says hardly depends on any other.

    Its own weights there are random and small, so that all that it says is nearly uniform: an
    adapter of its attention, however large, moves it by a hundredth of a nat.
    """
    folder = tmp_path_factory.mktemp("random") / "adapter"
    head = ["lm_head"]
    return write_adapter(tiny_model, folder, lora_alpha=4000, lora_dropout=0.0, target_modules=head)


@pytest.fixture(scope="module")
def near_adapter(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with hardly an effect."""
    folder = tmp_path_factory.mktemp("near") / "adapter"
    return write_adapter(tiny_model, folder, lora_alpha=1, lora_dropout=0.0)


@pytest.fixture
async def _random_waits(engine: AsyncEngine, random_adapter: Path, url: str) -> None:
    """A random adapter waits for its replay of recorded calls."""
    await recorded(engine)
    await candidate(engine)
    await loaded(random_adapter, url)


@pytest.mark.usefixtures("_random_waits")
async def test_random_adapter_is_stopped(engine: AsyncEngine, url: str) -> None:
    await look(engine, url)
    assert await states(engine) == {0: "serving", 1: "rejected"}
    event = await last_event(engine)
    assert (event.from_state, event.to_state, event.actor) == (
        "candidate",
        "rejected",
        "controller",
    )
    assert "gate.most_kl_to_serving is 0.5" in event.reason
    assert event.evidence is not None
    assert event.evidence["rule"]["most_kl_to_serving"] == 0.5
    replay = event.evidence["replay"]
    assert (replay["states"], replay["held_out"], replay["tokens"]) == (6, 3, 48)
    assert replay["kl"] > 0.5
    async with engine.connect() as connection:
        assert (await head_of(connection, "m")).version == 0


async def test_adapter_that_answers_alike_is_tried_with_the_evidence(
    engine: AsyncEngine, near_adapter: Path, url: str
) -> None:
    await recorded(engine)
    await candidate(engine)
    await loaded(near_adapter, url)
    await look(engine, url, times=2)
    assert (await states(engine))[1] == "candidate"
    await look(engine, url)
    assert (await states(engine))[1] == "canary"
    assert 0.0 <= (await replay_of(engine))["kl"] < 0.5


@pytest.mark.parametrize("states_wanted", [0, 6])
async def test_trial_begins_without_a_replay_of_none_or_of_no_recorded_call(
    engine: AsyncEngine, server: FakeModelServer, states_wanted: int
) -> None:
    """What it would answer is too far from what serves."""
    server.logprobs = {"m@1": -9.0}
    if not states_wanted:
        await recorded(engine)
    await candidate(engine, replay_states=states_wanted)
    await look(engine, server.url, times=5 if states_wanted else 1)
    assert (await states(engine))[1] == "canary"
    if states_wanted:
        replay = await replay_of(engine)
        assert (replay["states"], replay["kl"]) == (0, None)
    else:
        assert (await last_event(engine)).evidence is None


@pytest.mark.usefixtures("_random_waits")
async def test_version_trained_on_from_a_stopped_one_never_serves(
    engine: AsyncEngine, url: str
) -> None:
    await add_child(engine, 2)
    await look(engine, url)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "rejected"}
    # Nor what was being trained meanwhile, and is recorded only now.
    await add_child(engine, 3)
    async with engine.begin() as connection:
        assert (await head_of(connection, "m")).version == 0
        why = await reject_orphan(connection, "m", 3)
    assert why == "it was trained on from m@1, which failed its replay"
    assert (await states(engine))[3] == "rejected"


async def add_child(engine: AsyncEngine, number: int) -> None:
    """A written version that was trained on from version 1."""
    made = {"id": new_id(), "policy": "m", "parent_version": 1, "version": number}
    async with engine.begin() as connection:
        await connection.execute(insert(updates).values(**made, state="done", recipe={}))
        await add_version(connection, "m", number, f"/m/{number}", made["id"])


@pytest.mark.usefixtures("_random_waits")
async def test_controller_killed_in_the_middle_comes_to_the_same_when_it_is_started_again(
    engine: AsyncEngine, url: str
) -> None:
    uninterrupted = await replayed(engine, url)
    # Four of six calls are answered, and what is recorded then is asked about by nobody.
    await look(engine, url, times=1)
    await recorded(engine, held_out=9, others=9, run="late-", ago_s=0.0)
    await look(engine, url)
    assert await replay_of(engine) == json.loads(msgspec.json.encode(uninterrupted))


async def replayed(engine: AsyncEngine, url: str) -> Replayed | None:
    """What a replay comes to that nothing interrupts."""
    async with engine.connect() as connection:
        stands = await gated(connection, "m")
    assert stands is not None
    assert stands.candidate is not None
    rule = replay_rule_of(stands.candidate.gate or {})
    replay = Replay(stands.candidate, stands.serving, rule)
    async with Replicas([url]) as replicas:
        while replay.verdict is None:
            assert await replay.step(engine, replicas)
    return replay.verdict


@pytest.mark.usefixtures("_waits")
async def test_candidate_waits_while_no_server_answers(
    engine: AsyncEngine, server: FakeModelServer
) -> None:
    with capture_logs() as logs:
        await look(engine, AWAY)
    assert [one["event"] for one in logs] == ["replay_waits_for_server"]
    assert (await states(engine))[1] == "candidate"
    # It has it loaded no more, or not yet.
    del server.loaded["m@1"]
    await look(engine, server.url)
    assert (await states(engine))[1] == "candidate"
    server.loaded["m@1"] = "/m/1"
    await look(engine, AWAY, server.url)
    assert (await states(engine))[1] == "canary"


@pytest.mark.usefixtures("_waits")
async def test_server_whose_engine_died_is_passed_over(
    engine: AsyncEngine, server: FakeModelServer
) -> None:
    """It lists its models all the same."""
    async with fake_model_server() as dead:
        dead.loaded["m@1"] = "/m/1"
        dead.engine_is_dead = True
        dead.cannot_answer |= {"m", "m@1"}
        await look(engine, dead.url)
        assert (await states(engine))[1] == "candidate"
        await look(engine, dead.url, server.url)
    assert (await states(engine))[1] == "canary"
    assert (await replay_of(engine))["states"] == 6


@pytest.mark.usefixtures("_waits")
async def test_server_that_was_restarted_in_the_middle_is_asked_again(
    engine: AsyncEngine, server: FakeModelServer, judge: Gating
) -> None:
    server.forgets = {"m@1"}
    await rounds(judge, engine)
    assert (await states(engine))[1] == "candidate"
    server.loaded["m@1"] = "/m/1"
    await rounds(judge, engine)
    assert (await states(engine))[1] == "canary"
    assert (await replay_of(engine))["states"] == 6


@pytest.mark.usefixtures("_waits")
async def test_slow_server_keeps_no_policy_from_being_judged(
    engine: AsyncEngine, server: FakeModelServer, judge: Gating
) -> None:
    await candidate(engine, "n", replay_states=0)
    server.slow_answer = asyncio.Event()

    async def is_tried(name: str) -> bool:
        async with engine.connect() as connection:
            return (await list_versions(connection, name))[1].state == "canary"

    async with following(judge):
        await until(lambda: server.asked >= 4, within_s=120.0)
        await eventually(lambda: is_tried("n"), within_s=120.0)
        # Four at once, however many wait.
        assert server.asked == 4
        server.slow_answer.set()
        await eventually(lambda: is_tried("m"), within_s=120.0)


async def test_answer_that_does_not_come_in_time_is_given_up_after_some_tries(
    engine: AsyncEngine, server: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await recorded(engine)
    await candidate(engine, replay_states=4)
    server.slow_answer = asyncio.Event()
    monkeypatch.setattr("pawl.controller.replays.ANSWER_S", 0.1)
    await look(engine, server.url, times=TRIES)
    assert len(await events_of(engine)) == 2
    await look(engine, server.url, times=TRIES + 1)
    assert (await states(engine))[1] == "candidate"
    replay = await replay_of(engine)
    assert (replay["states"], replay["left_out"], replay["missing"]) == (0, 4, 0)
    assert "TimeoutError" in (await last_event(engine)).reason
    server.slow_answer.set()


async def test_prompts_that_are_too_long_for_the_server_are_left_out(
    engine: AsyncEngine, server: FakeModelServer
) -> None:
    await recorded(engine)
    await recorded(engine, held_out=1, others=0, run="long-", tokens=tokens([2] * 40, [6]))
    await candidate(engine, replay_states=9)
    server.longest = 30
    await look(engine, server.url)
    assert (await states(engine))[1] == "canary"
    replay = await replay_of(engine)
    assert (replay["states"], replay["left_out"], replay["missing"]) == (8, 1, 0)
    assert "maximum context length is 30 tokens" in replay["why_left_out"]


@pytest.mark.usefixtures("_waits")
async def test_no_user_meets_a_candidate_of_which_nothing_could_be_asked(
    engine: AsyncEngine, server: FakeModelServer, judge: Gating, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.longest = 2
    with capture_logs() as logs:
        await rounds(judge, engine)
    assert (await states(engine))[1] == "candidate"
    [warning] = [one for one in logs if one["event"] == "replay_asked_nothing"]
    replay = await replay_of(engine)
    figures = [replay[name] for name in ("states", "left_out", "missing", "kl")]
    assert figures == [0, 6, 0, None]
    lines = await versions_of(engine, "m")
    assert [line.waits for line in lines if line.waits] == [warning["reason"]]
    caption = str(versions_table(lines).caption)
    assert "m@1 waits: in its replay none of 6 recorded calls" in caption
    assert "maximum context length is 2 tokens" in warning["reason"]
    # It is asked again, and the event is written once, also by a controller that is started again.
    monkeypatch.setattr("pawl.controller.replays.AGAIN", timedelta(0))
    await rounds(judge, engine)
    await look(engine, server.url)
    assert [one.to_state for one in await events_of(engine)] == ["candidate", *REJECTED[1:]]
    # Nor does one with another reason from the server write an event at every look.
    for server.longest in (3, 2, 3):
        await look(engine, server.url)
        await rounds(judge, engine)
    assert len(await events_of(engine)) == 4
    server.longest = None
    await rounds(judge, engine)
    assert (await states(engine))[1] == "canary"
    assert (await replay_of(engine))["states"] == 6
    assert not any(line.waits for line in await versions_of(engine, "m"))


@pytest.mark.usefixtures("_waits")
async def test_candidate_that_cannot_answer_what_serves_can_is_rejected(
    engine: AsyncEngine, server: FakeModelServer
) -> None:
    """As one whose log-probabilities are no numbers, which vLLM answers with 500."""
    server.cannot_answer = {"m@1"}
    await look(engine, server.url, times=2 * TRIES + 1)
    assert (await states(engine))[1] == "rejected"
    assert "refused 6 of 6 answers" in (await last_event(engine)).reason
    assert (await replay_of(engine))["missing"] == 6


async def test_candidate_with_more_malformed_tool_calls_than_what_serves_is_rejected(
    engine: AsyncEngine, server: FakeModelServer
) -> None:
    await recorded(engine, request=TOOLS)
    await candidate(engine)
    server.says = {
        "m": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "m@1": '<tool_call>{"name": "add", "arguments": {"b": 1}}</tool_call>',
    }
    await look(engine, server.url)
    assert (await states(engine))[1] == "rejected"
    reason = (await last_event(engine)).reason
    assert "100% of its tool calls are malformed, and 0% of those of what serves" in reason
    replay = await replay_of(engine)
    assert (replay["malformed"], replay["judged_calls"]) == ([1.0, 0.0], [6, 6])


@pytest.mark.parametrize("is_answering", [False, True])
@pytest.mark.usefixtures("_waits")
async def test_newer_candidate_begins_a_replay_of_its_own(
    engine: AsyncEngine, server: FakeModelServer, judge: Gating, is_answering: bool
) -> None:
    """Whether the older one has some answers, or is in the middle of one."""
    # What the first says is too far, and only the first says so.
    server.logprobs = {"m@1": -9.0, "m@2": -1.0}
    if is_answering:
        server.slow_answer = asyncio.Event()

    await judge.look(engine)
    answering = asyncio.create_task(judge.replays.go_on(engine))
    await (until(lambda: server.asked >= 4, within_s=120.0) if is_answering else answering)
    await next_candidate(engine, 2, 1, REPLAYED)
    await judge.look(engine)
    if server.slow_answer is not None:
        server.slow_answer.set()
    await answering
    await judge.look(engine)
    assert (await states(engine))[2] == "candidate"
    await rounds(judge, engine)
    assert await states(engine) == {0: "serving", 1: "rejected", 2: "canary"}
    assert (await replay_of(engine, 2))["states"] == 6


async def test_replay_begins_again_beside_what_serves_by_its_end(
    engine: AsyncEngine, server: FakeModelServer, judge: Gating
) -> None:
    await recorded(engine)
    async with engine.begin() as connection:
        await trained(connection, 0)
        await promote(connection, "m", 1)
    await next_candidate(engine, 2, 1, REPLAYED)
    server.logprobs = {"m@1": -9.0}
    await rounds(judge, engine, 1)
    async with engine.begin() as connection:
        await promote(connection, "m", 0)
    await rounds(judge, engine)
    assert (await states(engine))[2] == "canary"
    assert (await replay_of(engine, 2))["kl"] == 0.0


@pytest.mark.usefixtures("_waits")
async def test_verdict_about_a_frozen_policy_waits(engine: AsyncEngine, judge: Gating) -> None:
    await judge.look(engine)
    for frozen in (True, False):
        async with engine.begin() as connection:
            await freeze(connection, "m", frozen=frozen, reason="f", actor="operator")
        await rounds(judge, engine)
        assert (await states(engine))[1] == ("candidate" if frozen else "canary")


async def test_recorded_ids_are_continued_at_temperature_one_with_a_seed(
    engine: AsyncEngine, server: FakeModelServer
) -> None:
    await recorded(engine, held_out=1, others=0)
    await candidate(engine)
    seeds = set()
    for _ in range(2):
        await look(engine, server.url, times=1)
        body = server.sampled_with
        assert body is not None
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("m@1", [2, 3, 4], 8)
        assert (body["temperature"], body["top_p"], body["ignore_eos"]) == (1.0, 1.0, False)
        assert body["skip_special_tokens"] is False
        seeds.add(body["seed"])
    assert len(seeds) == 1
