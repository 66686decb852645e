"""Run by launched.py: load a base model, and note the most memory of a process's own meanwhile.

Arguments: MODEL FOLDER
"""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.training import recipe
from trainer.learners.model import Base


def main(arguments: Sequence[str]) -> None:
    model, folder = arguments[0], Path(arguments[1])
    before = own_memory()
    most, is_over = [before], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            most.append(own_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    base = Base(model, recipe())
    is_over.set()
    watching.join()
    found = {"model": model, "most": max(most) - before, "hash": base.hash}
    (folder / f"{base.processes.rank}.json").write_text(json.dumps(found))
    base.processes.close()


def own_memory() -> int:
    """Without pages of files, which the kernel drops as it likes."""
    [kib] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024
