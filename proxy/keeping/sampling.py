"""The settings that a call was sampled with: what the server made of those it was sent (pure).

vLLM's request classes read more than they say: a number in a string, true for 1. And it samples
at no temperature between 0 and 0.01. What is recorded is what it used; a setting that we cannot
tell the meaning of is recorded as it was sent, and named in `unreadable`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from proxy.trainable import GRAMMARS, NEUTRAL, STRICT_TOOLS, UNREADABLE
from store.sampling import number_of, used_temperature

RECORDED: Final = (
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "n",
    "tool_choice",
    "response_format",
    # The same in the words of the Responses and the Messages API.
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
# What else these are cannot be looked into. A value that no parser of ours takes (with 1e400 in
# it, say) comes as its text.
KINDS: Final[Mapping[str, type]] = {"text": dict, "output_config": dict, "thinking": dict}


def sampling_settings(
    request: Mapping[str, Any] | None, default_temperature: float
) -> dict[str, Any]:
    """Return the settings of a request, the temperature always.

    `request` is None where the body could not be parsed: then nothing is known of them.
    """
    if request is None:
        return {UNREADABLE: ["request"]}
    found = {
        name: value for name, value in request.items() if value is not None and name in RECORDED
    }
    found.setdefault("temperature", default_temperature)
    unreadable = list(_read_numbers(found))
    unreadable += [n for n, kind in KINDS.items() if not isinstance(found.get(n, kind()), kind)]
    tools = request.get("tools")
    if not isinstance(tools, list | None):
        unreadable.append("tools")
    elif _has_strict_tool(tools or ()):
        found[STRICT_TOOLS] = True
    if unreadable:
        found[UNREADABLE] = unreadable
    return found


def _read_numbers(found: dict[str, Any]) -> Iterator[str]:
    """Put the numbers that were used in place of those that were sent; names what is none."""
    used = used_temperature(found["temperature"])
    if used is None:
        yield "temperature"
    else:
        found["temperature"] = used
    for name in NUMBERS & found.keys():
        number = number_of(found[name])
        if number is None:
            yield name
        elif isinstance(found[name], str | bool):
            found[name] = number


def _has_strict_tool(tools: Any) -> bool:
    """vLLM holds strict tools to their schema by a grammar: another distribution.

    In a chat the tool's function says it, in the other APIs the tool itself. Whatever is not
    plainly false may be read as true.
    """
    return any(
        holder.get("strict") not in (None, False)
        for tool in tools
        if isinstance(tool, dict)
        for holder in (tool, tool.get("function"))
        if isinstance(holder, dict)
    )
