"""Run by `accelerate launch` in test_processes.py: one program of several processes after another.

launched.py PROGRAMS: a JSON list of [module, processes, port, arguments]. Each runs in a child that
is forked once all is imported, which takes far longer than the programs themselves, and that meets
the others at `port`; of the launched processes, the first `processes` run it. The first that fails
ends all.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module

from pawl.processes import die_with_parent, large_imports


def main() -> None:
    programs = json.loads(sys.argv[1])
    with large_imports():
        modules = [import_module(f"tests.support.distributed.{name}") for name, *_ in programs]
    for module, (_, processes, port, arguments) in zip(modules, programs, strict=True):
        if int(os.environ["RANK"]) >= processes:
            continue
        child = os.fork()
        if not child:
            # The launcher has a store for one program; each of several makes its own.
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            _be(module.main, arguments)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(1)


def _be(program: Callable[[list[str]], None], arguments: list[str]) -> None:
    status = 1
    try:
        die_with_parent()
        program(arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
