"""Values that Python cannot hold reach the client as they came."""

import re

import pytest

from proxy.formats.base import read_request
from proxy.formats.registry import FORMATS
from tests.support.recordings import follow

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
