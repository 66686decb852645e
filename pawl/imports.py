"""Import what takes seconds: without looking for garbage meanwhile, or in it later."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Import within the block without garbage collection, and exempt from it what is there then.

    Modules live as long as the process. To go through those of torch, transformers and TRL again
    and again takes a seventh of the processor time of their import, and later, in a trainer of
    several policies, a part of every turn.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # At its end the process looks through all of it, or libraries tell of what they had left.
        atexit.register(gc.unfreeze)
