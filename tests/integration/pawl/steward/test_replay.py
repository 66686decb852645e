"""Before any user meets a candidate it answers recorded calls: a bad one is stopped there."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward.gate.replay import Replayed, replay_rule_of
from pawl.steward.replays import Replay
from store import version_states
from store.ids import new_id
from store.lineage import head_of
from store.read.standing import gated
from store.schema.trained import updates
from store.version_states import add_version, reject_orphan
from tests.support.faults.killing import Killed, killing
from tests.support.servers.computing_server import computing_server
from tests.support.steward.replays import (
    candidate,
    events_of,
    last_event,
    loaded,
    look,
    recorded,
    replay_of,
)
from tests.support.steward.trials import states
from tests.support.training import write_adapter
from trainer.publishing.model_server import Replicas


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
async def test_random_adapter_is_stopped(engine: AsyncEngine, database_url: str, url: str) -> None:
    await look(database_url, engine, url)
    assert await states(engine) == {0: "serving", 1: "rejected"}
    event = await last_event(engine)
    assert (event.from_state, event.to_state, event.actor) == ("candidate", "rejected", "steward")
    assert "gate.most_kl_to_serving is 0.5" in event.reason
    assert event.evidence is not None
    assert event.evidence["rule"]["most_kl_to_serving"] == 0.5
    replay = event.evidence["replay"]
    assert (replay["states"], replay["held_out"], replay["tokens"]) == (6, 3, 48)
    assert replay["kl"] > 0.5
    async with engine.connect() as connection:
        assert (await head_of(connection, "m")).version == 0


async def test_adapter_that_answers_alike_is_tried_with_the_evidence(
    engine: AsyncEngine, database_url: str, near_adapter: Path, url: str
) -> None:
    await recorded(engine)
    await candidate(engine)
    await loaded(near_adapter, url)
    await look(database_url, engine, url, times=2)
    assert (await states(engine))[1] == "candidate"
    await look(database_url, engine, url)
    assert (await states(engine))[1] == "canary"
    assert 0.0 <= (await replay_of(engine))["kl"] < 0.5


async def test_without_the_key_there_is_no_replay(
    engine: AsyncEngine, database_url: str, random_adapter: Path, url: str
) -> None:
    await recorded(engine)
    await candidate(engine, replay_states=0)
    await loaded(random_adapter, url)
    await look(database_url, engine, url, times=1)
    assert (await states(engine))[1] == "canary"
    assert (await last_event(engine)).evidence is None


async def test_trial_begins_if_there_is_no_recorded_call(
    engine: AsyncEngine, database_url: str, near_adapter: Path, url: str
) -> None:
    await candidate(engine)
    await loaded(near_adapter, url)
    await look(database_url, engine, url)
    assert (await states(engine))[1] == "canary"
    replay = await replay_of(engine)
    assert (replay["states"], replay["kl"]) == (0, None)


@pytest.mark.usefixtures("_random_waits")
async def test_version_trained_on_from_a_stopped_one_never_serves(
    engine: AsyncEngine, database_url: str, url: str
) -> None:
    await add_child(engine, 2)
    await look(database_url, engine, url)
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
async def test_steward_killed_in_the_middle_comes_to_the_same_when_it_is_started_again(
    engine: AsyncEngine, database_url: str, url: str
) -> None:
    uninterrupted = await replayed(engine, url)
    # Four of six calls are answered, and what is recorded then is asked about by nobody.
    await look(database_url, engine, url, times=1)
    await recorded(engine, held_out=9, others=9, run="late-", ago_s=0.0)
    await look(database_url, engine, url)
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


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.usefixtures("_random_waits")
async def test_steward_killed_as_it_stops_one_leaves_all_or_nothing(
    engine: AsyncEngine,
    database_url: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
) -> None:
    killing(version_states, "change_state", after=after)(monkeypatch)
    with pytest.raises(Killed):
        await look(database_url, engine, url)
    monkeypatch.undo()
    assert (await states(engine))[1] == "candidate"
    await look(database_url, engine, url)
    became = [event.to_state for event in await events_of(engine)]
    assert became == ["rejected", "candidate", "written"]
