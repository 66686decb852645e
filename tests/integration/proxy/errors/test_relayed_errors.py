"""Errors as clients see them: the upstream's are named as its own, and each API has its words."""

import json

from tests.integration.conftest import Proxy
from tests.integration.faults.test_faults import (
    APIS,
    JSON,
    parts,
    port_of,
    sized,
)
from tests.integration.proxy.test_transparency import MESSAGES, WHOLE, proxy, vllm
from tests.support.servers.raw_upstream import (
    RawUpstream,
    post,
    raw_ask,
    says,
)

__all__ = ["proxy", "vllm"]


# errors


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


async def test_relayed_errors_name_the_upstream_and_are_anthropics_to_its_clients(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    for status, kind in KINDS.items():
        said = {"message": "no", "type": "BadRequestError", "param": None, "code": status}
        body = json.dumps({"error": said}).encode()
        vllm.script = says(sized(b"%d No" % status, body, JSON))
        for path in APIS:
            reply = await raw_ask(port_of(proxy), post(path, APIS[path]))
            assert reply.startswith(b"HTTP/1.1 %d No\r\n" % status)
            assert reply.lower().count(b"x-pawl-fault: upstream\r\n") == 1
            seen = parts(reply)[2]
            if path == MESSAGES:
                wanted = {"type": "error", "error": {"type": kind, "message": "no"}}
                assert json.loads(seen) == wanted
            else:
                assert seen == body


async def test_our_own_refusals_are_anthropics_to_its_clients(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    vllm.script = says(sized(b"200 OK", WHOLE, JSON)[:-1], then="reset")
    large = b'{"model":"' + b"x" * (8 * 2**20) + b'"}'
    for body, status, kind in (
        (large, 413, b"request_too_large"),
        (APIS[MESSAGES], 502, b"api_error"),
    ):
        reply = await raw_ask(port_of(proxy), post(MESSAGES, body))
        assert reply.startswith(b"HTTP/1.1 %d " % status)
        assert b'{"type":"error","error":{"type":"%b"' % kind in reply


async def test_what_speaks_anthropics_api_itself_is_passed_on_untouched(
    proxy: Proxy, vllm: RawUpstream
) -> None:
    vllm.owned_by = "anthropic"
    body = b'{"type":"error", "error":{"type":"some_new_error","message":"no"},"request_id":"r"}'
    vllm.script = says(sized(b"400 No", body, JSON))
    reply = await raw_ask(port_of(proxy), post(MESSAGES, APIS[MESSAGES]))
    assert parts(reply)[2] == body


async def test_a_forwarded_reply_that_breaks_off(proxy: Proxy, vllm: RawUpstream) -> None:
    request = post("/v1/embeddings", b"{}")
    vllm.script = says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", then="reset")
    reply = await raw_ask(port_of(proxy), request)
    assert reply.startswith(b"HTTP/1.1 502 ")
    assert b"x-pawl-fault: upstream\r\n" in reply
    assert b"broke off" in reply
    # What has begun can only be torn.
    vllm.script = says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", then="reset")
    assert (await raw_ask(port_of(proxy), request)).endswith(b"\r\n\r\nabc")
    vllm.script = says(sized(b"404 Nope", b"{}", JSON))
    reply = await raw_ask(port_of(proxy), request)
    assert reply.startswith(b"HTTP/1.1 404 Nope\r\n")
    assert b"x-pawl-fault: upstream\r\n" in reply
