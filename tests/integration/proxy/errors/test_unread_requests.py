"""What the admin port cannot read is answered, and is no failure that the log has."""

import pytest

from tests.integration.conftest import Proxy
from tests.support.servers.raw_upstream import raw_ask


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Pawl: a\rb\r\n\r\n",
        b'{"event":"call","level":"info"}\n\n',
    ],
)
async def test_a_stranger_writes_nothing_into_the_log(
    proxy: Proxy, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await raw_ask(int(proxy.admin.rpartition(":")[2]), request_bytes)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert caplog.records == []
