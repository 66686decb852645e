"""Run a model server as a process that can be killed: one that computes, or a real vLLM."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from benchmarks.chaos.trainer.cast import BASE
from benchmarks.chaos.trainer.forks import Zygote
from benchmarks.stack import free_port
from pawl.stack.vllm import VllmOptions, vllm_command, vllm_environment

LIST_S: Final = 10.0
POLL_S: Final = 0.02
LONGEST: Final = 128
RANK: Final = 8


class NotUp(Exception):
    """Report that a model server did not answer in time; the message ends with its last words."""


class ModelServer(Protocol):
    """Describe a server that can be started and killed.

    Attributes:
        port: where it answers, whenever it is up.
        start_s: within so many seconds it is up.
        is_slow: whether a trainer's life is over before it is up.
    """

    port: int
    start_s: float
    is_slow: bool

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            NotUp: see there.
        """

    def kill(self) -> None:
        """`kill -9`; returns when it is gone."""


def listed(port: int) -> Mapping[str, str]:
    """Return the folder of each model that a server has, by name.

    Raises:
        OSError: it does not answer.
    """
    url = f"http://127.0.0.1:{port}/v1/models"
    with urllib.request.urlopen(url, timeout=LIST_S) as reply:
        return {model["id"]: str(model["root"]) for model in json.load(reply)["data"]}


def _until_up(server: ModelServer, log: Path, is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + server.start_s
    while True:
        try:
            listed(server.port)
        except OSError as error:
            if not is_alive() or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise NotUp(f"the model server did not come up:\n{tail}") from error
            time.sleep(POLL_S)
        else:
            return


class Computing:
    """Run the one of `benchmarks.chaos.trainer.server`: it is up at once, and has no adapter then.

    What bytes it was given under a name outlives it: other ones are refused for ever.
    """

    start_s = 60.0
    is_slow = False

    def __init__(self, forks: Zygote, folder: Path, model: Path) -> None:
        self.port = free_port()
        self._forks, self._model, self._seen = forks, model, folder / "seen"
        self._log = folder / "server.log"
        self._seen.mkdir()
        self._pid: int | None = None

    def start(self) -> None:
        """Do as `ModelServer` says."""
        self._pid = self._forks.start(
            "server",
            self._log,
            {},
            model=str(self._model),
            port=self.port,
            seen=str(self._seen),
        )
        _until_up(self, self._log, self._is_alive)

    def _is_alive(self) -> bool:
        if self._pid is not None and self._forks.wait(self._pid, 0.0) is not None:
            self._pid = None
        return self._pid is not None

    def kill(self) -> None:
        """Do as `ModelServer` says."""
        if self._pid is not None:
            self._forks.end(self._pid, signal.SIGKILL)
            self._pid = None


class Vllm:
    """Run a real one, as `pawl up` starts it."""

    start_s = 300.0
    is_slow = True

    def __init__(self, folder: Path, model: Path) -> None:
        self.port = free_port()
        self._log = folder / "vllm.log"
        self._command = vllm_command(
            VllmOptions(
                model=str(model),
                served_name=BASE,
                port=self.port,
                dtype="float32",
                max_model_len=LONGEST,
                max_lora_rank=RANK,
            )
        )
        self._environment = vllm_environment(len(os.sched_getaffinity(0)))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Do as `ModelServer` says."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command,
                env=self._environment | {"VLLM_CPU_KVCACHE_SPACE": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process
        _until_up(self, self._log, lambda: process.poll() is None)

    def kill(self) -> None:
        """Kill all of it: its engine is a process of its group, and goes with it."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def running(server: ModelServer) -> Iterator[ModelServer]:
    """Keep a server up; it is gone when the block is left."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
