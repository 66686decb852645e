"""Whatever client and server say to each other, a record comes of it that the spool can hold."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
from proxy.spool.segments import decode_payload, encode_frame, read_frames
from store.records import CallRecord
from tests.support.recordings import follow
from tests.support.records import captured

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
REQUEST_FIELDS = ["model", "messages", "temperature", "top_p", "seed", "tools", "stream", "n"]
REPLY_FIELDS = ["id", "model", "choices", "usage", "output", "content", "status", "stop_reason"]
REPLY_FIELDS += ["prompt_token_ids", "type", "message", "response", "index", "delta"]


def fields(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=4), VALUES, max_size=6)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(FORMATS)),
    fields(REQUEST_FIELDS),
    fields(REPLY_FIELDS),
    st.booleans(),
)
def test_any_call_becomes_a_record(
    name: str, request: dict[str, Any], reply: dict[str, Any], streamed: bool
) -> None:
    body = json.dumps(reply).encode()
    seen = captured(
        dialect=name,
        served_model="m@1",
        streamed=streamed,
        request=json.dumps(request).encode(),
        reply=b"data: " + body + b"\n\n" if streamed else body,
    )
    [(_, payload)] = read_frames(encode_frame(seen))
    assert decode_payload(payload) == seen
    record = transcribe(seen)
    assert record.request == seen.request
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=CallRecord) == record


UNHOLDABLE = (
    b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"},"token_ids":[1],"logprobs":null}]}',
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"\\ud83d"}],"x":1e400}',
    b'{"type":"message_start","message":{"model":"m@1","id":"\\udc00"},"usage":1e999}',
    b'{"id":"r","model":"m@1","usage":{"x":1e400},"content":[{"type":"text","text":"\\ud800"}]}',
)


@pytest.mark.parametrize("body", UNHOLDABLE)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_values_that_python_cannot_hold_reach_the_client(name: str, body: bytes) -> None:
    """Halves of an emoji in a stream, numbers past any float: for the client, not for us."""
    spoken = FORMATS[name]
    request = spoken.rewrite(read_request(b'{"model":"m"}'), "m@1", want_ids=True)
    for streamed, reply in ((False, body), (True, b"data: " + body + b"\n\n")):
        seen = follow(name, request, [reply], "m@1", streamed=streamed).seen
        assert all(part in seen for part in re.findall(rb"1e\d+|\\\\ud[0-9a-f]+", body))
