"""Measure the console on a ledger of a million calls, and how much it slows serving.

Each page is requested with many filters, places and episodes: the 95th percentile of the times.
Then streams run through a proxy on the same database, in turns with an idle console and with two
people who request one page after another: the 99th percentile of the time to the first chunk, and
of a chunk's delay. Proxy, PostgreSQL and console share all cores, as on a user's machine.
Making the ledger takes two minutes and 3 GB; `--ledger FOLDER` keeps it for the next time.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import asyncpg
from rich.console import Console

from benchmarks.ledger import LONG_RUN, POLICIES, VERSIONS, fill_database
from benchmarks.proxy.__main__ import INTERVAL_S, load_streams, work_folder
from benchmarks.proxy.peers import LOAD_CORE, Running
from benchmarks.proxy.streams import Plan
from benchmarks.report import Bar, Rows, bars_table, number, percentile
from benchmarks.stack import answers, free_port, on_core, running, running_proxy, wait_for
from store.embedded import EmbeddedPostgres

PAGE_MS, PAGE_BYTES = 300, 2_000_000
# Limit of serving's p99 with a busy console over that with an idle one: the machine's own noise.
NOISE: Final = 1.25
STREAMS, CHUNKS = 32, 20
LOOKERS: Final = 2


@dataclass(slots=True)
class PageTimes:
    """The milliseconds and bytes of each request of a page."""

    ms: list[float]
    sizes: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.console", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--requests", type=int, default=100, help="of each page (100)")
    parser.add_argument("--rounds", type=int, default=5, help="of serving, in turns (5)")
    parser.add_argument("--seconds", type=int, default=15, help="of each turn (15)")
    parser.add_argument("--ledger", type=Path, help="folder in which the ledger is, or will be")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 220)
    with ExitStack() as stack:
        folder = options.ledger or stack.enter_context(work_folder())
        pages = asyncio.run(pages_of(folder, console))
        proxy, address = stack.enter_context(running_console(folder))
        measured = {
            name: request_page(address, addresses, options.requests)
            for name, addresses in pages.items()
        }
        console.print(pages_table(measured).rich())
        ratios = serving_ratios(proxy, address, pages, folder, options.rounds, options.seconds)
    console.print(
        bars_table(
            [
                Bar("slowest_page_p95_ms", max(p95(page) for page in measured.values()), PAGE_MS),
                Bar("largest_page_bytes", max(max(p.sizes) for p in measured.values()), PAGE_BYTES),
                *(Bar(f"{name}_ratio", ratio, NOISE) for name, ratio in ratios.items()),
            ]
        ).rich()
    )


async def pages_of(folder: Path, console: Console) -> dict[str, list[str]]:
    """Fill the database in `folder` if it is empty; return the addresses of each kind of page."""
    server = EmbeddedPostgres(folder)
    url = server.ensure_running()
    try:
        connection = await asyncpg.connect(url)
        if await connection.fetchval("SELECT to_regclass('episodes')") is None:
            await fill_database(url, say=console.print)
        some = await connection.fetch(
            "SELECT id, task, policy FROM episodes TABLESAMPLE SYSTEM (2) LIMIT 200"
        )
        trained = await connection.fetch(
            "SELECT p.episode_id, p.policy, p.task, u.id FROM updates u CROSS JOIN LATERAL"
            " (SELECT * FROM episode_policies WHERE claimed_by = u.id LIMIT 3) p"
            " WHERE u.state = 'done'"
        )
        long_run = await connection.fetchval("SELECT id FROM episodes WHERE key = $1", LONG_RUN)
        updates = await connection.fetch("SELECT id FROM updates")
        await connection.close()
    finally:
        server.stop()
    tasks = [f"policy={row['policy']}&task={quote(row['task'])}" for row in some if row["task"]]
    versions = [f"{policy}/{version}" for policy in POLICIES for version in range(VERSIONS)]
    filters = [
        *("", *(f"policy={policy}" for policy in POLICIES), "policy=sql&version=3", "version=17"),
        *("agent=coder", "agent=nobody", "state=unscored", "state=failed", "split=eval"),
        *("low=0.4&high=0.45", "low=0.97&high=0.98", "text=run-4999", "text=nothing-like-it"),
        *("reason=alone", "reason=error_reply", "reason=greedy&policy=code", tasks[0], tasks[1]),
    ]
    return {
        "overview": [f"/?days={days}" for days in (1, 7, 30)],
        "overview's figures": [f"/overview/figures?days={days}" for days in (1, 7, 30)],
        "episodes": [f"/episodes?{one}" for one in filters],
        "episodes' counts": [f"/episodes/counts?{one}" for one in filters],
        "episode": [f"/episodes/{row['id']}" for row in some],
        "episode of 200 calls": [f"/episodes/{long_run}"],
        "credit": [f"/updates/{row['id']}/credit?episode={row['episode_id']}" for row in trained],
        "versions": ["/versions", *(f"/versions?policy={policy}" for policy in POLICIES)],
        "version": [f"/versions/{one}" for one in versions],
        "updates": ["/updates", *(f"/updates?policy={policy}" for policy in POLICIES)],
        "update": [f"/updates/{row['id']}" for row in updates],
        "review": ["/review"],
    }


@contextmanager
def running_console(folder: Path) -> Iterator[tuple[Running, str]]:
    """Run a model server, a proxy and a console on the database in `folder`."""
    upstream, port = free_port(), free_port()
    server = [sys.executable, "-m", "benchmarks.upstream", str(upstream), str(INTERVAL_S)]
    with work_folder() as logs, running(server, logs / "model.log", {}, LOAD_CORE) as model:
        models = f"http://127.0.0.1:{upstream}/v1/models"
        wait_for(lambda: answers(models), model, logs / "model.log")
        with running_proxy(folder, upstream) as proxy:
            environment = {
                "DATABASE_URL": proxy.database_url,
                "PAWL_CONSOLE_LISTEN": f"127.0.0.1:{port}",
            }
            command = [sys.executable, "-m", "pawl.cli", "console"]
            address, log = f"http://127.0.0.1:{port}", logs / "console.log"
            with running(command, log, environment) as process:
                wait_for(lambda: answers(f"{address}/healthz"), process, log)
                roots = {"proxy": proxy.process.pid, "postgres": proxy.postgres_pid}
                up = Running(proxy.port, roots=roots, database_url=proxy.database_url)
                yield up, address


def request_page(address: str, paths: Sequence[str], count: int) -> PageTimes:
    """Request a page `count` times, each address before any again, and after an unmeasured one."""
    dice, page = random.Random(7), PageTimes([], [])
    page_size(address + paths[0])
    for place in range(count):
        path = paths[place] if place < len(paths) else dice.choice(paths)
        began = time.perf_counter()
        size = page_size(address + path)
        page.ms.append((time.perf_counter() - began) * 1000)
        page.sizes.append(size)
    return page


def page_size(url: str) -> int:
    """Request a page, and return its size in bytes."""
    try:
        with urlopen(url, timeout=30) as reply:
            return len(reply.read())
    except HTTPError as error:
        raise RuntimeError(f"{url} answers {error.code}: {error.read()[-600:]!r}") from error


def serving_ratios(
    up: Running,
    address: str,
    pages: Mapping[str, Sequence[str]],
    folder: Path,
    rounds: int,
    seconds: int,
) -> dict[str, float]:
    """Return for each p99 of serving the median with a busy console over that with an idle one."""
    plan = Plan(up.port, up.path, STREAMS, CHUNKS, INTERVAL_S, seconds)
    figures: dict[str, dict[bool, list[float]]] = {}
    with on_core(LOAD_CORE):
        for turn in range(2 * rounds):
            busy = turn % 4 in (1, 2)
            with people_looking(address, pages) if busy else ExitStack():
                measured = load_streams(up, folder, plan)
            if measured["failed"]:
                raise RuntimeError(f"streams failed: {json.dumps(measured['failed'])}")
            for name in ("first_p99_ms", "delay_p99_ms"):
                figures.setdefault(name, {False: [], True: []})[busy].append(measured[name])
    for name, of in figures.items():
        print(name, {("busy" if busy else "idle"): values for busy, values in of.items()})
    return {name: median(of[True]) / median(of[False]) for name, of in figures.items()}


@contextmanager
def people_looking(address: str, pages: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Request pages during the block, as `LOOKERS` people do, one after another."""
    stopping = threading.Event()

    def look(seed: int) -> None:
        dice = random.Random(seed)
        while not stopping.is_set():
            page_size(address + dice.choice(pages[dice.choice(list(pages))]))

    people = [threading.Thread(target=look, args=(seed,)) for seed in range(LOOKERS)]
    for person in people:
        person.start()
    try:
        yield
    finally:
        stopping.set()
        for person in people:
            person.join()


def p95(page: PageTimes) -> float:
    return percentile(page.ms, 0.95)


def pages_table(pages: Mapping[str, PageTimes]) -> Rows:
    lines = [
        [
            name,
            *(number(percentile(page.ms, share), 1) for share in (0.5, 0.95, 1.0)),
            number(max(page.sizes) / 1000, 1),
        ]
        for name, page in pages.items()
    ]
    return Rows("Pages", ["page", "median ms", "p95 ms", "slowest ms", "largest KB"], lines)


if __name__ == "__main__":
    main()
