"""Wait for what another task or process brings about."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

Found = TypeVar("Found")

PATIENCE_S: Final = 60.0
# What comes soon is seen soon, and what takes minutes is not disturbed.
FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.2


async def awaited(
    look: Callable[[], Awaitable[Found]],
    good: Callable[[Found], bool] = bool,
    within_s: float = PATIENCE_S,
) -> Found:
    """Return the first good outcome of `look`, or the last one once time is up."""
    clock = asyncio.get_running_loop().time
    deadline, pause = clock() + within_s, FIRST_PAUSE_S
    while True:
        found = await look()
        if good(found) or clock() > deadline:
            return found
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE_S)


async def eventually(check: Callable[[], Awaitable[Found]], within_s: float = PATIENCE_S) -> Found:
    """Return the first true outcome of `check`; fail once time is up."""
    found = await awaited(check, within_s=within_s)
    assert found, f"still {found!r}"
    return found


def until_true(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds, outside of an event loop; fail once time is up."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still {found!r}"
        time.sleep(FIRST_PAUSE_S)


async def at_rest(look: Callable[[], Found], for_s: float, within_s: float = PATIENCE_S) -> Found:
    """Return what `look` finds once it has found the same for a while; fail once time is up."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + within_s
    found, since = look(), clock()
    while clock() - since < for_s:
        assert clock() < deadline, f"still changing: {found!r}"
        await asyncio.sleep(FIRST_PAUSE_S)
        if (now := look()) != found:
            found, since = now, clock()
    return found


async def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds; fail once time is up."""

    async def look() -> bool:
        return condition()

    await eventually(look, within_s)
