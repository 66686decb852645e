"""Measure two proxies in turns: medians of the pairs' ratios.

They are this checkout's and an earlier commit's, or this checkout's with and without an addition.

Both are up at once, each with a PostgreSQL and a model server of its own. What disturbs
a shared machine lasts longer than a pair of loads, so it disturbs both alike, and the ratio of a
pair says more than figures of different hours.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.commits import ROOT, sources_of
from benchmarks.proxy.additions import Addition
from benchmarks.proxy.figures import ALONE, MANY, Calls
from benchmarks.proxy.measure import Lengths, brought_up, load_once
from benchmarks.proxy.peers.contenders import Contender, Running, pawl_of
from benchmarks.proxy.tables import Rows, number

COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)
# What is compared, by the group of processes whose CPU it is.
CPU: Final = {"serving": "worker", "beside": "ingester", "postgres": "PostgreSQL"}
HEADS: Final = ("calls/s", "median latency", *(f"{name}: CPU a call" for name in CPU.values()))
# Ratios of one kind of load, a pair of turns each, by what is compared.
Ratios = Mapping[str, Sequence[float]]


def compared(commit: str, lengths: Lengths, console: Console) -> dict[int, Ratios]:
    """Return the ratios of this checkout's figures to the commit's, by calls at once.

    Raises:
        NoSuchCommit: there is no such commit.
        NotUp, WrongAnswer: one of them does not come up, or does not answer right.
    """
    with sources_of(commit) as earlier, Progress(*COLUMNS, console=console) as progress:
        sides = [Contender(str(root), partial(pawl_of, root)) for root in (earlier, ROOT)]
        return _in_turns(sides, lengths, progress)


def compared_with(addition: Addition, lengths: Lengths, console: Console) -> dict[int, Ratios]:
    """Return the ratios of this checkout's figures with an addition to those without it.

    Raises:
        NotUp, WrongAnswer: as above.
    """
    sides = [
        Contender(name, partial(pawl_of, ROOT, prepare=prepare))
        for name, prepare in (("without", addition.without), ("with", addition.added))
    ]
    with Progress(*COLUMNS, console=console) as progress:
        return _in_turns(sides, lengths, progress)


def _in_turns(
    contenders: Sequence[Contender], lengths: Lengths, progress: Progress
) -> dict[int, Ratios]:
    """Bring both up, and load them in turns: the second's figures to the first's."""
    found: dict[int, Ratios] = {}
    with ExitStack() as stack:
        sides = [brought_up(one, stack) for one in contenders]
        for at_once in (ALONE, MANY):
            measuring = progress.add_task(f"{at_once} at once", total=lengths.rounds)
            turns: list[tuple[Calls, Calls]] = []
            for turn in range(lengths.rounds):
                turns.append(_turn(sides, lengths.round_s, at_once, backwards=turn % 2 == 1))
                progress.advance(measuring)
            found[at_once] = ratios(turns)
    return found


def _turn(
    sides: Sequence[tuple[Running, Path]], seconds: int, at_once: int, *, backwards: bool
) -> tuple[Calls, Calls]:
    """Load both, one after the other; who comes second finds the machine as the first left it."""
    order = sides[::-1] if backwards else sides
    first, second = (load_once(running, folder, seconds, at_once) for running, folder in order)
    return (second, first) if backwards else (first, second)


def ratios(pairs: Sequence[tuple[Calls, Calls]]) -> Ratios:
    """Return what is compared, with the ratio of the later to the earlier of each pair."""
    found = {
        HEADS[0]: [b.calls_per_s / a.calls_per_s for a, b in pairs],
        HEADS[1]: [b.median_ms / a.median_ms for a, b in pairs],
    }
    for head, group in zip(HEADS[2:], CPU, strict=True):
        found[head] = [b.cpu_us[group] / a.cpu_us[group] for a, b in pairs]
    return found


def ratios_table(found: Mapping[int, Ratios], title: str) -> Rows:
    """Return the table: medians, each with the lowest and the highest pair."""
    lines = [
        [f"{at_once} at once", *(_spread(of[head]) for head in HEADS)]
        for at_once, of in found.items()
    ]
    pairs = {len(of[HEADS[0]]) for of in found.values()}
    note = f"{pairs.pop()} pairs of turns each: the median, and the lowest and highest pair."
    return Rows(title, ("ratio", *HEADS), lines, [note])


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{number(median(values), 2)} ({number(low, 2)} to {number(high, 2)})"
