"""Compare served log-probabilities of a new version with the trainer's (pure)."""

from collections.abc import Sequence

from store.records import Record


class ProbeRow(Record, frozen=True, kw_only=True):
    """Hold a token sequence, and the trainer's log-probabilities of its last tokens.

    Shapes: `ids` (P + S,), `logprobs` (S,) in nats, at temperature one.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ProbeResult(Record, frozen=True, kw_only=True):
    """Hold differences between log-probabilities over all probe tokens, in nats per token.

    `mean_difference` and `largest_difference` are |served − trainer|; `moved` is the largest
    |served now − served by the version before|.
    """

    mean_difference: float
    largest_difference: float
    moved: float
    tokens: int


def compare(
    served: Sequence[Sequence[float]],
    trained: Sequence[Sequence[float]],
    before: Sequence[Sequence[float]],
) -> ProbeResult:
    """Compare log-probabilities: served now, the trainer's, and served by the version before.

    Shapes: each is (rows, S), the log-probabilities of each row's sampled tokens.
    """
    differences = [abs(a - b) for a, b in _pairs(served, trained)]
    moved = [abs(a - b) for a, b in _pairs(served, before)]
    return ProbeResult(
        mean_difference=sum(differences) / len(differences),
        largest_difference=max(differences),
        moved=max(moved),
        tokens=len(differences),
    )


def rejection_reason(probe: ProbeResult, tolerance: float) -> str | None:
    """Return why a version must not serve, or None if it may.

    `tolerance` bounds the mean difference. A NaN difference is rejected too. A version that
    answers exactly as the one before was not loaded: an update always moves the policy.
    """
    if not probe.mean_difference <= tolerance:
        return (
            "served log-probabilities differ from the trainer's by"
            f" {probe.mean_difference:.4f} nats per token in the mean, more than"
            f" publish.tolerance = {tolerance}: does the server use the same base model and dtype?"
        )
    if probe.moved == 0.0:
        return (
            "the server answers under the new name exactly as under the old one: it did not load"
            " the adapter"
        )
    return None


def _pairs(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> list[tuple[float, float]]:
    return [
        pair
        for one, other in zip(left, right, strict=True)
        for pair in zip(one, other, strict=True)
    ]
