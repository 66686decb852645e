"""Headers on their way through: what is passed on, in which order, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http import wire
from proxy.http.wire import Headers, headers_for_upstream
from store.tenants import DEFAULT

SAID: Headers = [
    (b"Content-Type", b"application/json"),
    (b"User-Agent", b"agent@1"),
    (b"anthropic-version", b"2023-06-01"),
    (b"X-Stainless-Lang", b"python"),
    (b"traceparent", b"00-1-2-01"),
]
STEERING: Headers = [
    (b"X-Gateway-Model-Name-Rewrite", b"pb@1"),
    (b"x-portkey-custom-host", b"http://x"),
    (b"Helicone-Target-Url", b"http://x"),
    (b"X-Vllm-Priority", b"-9"),
    (b"x-request-id", b"resp_1"),
    (b"Idempotency-Key", b"k"),
    (b"OpenAI-Project", b"proj_1"),
    (b"Cookie", b"a=b"),
    (b"x-litellm-tags", b"paid"),
]


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_steering_headers_are_passed_on_for_the_default_tenant_alone(tenant: str) -> None:
    both = [*SAID, *STEERING]
    assert headers_for_upstream(both, tenant, plain=False) == SAID
    coded = (b"Accept-Encoding", b"identity")
    assert headers_for_upstream(both, tenant, plain=True) == [*SAID, coded]
    assert headers_for_upstream(both, DEFAULT, plain=False) == both


NAMES = st.text("abcXYZ-", min_size=1, max_size=12).map(lambda n: b"X-" + n.encode())
VALUES = st.binary(max_size=20).map(lambda v: bytes(33 + b % 94 for b in v))
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@given(HEADERS)
def test_headers_keep_their_case_and_order_both_ways(headers: wire.Headers) -> None:
    ours = [pair for pair in headers if pair[0].lower().startswith(wire.OWN_PREFIX)]
    others = [pair for pair in headers if pair not in ours]
    assert wire.headers_for_client(headers) == others
    assert wire.headers_for_upstream(headers, DEFAULT, plain=False) == others
    sent = wire.request_head("POST", "/v1/x", b"h", headers, 0)
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    assert sent == b"POST /v1/x HTTP/1.1\r\nHost: h\r\n" + lines + b"Content-Length: 0\r\n\r\n"


def test_hop_by_hop_headers_are_not_passed_on() -> None:
    hop = [(b"Connection", b"X-Mine, close"), (b"x-mine", b"1"), (b"TE", b"trailers")]
    hop += [(b"Keep-Alive", b"5"), (b"Transfer-Encoding", b"chunked"), (b"Trailer", b"x")]
    assert wire.headers_for_client([*hop, (b"Server", b"s")]) == [(b"Server", b"s")]
    assert wire.headers_for_client([(b"X-Pawl-Tenant", b"b"), (b"Server", b"s")]) == [
        (b"Server", b"s")
    ]
    sent = [*hop, (b"Host", b"h"), (b"X-Pawl-Agent", b"a")]
    kept = wire.headers_for_upstream(sent, DEFAULT, plain=True)
    assert kept == [(b"Accept-Encoding", b"identity")]
