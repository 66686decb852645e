"""The interface of learners to the update loop; `trainer.learners.learner` implements it.

It has its own module because the implementation needs torch and the loop does not.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from store.values.sampling import Distribution
from trainer.batches import Row, RowKey


class LearnerProtocol(Protocol):
    """Hold one policy's model between updates, and train it.

    Methods that compute raise `ShortOfMemory` if memory runs out and no row is too long.
    """

    def restore(self, adapter: Path | None) -> None:
        """Load a version with its optimiser state, or a new adapter if `adapter` is None.

        Raises:
            AdapterError, FilesUnread: a state file is damaged, or cannot be read for now.
        """

    def update(self, rows: Sequence[Row], step_share: float = 1.0) -> dict[str, Any]:
        """Train on rows whose weights sum to one, and return the update's metrics, JSON-ready.

        `step_share` (above 0, at most 1) multiplies the learning rate. After any of these errors
        the learner must be restored.

        Raises:
            DriftOutOfBounds: server and trainer compute different log-probabilities.
            Unusable: some rows cannot be used, or the loss or gradient is not finite.
            Interrupted: `interrupt` was called.
        """

    def policy_logprobs(self) -> Mapping[RowKey, bytes]:
        """Return the policy's log-probabilities (S,) of each row that the last update trained on.

        They were computed before the first step on the row, and are packed by `pack_logprobs`.
        Imitated rows and corrections have none: their loss has no ratio to the sampling policy.
        """

    def interrupt(self) -> None:
        """Stop for good: running and later `update` and `version_logprobs` raise `Interrupted`."""

    def save(self, folder: Path) -> None:
        """Write the adapter for model servers, and the state to resume from, into `folder`.

        Raises:
            OSError: the disk refused a write; the learner is unchanged, and `save` can be repeated.
        """

    def mark_saved(self, adapter: Path) -> None:
        """Take the folder `adapter` as that of the last saved state; nothing is written."""

    def set_served_context(self, tokens: int) -> None:
        """Encode positions as a server with a context of `tokens` tokens does."""

    def layer_kinds(self) -> Sequence[str]:
        """Return the kinds of layers of a new adapter, such as `layers.*.mlp.up_proj`.

        The learner must be restored before it trains.
        """

    def halve_micro_batches(self, halvings: int) -> int:
        """Halve the full micro-batches `halvings` times for some updates; return their tokens."""

    def leave_out_kinds(self, kinds: Collection[str]) -> None:
        """Leave layers of these kinds out of new adapters, and load a new one.

        Raises:
            LearnerError: the recipe names them, or no layer is left.
        """

    def write_test_adapter(self, folder: Path, kind: str | None = None) -> list[Row]:
        """Write a random adapter into `folder`, and return rows to compare servers on.

        The adapter has all layers, or those of one `kind`, and changes the rows' log-probabilities
        by about half a nat a token on average. The learner must be restored before it trains.

        Raises:
            NoEffect: no random weights change the log-probabilities.
            OSError: the disk refused a write.
        """

    def probe_rows(self) -> list[Row]:
        """Return the rows that every version is probed with."""

    def vocabulary_probe(self) -> tuple[str, Sequence[int]]:
        """Return a text that other tokenizers encode differently, and its ids by this model's."""

    def rehearse(self) -> None:
        """Train a new adapter on made-up rows, to find out whether updates can work.

        The learner must be restored before it trains on others.

        Raises:
            LearnerError: the training failed, as an update would.
        """

    def why_another_base(self, adapter: Path) -> str | None:
        """Return why the version in `adapter` is not of this base model, or None if it is.

        Raises:
            AdapterError, FilesUnread: a file is missing or damaged, or cannot be read for now.
        """

    def why_unreplayable(
        self, distribution: Distribution, sampled_ids: Sequence[int]
    ) -> str | None:
        """Return why a call's grammar cannot be replayed, or None if it can."""

    def reply_ids(
        self, request: bytes | None, prompt_ids: Sequence[int], text: str
    ) -> tuple[int, ...] | str:
        """Return a correction's token ids, (S,), or the reason why it cannot be trained."""

    def version_logprobs(self, adapter: Path | None, rows: Sequence[Row]) -> list[list[float]]:
        """Return log-probabilities (S,) of each row's sampled tokens under a version.

        Each row's sampling settings are applied. `adapter` is the version's folder, or None for the
        base. The learner must be restored before it trains again.

        Raises:
            Unusable: some rows cannot be used.
            Interrupted: `interrupt` was called.
        """

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return the log-probabilities (S,) of each row's sampled tokens at temperature one.

        They are those of the adapter that is loaded or was trained last. Sampling settings are not
        applied: a probe asks the server for the same figures.
        """
