"""An upstream's own key goes there, the client's does not, and no redirect takes one elsewhere."""

import pytest

from proxy.errors import Redirected
from proxy.upstreams.litellm import LitellmReply
from proxy.upstreams.server import VERSION, Key, Style, check_redirect

CLIENT = [
    (b"authorization", b"Bearer client"),
    (b"X-Api-Key", b"client"),
    (b"Api-Key", b"client"),
    (b"User-Agent", b"x"),
]
BEARER = (b"Authorization", b"Bearer ours")
PLAIN = (b"x-api-key", b"ours")


@pytest.mark.parametrize(
    ("style", "target", "shown"),
    [
        ("authorization", "/v1/messages", [BEARER]),
        ("x-api-key", "/v1/chat/completions", [PLAIN]),
        ("anthropic", "/v1/chat/completions", [BEARER]),
        ("anthropic", "/v1/messages?beta=true", [VERSION, PLAIN]),
        ("anthropic", "/v1/models", [VERSION, PLAIN]),
    ],
)
def test_the_key_is_shown_as_the_server_wants_it(
    style: Style, target: str, shown: list[tuple[bytes, bytes]]
) -> None:
    assert Key("ours", style).shown(CLIENT, target) == [(b"User-Agent", b"x"), *shown]


def test_the_version_that_a_client_speaks_is_kept() -> None:
    spoken = (b"Anthropic-Version", b"2099-01-01")
    assert Key("ours", "anthropic").shown([spoken], "/v1/messages") == [spoken, PLAIN]


def test_a_key_does_not_show_in_logs() -> None:
    assert "ours" not in repr(Key("ours", "authorization"))


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
def test_redirect_within_the_proxy_is_passed_on(location: bytes) -> None:
    assert not is_refused(location)


def test_each_location_of_several_is_checked() -> None:
    reply = LitellmReply(302, [(b"Location", b"/x"), (b"location", b"https://evil")], b"")
    with pytest.raises(Redirected, match="answered 302"):
        check_redirect(reply, KEY)
