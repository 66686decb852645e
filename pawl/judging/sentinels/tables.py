"""Show sentinels and rounds on a terminal."""

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from pawl.output import cell
from store.judge.rounds import Round, Watched
from store.judge.sentinels import SentinelLine
from store.tenants import DEFAULT

# What is longer is cut; `--json` has all.
MOST_REASON: Final = 120
VERDICTS: Final = {
    True: "the judge HAS DRIFTED",
    False: "the judge is not shown to have drifted",
    None: "too few sentinels, or scores of them, could be compared for any drift to be shown",
}
COLUMNS = {
    "round": "round",
    "at": "at",
    "scored": "scored",
    "unscored": "not scored",
    "changed": "changed",
    "gone": "gone",
    "compared": "compared",
    "mean": "mean difference",
    "mean_absolute": "its size",
    "evidence": "evidence",
}


def in_words(one: Round) -> str:
    """Return what a round came to, in one line."""
    counts = (
        f"round {one.round}: sentinels: {one.scored} scored, {one.unscored} not scored, "
        f"{one.changed} changed, {one.gone} gone"
    )
    if one.changed:
        counts += " (`pawl sentinels renew` takes those that changed as they are now)"
    if one.mean is None:
        return f"{counts}; none could be compared: none that was scored has all its references yet"
    return (
        f"{counts}; {one.compared} compared: mean difference {one.mean:+.4f}, mean size "
        f"{one.mean_absolute:.4f}, evidence {one.evidence:.4g}: {VERDICTS[one.drifted]}"
    )


def verdict_in_words(one: Watched) -> str:
    """Return what is known of a judge by its rounds, in one line."""
    last = one.last
    if last is None:
        return "no round has ended since the references were to be taken: nothing is known yet"
    if one.drifted is None:
        reason = VERDICTS[None] if last.compared else "not all references are there yet"
        return f"nothing is known of a drift: {reason}"
    if last.drifted is None:
        reason = f"{VERDICTS[one.drifted]}, by an earlier round; in the last one {VERDICTS[None]}"
        return f"{reason}: see `pawl sentinels list`"
    return VERDICTS[one.drifted]


def rounds_table(rounds: Sequence[Round]) -> Table:
    """Return rounds as a table, in the order given."""
    grid = Table(box=None, pad_edge=False)
    for title in (*COLUMNS.values(), ""):
        grid.add_column(title)
    for one in rounds:
        values = {name: getattr(one, name) for name in COLUMNS}
        values["at"] = f"{one.at.astimezone():%Y-%m-%d %H:%M:%S}"
        values["evidence"] = None if one.evidence is None else f"{one.evidence:.4g}"
        verdict = "DRIFTED" if one.drifted else None
        if one.compared and one.drifted is None:
            verdict = "too few sentinels"
        grid.add_row(*map(cell, values.values()), cell(verdict))
    return grid


def sentinels_table(lines: Sequence[SentinelLine]) -> Table:
    """Return sentinels as a table, in the order given."""
    grid = Table(box=None, pad_edge=False)
    titles = ("judge", "episode", "metric", "reference", "draws", "last", "score", "reason")
    for title in titles:
        grid.add_column(title, overflow="fold")
    for line in lines:
        judge = line.judge if line.tenant == DEFAULT else f"{line.tenant}: {line.judge}"
        drawn = f"{line.drawn}/{line.draws}"
        last = (line.outcome, line.score, line.reason and line.reason[:MOST_REASON])
        row = (judge, line.episode, line.metric, line.reference, drawn, *last)
        grid.add_row(*map(cell, row))
    return grid
