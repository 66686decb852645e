"""What is killed beside a trainer, and which of its callers' failures are due to that (pure)."""

import random
import signal
from collections import Counter
from collections.abc import Mapping

import pytest

from benchmarks.chaos.__main__ import broken_promises
from benchmarks.chaos.beside import killer
from benchmarks.chaos.beside.callers import Answered
from benchmarks.chaos.beside.killer import Happened, Killer, Steward
from benchmarks.chaos.beside.standing import beside_report


class FakeServer:
    port, start_s, is_slow = 1, 1.0, False

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def kill(self) -> None:
        self.done.append("kill")


class FakeSteward(Steward):
    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def end(self, by: signal.Signals) -> int | None:
        self.done.append("kill")
        return -by


def killing(
    monkeypatch: pytest.MonkeyPatch, kills: int, listed: Mapping[str, str]
) -> tuple[Killer, FakeServer, FakeSteward]:
    for name in ("QUIET_S", "AWAY_S"):
        monkeypatch.setattr(killer, name, (0.0, 0.0))
    for name in ("POLL_S", "LOADED_WITHIN_S"):
        monkeypatch.setattr(killer, name, 0.0)
    monkeypatch.setattr(killer, "listed", lambda _: listed)
    server, steward = FakeServer(), FakeSteward()
    made = Killer(server, steward, lambda: {"m@1": "/a/1"}, kills, random.Random(1))
    return made, server, steward


@pytest.mark.parametrize("kills", [3, 8, 40])
def test_so_many_are_killed_and_all_are_started_again(
    monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    made, server, steward = killing(monkeypatch, kills, {"m@1": "/a/1"})
    made.meanwhile(lambda: 1.0, lambda: False)
    made.in_the_end()
    assert made.happened.killed.total() == kills
    for part, name in ((server, "model server"), (steward, "steward")):
        done = Counter(part.done)
        assert done["kill"] == done["start"] == made.happened.killed[name]  # type: ignore[index]
    assert not made.happened.not_loaded
    assert len(made.happened.loaded_without_trainer) == 2


@pytest.mark.parametrize("listed", [{}, {"m@1": "/elsewhere"}])
def test_an_adapter_that_does_not_come_back_is_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, listed: Mapping[str, str]
) -> None:
    made, _, _ = killing(monkeypatch, 3, listed)
    made.in_the_end()
    report = beside_report(made.happened, [])
    assert broken_promises(report) == ["not_loaded: 2 × m@1"]


def answered(began: float, status: int) -> Answered:
    return Answered(began, began + 0.5, "m@1", status, "what it said")


def test_a_call_may_fail_while_the_server_is_away_but_is_never_a_404() -> None:
    happened = Happened(away=[(10.0, 12.0)])
    fine = [answered(1.0, 200), answered(9.8, 502), answered(12.5, 503)]
    assert broken_promises(beside_report(happened, fine)) == []
    for began, status, promise in ((11.0, 404, "not_found"), (20.0, 502, "failed_otherwise")):
        broken = broken_promises(beside_report(happened, [*fine, answered(began, status)]))
        assert [one.split(":")[0] for one in broken] == [promise]
