"""Pause training after repeated failures, and decide when it may go on (pure, but for the clock).

A fault of the machine, the server or the recipe stops every update alike. After two failures in a
row the trainer pauses: it claims nothing, and tests now and then, on made-up rows, whether it could
go on.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final, Literal

# Why a trainer pauses, in a word; the log has the whole reason.
PauseReason = Literal[
    "failed",
    "out_of_memory",
    "drift",
    "rejected",
    "server",
    "server_away",
    "teacher",
    "no_slot",
    "unpublished",
]
# Failed updates in a row before the trainer pauses.
FAILURES: Final = 2
# Seconds between a pause's beginning, or a test that failed, and the next test.
TEST_S: Final = 20.0
# If tests succeed but updates still fail, each pause is twice as long, up to this.
LONGEST_PAUSE_S: Final = 3600.0
# Updates in a row with wrongly sampled rows before the trainer pauses, even if the server passes
# every test: the test may miss a fault.
PAST_FAULTS: Final = 8
# Fewer odd episodes than this do not point to a fault of the system.
FEWEST_ODD: Final = 4


def looks_like_a_fault(odd: int, total: int) -> bool:
    """Return whether `odd` of an update's `total` episodes point to a fault of the system.

    Odd episodes are those that an update cannot train on, or that are too far off the policy. A
    server that samples wrongly makes all its episodes odd, a machine short of memory nearly all.
    """
    return odd >= FEWEST_ODD and 2 * odd >= total


class CircuitBreaker:
    """Count the failed updates of one policy, and pause after `FAILURES` in a row.

    Attributes:
        suspects_servers: whether the pause is for a test of the servers, and not for failures.
        why: why training is paused, in full; None if it is not paused.
        reason: why training is paused, as a keyword; None if it is not paused.
        tested_return_count: `Replicas.return_count` at the last test of the servers.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begin without a failure; `clock` returns seconds."""
        self._clock = clock
        self._failures = 0
        # Tests that passed since the last successful update; updates failed all the same.
        self._tests_in_vain = 0
        self._past_faults = 0
        self._drifts = 0
        self._test_at = 0.0
        self.suspects_servers = False
        self.why: str | None = None
        self.reason: PauseReason | None = None
        self.tested_return_count = 0

    @property
    def is_open(self) -> bool:
        """Return whether training is paused, so that nothing may be claimed."""
        return self.why is not None

    @property
    def test_is_due(self) -> bool:
        """Return whether training is paused and the time of the next test has come."""
        return self.is_open and self._clock() >= self._test_at

    def forget_failures(self) -> None:
        """Forget all failures so far: an update's version was published."""
        self._failures = self._tests_in_vain = self._past_faults = self._drifts = 0

    @property
    def sampled_wrongly(self) -> bool:
        """Return whether so many updates had wrong samples that all earlier samples are suspect."""
        return self._drifts >= FAILURES

    def count_drift(self) -> None:
        """Count an update with wrongly sampled rows, even if the server is at fault no longer."""
        self._drifts += 1

    def count_failure(self, why: str, reason: PauseReason = "failed") -> None:
        """Count a failed update or a rejected version; pause after `FAILURES` in a row."""
        self._failures += 1
        if self._failures >= FAILURES:
            pause_s = min(LONGEST_PAUSE_S, TEST_S * 2.0 ** max(0, self._tests_in_vain - 1))
            self._pause(why, pause_s, reason)

    def count_past_fault(self, why: str) -> None:
        """Count an update with wrongly sampled rows after which the servers passed their test.

        Pause after `PAST_FAULTS` of them.
        """
        self._past_faults += 1
        if self._past_faults >= PAST_FAULTS:
            self._past_faults = 0
            self._pause(why, min(LONGEST_PAUSE_S, TEST_S * 2.0**self._tests_in_vain), "drift")

    def pause_until_test(self, why: str, reason: PauseReason = "server_away") -> None:
        """Unless paused already, pause until a test passes; the test is due at once."""
        if not self.is_open:
            self._pause(why, 0.0, reason)
            self.suspects_servers = True

    def end_suspicion(self) -> None:
        """End a pause that `pause_until_test` began."""
        if self.suspects_servers:
            self.suspects_servers = False
            self._resume()

    def apply_test_result(self, why: str | None) -> None:
        """End the pause if `why` is None (the self-test passed), else prolong it by `TEST_S`."""
        is_suspect, self.suspects_servers = self.suspects_servers, False
        if why is not None:
            # The first test after a wait for a server or a slot: the server is at fault.
            is_first = self.reason in ("server_away", "no_slot")
            self._pause(why, TEST_S, "server" if is_first else self.reason or "failed")
            return
        self._resume()
        if is_suspect:
            return
        # One more failure pauses training again.
        self._failures = FAILURES - 1
        self._tests_in_vain += 1

    def _resume(self) -> None:
        self.why = self.reason = None

    def _pause(self, why: str, pause_s: float, reason: PauseReason) -> None:
        self.why, self.reason = why, reason
        self._test_at = self._clock() + pause_s
