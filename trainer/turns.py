"""Decide whose turn it is, of the policies that one trainer trains one at a time (pure)."""

from collections.abc import Sequence
from typing import Final

from store.records import Record

# Nobody waits for more turns of others than this, for each policy that shares the trainer.
PATIENCE: Final = 4


class Waiting(Record, frozen=True, kw_only=True):
    """Hold what waits for one policy.

    `updates` is the signal that waits, as a number of updates that its recipe would make of it, so
    that a policy with small updates is not behind one with large ones. `turns` are those that
    others had since its own last.
    """

    policy: str
    updates: float
    turns: int


def in_turn(waiting: Sequence[Waiting]) -> list[str]:
    """Return the policies in the order in which they may have the next turn.

    Most signal first; among equals, who has waited for more turns. Before all come those that
    waited for `PATIENCE` turns a policy, the longest first, whatever waits for them: less signal
    than an update needs may be enough once it is old. One that makes no update of its turn passes
    it on.
    """
    patience = PATIENCE * len(waiting)

    def rank(one: Waiting) -> tuple[bool, float, int]:
        is_overdue = one.turns >= patience
        return not is_overdue, 0.0 if is_overdue else -one.updates, -one.turns

    return [one.policy for one in sorted(waiting, key=rank)]
