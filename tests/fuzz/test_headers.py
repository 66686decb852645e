"""Any header through all that reads headers: names and events, or nothing and a warning."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import NotAllowed
from proxy.formats.base import ReplySummary, read_request
from proxy.http.wire import headers_by_name, headers_for_client, headers_for_upstream
from proxy.identity.call_memory import CallMemory, provided_fingerprints
from proxy.identity.identify import SESSION_HEADERS, identify, parse_baggage, trace_context
from proxy.routing import Route, find_route
from proxy.tool_events import STATUS_HEADER, ToolStatusError, parse_tool_status
from store.tenants import DEFAULT
from tests.fuzz import calls
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import Tape, made, made_of
from tests.fuzz.texts import anything, damaged, one_of

KNOWN = (
    *(b"x-pawl-episode", b"x-pawl-agent", b"x-pawl-task", STATUS_HEADER.encode(), b"baggage"),
    *(b"x-pawl-split", b"traceparent", b"x-stainless-retry-count", b"connection"),
    b"x-claude-code-agent-id",
    *(name.encode() for name, _ in SESSION_HEADERS),
)
_value = damaged(
    one_of(
        b"run-7",
        b'ok;id="call_1", error;id="call_2";detail="exit 2";ms=1.5',
        b"pawl.episode=e1,session.id=s%20%ff;p=1,pawl.task=%00",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        b"close, x-y",
        b"1",
        *('ok;id="é"'.encode(), b"", b"a" * 300, b"," * 9_000, b"\xed\xa0\x80", b"9" * 5_000),
        *(b"ok;id=:" + b"A" * 99, b"ok;id=%" + b'"', b"(" * 2_000, b"ok;ms=" + b"9" * 20),
    )
)
values = made(_value) | st.binary(max_size=20)


def _pair(tape: Tape) -> tuple[bytes, bytes]:
    return (tape.bytes(5) if tape.rarely() else tape.pick(KNOWN)), _value(tape)


headers = made_of(lambda tape: [_pair(tape) for _ in range(tape.below(5))])
paths = st.sampled_from(
    (
        *("/v1/chat/completions", "/task/t/episode/e/agent/a/v1/messages", "/v1/responses"),
        *("/episode/%00%ff/v1/completions", "/feedback", "/task//v1/chat/completions"),
    )
) | st.text(max_size=12)


def _route(path: str) -> Route:
    chat = find_route("POST", "/v1/chat/completions")
    try:
        route = find_route("POST", path)
    except NotAllowed:
        return chat
    # Only calls are identified.
    return msgspec.structs.replace(route, wire_format=route.wire_format or chat.wire_format)


@fuzzing(500)
@given(headers, paths, made(calls.requests) | made(anything), st.text(max_size=4))
def test_any_headers_identify_a_call_or_are_ignored(
    pairs: list[tuple[bytes, bytes]], path: str, body: bytes, reply: str
) -> None:
    lower, route = headers_by_name(pairs), _route(path)
    request = read_request(body)
    stitches = CallMemory()
    found = identify(lower, route, request, "own", stitches)
    # The ledger keeps them as UTF-8 without NUL.
    for name in (found.episode, found.agent, found.task or "-"):
        assert name.isprintable()
        assert name.encode()
    summary = ReplySummary(response_id="r", text=reply)
    provides = provided_fingerprints(
        route.wire_format.turns, request.fields, summary, found.conversation
    )
    stitches.provide(provides, found.episode, found.follows)
    assert identify(lower, route, request, "next", stitches).episode
    for tenant in (DEFAULT, "a"):
        headers_for_upstream(pairs, tenant, plain=True)
    headers_for_client(pairs)


@fuzzing(1_000)
@given(values)
def test_any_value_of_a_structured_header_is_read_or_refused(value: bytes) -> None:
    text = value.decode("utf-8", "surrogateescape")
    parse_baggage(text)
    trace_context({"traceparent": text})
    try:
        events = parse_tool_status(text)
    except ToolStatusError as refusal:
        # It goes to the client as a warning.
        str(refusal).encode(errors="replace")
        return
    for event in events:
        for field in (event.tool_id, event.name, event.detail):
            assert b"\0" not in (field or "").encode()
