"""List the paths of OpenAI's API beside calls, forwarded untouched and unrecorded (pure).

This is an allow-list of methods and paths, as in `proxy.door.routes`: files, audio, images,
batches, stored conversations and the like. No rule matches a path of vLLM that is not OpenAI's too.
"""

import re
from typing import Final

import msgspec

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
    `proxy.door.forward`. `keeps` marks what reaches the files, responses and the like that the
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
