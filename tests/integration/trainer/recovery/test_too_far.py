"""A version that has gone too far from its base model never has traffic, in either mode."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.read.events import list_events
from store.updates.policies import numbered_version
from tests.support.faults.killing import Killed, killing
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.recovery import Bench, FakeLearner, run_once
from trainer.publishing.publish import Publisher
from trainer.recipes.gate import GateOptions

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
