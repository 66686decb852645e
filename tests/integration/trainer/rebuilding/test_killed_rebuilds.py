"""A rebuild that is killed at any step goes on where it stopped, by itself or by a trainer."""

import pytest

from store import version_states
from store.updates import claims
from tests.support.faults.killing import Killed, killing
from tests.support.trainer.rebuilding import GATED, Stand, waves
from trainer.publishing import adapters
from trainer.publishing.publisher import Publisher

STEPS = {
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "before the record": killing(claims, "consume", after=False),
    "after the record": killing(Publisher, "clean", after=False),
    "before publishing": killing(Publisher, "publish", after=False),
    "before promoting": killing(version_states, "promote", after=False),
}


KILLED = ["w0/e1", "w1/e2"]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, bytes]]:
    """Keep what a rebuild comes to that nobody kills."""
    return {}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("trains_on", [False, True])
async def test_one_that_is_killed_goes_on_where_it_stopped(
    stand: Stand,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, dict[str, bytes]],
    step: str,
    trains_on: bool,
) -> None:
    made, out = waves(version=0), KILLED
    if not undisturbed:
        whole = await stand.bench("whole")
        await whole.trains(made[:2])
        await whole.rebuild(*out)
        undisturbed |= {"adapter": whole.written(4), "state": whole.state(4)}
    bench = await stand.bench("killed")
    await bench.trains(made[:2])
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await bench.rebuild(*out)
    if trains_on:
        # A trainer that is started meanwhile publishes no part of it, and takes nothing from it.
        assert not await bench.train([])
        is_offered = step in ("before publishing", "before promoting")
        serving = [number for number, state in (await bench.states()).items() if state == "serving"]
        assert serving == [4 if is_offered else 2]
    result = await bench.rebuild(*out)
    assert await bench.running() is None
    head = result.version.version
    assert result.version.state == "serving"
    assert {"adapter": bench.written(head), "state": bench.state(head)} == undisturbed
    done = await bench.all("SELECT id FROM updates WHERE state = 'done'")
    assert len(done) == 4
    states = await bench.states()
    assert (states[1], states[2]) == ("retired", "retired")


async def test_with_a_gate_a_trainer_that_finds_it_lets_it_serve(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = f"{GATED}updates_per_candidate = 2\n"
    bench = await stand.bench("rebuilt", recipe)
    await bench.trains(waves(version=0)[:2])
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "candidate"}
    STEPS["before publishing"](monkeypatch)
    with pytest.raises(Killed):
        await bench.rebuild("w0/e1")
    assert not await bench.train([])
    assert (await bench.states())[4] == "serving"
    assert (await bench.rebuild("w0/e1")).retired == ("m@2",)
