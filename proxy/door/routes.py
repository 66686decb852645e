"""Routes of the requests that are let through, decided on method and path alone (pure).

This is an allow-list, never a prefix rule: vLLM serves its adapter and admin endpoints under the
same `/v1`. A path that is not exactly one of these, in any spelling, is refused.
"""

import re
from enum import Enum
from typing import Final
from urllib.parse import unquote

import msgspec

from proxy.door.openai_paths import openai_rule
from proxy.errors import NotAllowed


class Kind(Enum):
    """The ways in which a request is handled."""

    CALL = "call"
    FORWARD = "forward"
    FEEDBACK = "feedback"


class Route(msgspec.Struct, frozen=True):
    """An allowed request: its kind, the upstream's path, and the names in the URL's prefix."""

    kind: Kind
    path: str
    dialect: str | None = None
    task: str | None = None
    episode: str | None = None
    agent: str | None = None
    # The path in metrics, which never contains an id.
    label: str = ""
    # Manages the account at the provider: forwarded only with the client's own key.
    administers: bool = False


_EXACT: Final = {
    ("POST", "/v1/chat/completions"): Kind.CALL,
    ("POST", "/v1/completions"): Kind.CALL,
    ("POST", "/v1/responses"): Kind.CALL,
    ("POST", "/v1/messages"): Kind.CALL,
    ("POST", "/v1/messages/count_tokens"): Kind.FORWARD,
    ("POST", "/v1/embeddings"): Kind.FORWARD,
    ("GET", "/v1/models"): Kind.FORWARD,
    ("POST", "/tokenize"): Kind.FORWARD,
    ("POST", "/detokenize"): Kind.FORWARD,
    ("POST", "/feedback"): Kind.FEEDBACK,
}
DIALECT_OF: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
_PLAIN: Final = {
    (method, path): Route(kind=kind, path=path, dialect=DIALECT_OF.get(path), label=path)
    for (method, path), kind in _EXACT.items()
}
# A model's name may contain slashes and an adapter's version, but no `..`.
_MODEL: Final = re.compile(
    r"/v1/models/(?!.*\.\.)[A-Za-z0-9][\w.@:+-]*(?:/[\w.@:+-]+)*\Z", re.ASCII
)
_PREFIX: Final = re.compile(
    r"(?:/task/(?P<task>[^/]+))?(?:/episode/(?P<episode>[^/]+))?(?:/agent/(?P<agent>[^/]+))?"
    r"(?P<rest>/.*)\Z"
)


def find_route(method: str, raw_path: str) -> Route:
    """Return the route of a request, from its path as it was sent (still percent-encoded).

    Raises:
        NotAllowed: the proxy does not serve this method and path.
    """
    plain = _PLAIN.get((method, raw_path))
    if plain is not None:
        return plain
    match = _PREFIX.match(raw_path)
    if match is None:
        raise NotAllowed(_message(method, raw_path), code="unknown_url")
    rest = match["rest"]
    named = {name: unquote(match[name]) for name in ("task", "episode", "agent") if match[name]}
    return msgspec.structs.replace(_route(method, rest), **named)


def _route(method: str, path: str) -> Route:
    # HEAD is allowed wherever GET is (RFC 9110 §9.3.2).
    reading = "GET" if method == "HEAD" else method
    plain = _PLAIN.get((reading, path))
    if plain is not None:
        return plain
    if reading == "GET" and _MODEL.match(path):
        return Route(kind=Kind.FORWARD, path=path, label="/v1/models")
    rule = openai_rule(reading, path)
    if rule is None:
        raise NotAllowed(_message(method, path), code="unknown_url")
    return Route(kind=Kind.FORWARD, path=path, label=rule.label, administers=rule.administers)


def _message(method: str, path: str) -> str:
    hint = ""
    if (method, "/v1" + path) in _EXACT:
        hint = " Is the base URL missing its /v1?"
    elif any(path == allowed for _, allowed in _EXACT):
        allowed = " or ".join(m for m, p in _EXACT if p == path)
        hint = f" Use {allowed}."
    return f"{method} {path} is not a path that Pawl serves.{hint}"
