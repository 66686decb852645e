"""Any request and any reply through each wire format: no exception, and nothing altered unasked."""

from operator import or_
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest, ReplyParser, read_request
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
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


def _reply(tape: Tape) -> tuple[bool, list[bytes]]:
    """Whether it is a stream, and its pieces."""
    if tape.below(2):
        return True, cut(tape, calls.streams(tape))
    return False, [calls.wholes(tape)]


@fuzzing(1_000)
@given(names, requests, made_of(_reply), served, st.booleans())
def test_any_reply_can_be_followed(
    name: str,
    body: bytes,
    reply: tuple[bool, list[bytes]],
    served_name: str | None,
    want_ids: bool,
) -> None:
    """As the worker does in pieces, and as the ingester reads it: in pieces, and at once."""
    wire_format, (streamed, pieces) = FORMATS[name], reply
    asked = wire_format.rewrite(read_request(body), served_name, want_ids=want_ids)
    worker = wire_format.reply_parser(asked, served_name, streamed=streamed)
    passed = _fed(worker, pieces)
    if _is_unchanged(asked, served_name):
        assert passed == b"".join(pieces)
    at_once, again = (
        wire_format.reply_parser(asked, served_name, streamed=streamed, reading=True)
        for _ in range(2)
    )
    assert _fed(at_once, [b"".join(pieces)]) == _fed(again, pieces) == b""
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


def _is_unchanged(asked: ModelRequest, served_name: str | None) -> bool:
    """Whether nothing was put into the request that must be taken out of the reply again."""
    renamed = served_name is not None and asked.model not in (None, served_name)
    return not (asked.injected or asked.path is not None or renamed)


@fuzzing(1_000)
@given(made_of(calls.recorded), requests, ends)
def test_any_recorded_call_can_be_transcribed(
    call: dict[str, Any], body: bytes, end: dict[str, Any]
) -> None:
    """As the ingester does: facts, ids, results of tools, sampling settings."""
    record = transcribe(captured(**(call | {"request": body} | end)))
    assert (record.request or record.request_raw or b"") == body
