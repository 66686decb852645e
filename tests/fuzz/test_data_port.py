"""Any request to the data port, whatever the model server says to it: one answer, one record."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import given

from proxy.ingester.transcribe import transcribe
from proxy.intake import Intake
from tests.fuzz import calls
from tests.fuzz.loops import run
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import Tape, made_of
from tests.fuzz.test_feedback import one_statement
from tests.fuzz.texts import anything, cut
from tests.support.doubles import MOST, Remembered, SaidReply, SaidServer, data_port
from tests.support.http_wires import Wire, settle

CALLS = (
    *(b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses"),
    *(b"/episode/e7/agent/a/v1/chat/completions", b"/task/%00/episode/%ff/v1/messages"),
)
HEADERS = (
    *(b"x-pawl-episode: e1", b"x-pawl-episode: \xff\xfe", b"x-pawl-tool-status: ok;id=1"),
    *(b"baggage: pawl.episode=%00", b"traceparent: 00-x", b"Idempotency-Key: k", b"Accept: \xff"),
    *(b"x-stainless-retry-count: 2", b"session_id: \xed\xa0\x80", b"x-pawl-task: a\tb"),
)
KINDS = (b"application/json", b"text/event-stream", b"text/event-stream; charset=utf-8", b"\xff")
STATUSES = (200, 200, 200, 400, 422, 429, 204, 304, 503)
NOBODY = UUID(int=0)
PATIENCE_S = 10.0


class Exchange(NamedTuple):
    """A request, and what the model server says to it (nothing: it breaks off)."""

    path: bytes
    request: bytes
    body: bytes
    status: int
    headers: list[tuple[bytes, bytes]]
    pieces: list[bytes] | None
    torn: bool
    gives_ids: bool


def _exchange(tape: Tape) -> Exchange:
    path = b"/feedback" if tape.rarely() else tape.pick(CALLS)
    body = one_statement(tape) if path == b"/feedback" else calls.requests(tape)
    if tape.rarely():
        body = anything(tape)
    lines = [b"POST %b HTTP/1.1" % path, b"Host: a", b"Content-Length: %d" % len(body)]
    lines += [tape.pick(HEADERS) for _ in range(tape.below(3))]
    kind = tape.pick(KINDS)
    reply = calls.streams(tape) if kind.startswith(b"text/event") else calls.wholes(tape)
    return Exchange(
        path=path,
        request=b"\r\n".join([*lines, b"", b""]) + body,
        body=body,
        status=tape.pick(STATUSES),
        headers=[(b"Content-Type", kind), *([(b"X-Odd", b"\xff")] if tape.rarely() else [])],
        pieces=None if tape.rarely() else cut(tape, reply),
        torn=tape.rarely(),
        gives_ids=bool(tape.below(2)),
    )


@fuzzing(400)
@given(made_of(_exchange))
def test_any_request_gets_one_answer_and_any_call_one_record(exchange: Exchange) -> None:
    frames, wire, is_done = run(lambda: _ask(exchange))
    assert is_done, "nobody is answered"
    # One head, unless the upstream broke off: then it may be none.
    assert wire.sent.count(b"HTTP/1.1 ") == 1 or (exchange.torn and wire.is_closing())
    # Nothing here fails by itself: an exception that is answered is one all the same.
    assert not wire.sent.startswith(b"HTTP/1.1 500 ")
    if exchange.path == b"/feedback":
        assert len(frames) == wire.sent.startswith(b"HTTP/1.1 20")
    elif not frames:
        # A call that the proxy itself refuses (4xx) may have no record.
        assert b"x-pawl-fault: client" in wire.sent.lower()
    else:
        [frame] = frames
        assert frame.request == exchange.body
        assert transcribe(frame).episode


async def _ask(exchange: Exchange) -> tuple[list[Any], Wire, bool]:
    """What is recorded, what the client got, and whether the proxy is done with it."""
    # Small enough that it is asked for more than there is.
    intake = Intake(budget=MOST, max_body=MOST, max_feedback=MOST)
    kept = Remembered()
    server = SaidServer(lambda: _reply(exchange), gives=exchange.gives_ids)
    try:
        with TemporaryDirectory() as folder:
            connection, wire = data_port(server, kept, intake, Path(folder))
            connection.data_received(exchange.request)
            await settle()
            if connection.task is not None:
                await asyncio.wait({connection.task}, timeout=PATIENCE_S)
            await settle()
            work = connection.task
            is_done = work is None or work.done()
    finally:
        intake.close()
    return kept.frames, wire, is_done


def _reply(exchange: Exchange) -> SaidReply | None:
    if exchange.pieces is None:
        return None
    return SaidReply(exchange.status, exchange.headers, exchange.pieces, torn=exchange.torn)
