"""What a trainer does with versions that others decide about: they wait, serve, or fall."""

from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import select

from controller import publishing
from store import claims
from store.claims import IMPORTED_FROM
from store.schema.tables import policies
from store.version_queries import list_events
from store.version_states import begin_canary, freeze, roll_back
from store.versions import PolicyEvent
from tests.support.controller.replicas import reconcile
from tests.support.ledger.lineage import promote
from tests.support.trainer.bench import STEPS, Bench
from trainer.metrics import TRAINED_VERSION
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.model_server import Replicas
from trainer.publishing.probe import ProbeRow
from trainer.updates.recording import Recording


@pytest.fixture
def bench(bare: Bench) -> Bench:
    """A trainer whose versions the controller tries, without an episode."""
    bare.change("publish", mode="canary")
    return bare


async def begin_trial(bench: Bench, number: int) -> None:
    version = await bench.version(number)
    async with bench.engine.begin() as connection:
        await begin_canary(connection, version, 0.1, reason="it waited", actor="controller")


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


async def shares(bench: Bench) -> dict[int, tuple[float | None, bool]]:
    """Return the share of each version, and whether it has a rule to be judged by."""
    query = select(policies.c.version, policies.c.share, policies.c.gate)
    async with bench.engine.connect() as connection:
        rows = await connection.execute(query)
        return {row.version: (row.share, row.gate is not None) for row in rows}


@pytest.mark.parametrize(
    "options", [{"mode": "canary"}, {"mode": "evaluated"}, {"mode": "immediate", "approve": True}]
)
async def test_probed_version_waits_for_a_decision_without_traffic(
    bare: Bench, options: dict[str, Any]
) -> None:
    """It is loaded, and no new episode begins with it before the decision."""
    bare.change("publish", **options)
    await bare.update("t")
    assert await bare.states() == {0: "serving", 1: "loaded"}
    assert list(bare.fake.loaded) == ["m@1"]
    assert await shares(bare) == {0: (None, False), 1: (None, True)}
    await bare.assert_spent_once(4)


async def test_trainers_metric_shows_a_version_promoted_by_the_controller(
    bench: Bench,
) -> None:
    await bench.update("t")
    await begin_trial(bench, 1)
    TRAINED_VERSION.clear()
    async with bench.working() as loop:
        await loop.watch_servers()
        assert 'pawl_trained_version{policy="m"} 0.0' in generate_latest().decode()
        await let_serve(bench, 1)
        await loop.watch_servers()
    assert 'pawl_trained_version{policy="m"} 1.0' in generate_latest().decode()


async def test_training_continues_from_the_newest_version_and_only_that_waits(bench: Bench) -> None:
    await bench.update("t", "u")
    assert bench.learner.parent == 1
    assert await bench.states() == {0: "serving", 1: "retired", 2: "loaded"}
    await begin_trial(bench, 2)
    await bench.update("v", "w")
    assert bench.learner.parent == 3
    waiting = {0: "serving", 1: "retired", 2: "canary", 3: "retired", 4: "loaded"}
    assert await bench.states() == waiting
    # Versions that make way are on no server any more.
    async with Replicas([bench.fake.url]) as servers:
        await reconcile(bench.engine, servers)
    assert [(await bench.version(number)).unloaded for number in (1, 2, 3)] == [True, False, True]


async def test_training_goes_on_while_the_traffic_is_frozen(bare: Bench) -> None:
    await bare.fill()
    async with bare.engine.begin() as connection:
        await freeze(connection, "m", frozen=True, reason="release day", actor="operator")
    await bare.run_once()
    await bare.update("u")
    assert bare.learner.parent == 1
    assert await bare.states() == {0: "serving", 1: "retired", 2: "loaded"}


async def test_after_a_roll_back_training_goes_on_from_the_version_that_serves(
    bench: Bench,
) -> None:
    await bench.update("t")
    await let_serve(bench, 1)
    await bench.update("u")
    await begin_trial(bench, 2)
    await bench.update("v")
    await turn_back(bench, 2)
    assert await bench.states() == {0: "retired", 1: "serving", 2: "rolled_back", 3: "rejected"}
    await bench.update("w")
    assert bench.learner.parent == 1
    assert (await bench.states())[4] == "loaded"


async def test_update_makes_no_version_if_its_parent_is_rolled_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.update("t")
    await begin_trial(bench, 1)
    real = Recording.record_update

    async def meanwhile(self: Recording, *args: Any) -> None:
        if (await bench.version(1)).state == "canary":
            await turn_back(bench, 1)
        await real(self, *args)

    monkeypatch.setattr(Recording, "record_update", meanwhile)
    await bench.update("v")
    # Its episodes are trained on from what is left.
    assert bench.learner.parent == 0
    assert await bench.states() == {0: "serving", 1: "rolled_back", 3: "loaded"}
    await bench.assert_spent_once(8)


async def test_a_version_loaded_while_its_parent_is_rolled_back_never_serves(
    bare: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bare.update("t")
    real = publishing.load_version

    async def meanwhile(*args: Any) -> object:
        probe = await real(*args)
        await turn_back(bare, 1)
        return probe

    monkeypatch.setattr(publishing, "load_version", meanwhile)
    await bare.update("u")
    assert await bare.states() == {0: "serving", 1: "rolled_back", 2: "rejected"}
    assert "m@2" not in bare.fake.loaded


async def test_imported_version_waits_for_a_decision(bench: Bench) -> None:
    await bench.fill()
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
    recording = Recording(bench.engine, "m", bench.recipe.judged_by)
    await recording.record_imported_version(new, folder)
    async with bench.working():
        assert (await bench.states())[1] == "loaded"


async def test_versions_that_training_can_continue_from_keep_their_files(bench: Bench) -> None:
    await bench.update("t")
    await begin_trial(bench, 1)
    await bench.update("u")
    async with bench.working():
        for number in (1, 2):
            assert adapters.read_manifest(bench.folder / "m" / str(number)) is not None


# A version that serves at once has a control, if the recipe gives it a share.


async def test_immediate_version_serves_at_once_and_the_base_model_stays_as_its_control(
    bare: Bench,
) -> None:
    await bare.update("t", "u")
    assert await bare.states() == {0: "retired", 1: "retired", 2: "serving"}
    assert await shares(bare) == {0: (0.15, False), 1: (None, True), 2: (None, True)}
    # Without a share nothing is compared, from the next version on.
    bare.change("publish", control_share=0.0)
    await bare.update("v")
    assert (await shares(bare))[0] == (None, False)


async def test_training_continues_from_the_control_after_a_full_roll_back(
    bare: Bench,
) -> None:
    await bare.update("t", "u", "v")
    await turn_back(bare, 3)
    rolled_back = dict.fromkeys((1, 2, 3), "rolled_back")
    assert await bare.states() == {0: "serving"} | rolled_back
    await bare.update("w")
    assert bare.learner.parent == 0
    assert (await bare.states())[4] == "serving"


# The bound on the distance to the base model


async def update_at(bench: Bench, *kls: float | None) -> None:
    """Run updates that end so far from the base model."""
    for number, kl in enumerate(kls):
        bench.learner.kl_to_base = kl
        await bench.update(f"{bench.learner.updates}-{number}-{kl}-")


@pytest.mark.parametrize(("mode", "next_state"), [("immediate", "serving"), ("canary", "loaded")])
async def test_version_too_far_from_the_base_is_rejected_with_its_kl_and_the_bound(
    bare: Bench, mode: str, next_state: str
) -> None:
    bare.change("publish", mode=mode, most_kl_to_base=0.2)
    await update_at(bare, 0.25)
    assert await bare.states() == {0: "serving", 1: "rejected"}
    assert not bare.fake.loads
    event = await last_event(bare, 1)
    assert "0.25 nats a token" in event.reason
    assert "publish.most_kl_to_base is 0.2" in event.reason
    evidence = {"kl_to_base": 0.25, "most_kl_to_base": 0.2}
    assert (event.actor, event.evidence) == ("controller", evidence)
    # The next is trained from the version that serves, or may.
    await update_at(bare, 0.1)
    assert bare.learner.restored is None
    assert (await bare.states())[2] == next_state


async def test_version_at_the_kl_bound_or_unmeasured_is_published(bare: Bench) -> None:
    bare.change("publish", most_kl_to_base=0.2)
    await update_at(bare, 0.2, None)
    assert await bare.states() == {0: "retired", 1: "retired", 2: "serving"}


async def test_kl_to_base_is_measured_without_a_bound_and_rejects_nothing(
    bare: Bench,
) -> None:
    await update_at(bare, 50.0)
    assert (await bare.states())[1] == "serving"
    assert (await bare.version(1)).kl_to_base == 50.0
    assert 'pawl_update_kl_to_base{policy="m"} 50.0' in generate_latest().decode()


async def test_version_too_far_from_the_base_is_rejected_after_a_kill_too(
    bare: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bare.fill()
    bare.change("publish", most_kl_to_base=0.2)
    bare.learner.kl_to_base = 0.25
    await bare.run_killed(monkeypatch, STEPS["before publishing"])
    await bare.run_once()
    assert await bare.states() == {0: "serving", 1: "rejected"}
    await bare.assert_spent_once(4)


async def test_trainer_pauses_after_two_versions_too_far_from_the_base(bench: Bench) -> None:
    await bench.fill()
    bench.change("publish", most_kl_to_base=0.2)
    bench.learner.kl_to_base = 0.3
    async with bench.working() as loop:
        for name in "ab":
            await bench.fill(name)
            assert await loop.update_once()
        assert set((await bench.states()).values()) == {"serving", "rejected"}
        await bench.fill("c")
        assert not await loop.update_once()
