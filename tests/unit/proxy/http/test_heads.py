"""Of a tenant's headers only those reach the upstream that say nothing about where to go."""

import pytest

from benchmarks.http_requests import Nowhere
from proxy.door.heads import check_headers, passed_on
from proxy.errors import NotServed
from proxy.http.connection import Connection
from proxy.http.exchange import Exchange
from proxy.http.server import Server
from proxy.http.wire import Headers
from store.tenants import DEFAULT
from tests.unit.proxy.test_bodies import ALONE, OWNERS

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


async def nothing(_: Exchange) -> None:
    """Answer nothing: no request is sent."""


def exchange(tenant: str, headers: Headers) -> Exchange:
    connection = Connection(Server(nothing))
    connection.connection_made(Nowhere({"peername": ("127.0.0.1", 40000)}))
    made = Exchange(
        connection,
        "POST",
        "/v1/chat/completions",
        headers,
        keep_alive=True,
        chunks=True,
        expects=False,
    )
    made.tenant = tenant
    return made


async def test_a_tenants_headers_are_those_of_its_body_and_client() -> None:
    both = [*SAID, *STEERING]
    assert passed_on(exchange("a", both), plain=False) == SAID
    assert passed_on(exchange("a", both), plain=True) == [*SAID, (b"Accept-Encoding", b"identity")]
    assert passed_on(exchange(DEFAULT, both), plain=False) == both


def test_a_version_in_a_header_is_looked_at_where_it_is_passed_on() -> None:
    check_headers(OWNERS, "a", STEERING)
    check_headers(OWNERS, DEFAULT, SAID)
    check_headers(ALONE, DEFAULT, STEERING)
    with pytest.raises(NotServed, match="no version 'pb@1'"):
        check_headers(OWNERS, DEFAULT, STEERING)
