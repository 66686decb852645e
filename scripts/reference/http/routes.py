"""List the routes of the data port, as `proxy.door.routes` and `proxy.door.openai_paths` do."""

import re
from typing import Final, NamedTuple

from proxy.door import openai_paths, routes
from proxy.door.routes import Kind
from proxy.formats.base import WireFormat
from proxy.formats.registry import FORMATS

ID: Final = "<id>"
# How the page marks segments that may follow a path; their largest number comes after it.
BELOW_MARK: Final = "/…×"
BELOW: Final = re.compile(r"\(\?:/<id>\)\{0,(\d)\}")
# The regular expression of a route has at most these: literals, groups and optional groups.
GROUP: Final = re.compile(r"\(\?:((?:[^()]|\([^()]*\))*)\)(\??)")


class Forwarded(NamedTuple):
    """Describe routes forwarded unrecorded: methods, readable paths, and what they reach.

    That may be the account at the provider, or what is kept under it for all tenants.
    """

    methods: tuple[str, ...]
    paths: tuple[str, ...]
    administers: bool = False
    keeps: bool = False


def exact_routes() -> dict[tuple[str, str], Kind]:
    """Return what is done with each exact method and path."""
    return {where: route.kind for where, route in routes._EXACT.items()}


def recorded_paths() -> dict[str, WireFormat]:
    """Return the wire format of each recorded path."""
    return {one.path: one for one in FORMATS.values()}


def prefix_parts() -> tuple[str, ...]:
    """Return the parts that a URL's prefix may name, in their order."""
    return routes.PREFIX_NAMES


def forwarded_routes() -> list[Forwarded]:
    """Return all forwarded routes: the exact ones, one model, and the rest of OpenAI's API."""
    exact = [
        Forwarded((method,), (path,))
        for (method, path), kind in exact_routes().items()
        if kind is Kind.FORWARD
    ]
    rules = [
        Forwarded(
            tuple(sorted(rule.methods)), readable_paths(rule.pattern), rule.administers, rule.keeps
        )
        for rule in openai_paths.RULES
    ]
    return [*exact, Forwarded(("GET",), ("/v1/models/{model}",)), *rules]


def readable_paths(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Return the paths that a route's pattern matches, with `{id}` for an id.

    Segments that may follow, N at most, are written as `BELOW_MARK` and N.
    """
    text = pattern.pattern.removesuffix(r"\Z").replace(openai_paths.NOT_VLLM, "")
    text = BELOW.sub(rf"{BELOW_MARK}\1", text.replace(openai_paths.ID, ID))
    return tuple(path.replace(ID, "{id}") for path in _expanded(text))


def _expanded(text: str) -> list[str]:
    """Return what a pattern of literals, alternatives and optional groups can be.

    Raises:
        ValueError: it has something else in it.
    """
    group = GROUP.search(text)
    if group is None:
        if re.search(r"[()|?*+{}\\]", text):
            raise ValueError(f"{text!r} is not as simple as a route's pattern is expected to be")
        return [text]
    before, after = text[: group.start()], text[group.end() :]
    middles = [*([""] if group[2] else []), *_alternatives(group[1])]
    return [path for middle in middles for path in _expanded(before + middle + after)]


def _alternatives(text: str) -> list[str]:
    """Return the alternatives of a group; those inside inner groups are left for later."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
