"""Odd heads and paths: no failure of the proxy's, and nothing upstream that may not be there."""

import re
import socket
from contextlib import suppress
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.ports.conftest import READ, UPSTREAM_KEY, Ports
from tests.fuzz.ports.odd import connection, with_keys
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import made_of

# Whatever came before: it ends the connection, once all is answered. Twice, as the first may be
# taken for the end of a body.
LAST: Final = (
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-mark: nobody\r\nConnection: close\r\n\r\n" * 2
)
HEAD: Final = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
METRICS: Final = b"# HELP pawl_"
PATIENCE_S: Final = 60.0
# Failures of the proxy's that the document has, and that need no fault in it.
DOCUMENTED: Final = {(503, "proxy"), (507, "proxy"), (505, "client")}


def answered(port: int, text: bytes, *, to_the_end: bool) -> bytes:
    """What comes back until the connection is closed, or until something is answered."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        # Who refuses early closes while we still send; its answer is there all the same.
        with suppress(ConnectionError):
            client.sendall(text)
        with suppress(ConnectionResetError):
            while data := client.recv(2**16):
                received += data
                if not to_the_end and HEAD.search(received):
                    break
    return received


def heads(received: bytes) -> list[tuple[int, dict[str, str]]]:
    """Status and headers of each answer."""
    found = []
    for status, lines in HEAD.findall(received):
        pairs = (line.split(": ", 1) for line in lines.decode("latin-1").splitlines())
        found.append((int(status), {name.lower(): value for name, value in pairs}))
    return found


@fuzzing(400)
@given(odd=made_of(connection))
def test_odd_data_port_request_is_answered_and_forwards_nothing_forbidden(
    ports: Ports, odd: bytes
) -> None:
    # Twice, as the first may be taken for the end of a body.
    received = answered(ports.data, with_keys(odd, ports.keys) + LAST * 2, to_the_end=True)
    answers = heads(received)
    assert answers, "nobody is answered"
    for status, headers in answers:
        fault = headers.get("x-pawl-fault", "")
        assert status < 500 or (status, fault) in DOCUMENTED, (status, headers)
        assert status < 400 or fault in ("client", "proxy"), (status, headers)
        assert "x-injected" not in headers
    assert UPSTREAM_KEY.encode() not in received
    ports.check()


@fuzzing(100)
@given(odd=made_of(connection), path=st.sampled_from((b"/metrics", b"/healthz", b"/readyz", None)))
def test_odd_admin_port_request_never_fails_or_shows_metrics_without_a_key(
    ports: Ports, odd: bytes, path: bytes | None
) -> None:
    text = with_keys(odd, ports.keys)
    if path is not None:
        text = re.sub(rb"^(\S+) [^ ?#]*", rb"\1 " + path, text)
    received = answered(ports.admin, text + LAST, to_the_end=False)
    # aiohttp's answer may be lost where bytes follow that it does not read.
    assert all(status < 500 for status, _ in heads(received)), received
    may_read = any(ports.keys[name].encode() in text for name in READ)
    assert may_read or METRICS not in received
    ports.check()
