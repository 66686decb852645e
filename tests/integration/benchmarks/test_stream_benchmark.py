"""The generator of `benchmarks.proxy` sees what it is there to see."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.proxy import wire
from benchmarks.proxy.framing import HEAD_END
from benchmarks.proxy.stream_client import Load, Plan
from benchmarks.proxy.stream_server import STREAM_HEAD, Connection
from tests.support.servers.listening import listening

DONE = wire.framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def seen_of(port: int, capsys: pytest.CaptureFixture[str], at_once: int = 3) -> Any:
    plan = Plan(port, "/v1/chat/completions", at_once, chunks=3, interval_s=0.06, window_s=2.0)
    await Load(plan).run()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [{"now": "opens"}, {"now": "closes"}]
    return lines[2]


async def served(answer: Answer, capsys: pytest.CaptureFixture[str]) -> Any:
    """What is seen of a server that answers so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while not writer.is_closing():
                await reader.readuntil(HEAD_END)
                writer.write(STREAM_HEAD)
                await answer(writer)

    async with listening(handle) as port:
        return await seen_of(port, capsys)


def chunk(written: float) -> bytes:
    return wire.framed(wire.chunk(written, first=False, last=False, ids=False))


async def test_streams_of_the_model_server_come_whole(capsys: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(loop, 0.06), "127.0.0.1", 0)
    async with server:
        seen = await seen_of(server.sockets[0].getsockname()[1], capsys)
    assert seen["failed"] == {}
    assert seen["batched"] == 0
    assert seen["started"] > 3
    assert seen["chunks"] > 9
    assert 0 < seen["delay_median_ms"] < 50


async def test_chunks_held_back_are_batched(capsys: pytest.CaptureFixture[str]) -> None:
    async def all_at_once(writer: asyncio.StreamWriter) -> None:
        now = time.perf_counter()
        writer.write(b"".join(chunk(now - age) for age in (0.12, 0.06, 0.0)) + DONE)

    seen = await served(all_at_once, capsys)
    assert seen["failed"] == {}
    assert seen["batched"] == 2 * seen["started"]


async def test_a_torn_stream_and_a_missing_chunk_are_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def torn(writer: asyncio.StreamWriter) -> None:
        writer.write(chunk(time.perf_counter()))
        writer.close()

    async def short(writer: asyncio.StreamWriter) -> None:
        writer.write(chunk(time.perf_counter()) + DONE)

    seen = await served(torn, capsys)
    assert seen["failed"] == {"torn": seen["started"]}
    seen = await served(short, capsys)
    assert seen["failed"] == {"chunks missing": seen["started"]}
