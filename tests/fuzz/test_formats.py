"""Any request and any reply through each wire_format: no exception, and nothing altered unasked."""

from operator import or_
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest, ReplyParser, read_request
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
from store.records import CallRecord
from tests.fuzz import calls
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import Tape, made, made_of
from tests.fuzz.texts import anything, cut
from tests.support.records import captured

names = st.sampled_from(calls.FORMATS)
served = st.sampled_from((None, "m", "m@1"))
requests = made(calls.requests) | made(anything) | st.binary(max_size=20)
# What the upstream is known to do besides: it shapes what a call was sampled from.
UPSTREAMS: tuple[dict[str, Any], ...] = (
    {},
    {"tool_grammars": False},
    *({"tool_tag": tag} for tag in ("hermes", "llama", "kimi", "no such syntax")),
    {"default_temperature": 0.6, "sampling_defaults": {"top_p": 0.9, "top_k": 20.0}},
    {"explored": {"temperature": 1.3}, "sampling_defaults": {"min_p": float("nan")}},
)
ENDS: tuple[dict[str, Any], ...] = (
    {},
    {"http_status": 400},
    {"status": "truncated"},
    {"status": "upstream_error", "http_status": None},
)
ends = st.builds(or_, st.sampled_from(ENDS), st.sampled_from(UPSTREAMS))


def test_every_format_is_tried() -> None:
    assert set(calls.FORMATS) == set(FORMATS)


@fuzzing(500)
@given(names, requests, served, st.booleans())
def test_any_request_can_be_rewritten(
    name: str, body: bytes, served_name: str | None, want_ids: bool
) -> None:
    request = read_request(body)
    asked = FORMATS[name].rewrite(request, served_name, want_ids=want_ids)
    if not asked.injected and served_name in (None, request.model):
        assert asked.body == body


@fuzzing(500)
@given(names, requests, made(calls.wholes), served, st.booleans())
def test_any_whole_reply_can_be_followed(
    name: str, body: bytes, reply: bytes, served_name: str | None, want_ids: bool
) -> None:
    asked = FORMATS[name].rewrite(read_request(body), served_name, want_ids=want_ids)
    _follow(name, asked, served_name, [reply], streamed=False)


def _pieces(tape: Tape) -> list[bytes]:
    return cut(tape, calls.streams(tape))


@fuzzing(500)
@given(names, requests, made_of(_pieces), served, st.booleans())
def test_any_stream_can_be_followed(
    name: str, body: bytes, pieces: list[bytes], served_name: str | None, want_ids: bool
) -> None:
    asked = FORMATS[name].rewrite(read_request(body), served_name, want_ids=want_ids)
    _follow(name, asked, served_name, pieces, streamed=True)


def _follow(
    name: str, asked: ModelRequest, served_name: str | None, pieces: list[bytes], *, streamed: bool
) -> None:
    """Follow a reply in pieces as the worker does, and read it: in pieces, and at once."""
    spoken, reply = FORMATS[name], b"".join(pieces)
    worker = spoken.reply(asked, served_name, streamed=streamed)
    passed = _fed(worker, pieces)
    assert _unchanged(asked, served_name, reply) in (None, passed)
    at_once, again = (
        spoken.reply(asked, served_name, streamed=streamed, reading=True) for _ in range(2)
    )
    assert _fed(at_once, [reply]) == _fed(again, pieces) == b""
    assert at_once.ended == again.ended
    # NaN is no equal of itself.
    assert repr(at_once.facts()) == repr(again.facts())


def _fed(parser: ReplyParser, pieces: list[bytes]) -> bytes:
    """What it passes on to its end; it is looked at before that too: it may break off anywhere."""
    passed = b"".join([parser.feed(piece) for piece in pieces])
    parser.summary()
    passed += parser.finish()
    parser.summary()
    return passed


def _unchanged(asked: ModelRequest, served_name: str | None, reply: bytes) -> bytes | None:
    """The reply, where nothing was put into the request that must be taken out of it again."""
    renamed = served_name is not None and asked.model not in (None, served_name)
    return None if asked.injected or asked.path is not None or renamed else reply


@fuzzing(500)
@given(names, requests, made(calls.wholes), st.booleans(), ends)
def test_any_whole_reply_is_read_again(
    name: str, body: bytes, reply: bytes, wanted_ids: bool, end: dict[str, Any]
) -> None:
    record = _read_again(name, body, reply, wanted_ids, end, streamed=False)
    assert (record.request or record.request_raw or b"") == body


@fuzzing(500)
@given(names, requests, made(calls.streams), st.booleans(), ends)
def test_any_stream_is_read_again(
    name: str, body: bytes, reply: bytes, wanted_ids: bool, end: dict[str, Any]
) -> None:
    record = _read_again(name, body, reply, wanted_ids, end, streamed=True)
    assert (record.request or record.request_raw or b"") == body


def _read_again(
    name: str, body: bytes, reply: bytes, wanted_ids: bool, end: dict[str, Any], *, streamed: bool
) -> CallRecord:
    """Read a call as the ingester does: facts, ids, results of tools, sampling settings."""
    seen = captured(
        dialect=name,
        request=body,
        reply=reply,
        streamed=streamed,
        wanted_ids=wanted_ids,
        served_model="m@1",
        **end,
    )
    return transcribe(seen)
