"""Find the correction of each call: the right reply, as stated in feedback (pure)."""

from collections.abc import Iterable, Sequence

from store.records import Feedback


def correction_of(statements: Iterable[Feedback]) -> str | None:
    """Return the newest correction among the statements about one target, or None.

    A statement of the same metric without a value withdraws a correction, unless it is older.
    """
    feedback = list(statements)
    withdrawn = [item for item in feedback if item.value is None]
    standing = [
        (item.at, item.correction)
        for item in feedback
        if item.correction is not None
        and not any(
            withdrawal.metric == item.metric and withdrawal.at >= item.at
            for withdrawal in withdrawn
        )
    ]
    return max(standing)[1] if standing else None


def corrections_of(
    of_episode: Iterable[Feedback], of_calls: Sequence[Iterable[Feedback]]
) -> list[str | None]:
    """Return the correction of each call of an episode, or None.

    A correction stated about the episode belongs to its only call. If the episode has several
    calls, it belongs to none of them.
    """
    if len(of_calls) == 1:
        return [correction_of((*of_episode, *of_calls[0]))]
    return [correction_of(statements) for statements in of_calls]
