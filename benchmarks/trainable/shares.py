"""Count which share of a row's calls can be trained, and why the others cannot (pure)."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.markup import escape
from rich.table import Table

from store.records import Episode, Record

BAR: Final = 0.95
# Questions that each program asks; each is a run of its own, with at least one call.
ASKED: Final = 20


class Found(Record, frozen=True, kw_only=True):
    """Count a row's calls.

    Attributes:
        key: the row's.
        title: the row's.
        calls: all that the framework made, also those that the server refused.
        episodes: those that they belong to.
        trainable: those of them that can be trained.
        reasons: why the others cannot be trained, with the number of calls.
        failures: how the framework's runs failed, with the number of runs.
    """

    key: str
    title: str
    calls: int
    episodes: int
    trainable: int
    reasons: Mapping[str, int]
    failures: Mapping[str, int] = {}

    @property
    def share(self) -> float:
        """Return the trainable calls' share; 0 if there are no calls."""
        return self.trainable / self.calls if self.calls else 0.0

    @property
    def missed(self) -> bool:
        """Return whether too few calls can be trained, or a question was not even asked."""
        return self.share < BAR or min(self.calls, self.episodes) < ASKED


def count(key: str, title: str, episodes: Iterable[Episode], failures: Mapping[str, int]) -> Found:
    """Count the calls of the agent `key`; those of a quarantined episode are never trained."""
    own = [
        [call.reason or episode.quarantined_reason for call in episode.calls if call.agent == key]
        for episode in episodes
    ]
    reasons = Counter(itertools.chain.from_iterable(own))
    calls, trainable = reasons.total(), reasons.pop(None, 0)
    why = {reason: number for reason, number in reasons.most_common() if reason is not None}
    return Found(
        key=key,
        title=title,
        calls=calls,
        episodes=sum(map(bool, own)),
        trainable=trainable,
        reasons=why,
        failures=failures,
    )


def shares_table(found: Iterable[Found]) -> Table:
    """Return the table of all rows' shares, those that miss the bar in red."""
    table = Table("framework", "episodes", "calls", "trainable", "share", "failed runs")
    for one in found:
        colour = "red" if one.missed else "green"
        table.add_row(
            one.title,
            str(one.episodes),
            str(one.calls),
            str(one.trainable),
            f"[{colour}]{one.share:.1%}[/]",
            str(sum(one.failures.values())),
        )
    return table


def reasons_table(found: Sequence[Found]) -> Table:
    """Return the table of why calls cannot be trained, and how runs failed, by framework."""
    table = Table("framework", "why not trainable, or how runs failed", "number")
    for one in found:
        for said in (one.reasons, one.failures):
            for reason, number in said.items():
                table.add_row(one.title, escape(reason), str(number))
    return table
