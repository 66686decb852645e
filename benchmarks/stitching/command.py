"""Measure whether calls without a name are joined into their episodes.

A thousand episodes of five clients (openai, LangChain, the Agents SDK on the Responses API,
AutoGen, anthropic), all at once in a random order, with no header that names anything. The
clients' own code runs against a scripted server; one that is not installed is replayed from
its recording (`--record` makes it anew, with what is installed). Then the requests go
through identity as the proxy sends them: by one proxy, and by three that share nothing but
the ledger's joins.
"""

import argparse
import asyncio
import json
import re
import statistics
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.stitching.clients import RUNNERS, versions
from benchmarks.stitching.plans import CLIENTS, KINDS, Plan, make_plan, make_plans
from benchmarks.stitching.replay import (
    Score,
    Seen,
    join_in_ledger,
    replay,
    score,
)
from benchmarks.stitching.server import Exchange, Server, serving

RECORDING: Final = Path(__file__).parents[1] / "recordings" / "stitching.json"
# A number that nothing else in a recording holds: it gives way to the episode's own.
RECORDED_NUMBER: Final = 271828
_IDS: Final = re.compile(r"(?:chatcmpl-tool-|chatcmpl-|resp_|msg_|rs_|fc_)[0-9a-f]{32}")
AT_ONCE: Final = 16
Runs = list[list[Exchange]]


async def run_live(plans: list[Plan]) -> Runs:
    """Have the clients themselves run the plans."""
    server = Server(plans)
    gate = asyncio.Semaphore(AT_ONCE)

    async def run(number: int, url: str) -> None:
        async with gate:
            plan = plans[number]
            await RUNNERS[plan.client](f"{url}/e/{number}", plan)

    async with serving(server) as url:
        await asyncio.gather(*(run(number, url) for number in range(len(plans))))
    return server.exchanges


def run_recorded(
    recording: dict[str, Any], plan: Plan, number: int, random: Random
) -> list[Exchange]:
    """Run an episode as its client did when it was recorded, under ids and a number of its own."""
    text = json.dumps(recording[plan.client]["runs"][plan.kind])
    for old in set(_IDS.findall(text)):
        text = text.replace(old, f"{old[:-32]}{random.getrandbits(128):032x}")
    text = text.replace(str(RECORDED_NUMBER), str(number))
    return msgspec.json.decode(text, type=list[Exchange])


async def exchanges_of(plans: list[Plan], installed: set[str], seed: int) -> Runs:
    """Return every plan's exchanges, live where the client is installed."""
    random = Random(f"recorded {seed}")
    live = [number for number, plan in enumerate(plans) if plan.client in installed]
    runs: dict[int, list[Exchange]] = dict(
        zip(live, await run_live([plans[number] for number in live]), strict=True)
    )
    recording = json.loads(RECORDING.read_text()) if RECORDING.exists() else {}
    for number, plan in enumerate(plans):
        if number not in runs:
            runs[number] = run_recorded(recording, plan, number, random)
    return [runs[number] for number in range(len(plans))]


async def record(installed: set[str]) -> None:
    """Write down how the installed clients run each kind of episode."""
    recording = json.loads(RECORDING.read_text()) if RECORDING.exists() else {}
    for client in sorted(installed):
        random = Random(0)
        plans = [make_plan(client, kind, RECORDED_NUMBER, random) for kind, _ in KINDS]
        runs = await run_live(plans)
        recording[client] = {
            "versions": versions(client),
            "runs": {
                plan.kind: [msgspec.to_builtins(exchange) for exchange in run]
                for plan, run in zip(plans, runs, strict=True)
            },
        }
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_text(json.dumps(recording, ensure_ascii=False, separators=(",", ":")) + "\n")


def figures_of(name: str, result: Score) -> dict[str, float]:
    """Return a score under the figure's name."""
    counts = msgspec.to_builtins(result) | {"share": round(result.share, 4)}
    return {f"{name}_{key}": value for key, value in counts.items()}


def methods_of(seen: list[Seen]) -> dict[str, int]:
    """Count how many calls were found by each method."""
    counts: dict[str, int] = {}
    for call in seen:
        counts[call.who.method] = counts.get(call.who.method, 0) + 1
    return dict(sorted(counts.items()))


async def measure(episodes: int, seed: int, installed: set[str]) -> dict[str, Any]:
    """Measure both figures, and how long identity took."""
    plans = make_plans(episodes, seed)
    runs = await exchanges_of(plans, installed, seed)
    one, three = replay(runs, 1, seed), replay(runs, 3, seed)
    return {
        "episodes": episodes,
        "calls": len(one),
        "live": ", ".join(sorted(installed)),
        "alike": sum(len(plan.turns) - 1 for plan in plans if plan.kind == "alike"),
        **figures_of("one", score(one, join_in_ledger(one))),
        **figures_of("three", score(three, join_in_ledger(three))),
        **{f"by_{method}": count for method, count in methods_of(one).items()},
        "identity_us": round(statistics.median(call.seconds for call in one) * 1e6, 1),
    }


def show(figures: dict[str, Any]) -> None:
    """Show the figures as a table."""
    table = Table("", "one proxy", "three proxies")
    for key in ("joins", "right", "false", "quarantined", "own", "share"):
        table.add_row(key, str(figures[f"one_{key}"]), str(figures[f"three_{key}"]))
    console = Console()
    console.print(table)
    alike = f"{figures['alike']} continue a conversation that others began to the letter alike"
    console.print(f"{figures['calls']} calls of {figures['episodes']} episodes; {alike}.")
    methods = [f"{key[3:]} {value}" for key, value in figures.items() if key.startswith("by_")]
    console.print(f"One proxy found them by: {', '.join(methods)}.")
    console.print(f"Identity took {figures['identity_us']} µs a call (median), request and reply.")
    console.print(f"Run by the clients themselves: {figures['live'] or 'none'}.")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stitching", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recorded", action="store_true", help="replay every client's recording")
    parser.add_argument("--record", action="store_true", help="record the installed clients anew")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    there = {client for client in CLIENTS if versions(client) is not None}
    if options.record:
        asyncio.run(record(there))
        return
    installed = set() if options.recorded else there
    figures = asyncio.run(measure(options.episodes, options.seed, installed))
    show(figures)
    if options.json:
        print(json.dumps(figures))
