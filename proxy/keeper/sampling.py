"""The settings that a call was sampled with, as the model server understood them (pure).

vLLM's request classes accept more than they document: a number in a string, true for 1. It also
never samples at a temperature between 0 and 0.01. The value that it used is recorded. A setting
whose meaning is unclear is recorded as it was sent, and named in `unreadable`. So is a field that
nobody knows: a server may take it for a constraint.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from proxy.calls.trainable import GUIDED, NEUTRAL, STRICT_TOOLS, STRUCTURED, UNREADABLE
from proxy.formats.base import SamplingRules
from store.values.distribution import REPLAYED
from store.values.grammars import GRAMMAR
from store.values.sampling import number_of, used_temperature

# What a model server understands in every format; the formats have more names of their own.
COMMON: Final = frozenset(
    {*("max_tokens", "stop", "seed", "n", "tool_choice"), *REPLAYED, *NEUTRAL, STRUCTURED, *GUIDED}
)
NUMBERS: Final = frozenset(
    {
        *("top_p", "top_k", "min_p", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
NO_DEFAULTS: Final[Mapping[str, float]] = {}
# How many unknown fields are named.
MOST_UNKNOWN: Final = 8


def sampling_settings(
    request: Mapping[str, Any] | None,
    default_temperature: float,
    rules: SamplingRules,
    defaults: Mapping[str, float] = NO_DEFAULTS,
) -> dict[str, Any]:
    """Return a request's sampling settings; the temperature is always among them.

    Args:
        request: the parsed body, or None if it could not be parsed: no setting is known then.
        default_temperature: what the server uses if the request names none.
        rules: what the request's format says about its fields.
        defaults: what the server uses for other settings that the request does not name.
    """
    if request is None:
        return {UNREADABLE: ["request"]}
    recorded = COMMON | rules.settings
    given = {name: value for name, value in request.items() if value is not None}
    settings = {name: value for name, value in given.items() if name in recorded}
    settings = {"temperature": default_temperature, **defaults, **settings}
    unreadable = list(_read_numbers(settings))
    # A value that none of our parsers takes (one that holds 1e400, for example) is a text here.
    unreadable += [n for n in rules.objects if not isinstance(settings.get(n, {}), dict)]
    unreadable += [n for n in given if n not in recorded and n not in rules.harmless][:MOST_UNKNOWN]
    tools = request.get("tools")
    if not isinstance(tools, list | None):
        unreadable.append("tools")
    elif _has_strict_tool(tools or ()):
        settings[STRICT_TOOLS] = True
    grammar = None if any(name in given for name in GUIDED) else rules.grammar(given)
    if grammar is not None:
        settings[GRAMMAR] = grammar
    if unreadable:
        settings[UNREADABLE] = unreadable
    return settings


def _read_numbers(settings: dict[str, Any]) -> Iterator[str]:
    """Replace numbers as sent by numbers as used, and yield the names of those that are none."""
    used = used_temperature(settings["temperature"])
    if used is None:
        yield "temperature"
    else:
        settings["temperature"] = used
    for name in NUMBERS & settings.keys():
        number = number_of(settings[name])
        if number is None:
            yield name
        elif isinstance(settings[name], str | bool):
            settings[name] = number


def _has_strict_tool(tools: Any) -> bool:
    """Return whether any of the tools is strict.

    vLLM holds strict tools to their schema by a grammar, which changes the distribution. In a
    chat `strict` is a field of the tool's function, in the other APIs of the tool itself. Any
    value but false and null counts as true, because the server may read it so.
    """
    return any(
        holder.get("strict") not in (None, False)
        for tool in tools
        if isinstance(tool, dict)
        for holder in (tool, tool.get("function"))
        if isinstance(holder, dict)
    )
