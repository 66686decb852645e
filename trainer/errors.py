"""Define the trainer's exceptions, under one root; each message names the remedy."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

OUT_OF_MEMORY: Final = "out_of_memory"
TOO_LONG: Final = "too_long"
# How to give an update more memory.
MEMORY_REMEDY: Final = (
    "lower batch.micro_batch_tokens, leave batch.gradient_checkpointing at auto, or give the model"
    " server less (--gpu-memory-utilization)"
)


class TrainerError(Exception):
    """The root of the trainer's errors."""


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

    `evidence` has the compared figures, for the event of the rejection; None if there are none.
    """

    def __init__(self, message: str, evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.evidence = evidence


class FilesAltered(PublishError):
    """Report that a version is not loaded, because its files are not those that were written."""


class Misserved(PublishError):
    """Report that a server applied a version differently from the trainer; it was unloaded."""


class FilesUnread(TrainerError):
    """Report that a version's files cannot be read for now; it is retried, nothing is spent."""


class UpstreamAway(TrainerError):
    """Report that the model server does not answer; the trainer keeps asking."""


class NotFetched(UpstreamAway):
    """Report that a machine could not get a version's files; it is retried, nothing is spent.

    At publishing, a model server that cannot get the files counts as away.
    """


class LearnerError(TrainerError):
    """Report that the learner cannot train this model, or that an update failed.

    The update's episodes are free again, except the episodes to blame (`Unusable`). `is_poison`
    says that these are spent, so that the next update can succeed, and `suspects_servers` that a
    model server at fault may have sampled the episodes.
    """

    is_poison: bool = False
    suspects_servers: bool = False


class NoEffect(LearnerError):
    """Report that an adapter of some layers changes nothing, whatever its weights are."""


class ServerAtFault(LearnerError):
    """Report that a model server, which a self-test found at fault, may have sampled an update."""


class TeacherError(LearnerError):
    """Report that a teacher is away, or does not fit the recipe; it is asked again."""


class CompanionFailed(LearnerError):
    """Report that another process of the same update failed; the message says why.

    `is_memory` says whether all failed processes ran out of memory.
    """

    def __init__(self, *, is_memory: bool) -> None:
        super().__init__("another process failed")
        self.is_memory = is_memory


class Unusable(LearnerError):
    """Report that some episodes make an update impossible; only these may be spent for it.

    `episodes` maps the ids of the episodes to blame to the cause; it is empty if they are unknown.
    They are spent with `reason`. `metrics` are the update's figures so far.
    """

    reason: str = "non_finite"

    def __init__(
        self,
        message: str,
        episodes: Mapping[UUID, str] | None = None,
        reason: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.episodes = dict(episodes or {})
        self.reason = reason or self.reason
        self.metrics = dict(metrics or {})
        self.is_poison = bool(self.episodes)


class ShortOfMemory(Unusable):
    """Report that memory ran out, and no episode is to blame; other processes may free some."""

    reason = OUT_OF_MEMORY


class OtherVocabulary(Unusable):
    """Report token ids that the base model has no embedding for: another model sampled them."""

    # The server may still have another base model.
    suspects_servers = True
    reason = "damaged"


class DriftOutOfBounds(Unusable):
    """Report that server and trainer compute different log-probabilities for the newest version."""

    # The server's model, precision or options may differ.
    suspects_servers = True

    def __init__(
        self, message: str, episodes: Mapping[UUID, str], metrics: Mapping[str, Any]
    ) -> None:
        """Store the message, how far off each episode is, and the update's metrics."""
        super().__init__(message, episodes, "drift", metrics)
        # The server may be unchanged, and then the next update fails, too.
        self.is_poison = False


class Unreplayable(LearnerError):
    """Report a grammar whose masks cannot be made again, or a reply that does not fit it.

    `reason` says which; the update leaves such calls out before it begins.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Interrupted(TrainerError):
    """Report that an update was stopped from outside before it was complete."""
