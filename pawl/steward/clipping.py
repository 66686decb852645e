"""Show how many of the rewards that versions are judged by their range cuts, and warn of it."""

from collections.abc import Mapping
from typing import Literal

import structlog

from pawl.steward.gate.records import MOST_CLIPPED, ArmFigures
from pawl.steward.metrics import GATE_CLIPPED
from store.records import ARMS

log = structlog.get_logger()
Judged = Literal["trial", "watch"]
REMEDY = (
    "they lie outside of gate.reward_range and count as its ends, so a version that is worse may"
    " look as good: set it to your rewards' lowest and highest, for the versions to come"
)


class Clipping:
    """Show it of the trial, or of the watch, of one policy."""

    def __init__(self, policy: str, judged: Judged) -> None:
        """Begin without having seen a reward."""
        self._policy = policy
        self._judged: Judged = judged
        self._has_warned = False

    def show(self, arms: Mapping[str, ArmFigures]) -> None:
        """Show the shares of arms; log once if one is too large, until none is any more."""
        shares = {arm: figures.clipped_share for arm, figures in arms.items()}
        for arm, share in shares.items():
            GATE_CLIPPED.labels(self._policy, self._judged, arm).set(share)
        many = {arm: f"{share:.0%}" for arm, share in shares.items() if share > MOST_CLIPPED}
        if many and not self._has_warned:
            log.warning(
                "rewards_clipped",
                policy=self._policy,
                judged=self._judged,
                shares=many,
                reason=REMEDY,
            )
        self._has_warned = bool(many)

    def hide(self) -> None:
        """Show nothing more: nothing is judged."""
        self._has_warned = False
        for arm in ARMS:
            GATE_CLIPPED.remove(self._policy, self._judged, arm)
