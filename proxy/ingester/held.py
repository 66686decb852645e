"""Pass over records for now, so that the records behind them need not wait (pure).

They stay in their segment, which is kept until they are settled.
"""

from typing import Final, Literal, NamedTuple

from proxy.spool.segments import Piece

# Pause before a dead letter that the disk did not take is tried again.
LETTER_AGAIN_S: Final = 1.0
# Pause before a record that PostgreSQL did not take, while it answered, is tried again.
UNANSWERED_AGAIN_S: Final = 30.0

# `letter`: a dead letter that the disk does not take yet.
# `suspect`: storing it raised an unexpected error: the record's fault, or a bug that hits all.
# `unanswered`: PostgreSQL answers, but fails over this record and reports a fault of its own.
Why = Literal["letter", "suspect", "unanswered"]


TOLD: Final[dict[Why, str]] = {
    "letter": "a dead letter cannot be written to disk",
    "suspect": "storing a record fails, and none of its kind could be stored since",
    "unanswered": "PostgreSQL answers, and does not take a record",
}


class Held(NamedTuple):
    """Note a piece that was passed over, and why.

    `kind` is its record's type, None for a letter. `turn` (the settler's count of rounds) and
    `at` (seconds of the monotonic clock) say when it was last tried.
    """

    piece: Piece
    why: Why
    reason: str
    kind: type | None
    turn: int
    at: float


def is_due(held: Held, stored: dict[type, int], now: float) -> bool:
    """Return whether a held piece is to be tried again.

    A suspect is due once another record of its kind was stored: an error that it raises then is
    its own fault. Before that, the error may be a bug that hits every record, and a bug must not
    turn all records into dead letters.

    Args:
        held: the piece.
        stored: the turn in which a record of each type was last stored.
        now: seconds of the monotonic clock.
    """
    if held.why == "suspect":
        return held.kind is not None and stored.get(held.kind, -1) >= held.turn
    return now - held.at >= (LETTER_AGAIN_S if held.why == "letter" else UNANSWERED_AGAIN_S)
