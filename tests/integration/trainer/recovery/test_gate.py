"""A trainer's gate: new versions wait as candidates or are watched, and none is too far off."""

from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import select
from structlog.testing import capture_logs

from store import claims, version_states
from store.claims import IMPORTED_FROM
from store.schema.tables import policies
from store.version_queries import list_events
from store.version_states import begin_canary, roll_back
from store.versions import PolicyEvent
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.lineage import promote
from tests.support.trainer.bench import Bench
from trainer.metrics import VERSION
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.probe import ProbeRow
from trainer.publishing.publisher import Publisher
from trainer.updates.recording import Recording


@pytest.fixture
def bench(bare: Bench) -> Bench:
    """A gated trainer without an episode."""
    bare.change("gate", mode="gated")
    return bare


async def begin_trial(bench: Bench, number: int) -> None:
    version = await bench.version(number)
    async with bench.engine.begin() as connection:
        await begin_canary(connection, version, 0.1, 0.02, reason="it waited", actor="controller")


async def turn_back(bench: Bench, number: int) -> None:
    version = await bench.version(number)
    async with bench.engine.begin() as connection:
        await roll_back(connection, version, reason="it is worse", actor="controller")


async def let_serve(bench: Bench, number: int) -> None:
    async with bench.engine.begin() as connection:
        await promote(connection, "m", number, reason="it is better", actor="controller")


async def last_event(bench: Bench, number: int) -> PolicyEvent:
    async with bench.engine.connect() as connection:
        return (await list_events(connection, "m", number))[0]


async def test_a_version_that_passes_the_probe_waits_and_has_no_traffic(bench: Bench) -> None:
    await bench.update("t")
    assert await bench.states() == {0: "serving", 1: "candidate"}
    assert list(bench.fake.loaded) == ["m@1"]
    await bench.assert_spent_once(4)


async def test_a_version_that_a_controller_promoted_is_shown_by_the_trainer_too(
    bench: Bench,
) -> None:
    await bench.update("t")
    await begin_trial(bench, 1)
    VERSION.clear()
    async with bench.working() as loop:
        await loop.sync_adapters()
        assert 'pawl_trained_version{policy="m"} 0.0' in generate_latest().decode()
        await let_serve(bench, 1)
        await loop.sync_adapters()
    assert 'pawl_trained_version{policy="m"} 1.0' in generate_latest().decode()


async def test_training_goes_on_from_the_candidate_and_the_newest_waits_alone(
    bench: Bench,
) -> None:
    await bench.update("t", "u")
    assert bench.learner.parent == 1
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "candidate"}
    await begin_trial(bench, 2)
    await bench.update("v", "w")
    assert bench.learner.parent == 3
    assert await bench.states() == {
        0: "serving",
        1: "rejected",
        2: "canary",
        3: "rejected",
        4: "candidate",
    }


async def test_after_a_roll_back_training_goes_on_from_the_version_that_serves(
    bench: Bench,
) -> None:
    await bench.update("t")
    await let_serve(bench, 1)
    await bench.update("u")
    await begin_trial(bench, 2)
    await bench.update("v")
    await turn_back(bench, 2)
    assert await bench.states() == {0: "published", 1: "serving", 2: "rolled_back", 3: "rejected"}
    await bench.update("w")
    assert bench.learner.parent == 1
    assert (await bench.states())[4] == "candidate"


async def test_several_updates_make_one_candidate(bench: Bench) -> None:
    bench.change("gate", updates_per_candidate=3)
    await bench.update("t", "u")
    assert await bench.states() == {0: "serving", 1: "written", 2: "written"}
    assert bench.learner.parent == 1
    assert not bench.fake.loads
    # Nor does a trainer that is started again load one of them.
    assert not await bench.run_once()
    assert not bench.fake.loads
    await bench.update("v")
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected", 3: "candidate"}
    assert bench.fake.loads == ["m@3"]
    await bench.update("w")
    assert bench.learner.parent == 3
    assert (await bench.states())[4] == "written"


async def test_a_candidate_that_is_not_served_right_does_not_take_the_others_with_it(
    bench: Bench,
) -> None:
    bench.change("gate", updates_per_candidate=2)
    bench.fake.logprobs["m@2"] = -7.0
    await bench.update("t", "u")
    assert await bench.states() == {0: "serving", 1: "written", 2: "rejected"}
    await bench.update("v")
    assert bench.learner.parent == 1
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected", 3: "candidate"}


async def test_if_all_made_from_one_are_not_served_right_that_is_rejected_too(bench: Bench) -> None:
    """By the third the trainer has held, and found the servers right: it is what was learned."""
    bench.change("gate", updates_per_candidate=3)
    for number in (3, 4, 5):
        bench.fake.logprobs[f"m@{number}"] = -7.0
    await bench.update("t", "u", "v", "w")
    assert bench.learner.parent == 2
    waiting: dict[int, str] = {0: "serving", 1: "written", 2: "written"}
    assert await bench.states() == waiting | dict.fromkeys((3, 4), "rejected")
    await bench.update("x")
    assert bench.learner.parent == 2
    assert await bench.states() == {0: "serving", **dict.fromkeys(range(1, 6), "rejected")}
    for number in (1, 2):
        event = await last_event(bench, number)
        assert event.to_state == "rejected"
        assert "m@5" in event.reason
    await bench.update("y")
    assert bench.learner.parent == 0
    assert (await bench.states())[6] == "written"


@pytest.mark.parametrize("updates", [1, 2])
async def test_a_version_trained_while_its_parent_is_rolled_back_never_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    bench.change("gate", updates_per_candidate=updates)
    await bench.update(*("t", "u")[:updates])
    await begin_trial(bench, updates)
    real = Recording.update

    async def meanwhile(self: Recording, *args: Any) -> None:
        await turn_back(bench, updates)
        await real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Recording, "update", meanwhile)
        await bench.update("v")
    assert (await bench.states())[updates + 1] == "rejected"
    await bench.update("w")
    assert bench.learner.parent == 0
    assert f"m@{updates + 1}" not in bench.fake.loaded


async def test_a_version_loaded_while_its_parent_is_rolled_back_never_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.change("gate", mode="immediate")
    await bench.update("t")
    real = Publisher._probe

    async def meanwhile(self: Publisher, *args: Any) -> object:
        probe = await real(self, *args)
        await turn_back(bench, 1)
        return probe

    monkeypatch.setattr(Publisher, "_probe", meanwhile)
    await bench.update("u")
    assert await bench.states() == {0: "serving", 1: "rolled_back", 2: "rejected"}
    assert "m@2" not in bench.fake.loaded


async def test_an_import_is_a_candidate_by_itself(bench: Bench) -> None:
    await bench.fill()
    bench.change("gate", updates_per_candidate=3)
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
    await bench.run_once()
    assert (await bench.states())[1] == "candidate"


async def test_states_that_training_may_go_on_from_are_kept(bench: Bench) -> None:
    await bench.update("t")
    await begin_trial(bench, 1)
    await bench.update("u")
    async with bench.working():
        for number in (1, 2):
            assert adapters.read_manifest(bench.folder / "m" / str(number)) is not None


async def test_candidates_that_nobody_tries_are_logged(bench: Bench) -> None:
    with capture_logs() as logs:
        await bench.update("a")
        assert not [one for one in logs if one["event"] == "candidate_was_not_tried"]
        await bench.update("b")
        [warning] = [one for one in logs if one["event"] == "candidate_was_not_tried"]
        assert (warning["version"], warning["log_level"]) == ("m@2", "warning")
        assert "pawl controller" in warning["remedy"]
        # One that waits for the end of another's trial waits for that.
        await begin_trial(bench, 2)
        await bench.update("c", "d")
        assert len([one for one in logs if one["event"] == "candidate_was_not_tried"]) == 1


# Without a gate a version serves at once, and is watched if the recipe has a base share.


@pytest.fixture
def watched(bare: Bench) -> Bench:
    bare.change("gate", base_share=0.1)
    return bare


async def kept(bench: Bench) -> dict[int, tuple[float | None, bool]]:
    """Return the share of each version, and whether it has a rule to be watched by."""
    query = select(policies.c.version, policies.c.share, policies.c.gate)
    async with bench.engine.connect() as connection:
        rows = await connection.execute(query)
        return {row.version: (row.share, row.gate is not None) for row in rows}


async def test_by_default_the_base_model_gets_no_episodes_and_nothing_is_watched(
    bare: Bench,
) -> None:
    await bare.update("t")
    assert await bare.states() == {0: "published", 1: "serving"}
    assert await kept(bare) == {0: (None, False), 1: (None, False)}


async def test_with_a_base_share_each_version_serves_at_once_with_the_rule_it_is_watched_by(
    watched: Bench,
) -> None:
    await watched.update("t")
    assert await watched.states() == {0: "published", 1: "serving"}
    assert await kept(watched) == {0: (0.1, False), 1: (None, True)}
    # Back to none: from the next version on the base model gets no episodes any more.
    watched.change("gate", base_share=0.0)
    await watched.update("u")
    assert await kept(watched) == {0: (None, False), 1: (None, True), 2: (None, False)}


async def test_after_several_were_rolled_back_training_goes_on_from_the_version_before(
    watched: Bench,
) -> None:
    await watched.update("t", "u", "v")
    assert (await watched.states())[3] == "serving"
    first, last = await watched.version(2), await watched.version(3)
    async with watched.engine.begin() as connection:
        why = "it is worse"
        before = await roll_back(connection, last, reason=why, actor="controller", first=first)
    assert before is not None
    assert before.version == 1
    rolled_back = {2: "rolled_back", 3: "rolled_back"}
    assert await watched.states() == {0: "published", 1: "serving"} | rolled_back
    await watched.update("w")
    assert watched.learner.parent == 1
    assert (await watched.states())[4] == "serving"


async def test_a_version_is_watched_from_the_moment_that_it_serves(
    watched: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is there before the traffic is, in the same transaction."""
    real, seen = version_states.watch, []

    async def watch(*args: Any) -> None:
        seen.append(await watched.states())
        await real(*args)

    monkeypatch.setattr(version_states, "watch", watch)
    await watched.update("t")
    assert seen == [{0: "serving", 1: "written"}]


# The bound on the distance to the base model


async def update_at(bench: Bench, *kls: float | None) -> None:
    """Run updates that end so far from the base model."""
    for number, kl in enumerate(kls):
        bench.learner.kl_to_base = kl
        await bench.update(f"{bench.learner.updates}-{number}-{kl}-")


@pytest.mark.parametrize(("mode", "next_state"), [("immediate", "serving"), ("gated", "candidate")])
async def test_a_version_too_far_is_rejected_with_the_reason_and_the_figures(
    bench: Bench, mode: str, next_state: str
) -> None:
    bench.change("gate", mode=mode, most_kl_to_base=0.2)
    await update_at(bench, 0.25)
    assert await bench.states() == {0: "serving", 1: "rejected"}
    assert not bench.fake.loads
    event = await last_event(bench, 1)
    assert "0.25 nats a token" in event.reason
    assert "gate.most_kl_to_base is 0.2" in event.reason
    evidence = {"kl_to_base": 0.25, "most_kl_to_base": 0.2}
    assert (event.actor, event.evidence) == ("trainer", evidence)
    # The next is trained from the version that serves, or may.
    await update_at(bench, 0.1)
    assert bench.learner.restored is None
    assert (await bench.states())[2] == next_state


async def test_a_version_at_the_bound_or_not_measured_goes_on(bare: Bench) -> None:
    bare.change("gate", most_kl_to_base=0.2)
    await update_at(bare, 0.2, None)
    assert await bare.states() == {0: "published", 1: "published", 2: "serving"}


async def test_without_a_bound_the_distance_is_measured_and_nothing_is_rejected(
    bare: Bench,
) -> None:
    await update_at(bare, 50.0)
    assert (await bare.states())[1] == "serving"
    assert (await bare.version(1)).kl_to_base == 50.0
    assert 'pawl_update_kl_to_base{policy="m"} 50.0' in generate_latest().decode()


async def test_a_version_too_far_is_rejected_by_a_trainer_that_is_started_again_too(
    bare: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bare.fill()
    bare.change("gate", most_kl_to_base=0.2)
    bare.learner.kl_to_base = 0.25
    await bare.run_killed(monkeypatch, killing(Publisher, "publish", after=False))
    await bare.run_once()
    assert await bare.states() == {0: "serving", 1: "rejected"}
    await bare.assert_spent_once(4)


async def test_only_the_candidate_of_several_updates_is_held_against_the_bound(
    bench: Bench,
) -> None:
    bench.change("gate", updates_per_candidate=2, most_kl_to_base=0.2)
    await update_at(bench, 0.3)
    assert (await bench.states())[1] == "written"
    await update_at(bench, 0.1)
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "candidate"}


async def test_an_earlier_version_that_is_too_far_as_well_is_rejected_with_the_candidate(
    bench: Bench,
) -> None:
    bench.change("gate", updates_per_candidate=2, most_kl_to_base=0.2)
    await update_at(bench, 0.3, 0.25)
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected"}
    assert not bench.fake.loads
    event = await last_event(bench, 1)
    assert "its own KL to the base model is 0.3 nats a token" in event.reason
    assert "m@2" in event.reason
    assert event.evidence == {"kl_to_base": 0.3, "most_kl_to_base": 0.2}
    # The next update is not one of a candidate of four, but the first of a new one.
    await update_at(bench, 0.1)
    assert bench.learner.restored is None
    assert (await bench.states())[3] == "written"


@pytest.mark.parametrize("unmeasured", [0.15, None])
async def test_the_last_version_within_the_bound_is_the_candidate_instead(
    bench: Bench, unmeasured: float | None
) -> None:
    bench.change("gate", updates_per_candidate=4, most_kl_to_base=0.2)
    await update_at(bench, 0.1, unmeasured, 0.21, 0.22)
    assert await bench.states() == {
        0: "serving",
        1: "rejected",
        2: "candidate",
        3: "rejected",
        4: "rejected",
    }
    assert bench.fake.loads == ["m@2"]
    await update_at(bench, 0.15)
    assert bench.learner.parent == 2


STEPS = {
    "before it is rejected": killing(version_states, "reject_with_chain", after=False),
    "within that transaction": killing(version_states, "reject_with_chain", after=True),
    "after that": killing(Publisher, "try_to_publish", after=True),
}


@pytest.mark.parametrize("step", STEPS)
async def test_killed_while_a_candidate_is_rejected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await bench.fill()
    bench.change("gate", updates_per_candidate=3, most_kl_to_base=0.2)
    await update_at(bench, 0.1, 0.3)
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await update_at(bench, 0.4)
    died = {0: "serving", 1: "written", 2: "written", 3: "written"}
    if step == "after that":
        died |= {2: "rejected", 3: "rejected"}
    assert await bench.states() == died
    bench.restart()
    await bench.run_once()
    assert bench.learner.parent == 1
    # What was left to be tried by a trainer that died is part of the next candidate.
    first = "written" if step == "after that" else "candidate"
    states = {0: "serving", 1: first, 2: "rejected", 3: "rejected", 4: "written"}
    assert await bench.states() == states
    await bench.assert_spent_once(16)


async def test_a_trainer_whose_candidates_are_too_far_holds(bench: Bench) -> None:
    """A version that is written, and nothing more, does not mean that all is well."""
    await bench.fill()
    bench.change("gate", updates_per_candidate=2, most_kl_to_base=0.2)
    bench.learner.kl_to_base = 0.3
    async with bench.working() as loop:
        for name in "abcd":
            await bench.fill(name)
            assert await loop.update_once()
        assert set((await bench.states()).values()) == {"serving", "rejected"}
        await bench.fill("e")
        assert not await loop.update_once()
