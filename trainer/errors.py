"""The trainer's exceptions, under one root; each message names the remedy for the operator."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID


class TrainerError(Exception):
    """Root of the trainer's errors."""


class RecipeError(TrainerError):
    """The recipe cannot be read; the message names the key and the remedy."""


class CreditLineError(TrainerError):
    """A line is not an episode as `pawl export` writes it; the message names line and field."""


class AdapterError(TrainerError):
    """A version's files differ from its manifest, or a version would be written a second time."""


class PublishError(TrainerError):
    """A version could not be loaded, or the model server does not serve it correctly."""


class UpstreamAway(TrainerError):
    """The model server does not answer; the trainer keeps asking."""


class LearnerError(TrainerError):
    """The learner cannot train this model, or an update failed.

    The update's episodes are consumed with `reason`; `metrics` is what is known of the update.
    """

    reason = "learner_error"

    def __init__(self, message: str, metrics: Mapping[str, Any] | None = None) -> None:
        """Store the message, and the metrics that the failed update is recorded with."""
        super().__init__(message)
        self.metrics = dict(metrics or {})


class DriftOutOfBounds(LearnerError):
    """Model server and trainer compute different log-probabilities for the newest version."""

    reason = "drift"


class Unusable(LearnerError):
    """An update cannot be computed for some of its episodes; nothing of it may be spent for that.

    `episodes` says why, by the id of each episode that is to blame, which is spent with `reason`;
    it is empty where it cannot be told.
    """

    def __init__(
        self,
        message: str,
        episodes: Mapping[UUID, str] | None = None,
        reason: str = "non_finite",
    ) -> None:
        """Store the message, why by episode, and the reason that these are spent with."""
        super().__init__(message)
        self.episodes = dict(episodes or {})
        self.reason = reason


class Interrupted(TrainerError):
    """An update was stopped from outside before it was complete."""
