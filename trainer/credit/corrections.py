"""Find the correction of each call: the reply that somebody says would have been right (pure)."""

from collections.abc import Iterable, Sequence

from store.records import Feedback


def correction_of(statements: Iterable[Feedback]) -> str | None:
    """Return the newest correction among the statements about one target, or None.

    A withdrawal of the same metric takes a correction back, unless the withdrawal is older.
    """
    stated = list(statements)
    withdrawn = [one for one in stated if one.value is None]
    standing = [
        (one.at, one.correction)
        for one in stated
        if one.correction is not None
        and not any(each.metric == one.metric and each.at >= one.at for each in withdrawn)
    ]
    return max(standing)[1] if standing else None


def corrections_of(
    of_episode: Iterable[Feedback], of_calls: Sequence[Iterable[Feedback]]
) -> list[str | None]:
    """Return the correction of each call of an episode, or None.

    A correction of the episode belongs to its only call; if there are several calls, to none.
    """
    if len(of_calls) == 1:
        return [correction_of((*of_episode, *of_calls[0]))]
    return [correction_of(own) for own in of_calls]
