"""Of a tenant's headers only those reach the upstream that say nothing about where to go."""

import pytest

from proxy.http.wire import Headers, for_upstream
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
def test_a_tenants_headers_are_those_of_its_body_and_client(tenant: str) -> None:
    both = [*SAID, *STEERING]
    assert for_upstream(both, tenant, plain=False) == SAID
    coded = (b"Accept-Encoding", b"identity")
    assert for_upstream(both, tenant, plain=True) == [*SAID, coded]
    assert for_upstream(both, DEFAULT, plain=False) == both
