"""A trainer with a gate: what it makes waits for a trial, and training goes on meanwhile."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from store import claims, version_states
from store.claims import IMPORTED_FROM
from store.version_queries import list_events, numbered_version
from store.version_states import begin_canary, roll_back
from store.versions import PolicyVersion
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.lineage import promote
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.recovery import Bench, FakeLearner, run_once
from trainer.metrics import VERSION
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import ProbeRow
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import GateOptions
from trainer.updates.recording import Recording

GATED = GateOptions(mode="gated")


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        made = Bench(engine, server, tmp_path)
        made.gate = GATED
        await made.fill()
        yield made


async def update(bench: Bench, *names: str) -> None:
    """Run one update for each of these sets of episodes."""
    for name in names:
        await bench.fill(name)
        assert await run_once(bench)


async def numbered(bench: Bench, number: int) -> PolicyVersion:
    async with bench.engine.connect() as connection:
        found = await numbered_version(connection, "m", number)
    assert found is not None
    return found


async def begin_trial(bench: Bench, number: int) -> None:
    version = await numbered(bench, number)
    async with bench.engine.begin() as connection:
        await begin_canary(connection, version, 0.1, 0.02, reason="it waited", actor="steward")


async def turn_back(bench: Bench, number: int) -> None:
    version = await numbered(bench, number)
    async with bench.engine.begin() as connection:
        await roll_back(connection, version, reason="it is worse", actor="steward")


def parent_of(bench: Bench) -> int:
    """What the last update trained on from."""
    folder = bench.learner.restored
    return 0 if folder is None else int(folder.name)


async def test_what_passes_the_probe_waits_and_has_no_traffic(bench: Bench) -> None:
    assert await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "candidate"}
    assert list(bench.fake.loaded) == ["m@1"]
    await bench.assert_spent_once(4)


async def test_what_a_steward_promoted_is_shown_by_the_trainer_too(bench: Bench) -> None:
    assert await run_once(bench)
    await begin_trial(bench, 1)
    VERSION.clear()
    async with Replicas([bench.fake.url]) as servers:
        await bench.loop(servers).sync_adapters()
        assert 'pawl_trained_version{policy="m"} 0.0' in generate_latest().decode()
        async with bench.engine.begin() as connection:
            await promote(connection, "m", 1, reason="it is better", actor="steward")
        await bench.loop(servers).sync_adapters()
    assert 'pawl_trained_version{policy="m"} 1.0' in generate_latest().decode()


async def test_training_goes_on_from_what_waits_and_the_newest_waits_alone(bench: Bench) -> None:
    await update(bench, "t", "u")
    assert parent_of(bench) == 1
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "candidate"}
    await begin_trial(bench, 2)
    await update(bench, "v", "w")
    assert parent_of(bench) == 3
    assert await bench.states() == {
        0: "serving",
        1: "rejected",
        2: "canary",
        3: "rejected",
        4: "candidate",
    }


async def test_after_a_roll_back_training_goes_on_from_what_serves(bench: Bench) -> None:
    await update(bench, "t")
    async with bench.engine.begin() as connection:
        await promote(connection, "m", 1, reason="it is better", actor="steward")
    await update(bench, "u")
    await begin_trial(bench, 2)
    await update(bench, "v")
    await turn_back(bench, 2)
    assert await bench.states() == {0: "published", 1: "serving", 2: "rolled_back", 3: "rejected"}
    await update(bench, "w")
    assert parent_of(bench) == 1
    assert (await bench.states())[4] == "candidate"


async def test_several_updates_make_one_candidate(bench: Bench) -> None:
    bench.gate = GATED.model_copy(update={"updates_per_candidate": 3})
    await update(bench, "t", "u")
    assert await bench.states() == {0: "serving", 1: "written", 2: "written"}
    assert parent_of(bench) == 1
    assert not bench.fake.loads
    # Nor does a trainer that is started again load one of them.
    assert not await run_once(bench)
    assert not bench.fake.loads
    await update(bench, "v")
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected", 3: "candidate"}
    assert bench.fake.loads == ["m@3"]
    await update(bench, "w")
    assert parent_of(bench) == 3
    assert (await bench.states())[4] == "written"


async def test_a_candidate_that_is_not_served_right_does_not_take_the_others_with_it(
    bench: Bench,
) -> None:
    bench.gate = GATED.model_copy(update={"updates_per_candidate": 2})
    bench.fake.logprobs["m@2"] = -7.0
    await update(bench, "t", "u")
    assert await bench.states() == {0: "serving", 1: "written", 2: "rejected"}
    await update(bench, "v")
    assert parent_of(bench) == 1
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected", 3: "candidate"}


async def test_if_all_made_from_one_are_not_served_right_that_is_rejected_too(bench: Bench) -> None:
    """By the third the trainer has held, and found the servers right: it is what was learned."""
    bench.gate = GATED.model_copy(update={"updates_per_candidate": 3})
    for number in (3, 4, 5):
        bench.fake.logprobs[f"m@{number}"] = -7.0
    await update(bench, "t", "u", "v", "w")
    assert parent_of(bench) == 2
    assert await bench.states() == {
        0: "serving",
        1: "written",
        2: "written",
        **dict.fromkeys((3, 4), "rejected"),
    }
    await update(bench, "x")
    assert parent_of(bench) == 2
    assert await bench.states() == {0: "serving", **dict.fromkeys(range(1, 6), "rejected")}
    async with bench.engine.connect() as connection:
        for number in (1, 2):
            event = (await list_events(connection, "m", number))[0]
            assert event.to_state == "rejected"
            assert "m@5" in event.reason
    await update(bench, "y")
    assert parent_of(bench) == 0
    assert (await bench.states())[6] == "written"


@pytest.mark.parametrize("updates", [1, 2])
async def test_what_is_trained_while_its_parent_is_rolled_back_never_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    bench.gate = GATED.model_copy(update={"updates_per_candidate": updates})
    await update(bench, *("t", "u")[:updates])
    await begin_trial(bench, updates)
    real = Recording.update

    async def meanwhile(self: Recording, *args: object) -> None:
        await turn_back(bench, updates)
        await real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Recording, "update", meanwhile)
    await update(bench, "v")
    monkeypatch.undo()
    assert (await bench.states())[updates + 1] == "rejected"
    await update(bench, "w")
    assert parent_of(bench) == 0
    assert f"m@{updates + 1}" not in bench.fake.loaded


async def test_what_is_loaded_while_its_parent_is_rolled_back_never_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.gate = GateOptions()
    await update(bench, "t")
    real = Publisher._probe

    async def meanwhile(self: Publisher, *args: object) -> object:
        probe = await real(self, *args)  # type: ignore[arg-type]
        await turn_back(bench, 1)
        return probe

    monkeypatch.setattr(Publisher, "_probe", meanwhile)
    await update(bench, "u")
    assert await bench.states() == {0: "serving", 1: "rolled_back", 2: "rejected"}
    assert "m@2" not in bench.fake.loaded


STEPS = {
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "within the consuming transaction": killing(claims, "consume", after=True),
    "before publishing": killing(Publisher, "publish", after=False),
    "after loading": killing(ModelServer, "load", after=True),
    "before it is a candidate": killing(version_states, "make_candidate", after=False),
    "within that transaction": killing(version_states, "make_candidate", after=True),
    "after that": killing(Publisher, "publish", after=True),
}


@pytest.mark.parametrize("step", STEPS)
async def test_killed_at(bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    await run_once(bench)
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "candidate"}
    await bench.assert_spent_once(4)


async def test_an_import_is_a_candidate_by_itself(bench: Bench) -> None:
    bench.gate = GATED.model_copy(update={"updates_per_candidate": 3})
    async with bench.engine.begin() as connection:
        update_id = await claims.begin_update(connection, "m", 0, {})
    new = NewVersion(
        policy="m",
        version=1,
        update_id=update_id,
        parent_version=0,
        outcomes=(),
        metrics={IMPORTED_FROM: "/elsewhere"},
        probe=(ProbeRow(ids=(1, 2), logprobs=(-2.0,)),),
    )
    bench.fake.logprobs["m@1"] = -2.0
    folder = adapters.write_version(bench.folder, new, bench.learner.save)
    await Recording(bench.engine, "m").imported_version(new, folder)
    await run_once(bench)
    assert (await bench.states())[1] == "candidate"


async def test_states_of_what_training_may_go_on_from_are_kept(bench: Bench) -> None:
    await update(bench, "t")
    await begin_trial(bench, 1)
    await update(bench, "u")
    async with Replicas([bench.fake.url]) as server:
        await bench.loop(server).recover()
    for number in (1, 2):
        assert adapters.read_manifest(bench.folder / "m" / str(number)) is not None


async def test_it_is_told_if_nobody_tries_the_candidates(bench: Bench) -> None:
    with capture_logs() as logs:
        await update(bench, "a")
        assert not [one for one in logs if one["event"] == "candidate_was_not_tried"]
        await update(bench, "b")
        [told] = [one for one in logs if one["event"] == "candidate_was_not_tried"]
        assert (told["version"], told["log_level"]) == ("m@2", "warning")
        assert "pawl steward" in told["remedy"]
        # One that waits for the end of another's trial waits for that.
        await begin_trial(bench, 2)
        await update(bench, "c", "d")
        assert len([one for one in logs if one["event"] == "candidate_was_not_tried"]) == 1
