"""The model server behind the fuzzed ports notices each request that may not come."""

import pytest

from tests.fuzz.ports.document import is_allowed
from tests.fuzz.ports.odd import ALLOWED, FORBIDDEN
from tests.fuzz.ports.upstream import Heard, StrictUpstream, Unsound, first_of

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/embeddings HTTP/1.0\r\nHost: a\r\n\r\n",
        b"POST http://a/v1/embeddings HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/a b HTTP/1.1\r\nHost: a\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: +1\r\n\r\nx",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n",
        HEAD + b"X: a\r\n folded\r\n\r\n",
        HEAD + b"X : a\r\n\r\n",
        HEAD + b"X: a\nx-injected: b\r\n\r\n",
        HEAD + b"X: a\x00\r\n\r\n",
    ],
)
def test_request_that_could_be_read_in_two_ways_is_unsound(data: bytes) -> None:
    with pytest.raises(Unsound):
        first_of(data)


def test_document_allows_its_routes_and_no_path_of_a_servers_own() -> None:
    asked = [(method, path) for method, path in ALLOWED if path != b"/feedback"]
    assert len(asked) > 60
    assert all(is_allowed(method.encode(), path + b"?q") for method, path in asked)
    assert not is_allowed(b"POST", b"/feedback")
    for path in FORBIDDEN:
        for method in (b"POST", b"DELETE", b"GET", b"HEAD")[: 2 if path == b"/v1/models/m" else 4]:
            assert not is_allowed(method, path)
    assert not is_allowed(b"GET", b"/v1/files/%2e%2e/load_lora_adapter")
    assert not is_allowed(b"GET", b"/v1/models/../sleep")
    for call in (b"/v1/chat/completions", b"/v1/responses"):
        assert is_allowed(b"GET", call + b"/batches")
        assert not any(is_allowed(b"GET", call + end) for end in (b"/batch", b"/BATCH", b"/Render"))
    # Names of models and stored things may be any words.
    assert is_allowed(b"GET", b"/v1/files/batch")
    assert is_allowed(b"HEAD", b"/v1/models/meta/health")


def test_strict_upstream_notes_forbidden_requests() -> None:
    upstream = StrictUpstream(is_allowed, "ours")
    upstream.secrets = [b"theirs"]
    sound = [(b"Host", b"127.0.0.1:0"), (b"Authorization", b"Bearer ours")]
    upstream.take(Heard(b"POST", b"/v1/embeddings", sound, b""))
    assert upstream.wrong == []
    more = [*sound, (b"api-key", b"theirs"), (b"x-mark", b"nobody")]
    upstream.take(Heard(b"POST", b"/sleep", more, b""))
    assert [why for why, _ in upstream.wrong] == [
        "a path that is not allowed",
        "a header b'api-key'",
        "an agent's key",
        "a request without a key that may",
    ]
