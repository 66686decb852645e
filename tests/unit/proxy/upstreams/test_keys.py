"""An upstream's own key goes there, and the client's does not."""

import pytest

from proxy.upstreams.server import VERSION, Key, Style

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
