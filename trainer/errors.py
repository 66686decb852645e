"""Define the trainer's exceptions, under one root; each message names the remedy."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

OUT_OF_MEMORY: Final = "out_of_memory"
TOO_LONG: Final = "too_long"
# What gives an update more room in memory.
MEMORY_REMEDY: Final = (
    "lower batch.micro_batch_tokens, leave batch.gradient_checkpointing at auto, or give the model"
    " server less (--gpu-memory-utilization)"
)


class TrainerError(Exception):
    """Be the root of the trainer's errors."""


class RecipeError(TrainerError):
    """Report that the recipe cannot be read; the message names the key and the remedy."""


class CreditLineError(TrainerError):
    """Report a line that is no episode as `pawl export` writes it, with line and field."""


class AdapterError(TrainerError):
    """Report that files differ from their manifest, or that a version exists already."""


class FileMissing(AdapterError):
    """Report that a file of a version is not there."""


class PublishError(TrainerError):
    """Report that a version could not be loaded, or that it is not served correctly.

    `evidence` is what that rests on, for the event of its rejection; None if the message says all.
    """

    def __init__(self, message: str, evidence: Mapping[str, Any] | None = None) -> None:
        """Store the message, and the figures that were compared, if any."""
        super().__init__(message)
        self.evidence = evidence


class FilesAltered(PublishError):
    """Report that a version is not loaded, because its files are not those that were written."""


class Misserved(PublishError):
    """Report that a server serves a version otherwise than it was trained; it is unloaded there."""


class FilesUnread(TrainerError):
    """Report that a version's files cannot be read for now; it is tried again, nothing is spent."""


class UpstreamAway(TrainerError):
    """Report that the model server does not answer; the trainer keeps asking."""


class NotFetched(UpstreamAway):
    """Report that a machine could not get a version's files; nothing is spent, it is tried again.

    At publishing, a model server that cannot get them counts as one that is away.
    """


class LearnerError(TrainerError):
    """Report that the learner cannot train this model, or that an update failed.

    The update's episodes are free again, but for those that are to blame (`Unusable`). `is_poison`
    says that the next update can succeed, because those are spent, and `doubts_servers` that a
    model server that is at fault may have sampled the episodes.
    """

    is_poison: bool = False
    doubts_servers: bool = False


class NoEffect(LearnerError):
    """Report that an adapter of some layers changes nothing, whatever its weights are."""


class ServerAtFault(LearnerError):
    """Report that a model server, which a self-test found at fault, may have sampled an update."""


class TeacherError(LearnerError):
    """Report that a teacher is away, or is not what the recipe says; it is asked again."""


class CompanionFailed(LearnerError):
    """Report that another process of the same update failed; the message says why.

    `is_memory` says whether all of those that failed ran out of memory.
    """

    def __init__(self, *, is_memory: bool) -> None:
        """Store what is known of the failure."""
        super().__init__("another process failed")
        self.is_memory = is_memory


class Unusable(LearnerError):
    """Report that some episodes make an update impossible; no other may be spent for that.

    `episodes` says why, by the id of each episode that is to blame, which is spent with `reason`;
    it is empty where it cannot be told. `metrics` is what is known of the update.
    """

    reason: str = "non_finite"

    def __init__(
        self,
        message: str,
        episodes: Mapping[UUID, str] | None = None,
        reason: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the message, why by episode, the reason that these are spent with, and metrics."""
        super().__init__(message)
        self.episodes = dict(episodes or {})
        self.reason = reason or self.reason
        self.metrics = dict(metrics or {})
        self.is_poison = bool(self.episodes)


class ShortOfMemory(Unusable):
    """Report that memory ran out, and no episode is to blame; others may give some back."""

    reason = OUT_OF_MEMORY


class OtherVocabulary(Unusable):
    """Report token ids that the base model has no embedding for: another model sampled them."""

    # The server may still have another base model.
    doubts_servers = True
    reason = "damaged"


class DriftOutOfBounds(Unusable):
    """Report that server and trainer compute different log-probabilities for the newest version."""

    # The server's model, precision or options may be others.
    doubts_servers = True

    def __init__(
        self, message: str, episodes: Mapping[UUID, str], metrics: Mapping[str, Any]
    ) -> None:
        """Store the message, how far off each episode is, and the update's metrics."""
        super().__init__(message, episodes, "drift", metrics)
        # The server may still be as it was when these were sampled.
        self.is_poison = False


class Unreplayable(LearnerError):
    """Report a grammar whose masks cannot be made again, or a reply that does not fit it.

    `reason` says which; the update leaves such calls out before it begins.
    """

    def __init__(self, message: str, reason: str) -> None:
        """Store the message and the reason."""
        super().__init__(message)
        self.reason = reason


class Interrupted(TrainerError):
    """Report that an update was stopped from outside before it was complete."""
