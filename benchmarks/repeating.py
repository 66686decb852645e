"""Do something again and again, in a thread, while something else goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do `work` each so many seconds until the block ends; what is under way then is waited for."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
