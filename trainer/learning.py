"""What the loop asks of a learner. `trainer.learners` has the real one, which needs torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.rows import Row


class LearnerProtocol(Protocol):
    """Holds a policy between updates."""

    def restore(self, adapter: Path | None) -> None:
        """Continue from a version's folder; None: from the base model."""

    def update(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Train on rows whose weights sum to one; the update's metrics, JSON-ready."""

    def interrupt(self) -> None:
        """Make a running `update` raise `Interrupted` soon; the learner is not used again."""

    def save(self, folder: Path) -> None:
        """Write what the server and what resuming needs."""

    def saved_as(self, adapter: Path) -> None:
        """What was saved last is this version now."""

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probabilities (S,) of each row's sampled tokens, at temperature one."""
