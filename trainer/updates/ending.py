"""Notice that the recipe's schedule has ended: a further update would change nothing."""

from pathlib import Path

import structlog

from trainer.publishing.adapters import read_progress
from trainer.recipes.schedule import has_ended
from trainer.recipes.training import OptimizerOptions

log = structlog.get_logger()


class Ending:
    """Compare a policy's progress with the end of the schedule; log once that it has come."""

    def __init__(self, rule: OptimizerOptions) -> None:
        """Store the recipe's schedule."""
        self._rule = rule
        self._was_logged = False

    def has_come(self, folder: Path | None) -> bool:
        """Return True if the schedule has ended at the version in `folder` (None: the base)."""
        if self._rule.schedule == "constant":
            return False
        taken = 0 if folder is None else read_progress(folder)
        ended = has_ended(self._rule, taken)
        if ended and not self._was_logged:
            log.warning("schedule_ended", steps_taken=taken, remedy="raise optimizer.total_steps")
        self._was_logged = ended
        return ended
