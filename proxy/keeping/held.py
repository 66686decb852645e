"""Records that are passed over for now, so that nothing behind them has to wait (pure).

They stay in their segment, which is kept until they are settled.
"""

from typing import Final, Literal, NamedTuple

from proxy.segments import Piece

# So often a dead letter is tried that the disk did not take,
LETTER_AGAIN_S: Final = 1.0
# and a record that PostgreSQL did not take, while it answered.
UNANSWERED_AGAIN_S: Final = 30.0

# `letter`: it is a dead letter, which the disk does not take yet.
# `suspect`: storing it raised what nobody expected: its own fault, or a bug that hits all.
# `unanswered`: PostgreSQL fails over it, and says that the fault is its own.
Why = Literal["letter", "suspect", "unanswered"]


TOLD: Final[dict[Why, str]] = {
    "letter": "a dead letter cannot be written to disk",
    "suspect": "storing a record fails, and none of its kind could be stored since",
    "unanswered": "PostgreSQL answers, and does not take a record",
}


class Held(NamedTuple):
    """One of them. `kind` is its record's; `turn` and `at` (s) say when it was tried last."""

    piece: Piece
    why: Why
    reason: str
    kind: type | None
    turn: int
    at: float


def is_due(held: Held, stored: dict[type, int], now: float) -> bool:
    """Return whether to try it again; `stored` says in which turn each kind was last stored.

    A suspect is due once another of its kind could be stored: what it raises then is its own
    fault. Until then it may be everybody's, and a bug must not make dead letters of all.
    """
    if held.why == "suspect":
        return held.kind is not None and stored.get(held.kind, -1) >= held.turn
    return now - held.at >= (LETTER_AGAIN_S if held.why == "letter" else UNANSWERED_AGAIN_S)
