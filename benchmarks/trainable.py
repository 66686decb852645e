"""Measure the share of real frameworks' calls that can be trained.

Each framework runs, unchanged and with its defaults, in the clients' own environment
(`scripts/install_clients.py`) against a complete stack with a real vLLM and the packaged model. It
gets only the base URL. Only the ledger's data on its calls count: a model this small often fails as
an agent, but this does not matter.

Ends with status 1 if less than 95 % of a row's calls can be trained, or a row has fewer episodes or
calls than its program has questions.
"""

import argparse
import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.stack import (
    CLIENT_BINARIES,
    ROOT,
    TOOL_PARSER,
    ClientFailed,
    run_client,
    small_plan,
)
from pawl.stack.model import unpacked_model
from pawl.stack.stack import Stack, running_stack
from store.database import make_engine
from store.read.episodes import read_episodes
from store.records import Episode
from store.selecting import Selection, select_episodes
from store.settings import parse_address
from tests.support.faults.ledger import Scrapes, drained

# By the agent's name of a row's calls in the ledger: the title, and the program's arguments.
ROWS: Final[Mapping[str, tuple[str, ...]]] = {
    "langgraph": ("LangGraph: a graph of two agents", "langgraph"),
    "agents-chat": ("Agents SDK: chat, strict tools", "agents_sdk", "chat"),
    "agents-responses": ("Agents SDK: responses, strict tools", "agents_sdk"),
    "agents-streamed": ("Agents SDK: responses, streamed, strict tools", "agents_sdk", "streamed"),
    "agents-loose": ("Agents SDK: responses, tools not strict", "agents_sdk", "responses", "loose"),
    "agents-streamed-loose": (
        *("Agents SDK: responses, streamed, tools not strict", "agents_sdk", "streamed", "loose"),
    ),
    "autogen": ("AutoGen: an agent that reflects", "autogen"),
    "pydantic-ai": ("pydantic-ai: structured output", "pydantic_ai"),
    "anthropic": ("anthropic: tool runner", "anthropic", "whole"),
    "anthropic-streamed": ("anthropic: tool runner, streamed", "anthropic", "streamed"),
    "openai-thinking": ("openai: a thinking model's settings", "openai", "thinking"),
    "openai-penalties": ("openai: penalties", "openai", "penalties"),
    "openai-schema": ("openai: a JSON schema", "openai", "schema"),
}
PROGRAMS: Final = ROOT / "tests" / "clients" / "frameworks.py"
# The model that the programs request, and the number of questions that each asks.
MODEL: Final = "agent"
QUESTIONS: Final = 20
SHARE: Final = 0.95
FOLDER: Final = ROOT / "var" / "trainable"
CLIENT_S: Final = 300.0
DRAIN_S: Final = 60.0
COLUMNS: Final = (
    *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")),
)


class Result(NamedTuple):
    """Counts of a framework: calls, reasons why some cannot be trained, and failed runs."""

    title: str
    calls: int
    episodes: int
    trainable: int
    reasons: Mapping[str, int]
    failures: Mapping[str, int]

    @property
    def share(self) -> float:
        return self.trainable / self.calls if self.calls else 0.0

    @property
    def missed(self) -> bool:
        """Return whether too few calls can be trained, or a question was not asked."""
        return self.share < SHARE or min(self.calls, self.episodes) < QUESTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", default=list(ROWS))
    parser.add_argument("--tool-parser", default=TOOL_PARSER, help="vLLM's --tool-call-parser")
    options = parser.parse_args()
    results = asyncio.run(measure(options.only, options.tool_parser))
    rows = [one._asdict() | {"share": one.share, "missed": one.missed} for one in results]
    (FOLDER / "figures.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    console = Console()
    console.print(shares_table(results))
    if any(one.reasons or one.failures for one in results):
        console.print(reasons_table(results))
    sys.exit(1 if any(one.missed for one in results) else 0)


async def measure(keys: Sequence[str], tool_parser: str) -> list[Result]:
    """Measure the rows, one after another, on one stack whose vLLM has this tool parser."""
    if not CLIENT_BINARIES.is_dir():
        sys.exit("benchmarks.trainable: no clients here: scripts/install_clients.py gets them")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    results = []
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task("unpacking the model", total=len(keys))
        model = str(await asyncio.to_thread(unpacked_model, ROOT / "var" / "models"))
        plan = small_plan(FOLDER / "data", model, MODEL, "demo", tool_parser=tool_parser)
        async with running_stack(
            plan, lambda waiting: progress.update(task, description=f"waiting for {waiting}")
        ) as stack:
            for key in keys:
                progress.update(task, description=ROWS[key][0])
                results.append(await measure_row(stack, key))
                progress.advance(task)
    return results


async def measure_row(stack: Stack, key: str) -> Result:
    """Run a framework's program to its end, and read its calls back once they are stored."""
    title, framework, *arguments = ROWS[key]
    number = str(list(ROWS).index(key))
    command: list[str | Path] = [CLIENT_BINARIES / "python", PROGRAMS, framework, number]
    command += arguments
    try:
        base_url = f"http://{stack.plan.listen}/agent/{key}/v1"
        failures = json.loads(await run_client(base_url, *command, within_s=CLIENT_S))
    except ClientFailed as error:
        failures = {str(error): 1}
    admin = parse_address(stack.plan.admin_listen)[1]
    if await drained(admin, Scrapes(), within_s=DRAIN_S) is None:
        raise RuntimeError(f"the calls were not stored in {DRAIN_S:g} s")
    engine = make_engine(stack.database_url)
    try:
        async with engine.connect() as connection:
            episodes = await read_episodes(
                connection, await select_episodes(connection, Selection(agent=key))
            )
    finally:
        await engine.dispose()
    return count_calls(key, title, episodes, failures)


def count_calls(
    key: str, title: str, episodes: Iterable[Episode], failures: Mapping[str, int]
) -> Result:
    """Count the calls of the agent `key`; those of a quarantined episode are never trained."""
    by_episode = [
        [call.reason or episode.quarantined_reason for call in episode.calls if call.agent == key]
        for episode in episodes
    ]
    reasons = Counter(reason for calls in by_episode for reason in calls)
    calls, trainable = reasons.total(), reasons.pop(None, 0)
    why = {reason: number for reason, number in reasons.most_common() if reason is not None}
    return Result(title, calls, sum(map(bool, by_episode)), trainable, why, failures)


def shares_table(results: Iterable[Result]) -> Table:
    table = Table("framework", "episodes", "calls", "trainable", "share", "failed runs")
    for one in results:
        share = f"[{'red' if one.missed else 'green'}]{one.share:.1%}[/]"
        counts = [str(number) for number in (one.episodes, one.calls, one.trainable)]
        table.add_row(one.title, *counts, share, str(sum(one.failures.values())))
    return table


def reasons_table(results: Iterable[Result]) -> Table:
    table = Table("framework", "why not trainable, or how runs failed", "number")
    for one in results:
        for reason, number in (*one.reasons.items(), *one.failures.items()):
            table.add_row(one.title, escape(reason), str(number))
    return table


if __name__ == "__main__":
    main()
