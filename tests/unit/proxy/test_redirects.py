"""Which redirects a client with a key of the proxy's gets."""

import pytest

from proxy.errors import Redirected
from proxy.upstreams.litellm import LitellmReply
from proxy.upstreams.replies import check_redirect

KEY = "0123456789abcdef"


def is_refused(location: bytes, status: int = 307, key: str | None = KEY) -> bool:
    reply = LitellmReply(status, [(b"Server", b"s"), (b"LOCATION", location)], b"")
    try:
        check_redirect(reply, key)
    except Redirected:
        return True
    return False


@pytest.mark.parametrize(
    "location",
    [
        *(b"http://127.0.0.1:8000/v1/x", b"https://evil.example", b"HTTP:evil.example", b"//evil/"),
        *(b"/\\evil/", b"\\\\evil/", b"/\t/evil/", b" \thttps://evil", b"ht\ttps://evil", b"x:y"),
        *(b"\x01https://evil", b"evil.example/x", b"\xff", b"\x0chttps://evil"),
    ],
)
def test_no_redirect_leads_a_key_elsewhere(location: bytes) -> None:
    for status in (300, 301, 302, 303, 307, 308, 399):
        assert is_refused(location, status)
    assert not is_refused(location, key=None)
    assert not is_refused(location, 201)
    assert not is_refused(location, 404)


@pytest.mark.parametrize("location", [b"/v1/models/", b"?a=//b", b"#x", b"../x", b"./x", b".", b""])
def test_what_stays_at_the_proxy_is_passed_on(location: bytes) -> None:
    assert not is_refused(location)


def test_any_of_several_is_looked_at() -> None:
    reply = LitellmReply(302, [(b"Location", b"/x"), (b"location", b"https://evil")], b"")
    with pytest.raises(Redirected, match="answered 302"):
        check_redirect(reply, KEY)
