"""Decide on method and path alone which requests are let through, and how (pure).

This is an allow-list, never a prefix rule: vLLM serves its adapter and admin endpoints under the
same `/v1`. A path that is not exactly one of these, in any spelling, is refused. The routes of
recorded calls are those of the wire formats (`proxy.formats.registry`); the rest of OpenAI's API is
forwarded untouched and unrecorded.
"""

import re
from collections.abc import Collection
from enum import Enum
from typing import Final
from urllib.parse import unquote

import msgspec

from proxy.errors import NotAllowed
from proxy.formats.base import WireFormat
from proxy.formats.registry import FORMATS
from store.keys import Scope

ID: Final = r"(?!\.)[\w.:-]+"
# vLLM's own paths where OpenAI's API has the id of a stored completion or response.
# In any case of letters: a server, or what is before it, may read them alike.
NOT_VLLM: Final = r"(?!(?i:render|derender|batch)(?:/|\Z))"
STORES: Final = (
    "assistants|batches|chatkit|containers|conversations|evals|files|skills|threads|uploads"
    "|vector_stores|videos"
)


class Rule(msgspec.Struct, frozen=True):
    """Allow paths of one kind; `administers` marks those that manage the account at the provider.

    Those need a key that may do so, and are therefore forwarded only with the client's own.
    Deleting a model needs no key at many servers, and takes it from everybody: see
    `proxy.forwarding`. `keeps` marks what reaches the files, responses and the like that the
    provider keeps under that account, whoever put them there.
    """

    methods: frozenset[str]
    label: str
    pattern: re.Pattern[str]
    administers: bool = False
    keeps: bool = False


def _rule(
    methods: str, label: str, pattern: str, *, administers: bool = False, keeps: bool = False
) -> Rule:
    compiled = re.compile(pattern + r"\Z", re.ASCII)
    return Rule(frozenset(methods.split()), label, compiled, administers, keeps)


RULES: Final = (
    *(
        _rule("GET POST DELETE", f"/v1/{store}", rf"/v1/{store}(?:/{ID}){{0,6}}", keeps=True)
        for store in STORES.split("|")
    ),
    _rule(
        "POST",
        "/v1/audio",
        r"/v1/audio/(?:speech|transcriptions|translations)",
    ),
    _rule("POST", "/v1/audio/…", r"/v1/audio/(?:voices|voice_consents)", keeps=True),
    _rule("POST", "/v1/images", r"/v1/images/(?:generations|edits|variations)"),
    _rule("POST", "/v1/moderations", r"/v1/moderations"),
    _rule("POST", "/v1/content_provenance_checks", r"/v1/content_provenance_checks"),
    # A secret opens a session beside this proxy, which may name whatever the account keeps.
    _rule("POST", "/v1/realtime", r"/v1/realtime/client_secrets", keeps=True),
    _rule(
        "POST",
        "/v1/realtime/…",
        rf"/v1/realtime/calls/{ID}/(?:accept|hangup|refer|reject)",
        keeps=True,
    ),
    # They may name a stored response to go on from.
    _rule("POST", "/v1/responses/…", r"/v1/responses/(?:compact|input_tokens)", keeps=True),
    _rule("POST", "/v1/responses/…", rf"/v1/responses/{NOT_VLLM}{ID}/cancel", keeps=True),
    _rule("GET DELETE", "/v1/responses/…", rf"/v1/responses/{NOT_VLLM}{ID}", keeps=True),
    _rule("GET", "/v1/responses/…", rf"/v1/responses/{NOT_VLLM}{ID}/input_items", keeps=True),
    _rule(
        "GET",
        "/v1/chat/completions/…",
        rf"/v1/chat/completions(?:/{NOT_VLLM}{ID}(?:/messages)?)?",
        keeps=True,
    ),
    _rule(
        "POST DELETE",
        "/v1/chat/completions/…",
        rf"/v1/chat/completions/{NOT_VLLM}{ID}",
        keeps=True,
    ),
    *(
        _rule("GET POST DELETE", f"/v1/{part}", rf"/v1/{part}(?:/{ID}){{0,8}}", administers=True)
        for part in ("organization", "projects", "fine_tuning")
    ),
    _rule("DELETE", "/v1/models/…", rf"/v1/models/{ID}", administers=True),
)


def openai_rule(method: str, path: str) -> Rule | None:
    """Return the rule that lets a request through, or None if there is none."""
    return next(
        (rule for rule in RULES if method in rule.methods and rule.pattern.match(path)), None
    )


FEEDBACK: Final = "/feedback"


class Kind(Enum):
    """Name the ways in which a request is handled."""

    CALL = "call"
    FORWARD = "forward"
    FEEDBACK = "feedback"


# Looking a member of an enumeration up takes long in Python 3.11.
STATED: Final = Kind.FEEDBACK


class Route(msgspec.Struct, frozen=True):
    """Describe an allowed request: its kind, the upstream's path, and the names in its prefix."""

    kind: Kind
    path: str
    # The format that a recorded call speaks.
    wire_format: WireFormat | None = None
    task: str | None = None
    episode: str | None = None
    agent: str | None = None
    split: str | None = None
    # The path in metrics, which never contains an id.
    label: str = ""
    # Manages the account at the provider: forwarded only with the client's own key.
    administers: bool = False
    # Reaches what the provider keeps under one account, for all tenants.
    keeps: bool = False

    @property
    def scope(self) -> Scope:
        """Return what a key must be for."""
        if self.kind is STATED:
            return "feedback"
        return "admin" if self.administers else "infer"


_FORWARDED: Final = (
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)


def exact_routes(formats: Collection[WireFormat]) -> dict[tuple[str, str], Route]:
    """Return the routes whose paths are exact, by method and path."""
    calls = [
        Route(kind=Kind.CALL, path=one.path, wire_format=one, label=one.path) for one in formats
    ]
    beside = [("POST", path) for one in formats for path in one.forwarded]
    routes = {("POST", route.path): route for route in calls}
    for method, path in (*beside, *_FORWARDED):
        routes[method, path] = Route(kind=Kind.FORWARD, path=path, label=path)
    routes["POST", FEEDBACK] = Route(kind=Kind.FEEDBACK, path=FEEDBACK, label=FEEDBACK)
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
        raise NotAllowed(_message(method, raw_path), code="unknown_url")
    rest = match["rest"]
    named = {name: unquote(match[name]) for name in PREFIX_NAMES if match[name]}
    return msgspec.structs.replace(_route(method, rest), **named)


def _route(method: str, path: str) -> Route:
    # HEAD is allowed wherever GET is (RFC 9110 §9.3.2).
    reading = "GET" if method == "HEAD" else method
    plain = _EXACT.get((reading, path))
    if plain is not None:
        return plain
    if reading == "GET" and _MODEL.match(path):
        return Route(kind=Kind.FORWARD, path=path, label="/v1/models")
    rule = openai_rule(reading, path)
    if rule is None:
        raise NotAllowed(_message(method, path), code="unknown_url")
    return Route(
        kind=Kind.FORWARD,
        path=path,
        label=rule.label,
        administers=rule.administers,
        keeps=rule.keeps,
    )


def _message(method: str, path: str) -> str:
    hint = ""
    if (method, "/v1" + path) in _EXACT:
        hint = " Is the base URL missing its /v1?"
    elif any(path == allowed for _, allowed in _EXACT):
        allowed = " or ".join(m for m, p in _EXACT if p == path)
        hint = f" Use {allowed}."
    return f"{method} {path} is not a path that Pawl serves.{hint}"
