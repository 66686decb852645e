"""Is a version served right? Served log-probabilities against the trainer's (pure)."""

from collections.abc import Sequence

from store.records import Record


class ProbeRow(Record, frozen=True, kw_only=True):
    """A fixed sequence, and what the trainer gives its last tokens.

    Shapes: `ids` (P + S,), `logprobs` (S,) in nats, at temperature one.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ProbeResult(Record, frozen=True, kw_only=True):
    """What a comparison found, in nats per token."""

    mean_difference: float
    largest_difference: float
    moved: float
    tokens: int


def compare(
    served: Sequence[Sequence[float]],
    trained: Sequence[Sequence[float]],
    before: Sequence[Sequence[float]],
) -> ProbeResult:
    """Compare fixed sequences: served now, by the trainer, and served by the version before.

    Each is (rows, S): the log-probabilities of each row's sampled tokens.
    """
    off = [abs(a - b) for a, b in _pairs(served, trained)]
    moved = [abs(a - b) for a, b in _pairs(served, before)]
    return ProbeResult(
        mean_difference=sum(off) / len(off),
        largest_difference=max(off),
        moved=max(moved),
        tokens=len(off),
    )


def rejection_reason(probe: ProbeResult, tolerance: float) -> str | None:
    """Why a version must not serve; None if it may."""
    if not probe.mean_difference <= tolerance:
        return (
            f"served log-probabilities are off by {probe.mean_difference:.4f} nats a token in the"
            f" mean, more than {tolerance}"
        )
    if probe.moved == 0.0:
        return "the server answers exactly as before under the new name"
    return None


def _pairs(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> list[tuple[float, float]]:
    return [
        pair
        for one, other in zip(left, right, strict=True)
        for pair in zip(one, other, strict=True)
    ]
