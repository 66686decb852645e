"""One trainer of several policies: whose turn it is, and what fails in one alone."""

import asyncio
from typing import Any

import pytest

from store import claims
from tests.support.trainer.turns import Bench, bench
from tests.support.waiting import until
from trainer.errors import AdapterError, FilesUnread
from trainer.metrics import LEFT
from trainer.scheduler import PolicyWorker

__all__ = ["bench"]


async def test_the_most_waiting_signal_has_the_turn_in_updates_of_the_policys_own(
    bench: Bench,
) -> None:
    # 16 episodes are two updates of the writer's; 6 are three of the checker's.
    await bench.fill({"writer": 16, "checker": 6})
    assert await bench.turns(5) == ["checker", "writer", "checker", "writer", "checker"]
    assert await bench.serving() == {"writer": 2, "checker": 3}


async def test_a_policy_that_fails_does_not_stop_the_other(bench: Bench) -> None:
    await bench.fill({"writer": 16, "checker": 4})
    bench.learners["checker"].fails = AdapterError("its files are gone")
    assert await bench.turns(2) == ["writer", "writer"]
    assert LEFT.labels("checker")._value.get() == 1
    # Its episodes are held by its update, which who works on it next gives up.
    bench.learners["checker"].fails = None
    assert await bench.turns(2) == ["writer", "writer", "checker", "checker"]
    assert LEFT.labels("checker")._value.get() == 0


async def test_a_trainer_of_which_all_policies_fail_ends(bench: Bench) -> None:
    await bench.fill({"writer": 16, "checker": 4})
    for learner in bench.learners.values():
        learner.fails = AdapterError("its files are gone")
    async with bench.rounds() as rounds:
        with pytest.raises(AdapterError, match="its files are gone"):
            await asyncio.wait_for(rounds.run(0.01, once=True), 30)


async def test_a_trainer_goes_on_by_itself_once_what_it_could_not_read_can_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.scheduler.FIRST_PAUSE_S", 0.05)
    await bench.fill({"checker": 2})
    learner = bench.learners["checker"]
    learner.fails = FilesUnread("weights cannot be read (Input/output error)")
    async with bench.rounds(["checker"]) as rounds:
        # It has no other policy, and does not end.
        work = asyncio.create_task(rounds.run(0.01, once=True))
        await until(lambda: LEFT.labels("checker")._value.get() == 1)
        await until(lambda: work.done() or rounds._workers["checker"]._failures > 1)
        assert not work.done()
        learner.fails = None
        await asyncio.wait_for(work, 30)
    assert await bench.states() == {"checker@1": "serving"}
    assert LEFT.labels("checker")._value.get() == 0


async def test_a_rejected_version_of_one_does_not_stop_the_other(bench: Bench) -> None:
    await bench.fill({"writer": 8, "checker": 6})
    bench.learners["checker"].served = -7.0
    # After two in a row it holds, and its other episodes wait.
    async with bench.rounds() as rounds:
        for _ in range(6):
            await rounds._turn(await rounds._take_up())
    assert sorted(await bench.updates()) == ["checker"] * 2 + ["writer"]
    assert await bench.serving() == {"writer": 1, "checker": 0}
    assert [s for name, s in (await bench.states()).items() if "checker" in name] == [
        "rejected"
    ] * 2


async def test_a_policy_that_another_trainer_holds_is_passed_over_meanwhile(bench: Bench) -> None:
    await bench.fill({"writer": 8, "checker": 8})
    async with bench.engine.connect() as other:
        assert await claims.hold_policy(other, "checker")
        assert await bench.turns(1) == ["writer"]
        await other.invalidate()
    assert await bench.turns(1) == ["writer", "checker"]


async def test_a_policy_that_was_left_may_be_another_trainers(bench: Bench) -> None:
    await bench.fill({"writer": 8, "checker": 8})
    bench.learners["checker"].fails = AdapterError("its files are gone")
    async with bench.rounds() as rounds, bench.engine.connect() as other:
        await rounds._turn(await rounds._take_up())
        assert await claims.hold_policy(other, "checker")
        assert not await claims.hold_policy(other, "writer")
        await other.invalidate()


async def test_what_it_takes_to_begin_makes_no_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may take a minute to come up; the store is looked at as often as before."""
    looks, now, taken = 0, 0.0, PolicyWorker.take_up
    looked_again = asyncio.Event()

    async def slowly(self: PolicyWorker, guard: Any, engine: Any) -> bool:
        nonlocal looks, now
        looks, now = looks + 1, now + 60.0
        if looks > 1:
            looked_again.set()
        return await taken(self, guard, engine)

    monkeypatch.setattr(PolicyWorker, "take_up", slowly)
    # No time passes but in beginning: else the pause would depend on the machine.
    monkeypatch.setattr("trainer.scheduler.perf_counter", lambda: now)
    async with bench.rounds(["writer"]) as rounds:
        running = asyncio.create_task(rounds.run(0.01, once=False))
        try:
            # Ten times a minute's beginning would be ten minutes.
            await asyncio.wait_for(looked_again.wait(), 120.0)
        finally:
            running.cancel()
            await asyncio.wait([running])
    assert looks > 1
