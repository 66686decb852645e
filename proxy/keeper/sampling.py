"""The settings that a call was sampled with, as the model server understood them (pure).

vLLM's request classes accept more than they document: a number in a string, true for 1. It also
never samples at a temperature between 0 and 0.01. The value that it used is recorded. A setting
whose meaning is unclear is recorded as it was sent, and named in `unreadable`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from proxy.calls.trainable import GRAMMARS, NEUTRAL, STRICT_TOOLS, UNREADABLE
from store.values.sampling import number_of, used_temperature

RECORDED: Final = (
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "n",
    "tool_choice",
    "response_format",
    # The names of the same settings in the Responses and the Messages API.
    *("max_output_tokens", "stop_sequences", "text", "output_config", "thinking"),
    *NEUTRAL,
    *GRAMMARS,
)
NUMBERS: Final = frozenset(
    {
        *("top_p", "top_k", "min_p", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
# Settings that must be of one type to be understood. A value that none of our parsers takes
# (one that holds 1e400, for example) arrives here as its text.
KINDS: Final[Mapping[str, type]] = {"text": dict, "output_config": dict, "thinking": dict}


def sampling_settings(
    request: Mapping[str, Any] | None, default_temperature: float
) -> dict[str, Any]:
    """Return a request's sampling settings; the temperature is always among them.

    Args:
        request: the parsed body, or None if it could not be parsed: no setting is known then.
        default_temperature: what the server uses if the request names none.
    """
    if request is None:
        return {UNREADABLE: ["request"]}
    settings = {
        name: value for name, value in request.items() if value is not None and name in RECORDED
    }
    settings.setdefault("temperature", default_temperature)
    unreadable = list(_read_numbers(settings))
    unreadable += [n for n, kind in KINDS.items() if not isinstance(settings.get(n, kind()), kind)]
    tools = request.get("tools")
    if not isinstance(tools, list | None):
        unreadable.append("tools")
    elif _has_strict_tool(tools or ()):
        settings[STRICT_TOOLS] = True
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
