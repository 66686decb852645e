"""After two updates in a row that come to nothing the trainer claims nothing, and tries again."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.updates.holding import (
    FAILURES,
    LONGEST_PAUSE_S,
    PAST_FAULTS,
    TRIAL_S,
    Holding,
    looks_like_a_fault,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_holds_after_two_failures_in_a_row_and_tries_within_a_minute() -> None:
    clock = Clock()
    holding = Holding(clock)
    holding.note_failure("the server is full")
    assert not holding.is_held
    holding.note_success()
    holding.note_failure("the server is full")
    assert not holding.is_held
    holding.note_failure("the rank does not fit")
    assert (holding.is_held, holding.reason, holding.trial_is_due) == (
        True,
        "the rank does not fit",
        False,
    )
    clock.now += TRIAL_S
    assert holding.trial_is_due
    holding.note_trial("it still does not fit")
    assert (holding.reason, holding.trial_is_due) == ("it still does not fit", False)
    clock.now += TRIAL_S
    assert TRIAL_S < 60
    holding.note_trial(None)
    assert not holding.is_held


def test_a_trial_that_says_too_much_makes_pauses_longer_and_a_success_ends_that() -> None:
    clock = Clock()
    holding = Holding(clock)
    holding.note_failure("no")
    pauses = []
    for _ in range(12):
        # One failure is enough after a trial: what it spends is not spent twice.
        holding.note_failure("no")
        assert holding.is_held
        begun = clock.now
        while not holding.trial_is_due:
            clock.now += TRIAL_S / 2
        pauses.append(clock.now - begun)
        holding.note_trial(None)
    assert pauses[:4] == [TRIAL_S, TRIAL_S, 2 * TRIAL_S, 4 * TRIAL_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    holding.note_success()
    holding.note_failure("no")
    assert not holding.is_held


@given(st.lists(st.booleans(), max_size=30))
def test_it_is_held_exactly_if_some_failures_followed_each_other(outcomes: list[bool]) -> None:
    holding = Holding(Clock())
    in_a_row = 0
    for succeeded in outcomes:
        in_a_row = 0 if succeeded else in_a_row + 1
        if succeeded:
            holding.note_success()
        else:
            holding.note_failure("no")
        if in_a_row == FAILURES:
            break
    assert holding.is_held == (in_a_row >= FAILURES)


def test_rows_of_a_past_fault_do_not_hold_until_there_are_many() -> None:
    holding = Holding(Clock())
    for _ in range(PAST_FAULTS - 1):
        holding.note_past_fault("they drift")
        assert not holding.is_held
    holding.note_past_fault("they drift")
    assert holding.is_held


def test_a_doubt_is_settled_by_a_trial_and_leaves_the_count_as_it_was() -> None:
    holding = Holding(Clock())
    holding.doubt("the server was away")
    assert (holding.is_held, holding.trial_is_due) == (True, True)
    holding.note_trial(None)
    holding.note_failure("no")
    assert not holding.is_held
    holding.doubt("the server was away")
    holding.note_trial("its base model is another")
    assert (holding.reason, holding.trial_is_due) == ("its base model is another", False)
    holding.doubt("the server was away")
    assert holding.reason == "its base model is another"


def test_two_updates_that_drift_and_no_success_between_them_say_what_a_server_does() -> None:
    holding = Holding(Clock())
    holding.note_drift()
    assert not holding.sampled_wrongly
    holding.note_success()
    holding.note_drift()
    assert not holding.sampled_wrongly
    holding.note_drift()
    assert holding.sampled_wrongly
    holding.note_success()
    assert not holding.sampled_wrongly


def test_most_of_several_episodes_look_like_a_fault() -> None:
    assert looks_like_a_fault(4, 4)
    assert looks_like_a_fault(4, 8)
    assert not looks_like_a_fault(4, 9)
    assert not looks_like_a_fault(3, 3)
    assert not looks_like_a_fault(0, 0)


def test_what_it_holds_for_is_told_in_a_word() -> None:
    holding = Holding(Clock())
    holding.note_failure("its files differ", "rejected")
    assert holding.kind is None
    holding.note_failure("the GPU is full", "out_of_memory")
    assert holding.kind == "out_of_memory"
    holding.note_trial("the GPU is still full")
    assert holding.kind == "out_of_memory"
    holding.note_trial(None)
    assert holding.kind is None
    holding.note_success()
    holding.doubt("no server answers")
    assert holding.kind == "server_away"
    # It answers, and is another one.
    holding.note_trial("its base model is another")
    assert holding.kind == "server"


def test_a_doubt_that_is_settled_is_no_reason_any_more() -> None:
    holding = Holding(Clock())
    holding.doubt("the memory is short", "out_of_memory")
    holding.settle()
    assert (holding.is_held, holding.kind) == (False, None)


def test_a_part_of_a_candidate_ends_no_row_of_rejections() -> None:
    holding = Holding()
    holding.note_failure("it is too far from its base model", "rejected")
    holding.note_written()
    holding.note_failure("it is too far from its base model", "rejected")
    assert holding.is_held
    holding = Holding()
    holding.note_failure("no memory", "out_of_memory")
    holding.note_written()
    holding.note_failure("no memory", "out_of_memory")
    assert not holding.is_held
