"""A replay and its model servers: away, slow, refusing; and candidates that change meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.policies import versions_of, versions_table
from pawl.steward.gate.replay import TRIES
from pawl.steward.gating import Gating
from store.version_queries import list_versions
from store.version_states import freeze
from tests.support.ledger.lineage import promote, trained
from tests.support.records import tokens
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.replays import (
    REPLAYED,
    candidate,
    events_of,
    last_event,
    look,
    recorded,
    replay_of,
    rounds,
)
from tests.support.steward.trials import (
    AWAY,
    gating,
    next_candidate,
    states,
)
from tests.support.waiting import eventually
from trainer.publishing.model_server import Replicas

TOOLS = b'{"model":"m","tools":[{"function":{"name":"add","parameters":{"required":["a"]}}}]}'
REJECTED = ["rejected", "candidate", "written"]


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    """One that has loaded versions 1 and 2."""
    async with fake_model_server() as fake:
        fake.loaded |= {"m@1": "/m/1", "m@2": "/m/2"}
        yield fake


@pytest.fixture
async def judge(database_url: str, server: FakeModelServer) -> AsyncIterator[Gating]:
    """The server's steward."""
    async with Replicas([server.url]) as replicas:
        yield gating(database_url, replicas)


@pytest.fixture
async def _waits(engine: AsyncEngine) -> None:
    """Version 1 waits for its replay of six recorded calls."""
    await recorded(engine)
    await candidate(engine)


@pytest.mark.usefixtures("_waits")
async def test_candidate_waits_while_no_server_answers(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    with capture_logs() as logs:
        await look(database_url, engine, AWAY)
    assert [one["event"] for one in logs] == ["replay_waits_for_server"]
    assert (await states(engine))[1] == "candidate"
    # It has it loaded no more, or not yet.
    del server.loaded["m@1"]
    await look(database_url, engine, server.url)
    assert (await states(engine))[1] == "candidate"
    server.loaded["m@1"] = "/m/1"
    await look(database_url, engine, AWAY, server.url)
    assert (await states(engine))[1] == "canary"


@pytest.mark.usefixtures("_waits")
async def test_server_whose_engine_died_is_passed_over(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    """It lists its models all the same."""
    async with fake_model_server() as dead:
        dead.loaded["m@1"] = "/m/1"
        dead.engine_is_dead = True
        dead.cannot_answer |= {"m", "m@1"}
        await look(database_url, engine, dead.url)
        assert (await states(engine))[1] == "candidate"
        await look(database_url, engine, dead.url, server.url)
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

    async def is_asked() -> bool:
        return server.asked >= 4

    async def is_tried(name: str) -> bool:
        async with engine.connect() as connection:
            return (await list_versions(connection, name))[1].state == "canary"

    following = asyncio.create_task(judge.follow())
    await eventually(is_asked, within_s=120.0)
    await eventually(lambda: is_tried("n"), within_s=120.0)
    # Four at once, however many wait.
    assert server.asked == 4
    server.slow_answer.set()
    await eventually(lambda: is_tried("m"), within_s=120.0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_answer_that_does_not_come_in_time_is_given_up_after_some_tries(
    engine: AsyncEngine, database_url: str, server: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await recorded(engine)
    await candidate(engine, replay_states=4)
    server.slow_answer = asyncio.Event()
    monkeypatch.setattr("pawl.steward.replays.ANSWER_S", 0.1)
    await look(database_url, engine, server.url, times=TRIES)
    assert len(await events_of(engine)) == 2
    await look(database_url, engine, server.url, times=TRIES + 1)
    assert (await states(engine))[1] == "candidate"
    replay = await replay_of(engine)
    assert (replay["states"], replay["left_out"], replay["missing"]) == (0, 4, 0)
    assert "TimeoutError" in (await last_event(engine)).reason
    server.slow_answer.set()


async def test_prompts_that_are_too_long_for_the_server_are_left_out(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    await recorded(engine)
    await recorded(engine, held_out=1, others=0, run="long-", tokens=tokens([2] * 40, [6]))
    await candidate(engine, replay_states=9)
    server.longest = 30
    await look(database_url, engine, server.url)
    assert (await states(engine))[1] == "canary"
    replay = await replay_of(engine)
    assert (replay["states"], replay["left_out"], replay["missing"]) == (8, 1, 0)
    assert "maximum context length is 30 tokens" in replay["why_left_out"]


@pytest.mark.usefixtures("_waits")
async def test_no_user_meets_a_candidate_of_which_nothing_could_be_asked(
    engine: AsyncEngine,
    database_url: str,
    server: FakeModelServer,
    judge: Gating,
    monkeypatch: pytest.MonkeyPatch,
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
    # It is asked again, and the event is written once, also by a steward that is started again.
    monkeypatch.setattr("pawl.steward.replays.AGAIN", timedelta(0))
    await rounds(judge, engine)
    await look(database_url, engine, server.url)
    assert [one.to_state for one in await events_of(engine)] == ["candidate", *REJECTED[1:]]
    # Nor does one with another reason from the server write an event at every look.
    for server.longest in (3, 2, 3):
        await look(database_url, engine, server.url)
        await rounds(judge, engine)
    assert len(await events_of(engine)) == 4
    server.longest = None
    await rounds(judge, engine)
    assert (await states(engine))[1] == "canary"
    assert (await replay_of(engine))["states"] == 6
    assert not any(line.waits for line in await versions_of(engine, "m"))


@pytest.mark.usefixtures("_waits")
async def test_candidate_that_cannot_answer_what_serves_can_is_rejected(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    """As one whose log-probabilities are no numbers, which vLLM answers with 500."""
    server.cannot_answer = {"m@1"}
    await look(database_url, engine, server.url, times=2 * TRIES + 1)
    assert (await states(engine))[1] == "rejected"
    assert "refused 6 of 6 answers" in (await last_event(engine)).reason
    assert (await replay_of(engine))["missing"] == 6


async def test_candidate_with_more_malformed_tool_calls_than_what_serves_is_rejected(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    await recorded(engine, request=TOOLS)
    await candidate(engine)
    server.says = {
        "m": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "m@1": '<tool_call>{"name": "add", "arguments": {"b": 1}}</tool_call>',
    }
    await look(database_url, engine, server.url)
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

    async def is_asked() -> bool:
        return server.asked >= 4

    await judge.look(engine)
    answering = asyncio.create_task(judge.replays.go_on(engine))
    await (eventually(is_asked, within_s=120.0) if is_answering else answering)
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
        await promote(connection, "m", 1, reason="for the test", actor="operator")
    await next_candidate(engine, 2, 1, REPLAYED)
    server.logprobs = {"m@1": -9.0}
    await rounds(judge, engine, 1)
    async with engine.begin() as connection:
        await promote(connection, "m", 0, reason="for the test", actor="operator")
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


@pytest.mark.usefixtures("_waits")
async def test_several_stewards_reject_a_candidate_once(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    server.logprobs = {"m@1": -0.1, "m": -9.0}
    async with Replicas([server.url]) as replicas:
        stewards = [gating(database_url, replicas) for _ in range(3)]
        for _ in range(5):
            await asyncio.gather(*(rounds(one, engine, 1) for one in stewards))
    assert [one.to_state for one in await events_of(engine)] == REJECTED


async def test_recorded_ids_are_continued_at_temperature_one_with_a_seed(
    engine: AsyncEngine, database_url: str, server: FakeModelServer
) -> None:
    await recorded(engine, held_out=1, others=0)
    await candidate(engine)
    seeds = set()
    for _ in range(2):
        await look(database_url, engine, server.url, times=1)
        body = server.sampled_with
        assert body is not None
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("m@1", [2, 3, 4], 8)
        assert (body["temperature"], body["top_p"], body["ignore_eos"]) == (1.0, 1.0, False)
        assert body["skip_special_tokens"] is False
        seeds.add(body["seed"])
    assert len(seeds) == 1
