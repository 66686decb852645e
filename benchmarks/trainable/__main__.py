"""Measure the share of real frameworks' calls that can be trained.

Each framework runs, unchanged and at its own defaults, in the clients' own environment
(`scripts/install_clients.py`) against a whole stack with a real vLLM and the packaged model. It is
told nothing but the base URL. What counts is what the ledger says of its calls: a model this small
often fails as an agent, and its tokens are as good as any.

Ends with status 1 where under 95 % of a row's calls can be trained, or a row has fewer episodes or
calls than its program was to ask questions.
"""

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.chaos.scrape import Scrapes, drained
from benchmarks.client_process import BINARIES, ROOT, ClientFailed, require_clients, run_client
from benchmarks.small_stack import TOOL_PARSER, small_plan
from benchmarks.trainable.rows import MODEL, PROGRAMS, ROWS, Row
from benchmarks.trainable.shares import Found, count, reasons_table, shares_table
from pawl.stack.model import unpacked_model
from pawl.stack.stack import Stack, running_stack
from store.connection.engine import make_engine
from store.read.episodes import episode_ids, read_episodes
from store.settings import address

VAR: Final = ROOT / "var" / "trainable"
FIGURES: Final = VAR / "figures.json"
CLIENT_S: Final = 300.0
DRAIN_S: Final = 60.0
COLUMNS: Final = (
    *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")),
)


async def measure(rows: Sequence[Row], tool_parser: str) -> list[Found]:
    """Measure the rows, one after another, on one stack whose vLLM has this parser.

    Raises:
        ClientFailed: the clients are not installed.
    """
    require_clients()
    shutil.rmtree(VAR, ignore_errors=True)
    VAR.mkdir(parents=True)
    found = []
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task("unpacking the model", total=len(rows))
        model = str(await asyncio.to_thread(unpacked_model, ROOT / "var" / "models"))
        plan = small_plan(VAR / "data", model, MODEL, "demo", tool_parser=tool_parser)
        async with running_stack(
            plan, lambda waiting: progress.update(task, description=f"waiting for {waiting}")
        ) as stack:
            for row in rows:
                progress.update(task, description=row.title)
                found.append(await measure_row(stack, row))
                progress.advance(task)
                one = found[-1]
                progress.console.print(f"{one.title}: {one.trainable} of {one.calls} trainable")
    return found


async def measure_row(stack: Stack, row: Row) -> Found:
    """Run a framework's program to its end, and read its calls back once they are stored."""
    failures = await run_program(f"http://{stack.plan.listen}/agent/{row.key}/v1", row)
    admin = address(stack.plan.admin_listen)[1]
    if await drained(admin, Scrapes(), within_s=DRAIN_S) is None:
        raise RuntimeError(f"the calls were not stored in {DRAIN_S:g} s")
    engine = make_engine(stack.database_url)
    try:
        async with engine.connect() as connection:
            ids = await episode_ids(connection, agent=row.key)
            return count(row.key, row.title, await read_episodes(connection, ids), failures)
    finally:
        await engine.dispose()


async def run_program(base_url: str, row: Row) -> Mapping[str, int]:
    """Run a row's program to its end, and return how its runs failed, with the number of runs."""
    program = BINARIES / "python", PROGRAMS / row.program, str(ROWS.index(row))
    try:
        said = await run_client(base_url, *program, *row.arguments, within_s=CLIENT_S)
    except ClientFailed as error:
        return {str(error): 1}
    failures: dict[str, int] = json.loads(said)
    return failures


def write(found: Sequence[Found], path: Path) -> None:
    """Write the figures as JSON."""
    rows = [msgspec.to_builtins(one) | {"share": one.share, "missed": one.missed} for one in found]
    path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[row.key for row in ROWS], metavar="ROW")
    parser.add_argument("--tool-parser", default=TOOL_PARSER, help="vLLM's --tool-call-parser")
    options = parser.parse_args()
    chosen = [row for row in ROWS if not options.only or row.key in options.only]
    try:
        found = asyncio.run(measure(chosen, options.tool_parser))
    except ClientFailed as error:
        sys.exit(f"benchmarks.trainable: {error}")
    write(found, FIGURES)
    console = Console()
    console.print(shares_table(found))
    if any(one.reasons or one.failures for one in found):
        console.print(reasons_table(found))
    console.print(FIGURES)
    sys.exit(1 if any(one.missed for one in found) else 0)


if __name__ == "__main__":
    main()
