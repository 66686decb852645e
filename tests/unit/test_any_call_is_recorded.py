"""Whatever client and server say to each other, a record comes of it that the spool can hold."""

import json
import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.base import read_request
from proxy.dialects.table import DIALECTS
from proxy.identity import Identity
from proxy.recent import Recent
from proxy.recorder import Outcome, Recorder
from proxy.segments import decode_payload, encode_frame, read_frames
from proxy.versions import Serving

CALL = UUID("01a1f80b-8bb3-758b-b889-c07dbbff7a56")
WHO = Identity(episode="e", method="own", agent="default", task=None)
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
    st.sampled_from(sorted(DIALECTS)),
    fields(REQUEST_FIELDS),
    fields(REPLY_FIELDS),
    st.booleans(),
)
def test_any_call_becomes_a_record(
    name: str, request: dict[str, Any], reply: dict[str, Any], streamed: bool
) -> None:
    dialect = DIALECTS[name]
    asked = read_request(json.dumps(request).encode())
    rewritten = dialect.rewrite(asked, "m@1", want_ids=True)
    follow = dialect.streamed if streamed else dialect.whole
    transcript = follow(rewritten, "m@1")
    body = json.dumps(reply).encode()
    transcript.feed(b"data: " + body + b"\n\n" if streamed else body)
    transcript.finish()
    recorder = Recorder(None, Recent(), default_temperature=1.0)  # type: ignore[arg-type]
    now = datetime.now(UTC)
    record = recorder.make_record(
        CALL,
        name,
        WHO,
        Serving("m", 1, "m@1"),
        asked,
        transcript.facts(),
        Outcome("complete", 200, now, 1.0, 2.0, body),
        (),
        0,
    )
    [(_, payload)] = read_frames(encode_frame(record))
    assert decode_payload(payload) == record


UNHOLDABLE = (
    b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"},"token_ids":[1],"logprobs":null}]}',
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"\\ud83d"}],"x":1e400}',
    b'{"type":"message_start","message":{"model":"m@1","id":"\\udc00"},"usage":1e999}',
    b'{"id":"r","model":"m@1","usage":{"x":1e400},"content":[{"type":"text","text":"\\ud800"}]}',
)


@pytest.mark.parametrize("body", UNHOLDABLE)
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_values_that_python_cannot_hold_reach_the_client(name: str, body: bytes) -> None:
    """Halves of an emoji in a stream, numbers past any float: for the client, not for us."""
    dialect = DIALECTS[name]
    request = dialect.rewrite(read_request(b'{"model":"m"}'), "m@1", want_ids=True)
    whole = dialect.whole(request, "m@1")
    whole.feed(body)
    streamed = dialect.streamed(request, "m@1")
    passed = streamed.feed(b"data: " + body + b"\n\n") + streamed.finish()
    for seen in (whole.finish(), passed):
        assert all(part in seen for part in re.findall(rb"1e\d+|\\\\ud[0-9a-f]+", body))
    whole.facts()
    streamed.facts()
