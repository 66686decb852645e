"""No record keeps the others from being stored, and no bug makes dead letters of them all."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester import batch_writer, transcribe
from proxy.ingester.removing import DeadLetter, write_dead_letters
from store.records import CallRecord, SpoolRecord
from store.write.ingest import Ingester
from tests.integration.conftest import Proxy
from tests.integration.faults.conftest import Spooled
from tests.support.faults.counters import assert_adds_up
from tests.support.records import captured, reward
from tests.support.waiting import PATIENCE_S, eventually, until


def nested(levels: int) -> bytes:
    """A stream of Anthropic's API of which a tool's arguments nest."""
    arguments = '{\\"a\\":' * levels + "1" + "}" * levels
    events = [
        '{"type":"message_start","message":{"id":"m","role":"assistant","content":[]}}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t",'
        '"name":"n","input":{}}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta",'
        f'"partial_json":"{arguments}"' + "}}",
        '{"type":"content_block_stop","index":0}',
        '{"type":"message_stop"}',
    ]
    return "".join(f"data: {event}\n\n" for event in events).encode()


async def test_reply_nested_too_deep_to_parse_keeps_no_other_record_from_being_stored(
    spooled: Spooled,
) -> None:
    poison = captured("poison", dialect="messages", streamed=True, reply=nested(2000))
    spooled.write(captured("a"), poison, captured("b"))
    await spooled.drain()
    assert await spooled.stored() + len(spooled.letters()) == 3
    assert await spooled.stored() >= 2
    assert spooled.segments() == []


async def test_drain_cancelled_while_it_writes_dead_letters_counts_no_record_twice(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingester that stops cancels it, and tells of its counters until it has ended."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(root: Path, letters: Sequence[DeadLetter]) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        write_dead_letters(root, letters)

    poison = captured(
        "poison", dialect="messages", streamed=True, reply=nested(2000), deflated=True
    )
    spooled.write(captured("a"), poison, captured("b"))
    with monkeypatch.context() as patched:
        patched.setattr(batch_writer, "write_dead_letters", slow)
        draining = asyncio.create_task(spooled.drainer.drain_once())
        await until(begun.is_set)
        draining.cancel()
        go_on.set()
        await asyncio.wait([draining])
    assert draining.cancelled()
    await spooled.drainer.count()
    assert_adds_up()
    await spooled.drain()
    assert (await spooled.stored(), len(spooled.letters())) == (2, 1)


ERRORS = [
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    AssertionError("impossible"),
    TypeError("no"),
    OverflowError("too large"),
    StopIteration(),
    OSError(5, "Input/output error"),
    KeyError("k"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
]


def raising(error: BaseException, what: Callable[..., Any], poison: str) -> Callable[..., Any]:
    """Return `what`, changed to raise `error` for records of the episode `poison`."""

    def call(captured: Any, *rest: Any) -> Any:
        if captured.episode == poison:
            raise error
        return what(captured, *rest)

    return call


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_only_records_that_fail_to_transcribe_become_dead_letters(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(transcribe, "transcribe", raising(error, transcribe.transcribe, "poison"))
    spooled.write(captured("a"), captured("poison"), captured("b"), captured("poison"))
    await spooled.drain()
    assert await spooled.outcome() == (2, 2, [])
    assert type(error).__name__ in spooled.reasons()


@pytest.fixture
def storing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[SpoolRecord], object]], None]:
    """Has `Ingester.store` ask about each record first: what is raised then comes of it."""
    real = Ingester.store

    def use(check: Callable[[SpoolRecord], object]) -> None:
        async def store(
            self: Ingester, engine: AsyncEngine, records: Sequence[SpoolRecord]
        ) -> frozenset[UUID]:
            for record in records:
                check(record)
            return await real(self, engine, records)

        monkeypatch.setattr(Ingester, "store", store)

    return use


def fails(error: Exception, *episodes: str) -> Callable[[SpoolRecord], None]:
    def check(record: SpoolRecord) -> None:
        if isinstance(record, CallRecord) and (not episodes or record.episode in episodes):
            raise error

    return check


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), TypeError("t"), AssertionError(), RecursionError(), MemoryError()],
    ids=lambda error: type(error).__name__,
)
async def test_only_records_that_fail_to_store_become_dead_letters(
    spooled: Spooled, storing: Any, error: Exception
) -> None:
    storing(fails(error, "poison"))
    spooled.write(*[captured(f"e{n}" if n % 5 else "poison") for n in range(20)])
    await spooled.drain()
    assert await spooled.outcome() == (16, 4, [])
    assert type(error).__name__ in spooled.reasons()


@pytest.mark.parametrize("next_ingester", [False, True], ids=["same ingester", "next ingester"])
async def test_storage_error_that_hits_all_calls_makes_no_dead_letters(
    spooled: Spooled, storing: Any, next_ingester: bool
) -> None:
    """A bug, say; feedback goes on being stored. Once it is mended, all are."""
    storing(fails(KeyError("bug")))
    calls = [captured(f"e{n}") for n in range(12)]
    segment = spooled.write(*calls, reward(1.0, episode="e1"))
    await spooled.drain()
    assert await spooled.outcome() == (0, 0, [segment])
    assert spooled.drainer.progress.held == 12
    assert_adds_up()
    if next_ingester:
        await spooled.follow()
    storing(lambda record: None)
    # The first call that can be stored shows that it was not the records' fault.
    spooled.write(captured("later"))
    await spooled.drain()
    assert await spooled.outcome() == (13, 0, [])


async def test_lone_poison_record_waits_and_blocks_no_later_record(
    spooled: Spooled, storing: Any
) -> None:
    storing(fails(KeyError("k"), "poison"))
    segment = spooled.write(captured("poison"))
    await spooled.drain()
    assert await spooled.outcome() == (0, 0, [segment])
    spooled.write(captured("a"))
    await spooled.drain()
    assert await spooled.outcome() == (1, 1, [])


async def test_failure_to_count_stored_calls_never_stops_the_drain(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_writer, "_count_call", broken)
    spooled.write(captured("a"), captured("b"))
    await spooled.drain()
    assert await spooled.outcome() == (2, 0, [])


async def test_readyz_names_a_drain_that_is_stuck(
    proxy: Proxy, storing: Callable[[Any], None]
) -> None:
    async def ready(check: Callable[[Any], bool]) -> Any:
        async def look() -> Any:
            async with proxy.session.get(f"{proxy.admin}/readyz") as reply:
                # Serving does not depend on it: a balancer must not take the proxy away.
                assert reply.status == 200
                found = await reply.json()
            return found if check(found) else None

        return await eventually(look)

    await ready(lambda found: found["status"] == "ready" and found["drain"]["state"] == "moving")
    storing(fails(KeyError("bug")))
    assert (await proxy.chat(headers={"x-pawl-episode": "a"})).status == 200
    found = await ready(lambda found: found["drain"]["state"] == "stuck")
    assert found["status"] == "degraded"
    assert found["drain"]["held"] == 1
    assert found["drain"]["reason"]
    await ready(lambda found: found["drain"]["for_s"] >= 0.2)
    storing(lambda record: None)
    await proxy.chat(headers={"x-pawl-episode": "b"})
    await ready(lambda found: found["status"] == "ready" and found["drain"]["held"] == 0)
    assert len(await proxy.episodes(2)) == 2
