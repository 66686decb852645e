"""Import everything once and fork the other processes: a life begins in no time.

`python -m benchmarks.chaos.trainer.zygote` reads a JSON line a wish and answers with one.
It has one thread, no event loop and no model; each child reads its settings, loads its model
and opens its connections by itself, and `kill -9` hits a process as real as any.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pawl.imports import large_imports

NEEDED: Final = (
    "benchmarks.chaos.trainer.server",
    "benchmarks.chaos.trainer.stage",
    "pawl.cli",
    "pawl.steward.run",
    "trainer.run",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    """Answer until standard input ends."""
    said = os.fdopen(os.dup(1), "w")
    print(json.dumps({"boundaries": _import_all()}), file=said, flush=True)
    for line in sys.stdin:
        wish = json.loads(line)
        answer = {"status": _ended(wish["ended"])} if "ended" in wish else {"pid": _start(**wish)}
        print(json.dumps(answer), file=said, flush=True)


def _import_all() -> list[str]:
    """Import all that the roles need, and return the names of the boundaries."""
    # A child would copy the pages of all modules when it first looks for garbage in them.
    with large_imports():
        for name in NEEDED:
            import_module(name)
    from benchmarks.chaos.trainer.boundaries import BOUNDARIES

    return list(BOUNDARIES)


def _start(role: str, log: str, env: dict[str, str], arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env)
        os.chdir(Path(log).parent)
        _be(role, arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _be(role: str, arguments: dict[str, Any]) -> None:
    from benchmarks.chaos.trainer import boundaries, server, stage
    from benchmarks.chaos.trainer.cast import BASE

    if role == "stage":
        model = Path(arguments.pop("model"))
        stage.write_model(model)
        asyncio.run(stage.fill(arguments.pop("database_urls"), model, **arguments))
    elif role == "server":
        seen = Path(arguments["seen"])
        server.serve(BASE, Path(arguments["model"]), arguments["port"], seen)
    else:
        if arguments.get("dies") is not None:
            boundaries.BOUNDARIES[arguments["dies"]]()
        from pawl.cli import main as pawl

        # A trainer or a steward, as anyone starts it.
        sys.argv = ["pawl", role]
        pawl()


def _ended(child: int) -> int | None:
    """Return the child's exit status (negative: the signal); None if it lives on."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
