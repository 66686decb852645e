"""No episode is lost or trained twice: kill the trainer in mid-update, again and again.

A ledger of scored episodes is trained twice: by undisturbed trainers, and by trainers that are
killed, at boundaries of their steps and at random. The outcome of every episode, and the bytes of
every version, must be the same in both runs. If a single trainer of all policies is killed, it is
compared with one undisturbed trainer for each policy. A *life* is one process of a trainer, from
its start to its end.

Unless the test is plain, two kills in five hit the model server or the controller or both, while a
trainer works. A new model server has no adapters: the controller must load all that the store lists
as servable. The last of these kills come after the trainers have ended.
"""

import asyncio
import json
import random
import re
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from uuid import UUID

import asyncpg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.stack import NotUp, free_port
from store.embedded import EmbeddedPostgres
from store.schema.tables import SERVABLE
from tests.support.faults.stand import kill_and_start
from tests.support.trainer.scored_episodes import POLICIES_TOML, recipe_toml, trained
from tests.support.trainer.zygote import GONE_S, Zygote
from trainer.publishing.adapters import read_manifest

# Kills for each update: most lives end before they finish an update.
KILLS_AN_UPDATE: Final = 2
# The share of the kills that hit model server and controller.
SHARE_BESIDE: Final = 0.4
# Processes that are killed at the same time.
TOGETHER: Final = (("model server",), ("controller",), ("model server", "controller"))
# Kills after the trainers have ended: the controller alone must load the adapters, the second time
# after its own restart.
IN_THE_END: Final = (("model server",), ("model server", "controller"))
AWAY_S: Final = (0.0, 1.0)
LOADED_WITHIN_S: Final = 60.0
# An update killed at this boundary or earlier has left nothing that a later life could finish.
RENAME: Final = "before the rename"
# A life reaches a boundary in OF_A_RELEASE only if an earlier life was killed at this one.
CLAIMED: Final = "after the claim"
OF_A_RELEASE: Final = frozenset({"before a release", "in the transaction of a release"})
STARTING, WORKING = "at random, as it starts", "at random, at work"
UP: Final = b'"trainer_up"'
# Probabilities of the kinds of kill.
AT_BOUNDARY, IN_START, OF_POSTGRES = 0.4, 0.2, 0.1
# Before every tenth kill a life is asked to stop, which does not count as a kill.
ASKED_EVERY: Final = 10
FIRST_START_S, RETRY_S, LONGEST_S, STAGE_S, SERVER_UP_S = 2.0, 1.0, 120.0, 300.0, 60.0
POLL_S: Final = 0.02
# Pause between queries: each opens a session, and ten a second take a tenth of a core.
QUERY_S: Final = 0.5
# All files of a version but its manifest, which has the update's id.
COMPARED: Final = ("adapter_model.safetensors", "adapter_config.json", "base.json", "trainer/*")

_SPENT: Final = """
    SELECT bool_and(
        (SELECT count(*) FROM consumptions WHERE policy = asked) = (SELECT count(*) FROM episodes)
        AND NOT EXISTS (SELECT FROM policies WHERE name = asked AND state = 'written')
        AND (SELECT version FROM policies WHERE name = asked AND state = 'serving')
            = (SELECT max(version) FROM policies WHERE name = asked))
    FROM unnest($1::text[]) AS asked
"""
_HELD: Final = "SELECT array_agg(id) FROM updates WHERE policy = ANY($1) AND state = 'running'"
_UPDATE_S: Final = """
    SELECT coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY s), 0) FROM (
        SELECT extract(epoch FROM lead(claimed_at) OVER (ORDER BY claimed_at) - claimed_at) AS s
        FROM updates WHERE policy = $1) AS taken
"""
_OUTCOMES: Final = """
    SELECT e.key, u.version, u.state, c.trained, c.reason FROM episodes e
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (e.id, $1)
    LEFT JOIN updates u ON (u.id, u.policy) = (c.update_id, c.policy)
"""
_STATES: Final = "SELECT version, state FROM policies WHERE name = $1 ORDER BY version"
_ABANDONED: Final = "SELECT count(*) FROM updates WHERE policy = $1 AND state = 'abandoned'"
# Everything that a trainer could have made or claimed for other policies.
_OF_OTHERS: Final = """
    SELECT 'version of ' || name FROM policies WHERE name <> ALL($1)
    UNION ALL SELECT 'update of ' || policy FROM updates WHERE policy <> ALL($1)
    UNION ALL SELECT 'claim of ' || policy FROM episode_policies WHERE policy <> ALL($1)
"""
_FIRST: Final = """
    SELECT t.agent, count(*) FROM episodes e JOIN transitions t ON t.id = e.first_call_id
    GROUP BY 1 ORDER BY 1
"""
_CALLS: Final = """
    SELECT coalesce(policy, 'no policy'), count(*) FROM transitions GROUP BY 1 ORDER BY 1
"""
_SERVABLE: Final = f"""
    SELECT served_name, adapter_path FROM policies
    WHERE name = ANY($1) AND version > 0 AND {SERVABLE}
"""


class NotStaged(Exception):
    """The ledger could not be made; the message ends with the end of the log."""


class BoundaryNotReached(Exception):
    """A life did not reach a boundary at which it should have been killed."""


class Task(NamedTuple):
    """The training of both runs.

    `shared`: in the run with kills, one trainer trains all policies. `kills_beside` is the number
    of kills of model server and controller; None: these are not killed.
    """

    folder: Path
    updates: int
    seed: int
    policies: int = 1
    shared: bool = False
    kills_beside: int | None = None


def trainer_kills(
    forks: Zygote,
    folder: Path,
    kills: int,
    seed: int,
    *,
    policies: int = 1,
    shared: bool = False,
    plain: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run the test with `kills` kills in all; return the reports of `compare_runs`.

    With `plain` only trainers are killed.
    """
    beside = None if plain else round(SHARE_BESIDE * kills)
    of_trainers = kills - (beside or 0)
    updates = max(4, of_trainers // policies // KILLS_AN_UPDATE)
    each = of_trainers if shared else of_trainers // policies
    dice = {name: random.Random(seed + n) for n, name in enumerate(trained(policies))}
    task = Task(folder, updates, seed, policies, shared, beside)
    return compare_runs(
        forks, task, lambda run, update_s: run.kill(each, dice[run.place.names[0]], update_s)
    )


def compare_runs(
    forks: Zygote, task: Task, disturb: Callable[["Run", float], None]
) -> dict[str, dict[str, Any]]:
    """Train a ledger twice, the second time while `disturb` disturbs each run; return reports.

    `disturb` also gets the seconds that an undisturbed update takes. There is a report for each
    policy, one of the `ledger`, and one of the processes `beside` the trainers.
    """
    names = trained(task.policies)
    alone: list[tuple[str, ...]] = [(name,) for name in names]
    postgres = EmbeddedPostgres(task.folder)
    postgres.ensure_running()
    try:
        database = Database(postgres)
        calm_places = _places(task, "calm", database, alone)
        places = _places(task, "killed", database, [tuple(names)] if task.shared else alone)
        _make_ledgers(forks, task, [calm_places[0].database_url, places[0].database_url])
        with ServerAndController(forks, database, calm_places[0], names, None) as beside:
            runs = [Run(forks, database, place, beside) for place in calm_places]
            calm = _to_their_ends(runs, lambda _: None)

        def disturbed(run: Run) -> None:
            disturb(run, max(calm[name].update_s for name in run.place.names))

        with ServerAndController(forks, database, places[0], names, task.kills_beside) as beside:
            runs = [Run(forks, database, place, beside) for place in places]
            killed = _to_their_ends(runs, disturbed)
            beside.kill_in_the_end(random.Random(task.seed))
        ledger = asyncio.run(_ledger_report(places[0], names))
    finally:
        postgres.stop()
    reports = {name: _policy_report(task.updates, calm[name], killed[name]) for name in names}
    rest = {} if task.kills_beside is None else {"beside": beside.report()}
    return reports | {"ledger": ledger} | rest


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The files and database of a trainer of one or more policies; `updates` is for each policy."""

    folder: Path
    database_url: str
    names: tuple[str, ...]
    model: Path
    # None: the policy is the base model itself.
    policies: Path | None = None
    updates: int = 0

    @property
    def adapters(self) -> Path:
        return self.folder / "adapters"

    @property
    def log(self) -> Path:
        return self.folder / f"{'+'.join(self.names)}.log"

    def logged(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    def progress(self) -> float:
        """Return the share of the updates that exist as versions."""
        made = [1 for name in self.names for _ in (self.adapters / name).glob("[0-9]*")]
        return len(made) / (self.updates * len(self.names))

    def settings(self, upstream_port: int) -> dict[str, str]:
        """Return the environment variables of the trainer, and of a controller."""
        of_policies = {} if self.policies is None else {"PAWL_POLICIES": str(self.policies)}
        if len(self.names) == 1:
            of_policies["PAWL_POLICY"] = self.names[0]
        return of_policies | {
            "DATABASE_URL": self.database_url,
            "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
            "PAWL_ADAPTER_DIR": str(self.adapters),
            "PAWL_RECIPE": str(self.folder / "recipe.toml"),
            "PAWL_MODEL": str(self.model),
            "PAWL_TRAINER_LISTEN": f"127.0.0.1:{free_port()}",
            "PAWL_CONTROLLER_LISTEN": f"127.0.0.1:{free_port()}",
            "PAWL_POLL_S": "0.05",
            # No version is unloaded to make room, which would hide leftovers of a kill.
            "PAWL_ADAPTER_SLOTS": "1000000",
        }


def _places(
    task: Task, name: str, database: "Database", trainers: list[tuple[str, ...]]
) -> list[RunPlace]:
    """Make the places of a run, one for each of its trainers, with an empty database."""
    folder, url, model = task.folder / name, database.create(name), task.folder / "model"
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe_toml())
    (folder / "policies.toml").write_text(POLICIES_TOML)
    policies = folder / "policies.toml" if task.policies > 1 else None
    return [RunPlace(folder, url, names, model, policies, task.updates) for names in trainers]


def _make_ledgers(forks: Zygote, task: Task, urls: list[str]) -> None:
    log, model = task.folder / "stage.log", str(task.folder / "model")
    arguments = {"updates": task.updates, "seed": task.seed, "policies": task.policies}
    pid = forks.start("stage", log, {}, model=model, database_urls=urls, **arguments)
    if forks.wait(pid, STAGE_S) != 0:
        raise NotStaged(log.read_text()[-2000:])


class Database:
    """A PostgreSQL that a run may kill under all trainers, except while a run needs it."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        self._postgres = postgres
        self._needed_by = 0
        self._changed = threading.Condition()

    @contextmanager
    def keep_up(self) -> Iterator[None]:
        """Keep the server from being killed within the block."""
        with self._changed:
            self._needed_by += 1
        try:
            yield
        finally:
            with self._changed:
                self._needed_by -= 1
                self._changed.notify_all()

    def ask(self, url: str, query: str, *arguments: Any) -> list[Any]:
        """Return the rows of a query; the server is not killed meanwhile."""
        with self.keep_up():
            return asyncio.run(_rows(url, query, *arguments))

    def kill_and_start(self) -> None:
        """Kill and restart the server once no run needs it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._needed_by)
            asyncio.run(kill_and_start(self._postgres))

    def create(self, name: str) -> str:
        """Create an empty database, and return its URL."""
        admin_url = self._postgres.url.replace("/pawl?", "/postgres?")
        asyncio.run(_rows(admin_url, f"CREATE DATABASE {name}"))
        return self._postgres.url.replace("/pawl?", f"/{name}?")


async def _rows(url: str, query: str, *arguments: Any) -> list[Any]:
    connection = await asyncpg.connect(url, timeout=GONE_S)
    try:
        return list(await connection.fetch(query, *arguments))
    finally:
        await connection.close()


class Run:
    """The lives of one trainer, over the ledger of `place`.

    Attributes:
        killed: number of kills by kind.
        idle: number of kills after the last episode was consumed, when a trainer has no work.
        by_themselves: lives that ended in another way than intended.
        stopped_after: seconds from SIGTERM to the end, of each life that was asked to stop.
    """

    def __init__(
        self, forks: Zygote, database: Database, place: RunPlace, beside: "ServerAndController"
    ) -> None:
        self.place, self.idle = place, 0
        self.killed: Counter[str] = Counter()
        self.by_themselves: list[str] = []
        self.stopped_after: list[float] = []
        self._forks, self._database, self._beside = forks, database, beside
        self._start_s = FIRST_START_S
        self._settings = place.settings(beside.server.port)

    def to_its_end(self, disturb: Callable[["Run"], None]) -> None:
        """Run `disturb`, and then an undisturbed life until every episode is consumed."""
        disturb(self)
        self._finish()

    def kill_at_each_boundary(self) -> None:
        """Start a life for each boundary, at which it, or the controller beside it, is killed.

        Raises:
            BoundaryNotReached: a process was not killed, as it has no such step any more.
        """
        for name in self._forks.boundaries:
            for boundary in [CLAIMED, name] if name in OF_A_RELEASE else [name]:
                before = self.killed[boundary]
                self._kill_life(boundary, LONGEST_S)
                if self.killed[boundary] == before:
                    raise BoundaryNotReached(
                        f"no trainer reached the boundary '{boundary}': correct it"
                    )
        for boundary in self._forks.controllers_boundaries:
            self._beside.start_dying_controller(boundary)
            pid, _ = self._begin(None)
            self._beside.wait_for_death(boundary)
            self._count_kill(f"controller, {boundary}", self._forks.end(pid, signal.SIGKILL))

    def kill(self, times: int, dice: random.Random, update_s: float) -> None:
        """Start and kill lives `times` times, at boundaries and at random, over the whole ledger.

        The choice keeps the updates in step with the kills: while updates are ahead, lives are
        killed before they write anything. `update_s` is the time of an undisturbed update.
        """
        boundaries = self._forks.boundaries
        early = boundaries[: boundaries.index(RENAME) + 1]
        for number in range(times):
            progress = self.place.progress()
            is_ahead = progress > number / times
            if progress >= 1.0 and self._all_spent():
                self.idle += 1
            if number % ASKED_EVERY == 0:
                with self._database.keep_up():
                    self._stop_at_work(dice.uniform(0.0, update_s))
            victims = self._beside.next_victims(number / times, dice)
            if victims:
                kill = partial(self._beside.kill, victims, dice)
                self._kill_life_and_others(kill, dice.uniform(0.0, update_s), victims)
            elif dice.random() < AT_BOUNDARY:
                # If this life does not reach the boundary in this time, kill it anyway.
                self._kill_life(dice.choice(early if is_ahead else boundaries), 4.0 * update_s)
            elif not is_ahead and dice.random() < OF_POSTGRES:
                kill_postgres = self._database.kill_and_start
                self._kill_life_and_others(
                    kill_postgres, dice.uniform(0.0, update_s), ["PostgreSQL"]
                )
            elif dice.random() < IN_START:
                self._kill_life(None, dice.uniform(0.0, self._start_s), once_up=False)
            else:
                self._kill_life(None, dice.uniform(0.0, update_s * (1.0 if is_ahead else 3.0)))

    def _kill_life(self, boundary: str | None, seconds: float, *, once_up: bool = True) -> None:
        """Start a life; kill it at a boundary, or `seconds` after its start (or once it is up)."""
        pid, status = self._begin(boundary, once_up=once_up)
        if status is None:
            status = self._forks.wait(pid, seconds)
        if status is None:
            by = WORKING if once_up else STARTING
            status = self._forks.end(pid, signal.SIGKILL)
        else:
            by = boundary or "by itself"
        self._count_kill(by, status)

    def _kill_life_and_others(
        self, kill: Callable[[], None], seconds: float, victims: Sequence[str]
    ) -> None:
        """Start a life; while it works, `kill` (and restart) the `victims`; then kill the life."""
        pid, status = self._begin(None)
        if status is None:
            status = self._forks.wait(pid, seconds)
        kill()
        if status is None:
            # Time for the victims to be back, and for the life to be amid its next update.
            status = self._forks.wait(pid, RETRY_S + seconds)
        if status is None:
            status = self._forks.end(pid, signal.SIGKILL)
        self._count_kill(f"some time after {' and '.join(victims)}", status)

    def _count_kill(self, by: str, status: int | None) -> None:
        self.killed[by] += 1
        if status != -signal.SIGKILL:
            self._note(f"status {status} instead of a kill: {by}")

    def _stop_at_work(self, seconds: float) -> None:
        """Start a life, and ask it to stop at work (SIGTERM): it must end without a claim."""
        held = self._running_updates()
        pid, status = self._begin(None)
        if status is None:
            status = self._forks.wait(pid, seconds)
        asked = time.monotonic()
        if status is None:
            status = self._forks.end(pid, signal.SIGTERM)
        self.stopped_after.append(time.monotonic() - asked)
        if status != 0:
            self._note(f"status {status} after SIGTERM")
        # A claim of the previous life may remain: this life had no time to release it.
        if self._running_updates() - held:
            self._note("it kept its claim after SIGTERM")

    def _begin(self, boundary: str | None, *, once_up: bool = True) -> tuple[int, int | None]:
        """Start a life; return its process id once it is up, and its status if it has ended."""
        started, logged = time.monotonic(), len(self.place.logged())
        pid, status = self._start(boundary), None
        while once_up and status is None and UP not in self.place.logged()[logged:]:
            status = self._forks.wait(pid, POLL_S)
        if once_up and status is None:
            self._start_s = time.monotonic() - started
        return pid, status

    def _finish(self) -> None:
        """Start an undisturbed life; ask it to stop once every episode is consumed.

        If it makes no progress for `LONGEST_S`, note that, and ask it to stop.
        """
        pid = self._start(None)
        status, progress, deadline = None, -1.0, 0.0
        while status is None and not self._all_spent():
            if self.place.progress() > progress:
                progress, deadline = self.place.progress(), time.monotonic() + LONGEST_S
            if time.monotonic() > deadline:
                self._note("the last life made no progress")
                break
            status = self._forks.wait(pid, QUERY_S)
        if status is None:
            status = self._forks.stop(pid)
        if status != 0:
            self._note(f"the last life ended with status {status}")

    def _start(self, boundary: str | None) -> int:
        return self._forks.start("trainer", self.place.log, self._settings, dies=boundary)

    def _all_spent(self) -> bool:
        """Return whether the policies have nothing left to train, record or publish."""
        [row] = self._database.ask(self.place.database_url, _SPENT, list(self.place.names))
        return bool(row[0])

    def _running_updates(self) -> set[UUID]:
        """Return the ids of the policies' running updates, which hold claims."""
        [row] = self._database.ask(self.place.database_url, _HELD, list(self.place.names))
        return set(row[0] or ())

    def _note(self, event: str) -> None:
        """Record an unexpected event, with the end of the log."""
        self.by_themselves.append(f"{event}: {self.place.logged()[-1500:].decode()}")


class ComputingServer:
    """A model server that computes; it starts at once, without adapters.

    It refuses other bytes under a name that it has loaded before, even after a restart.
    """

    def __init__(self, forks: Zygote, folder: Path, model: Path) -> None:
        self.port = free_port()
        self._forks, self._log = forks, folder / "server.log"
        seen = folder / "seen"
        seen.mkdir()
        self._arguments = {"model": str(model), "port": self.port, "seen": str(seen)}

    def start(self) -> None:
        """Start the server, and wait until it answers.

        Raises:
            NotUp: it does not answer; the message is the end of its log.
        """
        self._pid = self._forks.start("server", self._log, {}, **self._arguments)
        deadline = time.monotonic() + SERVER_UP_S
        while self.models() is None:
            if self._forks.wait(self._pid, POLL_S) is not None or time.monotonic() > deadline:
                raise NotUp(self._log.read_text(errors="replace")[-2000:])

    def kill(self) -> None:
        self._forks.end(self._pid, signal.SIGKILL)

    def models(self) -> Mapping[str, str] | None:
        """Return the folder of each loaded model by name; None if the server does not answer."""
        url = f"http://127.0.0.1:{self.port}/v1/models"
        try:
            with urllib.request.urlopen(url, timeout=10.0) as reply:
                return {model["id"]: str(model["root"]) for model in json.load(reply)["data"]}
        except OSError:
            return None


class ServerAndController:
    """Runs a model server and a controller beside a run's trainers, and kills them.

    `place` is that of any of the run's trainers; they train `policies`. `kills` is the number of
    kills of both processes; None: none, not even in the end.
    """

    def __init__(
        self,
        forks: Zygote,
        database: Database,
        place: RunPlace,
        policies: Sequence[str],
        kills: int | None,
    ) -> None:
        self.server = ComputingServer(forks, place.folder, place.model)
        self._forks, self._database, self._place = forks, database, place
        self._policies, self._is_killed = list(policies), kills is not None
        self._kills_at_work = max(0, (kills or 0) - sum(map(len, IN_THE_END)))
        self._one_at_a_time = threading.RLock()
        self._killed: Counter[str] = Counter()
        self._back_after: list[float] = []
        self._loaded_after: list[float] = []
        self._loaded_without_trainer: list[float] = []
        self._not_loaded: list[str] = []
        self._by_themselves: list[str] = []

    def __enter__(self) -> "ServerAndController":
        self.server.start()
        self._start_controller()
        return self

    def __exit__(self, *_: object) -> None:
        if (status := self._forks.stop(self._controller)) != 0:
            self._by_themselves.append(f"the controller, after SIGTERM: status {status}")
        self.server.kill()

    def _start_controller(self, dies: str | None = None) -> None:
        log, settings = (
            self._place.folder / "controller.log",
            self._place.settings(self.server.port),
        )
        self._controller = self._forks.start("controller", log, settings, dies=dies)

    def start_dying_controller(self, boundary: str) -> None:
        """Start the controller again; it dies at a boundary."""
        self._forks.end(self._controller, signal.SIGKILL)
        self._start_controller(boundary)

    def wait_for_death(self, boundary: str) -> None:
        """Wait until the controller has died at a boundary, and start it again.

        Raises:
            BoundaryNotReached: it did not die.
        """
        if self._forks.wait(self._controller, LONGEST_S) != -signal.SIGKILL:
            raise BoundaryNotReached(f"no controller reached the boundary '{boundary}': correct it")
        self._start_controller()

    def next_victims(self, share: float, dice: random.Random) -> Sequence[str]:
        """Return the processes to kill now; none if `share` (0 to 1) of the kills is done."""
        left = self._kills_at_work - self._killed.total()
        return (
            dice.choice(TOGETHER)[:left]
            if share * self._kills_at_work > self._killed.total()
            else ()
        )

    def kill(self, victims: Sequence[str], dice: random.Random) -> None:
        """Kill all of `victims`, and start them again after a moment, in random order.

        In half of the cases wait for the adapters of a restarted model server.
        """
        with self._one_at_a_time:
            began = time.monotonic()
            self._killed.update(victims)
            for part in victims:
                if part == "model server":
                    self.server.kill()
                elif (
                    status := self._forks.end(self._controller, signal.SIGKILL)
                ) != -signal.SIGKILL:
                    self._by_themselves.append(
                        f"the controller, instead of a kill: status {status}"
                    )
            time.sleep(dice.uniform(*AWAY_S))
            for part in dice.sample(list(victims), len(victims)):
                if part == "model server":
                    self.server.start()
                    self._back_after.append(time.monotonic() - began)
                else:
                    self._start_controller()
            if "model server" in victims and dice.random() < 1 / 2:
                self._wait_until_loaded(self._loaded_after)

    def kill_in_the_end(self, dice: random.Random) -> None:
        """Kill after the trainers have ended: the controller alone must load the adapters again."""
        for victims in IN_THE_END if self._is_killed else ():
            self.kill(victims, dice)
            self._wait_until_loaded(self._loaded_without_trainer)

    def _wait_until_loaded(self, taken: list[float]) -> None:
        """Wait until the server has all servable adapters, and add the seconds to `taken`.

        After `LOADED_WITHIN_S` seconds give up, and note the missing ones in `_not_loaded`. The
        store's list is read repeatedly: a new controller unloads versions that had ended.
        """
        began = next_query = time.monotonic()
        while True:
            if (now := time.monotonic()) >= next_query:
                rows = self._database.ask(self._place.database_url, _SERVABLE, self._policies)
                next_query, wanted = now + QUERY_S, set(map(tuple, rows))
            if not (missing := wanted - set((self.server.models() or {}).items())):
                taken.append(now - began)
                return
            if now - began > LOADED_WITHIN_S:
                self._not_loaded += sorted(name for name, _ in missing)
                return
            time.sleep(POLL_S)

    def report(self) -> dict[str, Any]:
        """Return the numbers of kills, and the times until adapters were loaded again."""
        times = {
            "back_after_s": self._back_after,
            "loaded_after_s": self._loaded_after,
            "loaded_without_trainer_s": self._loaded_without_trainer,
        }
        return {
            "killed": dict(self._killed),
            **{
                name: [round(median(taken), 2), round(max(taken), 2)] if taken else []
                for name, taken in times.items()
            },
            "not_loaded": self._not_loaded,
            "by_themselves": self._by_themselves,
        }


class PolicyResult(NamedTuple):
    """The result of a run for one policy.

    Attributes:
        outcomes: by episode: the version that consumed it, whether it was trained, and the reason;
            None if no finished update consumed it.
        twice: episodes in the manifests of more than one version.
        states: the states of the versions.
        abandoned: number of abandoned updates.
        files: hashes of the files, by version and file.
        update_s: median seconds from one claim to the next.
        finished_late: number of updates that a later life recorded.
        run: the run of the policy's trainer.
    """

    outcomes: Mapping[str, tuple[int | None, bool, str | None] | None]
    twice: list[str]
    states: Mapping[int, str]
    abandoned: int
    files: Mapping[str, str]
    update_s: float
    finished_late: int
    run: Run


def _to_their_ends(runs: Sequence[Run], disturb: Callable[[Run], None]) -> dict[str, PolicyResult]:
    kills = TextColumn("updates, {task.fields[kills]} kills of the trainer")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), kills)
    with (
        Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(len(runs)) as threads,
    ):
        bars = {
            progress.add_task(f"{run.place.folder.name}: {run.place.log.stem}", kills=0): run
            for run in runs
        }
        ends = [threads.submit(run.to_its_end, disturb) for run in runs]
        while not all(end.done() for end in ends):
            time.sleep(QUERY_S)
            for bar, run in bars.items():
                total = run.place.updates * len(run.place.names)
                made = round(run.place.progress() * total)
                progress.update(bar, total=total, completed=made, kills=run.killed.total())
        for end in ends:
            end.result()
    return {name: asyncio.run(_result(run, name)) for run in runs for name in run.place.names}


async def _result(run: Run, policy: str) -> PolicyResult:
    url = run.place.database_url
    folders = sorted((run.place.adapters / policy).glob("[0-9]*"), key=lambda one: int(one.name))
    trained_on: Counter[str] = Counter()
    for folder in folders:
        if (manifest := read_manifest(folder)) is not None:
            trained_on.update(str(outcome.episode_id) for outcome in manifest.outcomes)
    # A kill may cut off a line, so the lines are not parsed.
    own = re.compile(rb'"policy": ?"%b"' % policy.encode())
    late = [line for line in run.place.logged().splitlines() if b'"update_finished_late"' in line]
    return PolicyResult(
        outcomes={
            row["key"]: (row["version"], row["trained"], row["reason"])
            if row["state"] == "done"
            else None
            for row in await _rows(url, _OUTCOMES, policy)
        },
        twice=[episode for episode, count in trained_on.items() if count > 1],
        states=dict(map(tuple, await _rows(url, _STATES, policy))),
        abandoned=int((await _rows(url, _ABANDONED, policy))[0][0]),
        files={
            f"{folder.name}/{path.relative_to(folder)}": sha256(path.read_bytes()).hexdigest()
            for folder in folders
            for pattern in COMPARED
            for path in sorted(folder.glob(pattern))
        },
        update_s=float((await _rows(url, _UPDATE_S, policy))[0][0]),
        finished_late=sum(own.search(line) is not None for line in late),
        run=run,
    )


def _policy_report(updates: int, calm: PolicyResult, killed: PolicyResult) -> dict[str, Any]:
    """Return the report on one policy: the undisturbed run compared with the run with kills."""
    run, adapter = killed.run, f"{max(calm.states)}/adapter_model.safetensors"
    both = {"undisturbed": calm, "killed": killed}
    return {
        "updates": updates,
        "episodes": len(calm.outcomes),
        "kills": run.killed.total(),
        "killed": dict(run.killed.most_common()),
        "kills_without_work": run.idle,
        "asked_to_stop": len(run.stopped_after),
        "slowest_stop_s": round(max(run.stopped_after, default=0.0), 2),
        "by_themselves": [*calm.run.by_themselves, *run.by_themselves],
        "updates_abandoned": killed.abandoned,
        "updates_finished_late": killed.finished_late,
        # Episodes that no finished update has consumed.
        "lost": [
            key for result in both.values() for key, out in result.outcomes.items() if out is None
        ],
        "twice": [*calm.twice, *killed.twice],
        "spent_otherwise": _differing_keys(calm.outcomes, killed.outcomes),
        "versions": {name: max(one.states) for name, one in both.items()},
        "states_differ": _differing_keys(calm.states, killed.states),
        "files": len(calm.files),
        "files_differ": _differing_keys(_kept_files(calm, killed), killed.files),
        "final_adapter": {name: one.files.get(adapter, "")[:16] for name, one in both.items()},
        "an_update_s": round(calm.update_s, 2),
    }


def _kept_files(calm: PolicyResult, killed: PolicyResult) -> dict[str, str]:
    """Return the files of the undisturbed run that the run with kills must have, too.

    A restarted controller or model server releases versions that ended, whose optimiser states are
    then deleted. The newest version keeps its state.
    """
    newest = max(killed.states)
    return {
        name: digest
        for name, digest in calm.files.items()
        if name in killed.files or "/trainer/" not in name or name.startswith(f"{newest}/")
    }


def _differing_keys(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[str]:
    keys = sorted({*one, *other}, key=str)
    return [str(key) for key in keys if one.get(key) != other.get(key)]


async def _ledger_report(place: RunPlace, policies: list[str]) -> dict[str, Any]:
    """Return counts of a run's episodes and calls by caller, and traces of untrained policies."""
    url, strange = place.database_url, {one.name for one in place.adapters.glob("[!.]*")}
    others = [row[0] for row in await _rows(url, _OF_OTHERS, policies)]
    return {
        "episodes_begun_by": dict(map(tuple, await _rows(url, _FIRST))),
        "calls_answered_by": dict(map(tuple, await _rows(url, _CALLS))),
        "of_untrained": [*others, *(f"folder {name}" for name in sorted(strange - set(policies)))],
    }
