"""Kill the model server and the steward at random moments, and see what comes back.

A model server that was killed has no adapters when it is up again: within a while it must have all
that the store lists as servable, from the files that the store names.
"""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from benchmarks.chaos.beside.model_server import ModelServer, listed
from benchmarks.chaos.trainer.forks import Zygote

Part = Literal["model server", "steward"]
TOGETHER: Final[tuple[tuple[Part, ...], ...]] = (
    ("model server",),
    ("steward",),
    ("model server", "steward"),
)
# With the trainers down, in the end: what the steward alone brings back, and after its own death.
IN_THE_END: Final[tuple[tuple[Part, ...], ...]] = (("model server",), ("model server", "steward"))
QUIET_S: Final = (0.2, 1.5)
# Where a server takes long to start, trainers must get on in between.
SLOW_QUIET_S: Final = (5.0, 20.0)
AWAY_S: Final = (0.0, 1.0)
POLL_S: Final = 0.05
LOADED_WITHIN_S: Final = 60.0


@dataclass(slots=True)
class Happened:
    """Record what was done, and what came of it."""

    killed: Counter[Part] = field(default_factory=Counter)
    # From a kill of the model server until it answered again (monotonic).
    away: list[tuple[float, float]] = field(default_factory=list)
    # From a model server's first answer until it had every adapter again.
    loaded_after: list[float] = field(default_factory=list)
    loaded_without_trainer: list[float] = field(default_factory=list)
    not_loaded: list[str] = field(default_factory=list)
    by_themselves: list[str] = field(default_factory=list)


class Steward:
    """Run `pawl steward`, which may be killed."""

    def __init__(self, forks: Zygote, log: Path, env: Mapping[str, str]) -> None:
        self._forks, self._log, self._env = forks, log, env
        self._pid = 0

    def start(self) -> None:
        """Start it."""
        self._pid = self._forks.start("steward", self._log, self._env)

    def end(self, by: signal.Signals) -> int | None:
        """Send a signal, and wait for the end; how it ended."""
        return self._forks.end(self._pid, by)


class Killer:
    """Kill so many times in all; the last of them once the trainers have ended."""

    def __init__(
        self,
        server: ModelServer,
        steward: Steward,
        servable: Callable[[], Mapping[str, str]],
        kills: int,
        dice: random.Random,
    ) -> None:
        self._server, self._steward, self._servable = server, steward, servable
        self._meanwhile = max(0, kills - sum(map(len, IN_THE_END)))
        self._dice = dice
        self._is_up = threading.Event()
        self._is_up.set()
        self.happened = Happened()

    def meanwhile(self, share: Callable[[], float], is_broken_off: Callable[[], bool]) -> None:
        """Kill in step with the trainers' kills, of which `share` are done; return after the last.

        Raises:
            NotUp: a model server did not come back.
        """
        done = self.happened.killed
        while (left := self._meanwhile - done.total()) > 0 and not is_broken_off():
            if share() * self._meanwhile < done.total():
                time.sleep(POLL_S)
                continue
            quiet_s = SLOW_QUIET_S if self._server.is_slow else QUIET_S
            time.sleep(self._dice.uniform(*quiet_s))
            victims = self._dice.choice(TOGETHER)[:left]
            self._kill(victims)
            if "model server" in victims and self._dice.random() < 1 / 2:
                self._see_loaded(self.happened.loaded_after)

    def in_the_end(self) -> None:
        """Kill with the trainers down: what is loaded then, the steward has loaded.

        Raises:
            NotUp: a model server did not come back.
        """
        for victims in IN_THE_END:
            self._kill(victims)
            self._see_loaded(self.happened.loaded_without_trainer)

    def wait_if_slow(self) -> None:
        """Wait for a model server that takes longer to start than a trainer lives."""
        if self._server.is_slow:
            self._is_up.wait()

    def _kill(self, victims: tuple[Part, ...]) -> None:
        """Kill all of `victims`, and start them again after a moment, in any order."""
        began = time.monotonic()
        self._is_up.clear()
        for part in victims:
            self._end(part)
            self.happened.killed[part] += 1
        time.sleep(self._dice.uniform(*AWAY_S))
        for part in self._dice.sample(victims, len(victims)):
            self._start(part)
        self._is_up.set()
        if "model server" in victims:
            self.happened.away.append((began, time.monotonic()))

    def _end(self, part: Part) -> None:
        if part == "model server":
            self._server.kill()
            return
        status = self._steward.end(signal.SIGKILL)
        if status != -signal.SIGKILL:
            self.happened.by_themselves.append(f"the steward, to be killed: status {status}")

    def _start(self, part: Part) -> None:
        if part == "model server":
            self._server.start()
        else:
            self._steward.start()

    def _see_loaded(self, taken: list[float]) -> None:
        """Wait until the server has what the store lists now, and note how long that took."""
        began = time.monotonic()
        wanted = self._servable()
        while missing := {name for name, _ in wanted.items() - self._listed().items()}:
            if time.monotonic() - began > LOADED_WITHIN_S:
                self.happened.not_loaded += sorted(missing)
                return
            time.sleep(POLL_S)
        taken.append(time.monotonic() - began)

    def _listed(self) -> Mapping[str, str]:
        try:
            return listed(self._server.port)
        except OSError:
            # It computes, or its queue of connections is full.
            return {}
