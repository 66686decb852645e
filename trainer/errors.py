"""What can go wrong in the trainer. One root; each says what the operator can do."""

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
    """An adapter's files are not what its manifest says, or a name would be used twice."""


class PublishError(TrainerError):
    """A version could not be made servable, or is not served right."""


class UpstreamAway(TrainerError):
    """The model server does not answer; it is asked again."""


class LearnerError(TrainerError):
    """The learner cannot train this model, or an update came out unusable.

    `reason` is what its episodes are consumed with, `metrics` what is known of the update.
    """

    reason = "learner_error"

    def __init__(self, message: str, metrics: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})


class DriftOutOfBounds(LearnerError):
    """Server and trainer disagree about the newest version: what they see is not one policy."""

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
        super().__init__(message)
        self.episodes = dict(episodes or {})
        self.reason = reason


class Interrupted(TrainerError):
    """An update was stopped from outside before it was complete."""
