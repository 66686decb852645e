"""Define the trainer's exceptions, under one root."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

OUT_OF_MEMORY: Final = "out_of_memory"
TOO_LONG: Final = "too_long"
# How to give a single call more memory, and how to give an update more.
LONG_CALL_REMEDY: Final = (
    "leave batch.gradient_checkpointing at auto, or give the model server less memory (on a GPU"
    " --gpu-memory-utilization)"
)
MEMORY_REMEDY: Final = f"lower batch.micro_batch_tokens, {LONG_CALL_REMEDY}"


class TrainerError(Exception):
    """The base class of the trainer's errors."""


class RecipeError(TrainerError):
    """Report that a recipe is missing, unreadable or invalid; the message names each wrong key."""


class CreditLineError(TrainerError):
    """Report a line that is not an exported episode, or repeats one; the message names the line."""


class AdapterError(TrainerError):
    """Report files that are unusable as an adapter or version, or a version that exists already."""


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
    """Report that a version is not loaded, because its files differ from the written ones."""


class Misserved(PublishError):
    """Report that a server applied a version differently from the trainer; it was unloaded."""


class WrongBase(Misserved):
    """Report that a server has another base model than the trainer: no version is to blame."""


class FilesUnread(TrainerError):
    """Report that a version's files cannot be read for now; reading is retried later."""


class UpstreamAway(TrainerError):
    """Report that the model server does not answer; the trainer keeps asking."""


class NotFetched(UpstreamAway):
    """Report that a version's files could not be brought to another machine; it is retried later.

    While a version is published, a model server that cannot get its files counts as away.
    """


class LearnerError(TrainerError):
    """Report that the learner cannot train this model, or that an update failed.

    The update's episodes are free again, except the episodes to blame (`Unusable`). `is_poison` is
    true if consuming those lets the next update succeed, `suspects_servers` if a faulty model
    server may have sampled the episodes.
    """

    is_poison: bool = False
    suspects_servers: bool = False


class NoEffect(LearnerError):
    """Report that an adapter of the chosen layers has no effect, whatever its weights are."""


class ServerAtFault(LearnerError):
    """Report that an update's episodes may come from a model server that failed a self-test."""


class TeacherError(LearnerError):
    """Report that a teacher does not answer or does not fit the recipe; the trainer asks again."""


class CompanionFailed(LearnerError):
    """Report that another process of the same update failed; the error of that process says why.

    `is_memory` says whether all failed processes ran out of memory.
    """

    def __init__(self, *, is_memory: bool) -> None:
        super().__init__("another process failed")
        self.is_memory = is_memory


class Unusable(LearnerError):
    """Report that some episodes make an update impossible; these alone are consumed, untrained.

    `episodes` maps the id of each episode to blame to the cause; it is empty if they are unknown.
    They are consumed with `reason`. `metrics` are the update's figures so far.
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
        # Consuming these episodes does not help if the server stays as it is: updates fail again.
        self.is_poison = False


class Unreplayable(LearnerError):
    """Report a grammar whose masks cannot be made again, or a reply that does not fit its grammar.

    `reason` says which of the two; an update leaves such calls out before it trains.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Interrupted(TrainerError):
    """Report that `interrupt` stopped the learner for good; a later trainer repeats the update."""
