"""Decide when a trainer whose updates come to nothing may claim again (pure, but for the clock).

A fault of the machine, the server or the recipe stops every update alike. After two in a row the
trainer holds: it claims nothing, and tries now and then, on made-up rows, whether it could go on.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final, Literal

# What a trainer holds for, in a word; the log has it in full.
HoldReason = Literal[
    "failed", "out_of_memory", "drift", "rejected", "server", "server_away", "no_slot"
]
# Updates in a row that come to nothing before the trainer holds.
FAILURES: Final = 2
# Seconds between a hold's beginning, or a trial that failed, and the next trial.
TRIAL_S: Final = 20.0
# Where trials succeed and updates fail all the same, each pause is twice as long, up to this.
LONGEST_PAUSE_S: Final = 3600.0
# Updates in a row of rows that were sampled wrongly, while the server is right by every trial,
# before the trainer holds nevertheless: the trial may miss something.
PAST_FAULTS: Final = 8
# Fewer odd episodes than these are no sign of anything but themselves.
FEWEST: Final = 4


def looks_like_a_fault(odd: int, of: int) -> bool:
    """Return whether so many of an update's episodes are odd that it may not be their doing.

    A server that samples wrongly makes all odd that it samples, and a machine with hardly any
    memory nearly all.
    """
    return odd >= FEWEST and 2 * odd >= of


class Holding:
    """Count the updates of one policy that come to nothing, and hold after `FAILURES` in a row.

    Attributes:
        is_in_doubt: nothing failed, and a trial is due.
        reason: why nothing may be claimed; None if something may.
        tried_at: how often a model server had come back by the last trial.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begin without a failure; `clock` returns seconds."""
        self._clock = clock
        self._failures = 0
        self._in_vain = 0
        self._past_faults = 0
        self._drifts = 0
        # Whether the last update that came to nothing made a version that was rejected.
        self._was_rejected = False
        self._trial_at = 0.0
        self.is_in_doubt = False
        self.reason: str | None = None
        self.kind: HoldReason | None = None
        self.tried_at = 0

    @property
    def is_held(self) -> bool:
        """Return whether nothing may be claimed."""
        return self.reason is not None

    @property
    def trial_is_due(self) -> bool:
        """Return whether the trainer holds and it is time to try whether it could go on."""
        return self.is_held and self._clock() >= self._trial_at

    def note_success(self) -> None:
        """Note an update that made a version which serves: all failures before it are past."""
        self._failures = self._in_vain = self._past_faults = self._drifts = 0
        self._was_rejected = False

    def note_written(self) -> None:
        """Note an update that made a part of a candidate, which is still to be probed.

        All failures before it are past but a rejection: whether the next candidate will be rejected
        as well nobody knows yet.
        """
        if not self._was_rejected:
            self.note_success()

    @property
    def sampled_wrongly(self) -> bool:
        """Return whether so many updates drifted that all of the time must be taken for wrong."""
        return self._drifts >= FAILURES

    def note_drift(self) -> None:
        """Note an update of rows that a server sampled wrongly, whether it still does or not."""
        self._drifts += 1

    def note_failure(self, why: str, kind: HoldReason = "failed") -> None:
        """Note an update that failed, drifted, or made a version that was rejected."""
        self._failures += 1
        self._was_rejected = kind == "rejected"
        if self._failures >= FAILURES:
            pause_s = min(LONGEST_PAUSE_S, TRIAL_S * 2.0 ** max(0, self._in_vain - 1))
            self._hold(why, pause_s, kind)

    def note_past_fault(self, why: str) -> None:
        """Note an update of rows that drift, whose server is right now by a trial."""
        self._past_faults += 1
        if self._past_faults >= PAST_FAULTS:
            self._past_faults = 0
            self._hold(why, min(LONGEST_PAUSE_S, TRIAL_S * 2.0**self._in_vain), "drift")

    def doubt(self, why: str, kind: HoldReason = "server_away") -> None:
        """Hold until a trial, which is due at once: the model servers may not be what they were."""
        if not self.is_held:
            self._hold(why, 0.0, kind)
            self.is_in_doubt = True

    def settle(self) -> None:
        """Go on where nothing but a doubt held, which is settled."""
        if self.is_in_doubt:
            self.is_in_doubt = False
            self._go_on()

    def note_trial(self, why: str | None) -> None:
        """Note a trial that failed for the reason `why`, or succeeded if it is None."""
        in_doubt, self.is_in_doubt = self.is_in_doubt, False
        if why is not None:
            # One that was away answers, or one is tried at last, and is not what it was.
            is_first = self.kind in ("server_away", "no_slot")
            self._hold(why, TRIAL_S, "server" if is_first else self.kind or "failed")
            return
        self._go_on()
        if in_doubt:
            return
        # One more failure, and it holds again.
        self._failures = FAILURES - 1
        self._in_vain += 1

    def _go_on(self) -> None:
        self.reason = self.kind = None

    def _hold(self, why: str, pause_s: float, kind: HoldReason) -> None:
        self.reason, self.kind = why, kind
        self._trial_at = self._clock() + pause_s
