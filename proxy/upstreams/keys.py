"""Send an upstream's key in place of the client's credentials (pure)."""

from typing import Final, Literal

from proxy.http.wire import Headers

# The header of OpenAI's API, that of many gateways, and Anthropic's choice: `x-api-key` for its
# own API, and a bearer token for the one in OpenAI's format
# (https://docs.anthropic.com/en/api/openai-sdk).
Style = Literal["authorization", "x-api-key", "anthropic"]

# Client credentials, removed before ours is added.
CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key"})
ANTHROPICS_OWN: Final = ("/v1/messages", "/v1/models")
VERSION: Final = (b"anthropic-version", b"2023-06-01")


class Key:
    """Hold a secret, and the style of header that it is sent in."""

    __slots__ = ("_bearer", "_plain", "_style")

    def __init__(self, secret: str, style: Style) -> None:
        """Prepare both headers that `style` may call for."""
        self._style = style
        self._bearer = (b"Authorization", b"Bearer " + secret.encode())
        self._plain = (b"x-api-key", secret.encode())

    def shown(self, headers: Headers, target: str) -> Headers:
        """Return `headers` with this key and without the client's credentials."""
        kept = [pair for pair in headers if pair[0].lower() not in CREDENTIALS]
        if self._style == "anthropic" and target.startswith(ANTHROPICS_OWN):
            if not any(name.lower() == VERSION[0] for name, _ in kept):
                kept.append(VERSION)
            return [*kept, self._plain]
        return [*kept, self._plain if self._style == "x-api-key" else self._bearer]
