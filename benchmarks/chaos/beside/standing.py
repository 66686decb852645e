"""Keep all of it up for the length of a run, and report what came of it."""

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

from benchmarks.chaos.beside.callers import Answered, Callers, by_status, calling
from benchmarks.chaos.beside.killer import Happened, Killer, Steward
from benchmarks.chaos.beside.model_server import ModelServer
from benchmarks.chaos.beside.servable import Servable
from benchmarks.chaos.trainer.database import Database
from benchmarks.chaos.trainer.forks import Zygote
from benchmarks.chaos.trainer.place import Place
from benchmarks.repeating import repeating
from benchmarks.stack import free_port

READ_S: Final = 0.5
NOT_FOUND: Final = 404
CALLS_IN_THE_END: Final = 8
# A proxy knows a moment later that a server is there again, and its callers after that.
SLACK_S: Final = 1.0


class Stand:
    """Keep a steward, a proxy and its callers beside a run's trainers, while some are killed."""

    def __init__(self, killer: Killer, callers: Callers) -> None:
        self._killer, self._callers = killer, callers
        self.wait_if_slow = killer.wait_if_slow

    @contextmanager
    def killing(self, share: Callable[[], float]) -> Iterator[None]:
        """Kill while the block runs, and a few times after it, when no trainer lives any more.

        `share` is that of the trainers' kills which are done.

        Raises:
            NotUp: a model server did not come back.
        """
        broken_off = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(self._killer.meanwhile, share, broken_off.is_set)
            try:
                yield
            except BaseException:
                broken_off.set()
                raise
            killing.result()
        self._killer.in_the_end()
        # A short run ends before callers ask for anything: versions are known to all a while later.
        self._callers.wait_until_served(CALLS_IN_THE_END)

    def report(self) -> dict[str, Any]:
        """Return what was killed, and what the callers saw."""
        return beside_report(self._killer.happened, self._callers.answered)


@contextmanager
def beside(
    forks: Zygote,
    database: Database,
    place: Place,
    policies: Sequence[str],
    server: ModelServer,
    kills: int,
    seed: int,
) -> Iterator[Stand]:
    """Keep all of it up; it is gone when the block is left.

    `place` is that of any of the run's trainers, which train `policies`; `kills` are those of model
    server and steward.
    """
    steward = Steward(forks, place.folder / "steward.log", _steward_env(place, server.port))
    servable = Servable(database, place.database_url, policies)
    killer = Killer(server, steward, servable.now, kills, random.Random(seed))
    steward.start()
    try:
        with (
            repeating(servable.now, READ_S),
            calling(place, server.port, servable.older_than, seed) as callers,
        ):
            yield Stand(killer, callers)
    finally:
        status = steward.end(signal.SIGTERM)
        if status != 0:
            killer.happened.by_themselves.append(f"the steward, asked to stop: status {status}")


def _steward_env(place: Place, upstream_port: int) -> dict[str, str]:
    return {
        "DATABASE_URL": place.database_url,
        "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "PAWL_STEWARD_LISTEN": f"127.0.0.1:{free_port()}",
    }


def beside_report(happened: Happened, answered: list[Answered]) -> dict[str, Any]:
    """Return what was killed, how soon adapters were back, and which calls failed without need."""
    failed = [one for one in answered if one.status != 200]
    return {
        "killed": dict(happened.killed),
        "back_after_s": _middle_and_worst([back - at for at, back in happened.away]),
        "loaded_after_s": _middle_and_worst(happened.loaded_after),
        "loaded_without_trainer_s": _middle_and_worst(happened.loaded_without_trainer),
        "not_loaded": happened.not_loaded,
        "by_themselves": happened.by_themselves,
        "calls": by_status(answered),
        "slowest_call_s": round(max((one.ended - one.began for one in answered), default=0.0), 2),
        "not_found": [f"{one.name}: {one.said}" for one in failed if one.status == NOT_FOUND],
        "failed_otherwise": [
            f"{one.status} for {one.name}: {one.said}"
            for one in failed
            if one.status != NOT_FOUND and not _is_due(one, happened)
        ],
    }


def _is_due(call: Answered, happened: Happened) -> bool:
    """Return whether the model server was away at some moment of the call."""
    return any(
        call.began <= back + SLACK_S and call.ended >= killed for killed, back in happened.away
    )


def _middle_and_worst(times: list[float]) -> list[float]:
    return [round(median(times), 2), round(max(times), 2)] if times else []
