"""Report figures: tables for the terminal and for pages of docs, and the limits for them (bars)."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

NONE = "–"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


class Rows(NamedTuple):
    """A table: title, column heads, lines, and notes below it."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", caption_justify="left")
        table.caption = Text("\n".join(self.notes))
        for number, head in enumerate(self.heads):
            table.add_column(head, justify="right" if number else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        rule = ["---", *["--:"] * (len(self.heads) - 1)]
        lines = "\n".join(f"| {' | '.join(line)} |" for line in (self.heads, rule, *self.lines))
        return "\n\n".join([lines, *self.notes])


class Bar(NamedTuple):
    """A limit for a value: at least or at most `limit`. The value None was not measured."""

    name: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def bound(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:.3g}"


def bars_table(bars: Iterable[Bar]) -> Rows:
    verdicts = {True: "yes", False: "NO", None: "not measured"}
    lines = [[bar.name, number(bar.value, 3), bar.bound, verdicts[bar.holds]] for bar in bars]
    return Rows("Bars", ["", "measured", "must be", "holds"], lines)


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators; a dash for None and NaN."""
    return NONE if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def percentile(values: Iterable[float], share: float) -> float:
    """Return the percentile `share` (0 to 1) by nearest rank; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def write_figures(
    page: Path, tables: Sequence[Rows], bars: Sequence[Bar], measured: str, picture: str
) -> None:
    """Replace the text between a page's marks by a picture, tables, and limits that do not hold.

    `measured` completes "Measured on"; `picture` is a file's name in docs/images. A bar that was
    not measured counts as not met.
    """
    before, begun, rest = page.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    assert begun, f"{page} has no line {BEGIN}"
    assert ended, f"{page} has no line {END}"
    parts = [f"Measured on {measured}.", f"![the figures as a picture](../images/{picture})"]
    parts += [f"### {table.title}\n\n{table.markdown()}" for table in tables]
    failed = [f"{bar.name} {number(bar.value, 3)} ({bar.bound})" for bar in bars if not bar.holds]
    parts.append(f"Bars not met ({len(failed)} of {len(bars)}): {'; '.join(failed) or 'none'}.")
    page.write_text("\n\n".join([before + BEGIN, *parts, END + after]))


def plotting() -> Any:
    """Return matplotlib's pyplot, configured to draw into files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return pyplot
