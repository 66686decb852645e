"""The key of an upstream in place of the client's (pure)."""

from typing import Final, Literal

from proxy.http.wire import Headers

# As OpenAI's API wants it, as many gateways do, and as Anthropic's does: there `x-api-key` for
# its own API and a bearer for the one in OpenAI's words
# (https://docs.anthropic.com/en/api/openai-sdk).
Style = Literal["authorization", "x-api-key", "anthropic"]

# What a client shows of itself to whom it believes to speak to.
CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key"})
ANTHROPICS_OWN: Final = ("/v1/messages", "/v1/models")
VERSION: Final = (b"anthropic-version", b"2023-06-01")


class Key:
    """A secret, and how it is shown."""

    __slots__ = ("_bearer", "_plain", "_style")

    def __init__(self, secret: str, style: Style) -> None:
        self._style = style
        self._bearer = (b"Authorization", b"Bearer " + secret.encode())
        self._plain = (b"x-api-key", secret.encode())

    def shown(self, headers: Headers, target: str) -> Headers:
        """`headers` with this key and no other."""
        kept = [pair for pair in headers if pair[0].lower() not in CREDENTIALS]
        if self._style == "anthropic" and target.startswith(ANTHROPICS_OWN):
            if not any(name.lower() == VERSION[0] for name, _ in kept):
                kept.append(VERSION)
            return [*kept, self._plain]
        return [*kept, self._plain if self._style == "x-api-key" else self._bearer]
