"""Decide on method and path alone which requests are let through, and how (pure).

This is an allow-list, never a prefix rule: vLLM serves its adapter and admin endpoints under the
same `/v1`. A path is refused unless it is spelled exactly as the list has it. The routes of
recorded calls are those of the wire formats (`proxy.formats.registry`); the rest of OpenAI's API is
forwarded untouched and unrecorded.
"""

import re
from collections.abc import Collection
from contextlib import suppress
from typing import Final
from urllib.parse import unquote

import msgspec

from proxy.errors import NotAllowed
from proxy.formats.base import WireFormat
from proxy.formats.registry import FORMATS
from store.grants import Scope

FEEDBACK: Final = "/feedback"
METHODS: Final = ("POST", "GET", "DELETE")


class Route(msgspec.Struct, frozen=True):
    """An allowed request: its path at the upstream, and the names in the prefix of its URL."""

    path: str
    # The format of a recorded call; None for feedback and forwarded requests.
    wire_format: WireFormat | None = None
    task: str | None = None
    episode: str | None = None
    agent: str | None = None
    split: str | None = None
    # The path in metrics, which never contains an id.
    label: str = ""
    # Manages the account at the provider, which needs a key with that right: forwarded only with
    # the client's own key. Many servers delete a model without a key: see `proxy.forwarding`.
    manages_account: bool = False
    # Reaches objects that the provider keeps under one account, for all tenants.
    reaches_stored: bool = False

    @property
    def scope(self) -> Scope:
        """Return the scope that a key must have."""
        if self.path == FEEDBACK:
            return "feedback"
        return "admin" if self.manages_account else "infer"


_FORWARDED: Final = (
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
_ID: Final = r"(?!\.)[\w.:-]+"
# vLLM's own paths where OpenAI's API has the id of a stored completion or response.
# In any letter case: a server, or a proxy before it, may ignore case.
_NOT_VLLM: Final = r"(?!(?i:render|derender|batch)(?:/|\Z))"
_STORED: Final = _NOT_VLLM + _ID
_STORES: Final = (
    *("assistants", "batches", "chatkit", "containers", "conversations", "evals", "files"),
    *("skills", "threads", "uploads", "vector_stores", "videos"),
)
# Other requests of OpenAI's API: methods, the path in metrics, and the paths.
_PASSED_ON: Final = (
    ("POST", "/v1/audio", r"/v1/audio/(?:speech|transcriptions|translations)"),
    ("POST", "/v1/images", r"/v1/images/(?:generations|edits|variations)"),
    ("POST", "/v1/moderations", r"/v1/moderations"),
    ("POST", "/v1/content_provenance_checks", r"/v1/content_provenance_checks"),
)
_KEPT: Final = (
    *(("GET POST DELETE", f"/v1/{one}", rf"/v1/{one}(?:/{_ID}){{0,6}}") for one in _STORES),
    ("POST", "/v1/audio/…", r"/v1/audio/(?:voices|voice_consents)"),
    # A secret opens a session that bypasses this proxy and may name any object of the account.
    ("POST", "/v1/realtime", r"/v1/realtime/client_secrets"),
    ("POST", "/v1/realtime/…", rf"/v1/realtime/calls/{_ID}/(?:accept|hangup|refer|reject)"),
    # They may continue a stored response.
    ("POST", "/v1/responses/…", r"/v1/responses/(?:compact|input_tokens)"),
    ("POST", "/v1/responses/…", rf"/v1/responses/{_STORED}/cancel"),
    ("GET DELETE", "/v1/responses/…", rf"/v1/responses/{_STORED}"),
    ("GET", "/v1/responses/…", rf"/v1/responses/{_STORED}/input_items"),
    ("GET", "/v1/chat/completions/…", rf"/v1/chat/completions(?:/{_STORED}(?:/messages)?)?"),
    ("POST DELETE", "/v1/chat/completions/…", rf"/v1/chat/completions/{_STORED}"),
)
_ADMINISTERED: Final = (
    *(
        ("GET POST DELETE", f"/v1/{one}", rf"/v1/{one}(?:/{_ID}){{0,8}}")
        for one in ("organization", "projects", "fine_tuning")
    ),
    ("DELETE", "/v1/models/…", rf"/v1/models/{_ID}"),
)
RULES: Final = tuple(
    (
        frozenset(methods.split()),
        re.compile(pattern + r"\Z", re.ASCII),
        Route("", label=label, manages_account=manages_account, reaches_stored=reaches_stored),
    )
    for table, manages_account, reaches_stored in (
        (_PASSED_ON, False, False),
        (_KEPT, False, True),
        (_ADMINISTERED, True, False),
    )
    for methods, label, pattern in table
)


def exact_routes(formats: Collection[WireFormat]) -> dict[tuple[str, str], Route]:
    """Return the routes with one fixed path each, by method and path."""
    routes = {
        ("POST", one.path): Route(one.path, wire_format=one, label=one.path) for one in formats
    }
    beside = [("POST", path) for one in formats for path in one.forwarded]
    for method, path in (*beside, *_FORWARDED):
        routes[method, path] = Route(path, label=path)
    routes["POST", FEEDBACK] = Route(FEEDBACK, label=FEEDBACK)
    return routes


_EXACT: Final = exact_routes(FORMATS.values())
# A model's name may contain slashes and an adapter's version, but no `..`.
_MODEL: Final = re.compile(
    r"/v1/models/(?!.*\.\.)[A-Za-z0-9][\w.@:+-]*(?:/[\w.@:+-]+)*\Z", re.ASCII
)
_PREFIX: Final = re.compile(
    r"(?:/task/(?P<task>[^/]+))?(?:/episode/(?P<episode>[^/]+))?(?:/agent/(?P<agent>[^/]+))?"
    r"(?:/split/(?P<split>[^/]+))?(?P<rest>/.*)\Z"
)
PREFIX_NAMES: Final = tuple(name for name in _PREFIX.groupindex if name != "rest")


def find_route(method: str, raw_path: str) -> Route:
    """Return the route of a request, from its path as it was sent (still percent-encoded).

    Raises:
        NotAllowed: the proxy does not serve this method and path.
    """
    plain = _EXACT.get((method, raw_path))
    if plain is not None:
        return plain
    match = _PREFIX.match(raw_path)
    if match is None:
        raise _not_allowed(method, raw_path)
    named = {name: unquote(match[name]) for name in PREFIX_NAMES if match[name]}
    return msgspec.structs.replace(_route(method, match["rest"]), **named)


def is_served(raw_path: str) -> bool:
    """Return whether the proxy serves any method at a path, as it was sent."""
    for method in METHODS:
        with suppress(NotAllowed):
            find_route(method, raw_path)
            return True
    return False


def _route(method: str, path: str) -> Route:
    # HEAD is allowed wherever GET is (RFC 9110 §9.3.2).
    reading = "GET" if method == "HEAD" else method
    plain = _EXACT.get((reading, path))
    if plain is not None:
        return plain
    if reading == "GET" and _MODEL.match(path):
        return Route(path, label="/v1/models")
    for methods, pattern, route in RULES:
        if reading in methods and pattern.match(path):
            return msgspec.structs.replace(route, path=path)
    raise _not_allowed(method, path)


def _not_allowed(method: str, path: str) -> NotAllowed:
    hint = ""
    if (method, "/v1" + path) in _EXACT:
        hint = " Is the base URL missing its /v1?"
    elif (method, path.removeprefix("/v1")) in _EXACT:
        hint = f" It is {path.removeprefix('/v1')}, without /v1."
    elif allowed := " or ".join(m for m, p in _EXACT if p == path):
        hint = f" Use {allowed}."
    message = f"{method} {path} is not a path that Pawl serves.{hint}"
    return NotAllowed(message, code="unknown_url")
