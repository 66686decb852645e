"""A version that has gone too far from its base model never has traffic, in either mode."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine

from store import version_states
from store.version_queries import list_events, numbered_version
from tests.support.faults.killing import Killed, killing
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.recovery import Bench, FakeLearner, run_once
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import GateOptions

BOUND = GateOptions(most_kl_to_base=0.2)


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        made = Bench(engine, server, tmp_path)
        made.gate = BOUND
        await made.fill()
        yield made


async def update(bench: Bench, name: str, kl: float | None) -> None:
    """Run an update that ends so far from the base model."""
    await bench.fill(name)
    bench.learner.kl_to_base = kl
    assert await run_once(bench)


@pytest.mark.parametrize("mode", ["immediate", "gated"])
async def test_it_is_rejected_with_the_reason_and_the_figures(bench: Bench, mode: str) -> None:
    bench.gate = GateOptions.model_validate({"mode": mode, "most_kl_to_base": 0.2})
    await update(bench, "t", 0.25)
    assert await bench.states() == {0: "serving", 1: "rejected"}
    assert not bench.fake.loads
    async with bench.engine.connect() as connection:
        event = (await list_events(connection, "m", 1))[0]
    assert "0.25 nats a token" in event.reason
    assert "gate.most_kl_to_base is 0.2" in event.reason
    assert (event.actor, event.evidence) == (
        "trainer",
        {"kl_to_base": 0.25, "most_kl_to_base": 0.2},
    )
    # What comes next is trained from what serves, or may.
    await update(bench, "u", 0.1)
    assert bench.learner.restored is None
    assert (await bench.states())[2] == {"immediate": "serving", "gated": "candidate"}[mode]


async def test_what_is_at_the_bound_or_was_not_measured_goes_on(bench: Bench) -> None:
    await update(bench, "t", 0.2)
    await update(bench, "u", None)
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}


async def test_without_a_bound_it_is_measured_and_nothing_is_rejected(bench: Bench) -> None:
    bench.gate = GateOptions()
    await update(bench, "t", 50.0)
    assert (await bench.states())[1] == "serving"
    async with bench.engine.connect() as connection:
        version = await numbered_version(connection, "m", 1)
    assert version is not None
    assert version.kl_to_base == 50.0
    assert 'pawl_update_kl_to_base{policy="m"} 50.0' in generate_latest().decode()


async def test_it_is_rejected_by_a_trainer_that_is_started_again_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.learner.kl_to_base = 0.25
    killing(Publisher, "publish", after=False)(monkeypatch)
    with pytest.raises(Killed):
        await run_once(bench)
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "rejected"}
    await bench.assert_spent_once(4)


async def test_only_the_candidate_of_several_updates_is_held_against_the_bound(
    bench: Bench,
) -> None:
    bench.gate = GateOptions(mode="gated", updates_per_candidate=2, most_kl_to_base=0.2)
    await update(bench, "t", 0.3)
    assert (await bench.states())[1] == "written"
    await update(bench, "u", 0.1)
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "candidate"}


async def make_candidate(bench: Bench, *kls: float | None) -> None:
    """Run updates that end so far from the base model, and make one candidate."""
    bench.gate = GateOptions(mode="gated", updates_per_candidate=len(kls), most_kl_to_base=0.2)
    for kl in kls:
        await update(bench, f"at-{kl}-", kl)


async def test_what_is_too_far_as_well_is_rejected_with_the_candidate(bench: Bench) -> None:
    await make_candidate(bench, 0.3, 0.25)
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "rejected"}
    assert not bench.fake.loads
    async with bench.engine.connect() as connection:
        event = (await list_events(connection, "m", 1))[0]
    assert "its own KL to the base model is 0.3 nats a token" in event.reason
    assert "m@2" in event.reason
    assert event.evidence == {"kl_to_base": 0.3, "most_kl_to_base": 0.2}
    # The next update is not one of a candidate of four, but the first of a new one.
    await update(bench, "next", 0.1)
    assert bench.learner.restored is None
    assert (await bench.states())[3] == "written"


@pytest.mark.parametrize("unmeasured", [0.15, None])
async def test_what_of_a_candidate_is_within_the_bound_is_the_candidate_instead(
    bench: Bench, unmeasured: float | None
) -> None:
    await make_candidate(bench, 0.1, unmeasured, 0.21, 0.22)
    assert await bench.states() == {
        0: "serving",
        1: "rejected",
        2: "candidate",
        3: "rejected",
        4: "rejected",
    }
    assert bench.fake.loads == ["m@2"]
    await update(bench, "next", 0.15)
    assert bench.learner.restored == bench.folder.resolve() / "m" / "2"


STEPS = {
    "before it is rejected": killing(version_states, "reject_with_chain", after=False),
    "within that transaction": killing(version_states, "reject_with_chain", after=True),
    "after that": killing(Publisher, "try_to_publish", after=True),
}


@pytest.mark.parametrize("step", STEPS)
async def test_killed_while_a_candidate_is_rejected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    bench.gate = GateOptions(mode="gated", updates_per_candidate=3, most_kl_to_base=0.2)
    await update(bench, "a", 0.1)
    await update(bench, "b", 0.3)
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await update(bench, "c", 0.4)
    died = {0: "serving", 1: "written", 2: "written", 3: "written"}
    if step == "after that":
        died |= {2: "rejected", 3: "rejected"}
    assert await bench.states() == died
    bench.learner = FakeLearner(bench.fake, bench.folder.resolve())
    await run_once(bench)
    assert bench.learner.restored == bench.folder.resolve() / "m" / "1"
    # What was left to be tried by a trainer that died is part of the next candidate.
    first = "written" if step == "after that" else "candidate"
    states = {0: "serving", 1: first, 2: "rejected", 3: "rejected", 4: "written"}
    assert await bench.states() == states
    await bench.assert_spent_once(16)


async def test_a_trainer_whose_candidates_are_too_far_holds(bench: Bench) -> None:
    """A version that is written, and nothing more, does not mean that all is well."""
    bench.gate = GateOptions(mode="gated", updates_per_candidate=2, most_kl_to_base=0.2)
    bench.learner.kl_to_base = 0.3
    async with Replicas([bench.fake.url]) as servers:
        loop = bench.loop(servers)
        for name in "abcd":
            await bench.fill(name)
            assert await loop.update_once()
        assert set((await bench.states()).values()) == {"serving", "rejected"}
        await bench.fill("e")
        assert not await loop.update_once()
