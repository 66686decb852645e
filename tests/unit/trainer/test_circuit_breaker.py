"""After two updates in a row that come to nothing the trainer claims nothing, and tries again."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.updates.circuit_breaker import (
    FAILURES,
    LONGEST_PAUSE_S,
    PAST_FAULTS,
    TEST_S,
    CircuitBreaker,
    looks_like_a_fault,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_training_pauses_after_two_failures_in_a_row_and_is_tested_within_a_minute() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    breaker.count_failure("the server is full")
    assert not breaker.is_open
    breaker.forget_failures()
    breaker.count_failure("the server is full")
    assert not breaker.is_open
    breaker.count_failure("the rank does not fit")
    assert (breaker.is_open, breaker.why, breaker.test_is_due) == (
        True,
        "the rank does not fit",
        False,
    )
    clock.now += TEST_S
    assert breaker.test_is_due
    breaker.apply_test_result("it still does not fit")
    assert (breaker.why, breaker.test_is_due) == ("it still does not fit", False)
    clock.now += TEST_S
    assert TEST_S < 60
    breaker.apply_test_result(None)
    assert not breaker.is_open


def test_pauses_get_longer_while_tests_pass_and_updates_fail() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    breaker.count_failure("no")
    pauses = []
    for _ in range(12):
        # One failure is enough after a test: what it spends is not spent twice.
        breaker.count_failure("no")
        assert breaker.is_open
        begun = clock.now
        while not breaker.test_is_due:
            clock.now += TEST_S / 2
        pauses.append(clock.now - begun)
        breaker.apply_test_result(None)
    assert pauses[:4] == [TEST_S, TEST_S, 2 * TEST_S, 4 * TEST_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    breaker.forget_failures()
    breaker.count_failure("no")
    assert not breaker.is_open


@given(st.lists(st.booleans(), max_size=30))
def test_breaker_opens_exactly_after_enough_failures_in_a_row(outcomes: list[bool]) -> None:
    breaker = CircuitBreaker(Clock())
    in_a_row = 0
    for succeeded in outcomes:
        in_a_row = 0 if succeeded else in_a_row + 1
        if succeeded:
            breaker.forget_failures()
        else:
            breaker.count_failure("no")
        if in_a_row == FAILURES:
            break
    assert breaker.is_open == (in_a_row >= FAILURES)


def test_past_faults_pause_training_only_once_there_are_many() -> None:
    breaker = CircuitBreaker(Clock())
    for _ in range(PAST_FAULTS - 1):
        breaker.count_past_fault("they drift")
        assert not breaker.is_open
    breaker.count_past_fault("they drift")
    assert breaker.is_open


def test_doubt_is_settled_by_a_server_test_and_keeps_the_count_of_failures() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.pause_until_test("the server was away")
    assert (breaker.is_open, breaker.test_is_due) == (True, True)
    breaker.apply_test_result(None)
    breaker.count_failure("no")
    assert not breaker.is_open
    breaker.pause_until_test("the server was away")
    breaker.apply_test_result("its base model is another")
    assert (breaker.why, breaker.test_is_due) == ("its base model is another", False)
    breaker.pause_until_test("the server was away")
    assert breaker.why == "its base model is another"


def test_two_drifting_updates_without_a_success_blame_the_server() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.count_drift()
    assert not breaker.sampled_wrongly
    breaker.forget_failures()
    breaker.count_drift()
    assert not breaker.sampled_wrongly
    breaker.count_drift()
    assert breaker.sampled_wrongly
    breaker.forget_failures()
    assert not breaker.sampled_wrongly


def test_failure_of_half_of_several_episodes_looks_like_a_fault() -> None:
    assert looks_like_a_fault(4, 4)
    assert looks_like_a_fault(4, 8)
    assert not looks_like_a_fault(4, 9)
    assert not looks_like_a_fault(3, 3)
    assert not looks_like_a_fault(0, 0)


def test_reason_of_a_training_pause_is_shown_as_a_single_word() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.count_failure("its files differ", "rejected")
    assert breaker.reason is None
    breaker.count_failure("the GPU is full", "out_of_memory")
    assert breaker.reason == "out_of_memory"
    breaker.apply_test_result("the GPU is still full")
    assert breaker.reason == "out_of_memory"
    breaker.apply_test_result(None)
    assert breaker.reason is None
    breaker.forget_failures()
    breaker.pause_until_test("no server answers")
    assert breaker.reason == "server_away"
    # It answers, and is another one.
    breaker.apply_test_result("its base model is another")
    assert breaker.reason == "server"


def test_settled_doubt_closes_the_breaker_and_clears_its_reason() -> None:
    breaker = CircuitBreaker(Clock())
    breaker.pause_until_test("the memory is short", "out_of_memory")
    breaker.end_suspicion()
    assert (breaker.is_open, breaker.reason) == (False, None)
