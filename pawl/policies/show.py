"""Shows the versions of a policy with their evaluation, as JSON lines or as a table."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import UnknownPolicy
from store.read.evaluations import evaluations
from store.records import PolicyState, Record
from store.updates.policies import list_versions

TEXTS = ("version", "state")


class VersionLine(Record, frozen=True, kw_only=True):
    """One version of a policy, with the fields in the order in which they are written.

    `eval_episodes` were evaluated and `scored` of them have a reward; the mean of these rewards
    lies in the 95 % interval from `low` to `high`.
    """

    version: str
    state: PolicyState
    eval_episodes: int = 0
    scored: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None


async def versions_of(engine: AsyncEngine, name: str) -> list[VersionLine]:
    """Return the versions of a policy, oldest first.

    Raises:
        UnknownPolicy: there is no policy of that name; the message names those that there are.
    """
    async with engine.connect() as connection:
        versions = await list_versions(connection, name)
        if not versions:
            known = sorted({version.name for version in await list_versions(connection)})
            names = ", ".join(known) or "there is none yet: start `pawl trainer`"
            raise UnknownPolicy(f"there is no policy {name!r} (known: {names})")
        curve = {point.version: point for point in await evaluations(connection, name)}
    lines = []
    for version in versions:
        line = VersionLine(version=f"{name}@{version.version}", state=version.state)
        point = curve.get(version.version)
        if point is not None:
            line = msgspec.structs.replace(
                line,
                eval_episodes=point.episodes,
                scored=point.scored,
                mean=point.mean,
                low=point.low,
                high=point.high,
            )
        lines.append(line)
    return lines


def write(lines: Sequence[VersionLine], *, as_json: bool) -> None:
    """Write to standard output: a table to a terminal unless `as_json`, else JSON lines."""
    if as_json or not sys.stdout.isatty():
        sys.stdout.buffer.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        sys.stdout.buffer.flush()
    else:
        Console().print(table(lines))


def table(lines: Sequence[VersionLine]) -> Table:
    """Return the lines as a table for a terminal, with the interval in one column."""
    grid = Table(box=None, pad_edge=False)
    for name in ("version", "state", "eval episodes", "scored", "mean reward", "95 % interval"):
        grid.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for line in lines:
        interval = "" if line.low is None else f"{_cell(line.low)} to {_cell(line.high)}"
        shown = (line.version, line.state, line.eval_episodes, line.scored, line.mean)
        # As plain text: clients choose a policy's name, so rich must not read markup.
        grid.add_row(*[Text(_cell(value)) for value in shown], Text(interval))
    return grid


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
