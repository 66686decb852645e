"""Which requests are let through, decided on method and path alone (pure).

An allow-list, never a prefix rule: vLLM keeps its adapter and admin endpoints under the
same `/v1`. A path that is not exactly one of these, in any spelling, is refused.
"""

import re
from enum import Enum
from typing import Final
from urllib.parse import unquote

import msgspec

from proxy.errors import NotAllowed


class Kind(Enum):
    """What is done with a request."""

    CALL = "call"
    FORWARD = "forward"
    FEEDBACK = "feedback"


class Route(msgspec.Struct, frozen=True):
    """A let-through request: what it is, the upstream's path, and who the URL says it is."""

    kind: Kind
    path: str
    dialect: str | None = None
    task: str | None = None
    episode: str | None = None
    agent: str | None = None


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
# A model's name may hold a slash and an adapter's version, and nothing that could climb.
_MODEL: Final = re.compile(
    r"/v1/models/(?!.*\.\.)[A-Za-z0-9][\w.@:+-]*(?:/[\w.@:+-]+)*\Z", re.ASCII
)
_PREFIX: Final = re.compile(
    r"(?:/task/(?P<task>[^/]+))?(?:/episode/(?P<episode>[^/]+))?(?:/agent/(?P<agent>[^/]+))?"
    r"(?P<rest>/.*)\Z"
)


def find_route(method: str, raw_path: str) -> Route:
    """The route of a request, from its path as it was sent (still percent-encoded).

    Raises:
        NotAllowed: it is none that the proxy forwards.
    """
    match = _PREFIX.match(raw_path)
    if match is None:
        raise NotAllowed(_message(method, raw_path), code="unknown_url")
    rest = match["rest"]
    kind = _EXACT.get((method, rest))
    if kind is None and method == "GET" and _MODEL.match(rest):
        kind = Kind.FORWARD
    if kind is None:
        raise NotAllowed(_message(method, rest), code="unknown_url")
    named = {name: unquote(match[name]) for name in ("task", "episode", "agent") if match[name]}
    return Route(kind=kind, path=rest, dialect=DIALECT_OF.get(rest), **named)


def _message(method: str, path: str) -> str:
    hint = ""
    if (method, "/v1" + path) in _EXACT:
        hint = " Is the base URL missing its /v1?"
    elif any(path == allowed for _, allowed in _EXACT):
        allowed = " or ".join(m for m, p in _EXACT if p == path)
        hint = f" Use {allowed}."
    return f"{method} {path} is not a path that Pawl serves.{hint}"
