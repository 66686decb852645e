"""No record, whatever is in it, keeps the others from being stored; and no bug buries them all."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester import batch_writer, transcribe
from proxy.ingester.drain import Drainer
from proxy.ingester.removing import DeadLetter, write_dead_letters
from proxy.spool.segments import Frame, encode_frame
from store.ids import new_id
from store.read.episodes import episode_ids
from store.records import CallRecord, SpoolRecord
from store.write.ingest import Ingester
from tests.integration.conftest import Proxy
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.records import captured, reward
from tests.support.waiting import PATIENCE_S, eventually, until


@dataclass
class Spooled:
    """A spool with records, and the drain that has to get them out."""

    folder: Path
    engine: AsyncEngine
    drainer: Drainer

    def write(self, *records: Frame) -> Path:
        """A segment that will not grow."""
        home = self.folder / "0"
        home.mkdir(exist_ok=True)
        path = home / f"{new_id()}.seg"
        path.write_bytes(b"".join(encode_frame(record) for record in records))
        return path

    async def drain(self) -> None:
        """Until nothing moves any more, and once more."""
        for _ in range(2):
            while await self.drainer.drain_once():
                pass
        await self.drainer.count()

    async def stored(self) -> int:
        async with self.engine.connect() as connection:
            return len(await episode_ids(connection))

    def letters(self) -> list[Path]:
        return sorted((self.folder / "dead").glob("*.letter"))

    def reasons(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "dead").glob("*.reason"))

    def segments(self) -> list[Path]:
        return list(self.folder.glob("*/*.seg"))


@pytest.fixture
async def spooled(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Spooled]:
    yield Spooled(tmp_path, engine, Drainer(tmp_path, lambda: engine, batch=10))
    assert_adds_up()


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


async def test_a_reply_that_nests_deeper_than_can_be_read_stops_nothing(spooled: Spooled) -> None:
    poison = captured("poison", dialect="messages", streamed=True, reply=nested(2000))
    spooled.write(captured("a"), poison, captured("b"))
    await spooled.drain()
    assert await spooled.stored() + len(spooled.letters()) == 3
    assert await spooled.stored() >= 2
    assert spooled.segments() == []


async def test_a_drain_that_is_cancelled_while_it_buries_has_counted_nothing_twice(
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
    """`what`, but for the record of one episode."""

    def call(captured: Any, *rest: Any) -> Any:
        if captured.episode == poison:
            raise error
        return what(captured, *rest)

    return call


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_whatever_reading_a_record_raises_it_alone_is_a_dead_letter(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(transcribe, "transcribe", raising(error, transcribe.transcribe, "poison"))
    spooled.write(captured("a"), captured("poison"), captured("b"), captured("poison"))
    await spooled.drain()
    assert await spooled.stored() == 2
    assert len(spooled.letters()) == 2
    assert type(error).__name__ in spooled.reasons()
    assert spooled.segments() == []


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
async def test_whatever_storing_a_record_raises_it_alone_is_a_dead_letter(
    spooled: Spooled, storing: Any, error: Exception
) -> None:
    storing(fails(error, "poison"))
    spooled.write(*[captured(f"e{n}" if n % 5 else "poison") for n in range(20)])
    await spooled.drain()
    assert await spooled.stored() == 16
    assert len(spooled.letters()) == 4
    assert type(error).__name__ in spooled.reasons()
    assert spooled.segments() == []


async def test_an_error_that_hits_all_calls_makes_no_dead_letter_of_any(
    spooled: Spooled, storing: Any
) -> None:
    """A bug, say; feedback goes on being stored. Once it is mended, all are."""
    storing(fails(KeyError("bug")))
    calls = [captured(f"e{n}") for n in range(12)]
    segment = spooled.write(*calls, reward(1.0, episode="e1"))
    await spooled.drain()
    assert spooled.letters() == []
    assert segment.exists()
    assert await spooled.stored() == 0
    assert spooled.drainer.progress.held == 12
    assert_adds_up()
    # An ingester that starts anew finds them all.
    follower = Drainer(
        spooled.folder,
        lambda: spooled.engine,
        batch=10,
        counted_before=int(ledger()["pawl_records_spooled"]),
    )
    await follower.count()
    assert_adds_up()
    storing(lambda record: None)
    spooled.drainer = follower
    await spooled.drain()
    assert (await spooled.stored(), spooled.letters(), spooled.segments()) == (12, [], [])


async def test_held_records_are_stored_once_the_error_is_gone(
    spooled: Spooled, storing: Any
) -> None:
    storing(fails(KeyError("bug")))
    spooled.write(*[captured(f"e{n}") for n in range(3)])
    await spooled.drain()
    storing(lambda record: None)
    # The first call that can be stored shows that it was not the records' fault.
    spooled.write(captured("later"))
    await spooled.drain()
    assert (await spooled.stored(), spooled.letters(), spooled.segments()) == (4, [], [])


async def test_a_poison_record_alone_waits_and_blocks_nothing_behind_it(
    spooled: Spooled, storing: Any
) -> None:
    storing(fails(KeyError("k"), "poison"))
    segment = spooled.write(captured("poison"))
    await spooled.drain()
    assert segment.exists()
    assert spooled.letters() == []
    spooled.write(captured("a"))
    await spooled.drain()
    assert (await spooled.stored(), len(spooled.letters()), spooled.segments()) == (1, 1, [])


async def test_a_record_that_postgres_fails_over_while_it_answers_is_passed_over(
    spooled: Spooled, storing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it is short of memory, over and over: the others must not wait for that."""
    storing(fails(TimeoutError("statement"), "huge"))
    spooled.write(captured("a"), captured("huge"), *[captured(f"e{n}") for n in range(5)])
    tries = 0
    while await spooled.stored() < 6:
        tries += 1
        assert tries < 30
        try:
            await spooled.drainer.drain_once()
        except TimeoutError as error:
            await spooled.drainer._note_failure(error)
    assert spooled.letters() == []
    assert len(spooled.segments()) == 1
    await spooled.drainer.count()
    assert spooled.drainer.progress.held == 1
    # It is never given up: what PostgreSQL says is no word against the record.
    storing(lambda record: None)
    monkeypatch.setattr("proxy.ingester.batch_writer.UNANSWERED_AGAIN_S", 0.0)
    await spooled.drain()
    assert (await spooled.stored(), spooled.letters(), spooled.segments()) == (7, [], [])


async def test_counting_what_was_stored_never_stops_the_drain(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_writer, "_count_call", broken)
    spooled.write(captured("a"), captured("b"))
    await spooled.drain()
    assert (await spooled.stored(), spooled.segments()) == (2, [])


async def test_readyz_tells_of_a_drain_that_does_not_move(
    proxy: Proxy, storing: Callable[[Any], None]
) -> None:
    async def told() -> Any:
        async with proxy.session.get(f"{proxy.admin}/readyz") as reply:
            # Serving does not depend on it: a balancer must not take the proxy away.
            assert reply.status == 200
            return await reply.json()

    assert (await told())["status"] == "ready"

    async def moves() -> bool:
        return bool((await told())["drain"]["state"] == "moving")

    await eventually(moves)
    storing(fails(KeyError("bug")))
    assert (await proxy.chat(headers={"x-pawl-episode": "a"})).status == 200

    async def stuck() -> Any:
        found = await told()
        return found if found["drain"]["state"] == "stuck" else None

    found = await eventually(stuck)
    assert found["status"] == "degraded"
    assert found["drain"]["held"] == 1
    assert found["drain"]["reason"]

    async def stuck_for_a_while() -> bool:
        return bool((await told())["drain"]["for_s"] >= 0.2)

    await eventually(stuck_for_a_while)
    storing(lambda record: None)
    await proxy.chat(headers={"x-pawl-episode": "b"})

    async def moving() -> bool:
        found = await told()
        return found["status"] == "ready" and found["drain"]["held"] == 0

    await eventually(moving)
    assert len(await proxy.episodes(2)) == 2
