"""Measure Pawl beside nginx, LiteLLM and Agent Lightning, a core each.

Whole calls (wrk, 1 and 64 at once, 4 KB prompts, 2.9 KB replies with ids; a 100 KB reply) and
streams (1, 256 and 1,000 at once, ten chunks a second each), in one run. For whole calls all are
up and take turns, since nothing on a shared machine is twice the same. What is measured has one
core with all it needs, Pawl's PostgreSQL included; load and model server share the other.
Needs nginx and wrk (Debian: nginx-light, wrk).

`--against COMMIT` measures this checkout in turns with an earlier commit instead, whole calls only:
a pair of turns a round, `--seconds 45 --rounds 15` for pairs of three seconds each. `--with keys`
measures it in turns with itself, with API keys beside without any; `limits` are a key's, `tenants`
has a key of another tenant's, `arms` a canary of a policy and a share for the base model, and with
`nothing` both do the same.
"""

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.commits import NoSuchCommit
from benchmarks.proxy.additions import ADDITIONS
from benchmarks.proxy.against import compared, compared_with, ratios_table
from benchmarks.proxy.figures import STREAMS, Bar, Peer, bars
from benchmarks.proxy.machine import LOAD_CORE, MEASURED_CORE, busy_share
from benchmarks.proxy.measure import Lengths, measured
from benchmarks.proxy.page import PAGE, PICTURE, with_figures
from benchmarks.proxy.peers.contenders import CONTENDERS
from benchmarks.proxy.picture import draw
from benchmarks.proxy.tables import bars_table, calls_table, streams_table

QUIET_SHARE = 0.1
FILE_WIDTH = 220


def main() -> None:
    """Parse, measure, print, write."""
    options = _options()
    _check_machine()
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else FILE_WIDTH)
    in_turns = options.against or options.addition
    busy = busy_share()
    if busy > QUIET_SHARE:
        console.print(f"others use {busy:.0%} of this machine: the figures will be too low")
    os.sched_setaffinity(0, {LOAD_CORE})
    lengths = Lengths(options.seconds, options.rounds, tuple(options.streams))
    if in_turns:
        _compare(options, lengths, console)
        return
    peers = measured([CONTENDERS[name] for name in options.peers], lengths, console)
    for name in CONTENDERS.keys() - peers.keys():
        peers[name] = Peer(name, missing="not asked for (--peers)")
    peers = {name: peers[name] for name in CONTENDERS}
    promises = bars(peers)
    tables = [calls_table(peers.values()), streams_table(peers.values()), bars_table(promises)]
    for table in tables:
        console.print(table.rich())
    if options.write:
        PAGE.write_text(with_figures(PAGE.read_text(), tables, _machine()))
        draw(PICTURE, peers)
        console.print(f"written: {PAGE}, {PICTURE}")
    if options.json:
        print(json.dumps(_as_json(peers, promises, busy)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=int, default=10, help="of each load (10)")
    parser.add_argument("--rounds", type=int, default=5, help="in which whole calls take turns (5)")
    parser.add_argument(
        "--peers", type=_peers, default=list(CONTENDERS), help=f"some of {','.join(CONTENDERS)}"
    )
    parser.add_argument(
        "--streams", type=_numbers, default=list(STREAMS), help="at once, in turn (1,256,1000)"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {PICTURE}")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    turns = parser.add_mutually_exclusive_group()
    turns.add_argument("--against", metavar="COMMIT", help="compare this checkout with a commit")
    turns.add_argument(
        "--with", dest="addition", choices=list(ADDITIONS), help="compare it with itself without"
    )
    return parser.parse_args()


def _compare(options: argparse.Namespace, lengths: Lengths, console: Console) -> None:
    """Print how this checkout does beside a commit, or beside itself without an addition."""
    try:
        if options.addition:
            title = f"with {options.addition}, in turns with the same without"
            found = compared_with(ADDITIONS[options.addition], lengths, console)
        else:
            title = f"this checkout, in turns with {options.against}"
            found = compared(options.against, lengths, console)
    except NoSuchCommit as error:
        sys.exit(f"benchmarks.proxy: {error}")
    table = ratios_table(found, title)
    console.print(table.rich())
    if options.json:
        print(json.dumps(found))
    else:
        console.print(table.markdown(), markup=False)


def _peers(given: str) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CONTENDERS)}")
    return names


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",") if number]


def _check_machine() -> None:
    for tool in ("nginx", "wrk"):
        if shutil.which(tool) is None:
            sys.exit(f"benchmarks.proxy needs {tool}: install it (Debian: nginx-light, wrk)")
    missing = {LOAD_CORE, MEASURED_CORE} - os.sched_getaffinity(0)
    if missing:
        sys.exit(f"benchmarks.proxy needs the cores 0 and 1; core {missing.pop()} is not allowed")


def _machine() -> str:
    model = "an unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores of {model}, Python {sys.version.split()[0]}, {date.today()}"


def _as_json(peers: dict[str, Peer], promises: list[Bar], busy: float) -> dict[str, Any]:
    judged = {bar.name: {**asdict(bar), "holds": bar.holds} for bar in promises}
    found = {name: asdict(peer) for name, peer in peers.items()}
    return dict(_finite({"bars": judged, "peers": found, "busy_before": round(busy, 3)}))


def _finite(value: Any) -> Any:
    """Replace NaN by None, as JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()
