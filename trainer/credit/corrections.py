"""Find the correction of each call: the reply that somebody says would have been right (pure)."""

from collections.abc import Iterable, Sequence

from store.records import Feedback


def correction_of(statements: Iterable[Feedback]) -> Feedback | None:
    """Return the statement about one target whose correction counts, or None.

    It is the newest with one. A withdrawal of its metric takes it back, unless it came before.
    """
    stated = list(statements)
    withdrawn = [one for one in stated if one.value is None]
    standing = [
        one
        for one in stated
        if one.correction is not None
        and not any(each.metric == one.metric and each.at >= one.at for each in withdrawn)
    ]
    return max(standing, key=lambda one: (one.at, one.correction or ""), default=None)


def corrections_of(
    of_episode: Iterable[Feedback], of_calls: Sequence[Iterable[Feedback]]
) -> list[str | None]:
    """Return the correction of each call of an episode, or None.

    A correction of an episode is one of its call; of several calls it is nobody's.
    """
    found = [correction_of(own) for own in of_calls]
    whole = correction_of(of_episode)
    if whole is not None and len(found) == 1 and (found[0] is None or found[0].at < whole.at):
        found = [whole]
    return [None if one is None else one.correction for one in found]
