"""Serve TCP for one test, and leave no connection open."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handler, limit: int = 2**16) -> AsyncIterator[int]:
    """Serve each connection with `handle` on a free port, which is yielded."""
    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[None]] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        finally:
            writer.close()

    # Not a coroutine: a connection must be known before its task has begun to run.
    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.append(asyncio.create_task(converse(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=limit)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            # asyncio's transport cannot be aborted once what it had to send before a close is sent.
            if writer.get_extra_info("socket").fileno() != -1:
                writer.transport.abort()
        # Transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)
