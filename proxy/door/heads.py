"""Decide which headers of a client's request the upstream gets (pure).

The default tenant's are passed on, as those of a client that no proxy is before. Of other tenants'
requests only those are that describe the body, the client and the API: gateways take others by
which a request goes to another model (`x-gateway-model-name-rewrite`), host
(`x-portkey-custom-host`) or place in the queue (`x-vllm-priority`), or gets a reply that was made
for somebody else (`idempotency-key`), and which there are nobody can list.
"""

from typing import Final

from proxy.http.exchange import Exchange
from proxy.http.wire import Headers, for_upstream
from proxy.policies.owners import Owners
from store.tenants import DEFAULT

_PASSED: Final = frozenset(
    {
        *(b"accept", b"accept-encoding", b"accept-language", b"content-type", b"content-encoding"),
        *(b"user-agent", b"anthropic-version", b"anthropic-beta", b"openai-beta"),
        *(b"traceparent", b"tracestate"),
    }
)
# What SDKs say of themselves.
_SDK: Final = b"x-stainless-"


def passed_on(exchange: Exchange, *, plain: bool) -> Headers:
    """Return the headers for the upstream; with `plain`, they ask for no content coding."""
    headers = for_upstream(exchange.headers, plain=plain)
    if exchange.tenant == DEFAULT:
        return headers
    return [pair for pair in headers if _is_passed(pair[0].lower())]


def check_headers(owners: Owners, tenant: str, headers: Headers) -> None:
    """Check that no header that is passed on names a version that is hidden from the tenant.

    Raises:
        NotServed: one does.
    """
    if tenant != DEFAULT:
        return
    for name, value in headers:
        # Nearly no value has one, and a product's name and version may.
        if b"@" in value and not _is_passed(name.lower()):
            owners.check(tenant, value.decode("latin-1"), name.decode("latin-1"))


def _is_passed(name: bytes) -> bool:
    return name in _PASSED or name.startswith(_SDK)
