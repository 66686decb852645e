"""Write the figures as rows: on the terminal, and as Markdown (pure)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from benchmarks.proxy.figures import ALONE, MANY, Bar, Peer

NONE = "–"


@dataclass(frozen=True, slots=True)
class Rows:
    """Hold a table: title, heads, lines, and what is to be said below it."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def rich(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title, title_justify="left", caption_justify="left")
        table.caption = Text("\n".join(self.notes))
        for number, head in enumerate(self.heads):
            table.add_column(head, justify="right" if number else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """Return the table for a page."""
        rule = ["---", *["--:"] * (len(self.heads) - 1)]
        lines = [self.heads, rule, *self.lines]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([table, *self.notes])


def number(value: float | None, digits: int = 0) -> str:
    """Write a number with thousands set apart; a dash for what there is not."""
    return NONE if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def calls_table(peers: Iterable[Peer]) -> Rows:
    """Return the table of whole calls; a peer that is missing says why in its line."""
    heads = [
        "through",
        f"calls/s at {MANY}",
        "until stored",
        "failed",
        f"median ms at {MANY}",
        "p99 ms",
        f"median ms at {ALONE}",
        "p99 ms",
        "CPU µs a call",
        "100 KB: CPU µs",
        "memory MiB",
    ]
    rows = list(peers)
    notes = [f"{_title(peer)} is missing: {peer.missing}." for peer in rows if peer.missing]
    return Rows("Whole calls", heads, [_calls_line(peer, len(heads)) for peer in rows], notes)


def _calls_line(peer: Peer, width: int) -> list[str]:
    alone, many = peer.calls.get(ALONE), peer.calls.get(MANY)
    if alone is None or many is None:
        return [_title(peer), "missing", *[NONE] * (width - 2)]
    return [
        _title(peer),
        number(many.calls_per_s),
        number(many.sustained_per_s) if many.drain_s is not None else NONE,
        number(many.failed),
        number(many.median_ms, 2),
        number(many.p99_ms, 2),
        number(alone.median_ms, 3),
        number(alone.p99_ms, 3),
        parts(many.cpu_us),
        parts(peer.large.cpu_us) if peer.large is not None else NONE,
        parts(peer.memory_mib),
    ]


def streams_table(peers: Iterable[Peer]) -> Rows:
    """Return the table of streams; a peer without them says why."""
    heads = ["through", "at once", "started", "failed", "batched", "first chunk: median ms", "p99"]
    heads += ["chunk delay: median ms", "p99", "CPU µs a chunk"]
    lines: list[list[str]] = []
    notes: list[str] = []
    for peer in peers:
        if not peer.streams:
            lines.append([_title(peer), "none", *[NONE] * (len(heads) - 2)])
            reason = peer.missing or peer.no_streams or "not asked for (--streams)"
            notes.append(f"{_title(peer)} has no streams: {reason}.")
        lines += _stream_lines(peer)
    return Rows("Streams of ten chunks a second", heads, lines, notes)


def _stream_lines(peer: Peer) -> list[list[str]]:
    return [
        [
            _title(peer),
            number(at_once),
            number(found.started),
            number(found.failures) + _reasons(found.failed),
            number(found.batched),
            number(found.first_median_ms, 2),
            number(found.first_p99_ms, 2),
            number(found.delay_median_ms, 2),
            number(found.delay_p99_ms, 2),
            # One stream leaves the process idle: what is counted then is the clock's ticks.
            parts(found.cpu_us) if at_once > ALONE else NONE,
        ]
        for at_once, found in peer.streams.items()
    ]


def bars_table(bars: Iterable[Bar]) -> Rows:
    """Return the table of the promises."""
    verdicts = {True: "yes", False: "NO", None: "not measured"}
    lines = [
        [
            bar.name,
            number(bar.value, 3),
            f"{'≥' if bar.at_least else '≤'} {bar.limit:.3g}",
            verdicts[bar.holds],
        ]
        for bar in bars
    ]
    return Rows("Bars", ["", "measured", "must be", "holds"], lines)


def parts(of: Mapping[str, float]) -> str:
    """Write a sum, and what it is made of where that is more than one thing."""
    if not of:
        return NONE
    whole = number(sum(of.values()))
    if len(of) == 1:
        return whole
    return f"{whole} ({', '.join(f'{name} {number(value)}' for name, value in of.items())})"


def _title(peer: Peer) -> str:
    return f"{peer.name} {peer.version}".strip()


def _reasons(failed: Mapping[str, int]) -> str:
    return (
        f" ({', '.join(f'{count} {reason}' for reason, count in failed.items())})" if failed else ""
    )
