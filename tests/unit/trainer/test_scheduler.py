"""Whose turn it is: who has most waiting, and in the end everybody."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from trainer.scheduler import PATIENCE, WaitingSignal, turn_order

NAMES = ("a", "b", "c", "d")
SIGNALS = st.floats(0.0, 1e6)


def waiting(
    signals: Mapping[str, float], turns: Mapping[str, int] | None = None
) -> list[WaitingSignal]:
    return [
        WaitingSignal(policy=name, updates=updates, turns=(turns or {}).get(name, 0))
        for name, updates in signals.items()
    ]


def test_policy_with_the_most_signal_is_trained_first() -> None:
    assert turn_order(waiting({"a": 1.0, "b": 3.0, "c": 2.0})) == ["b", "c", "a"]


def test_policy_that_waited_longer_comes_first_among_policies_of_equal_signal() -> None:
    assert turn_order(waiting({"a": 1.0, "b": 1.0}, {"b": 1})) == ["b", "a"]


def test_policy_without_a_signal_has_its_turn_after_waiting() -> None:
    assert turn_order(waiting({"a": 0.0, "b": 5.0}, {"a": 2 * PATIENCE})) == ["a", "b"]


@given(st.dictionaries(st.sampled_from(NAMES), SIGNALS), st.data())
def test_order_of_policies_to_train_names_each_policy_once(
    signals: dict[str, float], data: st.DataObject
) -> None:
    turns = {name: data.draw(st.integers(0, 100)) for name in signals}
    assert sorted(turn_order(waiting(signals, turns))) == sorted(signals)


@given(st.lists(st.tuples(*[SIGNALS] * 4, *[st.booleans()] * 4), min_size=60, max_size=90))
def test_every_ready_policy_gets_a_turn_in_time(history: list[tuple[float, ...]]) -> None:
    """A policy that could make an update at every turn is passed over a bounded number of times."""
    turns = dict.fromkeys(NAMES, 0)
    passed_over = dict.fromkeys(NAMES, 0)
    for at in history:
        signals = dict(zip(NAMES, at, strict=False))
        # Some have less than an update needs, whatever their signal: they pass their turn on.
        can = [name for name, able in zip(NAMES, at[4:], strict=True) if able]
        order = turn_order(waiting(signals, turns))
        had = next((name for name in order if name in can), None)
        if had is None:
            continue
        turns = {name: 0 if name == had else count + 1 for name, count in turns.items()}
        for name in NAMES:
            waits = name in can and name != had
            passed_over[name] = passed_over[name] + 1 if waits else 0
            assert passed_over[name] <= (PATIENCE + 1) * len(NAMES)


@given(st.integers(2, 4), st.integers(1, 10))
def test_policies_of_equal_signal_are_trained_equally_often(count: int, rounds: int) -> None:
    """Equal signal for all, in updates: they take turns."""
    names = NAMES[:count]
    turns = dict.fromkeys(names, 0)
    had = []
    for _ in range(rounds * count):
        first = turn_order(waiting(dict.fromkeys(names, 2.5), turns))[0]
        turns = {name: 0 if name == first else waited + 1 for name, waited in turns.items()}
        had.append(first)
    assert {had.count(name) for name in names} == {rounds}
