"""Ask the zygote for processes: start them, wait for them, kill them."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

# A process killed is gone in this time; one that is not is stuck in the kernel.
GONE_S: Final = 30.0
POLL_S: Final = 0.02


class Zygote:
    """Start processes in no time; `benchmarks.chaos.trainer.zygote` is the other end.

    Threads may share it: none waits in the pipe for what another started.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._pipe = threading.Lock()
        # Where a trainer may be told to die (`boundaries`).
        self.boundaries: list[str] = self._answer()["boundaries"]

    def start(self, role: str, log: Path, env: Mapping[str, str], **arguments: Any) -> int:
        """Fork a process of that role; its id."""
        wish = {"role": role, "log": str(log), "env": dict(env), "arguments": arguments}
        return int(self._ask(wish)["pid"])

    def wait(self, pid: int, within_s: float) -> int | None:
        """Return how the process ended (negative: the signal); None if it lives on."""
        deadline = time.monotonic() + within_s
        while True:
            status: int | None = self._ask({"ended": pid})["status"]
            left_s = deadline - time.monotonic()
            if status is not None or left_s <= 0:
                return status
            time.sleep(min(POLL_S, left_s))

    def end(self, pid: int, signal: int) -> int | None:
        """Send a signal, and wait for the end."""
        os.kill(pid, signal)
        return self.wait(pid, GONE_S)

    def _ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._pipe:
            self._process.stdin.write(json.dumps(wish) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def zygote(log: Path) -> Iterator[Zygote]:
    """Run a zygote within the block; its children have one thread for sums."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PAWL_")}
    kept.pop("DATABASE_URL", None)
    env = kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.chaos.trainer.zygote"]
    with (
        log.open("ab") as file,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        try:
            yield Zygote(process)
        finally:
            process.terminate()
