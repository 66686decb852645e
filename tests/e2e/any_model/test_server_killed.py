"""vLLM is killed, during an update and with the trainer down, and no agent sees a 404.

By its name it comes after the tests that need a trainer, which stays down.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from pawl.stack.stack import Stack
from store import claims
from store.database import make_engine
from store.version_queries import list_versions
from tests.e2e.conftest import PATIENCE_S, POLICY, make_episode
from tests.support.ledger.totals import totals
from tests.support.waiting import eventually

OK = 200
# What an agent may see while its model server is away, or has not been given the version yet.
AWAY = 502
MEANWHILE = {AWAY, 503}
PAUSE_S = 0.02
# After an answer. Without a pause, four agents take all of the processor time of an update that the
# test waits for; from the first refusal on, they ask as soon as they can.
ANSWERED_PAUSE_S = 0.5
LOOKS = 25


class Asker:
    """An agent that asks again and again, whatever it is told."""

    def __init__(self, stack: Stack) -> None:
        self.url = f"{stack.base_url}/chat/completions"
        self.port = stack.plan.vllm.port
        self.seen: Counter[tuple[int, str]] = Counter()
        self.last: list[tuple[int, str]] = []

    async def ask(self, session: aiohttp.ClientSession) -> int:
        said = [{"role": "user", "content": "Where does the river end?"}]
        body = {"model": POLICY, "max_tokens": 1, "messages": said}
        async with session.post(self.url, json=body) as reply:
            await reply.read()
            found = (reply.status, reply.headers.get("x-pawl-policy", ""))
        self.seen[found] += 1
        self.last.append(found)
        return found[0]

    async def keep_asking(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                status = await self.ask(session)
                await asyncio.sleep(ANSWERED_PAUSE_S if status == OK else PAUSE_S)
                if status == AWAY:
                    await self.back_or_bored()

    async def back_or_bored(self) -> None:
        """Wait until the model server takes connections again, but no longer than half a second.

        Whoever asks on at once has a server that is away tens of thousands of times.
        """
        for _ in range(LOOKS):
            if await takes_connections(self.port):
                return
            await asyncio.sleep(PAUSE_S)

    async def served(self, serving: Callable[[], Awaitable[int]], times: int) -> None:
        """Wait until the last so many answers are all by the version that serves then."""

        async def seen() -> bool:
            wanted = (OK, f"{POLICY}@{await serving()}")
            return self.last[-times:] == [wanted] * times

        await eventually(seen, PATIENCE_S)

    async def failed(self) -> bool:
        """Whether the model server is seen to be away."""
        return bool({status for status, _ in self.last[-4:]} & MEANWHILE)


async def takes_connections(port: int) -> bool:
    """Whether something listens there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@asynccontextmanager
async def asking(stack: Stack) -> AsyncIterator[Asker]:
    asker = Asker(stack)
    tasks = [asyncio.create_task(asker.keep_asking()) for _ in range(4)]
    try:
        yield asker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def killed(stack: Stack) -> None:
    """Kill vLLM, and wait until the stack has started another."""
    vllm = stack.processes["vllm"]
    before = vllm.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)

    async def another() -> bool:
        return vllm.pid != before

    await eventually(another, PATIENCE_S)


async def fill(stack: Stack) -> None:
    """Two tasks, each tried four times, twice well: what two updates take."""
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(
            *(
                make_episode(
                    stack, session, f"killed-{number // 4}", number, model=POLICY, max_tokens=12
                )
                for number in range(8)
            )
        )


async def test_no_call_gets_a_404_after_vllm_was_killed(stack: Stack) -> None:
    engine = make_engine(stack.database_url)

    async def serving() -> int:
        async with engine.connect() as connection:
            versions = await list_versions(connection, POLICY)
        return next(one.version for one in versions if one.state == "serving")

    async def updating() -> bool:
        async with engine.connect() as connection:
            return await claims.running_update(connection, POLICY) is not None

    async def moved_on() -> bool:
        return await serving() != first

    first = await serving()
    await fill(stack)
    await eventually(updating, PATIENCE_S)
    async with asking(stack) as asker:
        await killed(stack)
        await eventually(moved_on, PATIENCE_S)
        await asker.served(serving, 20)

        # Now with nobody but the controller to load anything.
        await stack.stop_training()
        await killed(stack)
        await eventually(asker.failed, PATIENCE_S)
        await asker.served(serving, 40)
    statuses = {status for status, _ in asker.seen}
    assert statuses <= {OK, *MEANWHILE}, asker.seen
    async with engine.connect() as connection:
        counted = await totals(connection)
    assert counted.twice_consumed_episodes == 0
    await engine.dispose()
