"""Run by launched.py: load a base model, and train a row, and note what memory a process has.

"most" is the most of its own while it loads, "kept" what the base's tensors take then, and
"computing" the most that they do while a row is computed, forward and backward.

Arguments: MODEL FOLDER
"""

import gc
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

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
    found |= {"kept": large_tensors(), "computing": while_computing(base)}
    (folder / f"{base.processes.rank}.json").write_text(json.dumps(found))
    base.processes.close()


class OnlyHolder:
    def forget_model(self) -> None:
        pass


def while_computing(base: Base) -> int:
    """Return the most bytes of tensors as large as a layer's, which a short row has none of."""
    model = base.attach(OnlyHolder(), recipe(), None, 0)
    seen = []

    def look(*computed: Any) -> None:
        seen.append(large_tensors())
        if len(computed) > 1:
            computed[-1].register_hook(look)

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(look)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    assert len(seen) == 24, len(seen)
    return max(seen)


def large_tensors() -> int:
    """Return the bytes of all living tensors of 64 KiB and more, each storage once."""
    tensors = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(size for size in sizes.values() if size >= 2**16)


def own_memory() -> int:
    """Without pages of files, which the kernel drops as it likes."""
    [kib] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024
