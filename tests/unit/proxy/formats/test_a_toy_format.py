"""A wire format is a room and a line in the registry: with these two, a new API is served whole."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from proxy import routing as routes
from proxy.error_replies import unreadable_request_body
from proxy.formats.base import ReplySummary
from proxy.formats.registry import FORMATS
from proxy.identity.call_memory import needed_fingerprints, provided_fingerprints
from proxy.ingester.transcribe import question_digest, transcribe
from proxy.intake import Intake
from proxy.routing import find_route
from proxy.spool.segments import CapturedCall
from store.records import CallRecord
from store.values.packing import unpack_ids
from store.write.rows import derived_task
from tests.support.doubles import MOST, Remembered, SaidReply, SaidServer, data_port
from tests.support.http_wires import settle
from tests.support.records import tokens
from tests.support.toy_format import TOY

ASKED = {"model": "m", "said": [{"by": "me", "words": "Hello?"}], "temperature": 1}
ANSWER = {"id": "toy-1", "model": "m@1", "words": "Hi.", "tokens": [[1, 2], [3, 4], [-0.5, -1.0]]}
JSON = [(b"Content-Type", b"application/json")]
EVENTS = [(b"Content-Type", b"text/event-stream")]


class Seen(NamedTuple):
    """What the server was asked, the client was answered, and the ingester makes of the record."""

    asked: dict[str, Any]
    head: bytes
    answer: bytes
    record: CallRecord


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the registry, and the table of routes that is made of it at the start."""
    monkeypatch.setitem(FORMATS, TOY.name, TOY)
    monkeypatch.setattr(routes, "_EXACT", routes.exact_routes(FORMATS.values()))


@pytest.fixture
def intake() -> Iterator[Intake]:
    taken = Intake(budget=MOST, max_body=MOST, max_feedback=MOST)
    yield taken
    taken.close()


async def call(
    intake: Intake, folder: Path, reply: SaidReply | None, fields: dict[str, Any] | None = None
) -> Seen:
    """Post to the toy API's path, through a whole data port."""
    body = json.dumps(ASKED | (fields or {})).encode()
    server, kept = SaidServer(lambda: reply, gives=True), Remembered()
    connection, wire = data_port(server, kept, intake, folder)
    lines = (b"POST /episode/e1/v1/toys HTTP/1.1", b"Host: a", b"Content-Length: %d" % len(body))
    connection.data_received(b"\r\n".join([*lines, b"", b""]) + body)
    await settle()
    if connection.task is not None:
        await asyncio.wait({connection.task}, timeout=10)
    [captured] = kept.frames
    assert isinstance(captured, CapturedCall)
    head, _, answer = wire.sent.partition(b"\r\n\r\n")
    return Seen(json.loads(server.asked[0]), head, answer, transcribe(captured))


def test_paths_of_a_new_wire_format_are_routes() -> None:
    found = find_route("POST", "/task/t/v1/toys")
    assert (found.path, found.task) == ("/v1/toys", "t")
    assert found.wire_format is TOY
    assert find_route("POST", "/v1/toys/count").wire_format is None


async def test_call_in_a_new_wire_format_is_rewritten_filtered_and_recorded(
    intake: Intake, tmp_path: Path
) -> None:
    body = json.dumps(ANSWER).encode()
    seen = await call(intake, tmp_path, SaidReply(200, JSON, [body], torn=False))
    assert seen.asked == ASKED | {"model": "m@1", "tokens": True}
    assert json.loads(seen.answer) == {"id": "toy-1", "model": "m", "words": "Hi."}
    record = seen.record
    assert (record.dialect, record.episode, record.response_id) == ("toy", "e1", "toy-1")
    assert json.loads(record.request or b"") == ASKED
    assert json.loads(record.reply or b"")["words"] == "Hi."
    assert list(unpack_ids(record.tokens.sampled_ids)) == [3, 4]
    assert (record.trainable, record.reason) == (True, None)


async def test_stream_in_a_new_wire_format_is_filtered_event_by_event(
    intake: Intake, tmp_path: Path
) -> None:
    events = [ANSWER | {"words": "Hi", "tokens": [[1], [3], [-0.5]]}]
    events += [ANSWER | {"words": ".", "tokens": [[1], [4], [-1.0]]}]
    pieces = [b"data: %b\n\n" % json.dumps(event).encode() for event in events]
    reply = SaidReply(200, EVENTS, [*pieces, b"data: [DONE]\n\n"], torn=False)
    seen = await call(intake, tmp_path, reply, {"stream": True})
    assert b"tokens" not in seen.answer
    assert seen.answer.count(b'"model":"m"') == 2
    assert b"data: [DONE]\n\n" in seen.answer
    assert json.loads(seen.record.reply or b"")["words"] == "Hi."
    assert list(unpack_ids(seen.record.tokens.sampled_ids)) == [3, 4]
    assert seen.record.trainable


async def test_errors_have_the_shape_of_the_wire_format(intake: Intake, tmp_path: Path) -> None:
    seen = await call(intake, tmp_path, None)
    assert json.loads(seen.answer).keys() == {"oops"}
    torn = await call(intake, tmp_path, SaidReply(200, EVENTS, [b"data: {}\n\n"], torn=True))
    assert b'data: {"oops":' in torn.answer
    assert json.loads(unreadable_request_body("/v1/toys", 400, "no head")).keys() == {"oops"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"colour": "red"}, None),
        ({"only": ["yes", "no"]}, "constrained_sampling"),
        ({"taste": "sour"}, "unreadable_sampling"),
    ],
)
async def test_request_fields_of_a_new_wire_format_decide_why_a_call_is_untrainable(
    intake: Intake, tmp_path: Path, fields: dict[str, Any], reason: str | None
) -> None:
    reply = SaidReply(200, JSON, [json.dumps(ANSWER).encode()], torn=False)
    assert (await call(intake, tmp_path, reply, fields)).record.reason == reason


async def test_call_with_a_picture_is_recorded_as_not_text(intake: Intake, tmp_path: Path) -> None:
    reply = SaidReply(200, JSON, [json.dumps(ANSWER).encode()], torn=False)
    said = [*ASKED["said"], {"by": "me", "picture": "sunset"}]
    record = (await call(intake, tmp_path, reply, {"said": said})).record
    assert (record.trainable, record.reason) == (False, "not_text")


async def test_tool_results_in_a_new_wire_format_become_tool_events(
    intake: Intake, tmp_path: Path
) -> None:
    reply = SaidReply(200, JSON, [json.dumps(ANSWER).encode()], torn=False)
    turns = [*ASKED["said"], {"by": "toy", "words": "Hm.", "tool": "add", "call": "c1"}]
    turns += [{"by": "tool", "call": "c1", "words": "no", "failed": True}]
    [event] = (await call(intake, tmp_path, reply, {"said": turns})).record.tool_events
    assert (event.tool_id, event.name, event.status) == ("c1", "add", "error")


def test_next_call_needs_the_fingerprints_that_the_reply_provides() -> None:
    said = [*ASKED["said"], {"by": "toy", "words": "Hi."}, {"by": "me", "words": "Bye."}]
    offered = provided_fingerprints(TOY.turns, ASKED, ReplySummary(text="Hi."))
    assert needed_fingerprints(TOY.turns, ASKED | {"said": said}) == offered


async def test_episodes_of_the_same_question_have_the_same_task(
    intake: Intake, tmp_path: Path
) -> None:
    reply = SaidReply(200, JSON, [json.dumps(ANSWER).encode()], torn=False)
    told = [{"by": "them", "words": "Be brief."}, *ASKED["said"]]
    records = [
        (await call(intake, tmp_path, reply, {"said": said})).record
        for said in (ASKED["said"], told, [{"by": "me", "words": "Goodbye?"}])
    ]
    # Of another prompt each, as they would be if only its ids told them apart.
    records = [
        msgspec.structs.replace(record, tokens=tokens([number], [4]))
        for number, record in enumerate(records)
    ]
    same, also, other = (derived_task(record, question_digest) for record in records)
    assert same == also
    assert None not in (same, other)
    assert same != other
