"""Measure whether clients notice that adapters are loaded and unloaded.

Clients stream episodes of several calls through a real proxy from a real vLLM, while one version
after another is imported. Turns of a minute with such loads alternate with turns without. Ends with
status 1 if a call failed, streams paused, an episode changed its version, or loads were not made or
exceeded the adapter slots. A run's files and logs are in `var/swap` until the next run.
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, pairwise
from statistics import median
from typing import Any, Final, NamedTuple
from zlib import crc32

import aiohttp
import msgspec
import structlog
from rich.console import Console
from sqlalchemy import ARRAY, Text, bindparam, text

from benchmarks.report import Bar, Rows, bars_table, number, percentile
from benchmarks.stack import ROOT, small_plan
from pawl.stack.model import unpacked_model
from pawl.stack.stack import Stack, running_stack
from store.database import make_engine
from store.version_states import mark_unloaded
from tests.support.shallow import write_shallow
from trainer.importing import AdapterImport
from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.policies import lock_policy
from trainer.publishing.cleaning import Cleaning
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import load_recipe
from trainer.settings import USUAL_SLOTS, TrainerSettings
from trainer.updates.versions import begin_policy

FOLDER: Final = ROOT / "var" / "swap"
POLICY: Final = "swap"
RECIPE: Final = """
learner = "grpo"
dtype = "float32"
[claim]
max_staleness = 64
[batch]
micro_batch_tokens = 256
[optimizer]
learning_rate = 1e-3
[publish]
control_share = 0.0
tolerance = 0.01
"""
# Longer than two calls of an episode take: a call is recorded when it ends, with the time when it
# began. A real trainer derives this from its updates, but nothing is trained here.
RETIRE_AFTER_S: Final = 10.0
# Different adapters, published in turn: each version must answer otherwise than its predecessor.
ADAPTERS: Final = 2
# The bar: the p99 gap with loads is at most this many times the p99 gap without.
TIMES: Final = 2.0
# The first turn begins after this many episodes of each client: the engine compiles shapes when it
# first meets them.
WARM_UP: Final = 2
POLL_S, UNLOADED_S, STORED_S, PATIENCE_S = 1.0, 120.0, 120.0, 600.0
QUESTIONS: Final = ("Where does the river end?", "And where does it begin?", "Who has seen both?")
# If all replies had the same length, clients would work in step, and a version that serves for a
# few seconds would get no new episode.
FEWEST_TOKENS, MOST_TOKENS = 16, 32
# Counts by ids, as calls from before the clients began are stored, too.
_COUNT: Final = text("SELECT count(*) FROM transitions WHERE id::text = ANY(:ids)").bindparams(
    bindparam("ids", type_=ARRAY(Text))
)
_CALLS: Final = text(
    "SELECT t.id::text AS id, e.key, coalesce(t.policy_version, 0) AS version, t.started_at"
    " FROM transitions t JOIN episodes e ON e.id = t.episode_id ORDER BY t.started_at, t.id"
)
_RETIRED: Final = text(
    "SELECT version, min(at) AS at FROM policy_events WHERE to_state = 'retired' GROUP BY version"
)
_IDLE: Final = text(
    "SELECT version FROM policies p WHERE name = :name AND version > 0 AND state = 'retired'"
    " AND unloaded_at IS NULL AND changed_at < now() - make_interval(secs => :idle_s)"
    " AND NOT EXISTS (SELECT FROM transitions t WHERE t.policy = p.name"
    " AND t.policy_version = p.version AND t.started_at > now() - make_interval(secs => :idle_s))"
)


class Call(NamedTuple):
    """A call as its client saw it; times are of `time.monotonic`.

    `id` and `version` come from the reply's headers. `first` is the time of the first chunk with
    text. `why` is the reason why the call failed; None: it did not.
    """

    began: float
    ended: float
    id: str
    version: str
    first: float | None
    why: str | None


class AdapterLoad(NamedTuple):
    """A published version: when its weights were ready, files recorded, and traffic moved to it."""

    version: str
    step: float
    recorded: float
    promoted: float


class SeenAdapters(NamedTuple):
    """The adapters that the model server had at the time `at`."""

    at: float
    loaded: frozenset[str]


class Schedule(NamedTuple):
    """The schedule of turns: the second, fourth and so on have loads; the first begins at `began`.

    Times are seconds of `time.monotonic`, whose clock all processes of a machine share.
    """

    began: float
    turns: int
    turn_s: float
    loads: int

    @property
    def ends(self) -> float:
        return self.began + self.turns * self.turn_s

    def loads_due(self, at: float) -> int:
        """Return how many loads of all turns should have begun by `at`; 0 in a turn without loads.

        Loads are spread evenly over the turns with loads. Late ones are due in the next such turn.
        """
        turn, into_s = divmod(at - self.began, self.turn_s)
        if not 0 <= turn < self.turns or turn % 2 == 0:
            return 0
        loading_s = turn // 2 * self.turn_s + into_s
        return min(self.loads, int(loading_s * self.loads / (self.turns // 2 * self.turn_s)) + 1)

    def has_loads(self, at: float, seen: Sequence[SeenAdapters]) -> bool | None:
        """Return whether `at` is in a turn with loads; None: do not count what happens then.

        That is outside of all turns, and in a turn without loads until at most one adapter is
        loaded: those of the turn before must be unloaded first.
        """
        turn = int((at - self.began) // self.turn_s)
        if not 0 <= turn < self.turns or turn % 2:
            return 0 <= turn < self.turns or None
        begins = self.began + turn * self.turn_s
        is_settled = any(begins <= one.at <= at and len(one.loaded) <= 1 for one in seen)
        return False if is_settled else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swap", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of all turns (10)")
    parser.add_argument("--loads", type=int, default=60, help="of all turns (60)")
    parser.add_argument("--streams", type=int, default=32, help="at once (32)")
    parser.add_argument("--layers", type=int, default=4, help="of the packaged model's 30 (4)")
    parser.add_argument("--slots", type=int, default=USUAL_SLOTS, help="vLLM's --max-loras")
    parser.add_argument("--retire-after", type=float, default=RETIRE_AFTER_S, help="in seconds")
    options = parser.parse_args()
    console = Console()
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "model").mkdir(parents=True)
    with console.status("starting") as status:
        tables, bars = asyncio.run(measure(options, status.update))
    for table in [*tables, bars_table(bars)]:
        console.print(table.rich())
    return 0 if all(bar.holds for bar in bars) else 1


async def measure(
    options: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[list[Rows], list[Bar]]:
    """Run clients and publisher at the same time on a stack; return the tables and limits."""
    recipe = FOLDER / "swap.toml"
    recipe.write_text(RECIPE)
    packaged = await asyncio.to_thread(unpacked_model, ROOT / "var" / "models")
    model = str(write_shallow(packaged, FOLDER / "model", options.layers))
    plan = small_plan(FOLDER / "data", model, POLICY, str(recipe))
    vllm = msgspec.structs.replace(plan.vllm, adapter_slots=options.slots)
    plan = msgspec.structs.replace(plan, vllm=vllm)
    context = multiprocessing.get_context("spawn")
    async with running_stack(plan, lambda names: tell(f"waiting for {names}")) as stack:
        # The publisher writes what the trainer would, and the controller publishes it.
        await stack.stop_training()
        settings = TrainerSettings(
            upstream_url=f"http://127.0.0.1:{plan.vllm.port}/v1",
            adapter_dir=plan.data_dir / "adapters",
            recipe=str(recipe),
            model=model,
        )
        with context.Manager() as manager:
            events, plans = manager.list(), manager.Queue()
            arguments = settings, stack.database_url, events, plans, options.retire_after
            publisher = context.Process(target=publish_all, args=arguments)
            publisher.start()
            try:
                clients, schedule = await follow(stack, publisher, events, plans, options, tell)
            finally:
                publisher.terminate()
                publisher.join()
            published = list(events)
        stored, retired = await read_ledger(stack.database_url, clients.calls)
    return figures(options, schedule, clients, published, stored, retired)


async def follow(
    stack: Stack,
    publisher: Any,
    events: Any,
    plans: Any,
    options: argparse.Namespace,
    tell: Callable[[str], None],
) -> tuple["Clients", Schedule]:
    """Warm up, send the publisher a schedule, run the clients, and wait for the publisher's end."""

    async def until(condition: Callable[[], object], step: str) -> None:
        while not condition():
            stack.check()
            if publisher.exitcode:
                raise RuntimeError(f"the publisher failed: see {FOLDER / 'publisher.log'}")
            tell(f"{step}; {len(clients.calls)} calls, {len(events)} events")
            await asyncio.sleep(POLL_S)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=PATIENCE_S)
    ) as session:
        clients = Clients(session, stack.base_url)
        await until(lambda: len(events), "waiting for the first version")
        await clients.until_served(f"{POLICY}@1")
        clients.start(options.streams)
        enough = WARM_UP * len(QUESTIONS) * options.streams
        await until(lambda: len(clients.calls) >= enough, f"warming up: {enough} calls")
        turns = max(2, 2 * int(options.minutes / 2))
        turn_s = options.minutes * 60.0 / turns
        schedule = Schedule(time.monotonic(), turns, turn_s, options.loads)
        plans.put(schedule)
        await until(lambda: time.monotonic() >= schedule.ends, f"{turns} turns of {turn_s:.0f} s")
        await clients.stop()
    await until(lambda: publisher.exitcode is not None, "unloading")
    return clients, schedule


def publish_all(
    settings: TrainerSettings, database_url: str, events: Any, plans: Any, idle_s: float
) -> None:
    """Publish a first version, then others as the schedule from `plans` says, until it ends.

    The adapters are made beforehand, as only the swap is measured.
    """
    with (FOLDER / "publisher.log").open("a") as log:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(log))
        recipe = load_recipe(settings.recipe)
        base = Base(str(settings.model), recipe)
        for seed in range(ADAPTERS):
            learner = Learner(base, recipe, seed, settings.scratch)
            learner.rehearse()
            (FOLDER / "prepared" / str(seed)).mkdir(parents=True)
            learner.save(FOLDER / "prepared" / str(seed))
        asyncio.run(_publish_all(settings, database_url, learner, events, plans, idle_s))


async def _publish_all(
    settings: TrainerSettings,
    database_url: str,
    learner: Learner,
    events: Any,
    plans: Any,
    idle_s: float,
) -> None:
    engine, recipe = make_engine(database_url), load_recipe(settings.recipe)
    async with engine.connect() as guard, Replicas(settings.server_urls) as servers:
        await lock_policy(guard, POLICY, "publish")
        await begin_policy(engine, POLICY, None, None)
        imports = AdapterImport(settings, recipe, engine, learner, POLICY)
        made = count()

        async def load() -> None:
            prepared = FOLDER / "prepared" / str(next(made) % ADAPTERS)
            await asyncio.to_thread(learner.adopt, prepared)
            step = time.monotonic()
            version = await imports.write(prepared)
            recorded = time.monotonic()
            await imports.until_published(version)
            events.append(AdapterLoad(f"{POLICY}@{version}", step, recorded, time.monotonic()))

        async def look() -> int:
            """Unload idle versions, as a trainer does; return how many adapters the server has."""
            began = time.monotonic()
            async with engine.begin() as connection:
                rows = await connection.execute(_IDLE, {"name": POLICY, "idle_s": idle_s})
                idle = [row.version for row in rows]
                await mark_unloaded(connection, POLICY, idle, "no call uses it", "trainer")
            listed = await servers.models()
            loaded = frozenset(name for name, model in listed.items() if model.get("parent"))
            events.append(SeenAdapters(time.monotonic(), loaded))
            await Cleaning(engine, servers, POLICY, settings.adapter_dir).clean()
            await asyncio.sleep(max(0.0, began + POLL_S - time.monotonic()))
            return len(loaded)

        await load()
        while plans.empty():
            await look()
        schedule: Schedule = plans.get()
        loads = 0
        while (now := time.monotonic()) < schedule.ends:
            if loads < schedule.loads_due(now):
                await load()
                loads += 1
            await look()
        deadline = time.monotonic() + UNLOADED_S
        while await look() > 1 and time.monotonic() < deadline:
            pass
        await guard.invalidate()
    await engine.dispose()


class Clients:
    """Runs concurrent clients, each of which has one call under way at any time.

    Attributes:
        calls: the ended calls.
        gaps: for each arrival of a reply's chunks but the first, its time, and the seconds since
            the one before; chunks that arrive together count as one.
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self.calls: list[Call] = []
        self.gaps: list[tuple[float, float]] = []
        self._session, self._url = session, f"{base_url}/chat/completions"
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def until_served(self, version: str) -> None:
        """Make calls until new episodes get `version`; these calls are not in `calls`.

        An episode that began before the policy existed has no version to keep.
        """
        for first in count():
            question = [{"role": "user", "content": QUESTIONS[0]}]
            if (await self._call(f"swap-first-{first}", question))[0].version == version:
                self.gaps.clear()
                return
            await asyncio.sleep(POLL_S)

    def start(self, streams: int) -> None:
        self._tasks = [asyncio.create_task(self._client(own)) for own in range(streams)]

    async def stop(self) -> None:
        """Let every client finish its current episode."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, own: int) -> None:
        for episode in count():
            messages: list[dict[str, str]] = []
            for question in QUESTIONS:
                if self._stopping and not messages:
                    return
                messages.append({"role": "user", "content": question})
                call, answer = await self._call(f"swap-{own}-{episode}", messages)
                self.calls.append(call)
                if call.why is not None:
                    await asyncio.sleep(POLL_S)
                    break
                messages.append({"role": "assistant", "content": answer})

    async def _call(self, episode: str, messages: list[dict[str, str]]) -> tuple[Call, str]:
        span = MOST_TOKENS - FEWEST_TOKENS + 1
        tokens = FEWEST_TOKENS + crc32(f"{episode} {len(messages)}".encode()) % span
        body = {
            "model": POLICY,
            "messages": messages,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, why, id_, version = time.monotonic(), None, None, "", ""
        answer, before, counted, rest = "", None, 0, b""
        headers = {"x-pawl-episode": episode}
        try:
            async with self._session.post(self._url, json=body, headers=headers) as response:
                id_ = response.headers.get("x-pawl-call", "")
                version = response.headers.get("x-pawl-policy", "")
                if response.status != 200:
                    raise ValueError(f"status {response.status}: {(await response.text())[:300]}")
                # Chunks that arrive together count as one.
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    chunks = [json.loads(line[6:]) for line in lines if line[:7] == b"data: {"]
                    for chunk in chunks:
                        answer += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                        counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
                    if chunks:
                        now = time.monotonic()
                        self.gaps += [] if before is None else [(now, now - before)]
                        before, first = now, first or (now if answer else None)
            if counted != tokens:
                raise ValueError(f"{counted} of {tokens} tokens")
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
        return Call(began, time.monotonic(), id_, version, first, why), answer


async def read_ledger(url: str, calls: Iterable[Call]) -> tuple[list[Any], Mapping[int, Any]]:
    """Return the stored calls, oldest first, and the time when each retired version was retired.

    First wait, for at most `STORED_S` seconds, until the answered calls are stored.
    """
    ids = [call.id for call in calls if call.why is None]
    engine, deadline = make_engine(url), time.monotonic() + STORED_S
    async with engine.connect() as connection:
        while (await connection.scalar(_COUNT, {"ids": ids}) or 0) < len(ids):
            if time.monotonic() > deadline:
                break
            await connection.rollback()
            await asyncio.sleep(POLL_S)
        stored = list(await connection.execute(_CALLS))
        retired = {row.version: row.at for row in await connection.execute(_RETIRED)}
    await engine.dispose()
    return stored, retired


def figures(
    options: argparse.Namespace,
    schedule: Schedule,
    clients: Clients,
    events: Sequence[AdapterLoad | SeenAdapters],
    stored: Sequence[Any],
    retired: Mapping[int, Any],
) -> tuple[list[Rows], list[Bar]]:
    """Return the tables and limits of a run; the first version's load is not counted."""
    calls, seen = clients.calls, [event for event in events if isinstance(event, SeenAdapters)]
    loads = [event for event in events if isinstance(event, AdapterLoad)][1:]
    unloads = [
        (version, later.at)
        for one, later in pairwise(seen)
        for version in sorted(one.loaded - later.loaded)
    ]
    first, last = dict[str, float](), dict[str, float]()
    for call in calls:
        last[call.version] = max(call.ended, last.get(call.version, 0.0))
        if call.first is not None:
            first[call.version] = min(call.first, first.get(call.version, call.first))
    gaps: dict[bool | None, list[float]] = {False: [], True: [], None: []}
    for at, seconds in clients.gaps:
        gaps[schedule.has_loads(at, seen)].append(seconds * 1000)
    by_episode: dict[str, list[Any]] = {}
    for row in stored:
        by_episode.setdefault(row.key, []).append(row)
    kinds = [version_change(rows, retired) for rows in by_episode.values()]
    good = [call for call in calls if call.why is None]
    by_id = {row.id: f"{POLICY}@{row.version}" for row in stored}
    times = {
        "optimiser step → files recorded": [load.recorded - load.step for load in loads],
        "optimiser step → promoted": [load.promoted - load.step for load in loads],
        "optimiser step → first token at a client": [
            first[load.version] - load.step for load in loads if load.version in first
        ],
        "longest gap while a version was published": longest_gaps(clients.gaps, loads),
        "last call of a version → unloaded": [
            at - last[version] for version, at in unloads if version in last
        ],
        "a call": [call.ended - call.began for call in calls],
    }
    shares = (0.5, 0.99, 0.999, 1)
    tables = [
        Rows(
            f"{options.streams} streams, {options.layers} layers, {options.slots} adapter slots",
            ["", "gaps", "median ms", "p99", "p99.9", "max"],
            [
                [name, number(len(own)), *(number(percentile(own, share), 1) for share in shares)]
                for name, own in (("without loads", gaps[False]), ("with loads", gaps[True]))
            ],
            [f"failed: {call.why}" for call in calls if call.why is not None][:5],
        ),
        Rows(
            f"Seconds, of {len(calls)} calls in {len(kinds)} episodes",
            ["", "median", "max"],
            [[name, number(median(t), 2), number(max(t), 2)] for name, t in times.items() if t],
        ),
    ]
    ratio = percentile(gaps[True], 0.99) / percentile(gaps[False], 0.99)
    misnamed = sum(by_id.get(call.id, call.version) != call.version for call in good)
    return tables, [
        Bar("loads", len(loads), options.loads, at_least=True),
        Bar("calls failed", len(calls) - len(good), 0),
        Bar("p99 gap, times that without loads", ratio, TIMES),
        Bar("episodes that changed their version", kinds.count("changed"), 0),
        Bar("episodes that had to leave a retired version", kinds.count("had to leave"), 0),
        Bar("answered calls not in the ledger", sum(call.id not in by_id for call in good), 0),
        Bar("answered calls of another version in the ledger", misnamed, 0),
        Bar("adapters loaded, at most", max(len(one.loaded) for one in seen), options.slots),
        Bar(
            "adapters unloaded under a call",
            sum(last.get(version, 0.0) > at for version, at in unloads),
            0,
        ),
        # The serving version, and the one that would serve after a roll-back.
        Bar("adapters loaded in the end", len(seen[-1].loaded), 2),
        Bar("versions that no client saw", sum(load.version not in first for load in loads), 0),
    ]


def version_change(rows: Sequence[Any], retired: Mapping[int, Any]) -> str:
    """Return `kept`, `had to leave` (its version was retired), or `changed` (without need)."""
    moves = [(one, other) for one, other in pairwise(rows) if one.version != other.version]
    if not moves:
        return "kept"
    forced = (
        one.version in retired and retired[one.version] <= other.started_at for one, other in moves
    )
    return "had to leave" if all(forced) else "changed"


def longest_gaps(gaps: Iterable[tuple[float, float]], loads: Sequence[AdapterLoad]) -> list[float]:
    """Return for each load the longest gap of any stream during it, in seconds.

    Gaps that only overlap with the load count, too. The p99 of all gaps would not show them, as
    there are too few.
    """
    longest, steps = [0.0] * len(loads), [load.step for load in loads]
    for at, seconds in gaps:
        # The last load that had begun when the gap ended; loads do not overlap.
        place = bisect_right(steps, at) - 1
        if place >= 0 and at - seconds < loads[place].promoted:
            longest[place] = max(longest[place], seconds)
    return longest


if __name__ == "__main__":
    sys.exit(main())
