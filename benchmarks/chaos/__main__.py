"""`python -m benchmarks.chaos --target proxy`: kills, an outage, memory, under load.

A model server that answers at once, an embedded PostgreSQL and `pawl proxy` are started; one
of three things is done (`--kills`, `--outage`, `--calls`), and what the clients saw is compared
with what is stored. Ends with status 1 where a promise is broken.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.kills import kills
from benchmarks.chaos.memory import memory
from benchmarks.chaos.outage import outage
from benchmarks.chaos.stand import standing

# Memory that is flat may still wander by pages: so many bytes a call are no growth.
FLAT: Final = 50.0


def main() -> None:
    """Parse, run, print."""
    options = _options()
    with (
        tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder,
        standing(Path(folder), options.workers) as stand,
    ):
        if options.calls:
            name, found = "memory", asyncio.run(memory(stand, options.calls))
        elif options.outage:
            name, found = "outage", asyncio.run(outage(stand, options.outage))
        else:
            name, found = "kills", asyncio.run(kills(stand, options.kills, options.seed))
    broken = broken_promises(found)
    Console(stderr=options.json).print(_table(name, found, broken))
    if options.json:
        print(json.dumps({name: found, "broken": broken}))
    sys.exit(1 if broken else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", choices=["proxy"], default="proxy")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims (1)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kills", type=int, default=100, help="kill -9 so many times (100)")
    what.add_argument("--outage", type=float, help="take the database away for so many seconds")
    what.add_argument("--calls", type=int, help="watch memory over so many calls")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def broken_promises(found: dict[str, Any]) -> list[str]:
    """Which of the promises that a run is about it broke; empty if none."""
    nothing = ("missing", "twice", "failed", "failed_otherwise", "scrapes_off", "scrapes_failed")
    broken = [f"{name}: {found[name]}" for name in nothing if found.get(name)]
    if found.get("drain_s", 0.0) is None:
        broken.append("the spool was not drained in time")
    for process, grows in found.get("bytes_a_call", {}).items():
        if grows > FLAT:
            broken.append(f"{process} grows by {grows} bytes a call")
    return broken


def _table(name: str, found: dict[str, Any], broken: list[str]) -> Table:
    table = Table("", "", title=f"proxy: {name}", caption="; ".join(broken) or "all promises held")
    for key, value in found.items():
        if isinstance(value, list):
            table.add_row(key, "\n".join(map(_said, value)) or "none")
        else:
            table.add_row(key, _said(value))
    return table


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {held}" for key, held in value.items()) or "none"
    return str(value)


if __name__ == "__main__":
    main()
