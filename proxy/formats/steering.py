"""Find by which fields a request would steer what becomes of it past this proxy (pure).

Model servers and gateways take more fields than their APIs have: other models to try, another
address or key for the provider, a place before the other requests. Which model a request reaches,
where it goes and whose key it takes is for this proxy to say where several tenants share it.

Models are named in fields of any name, so all texts of all fields are looked at but of those that
hold words, ids and settings. Addresses and keys are known by how their fields' names end: LiteLLM
alone has hundreds (`litellm/proxy/auth/auth_utils.py`).
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

# Words, ids and settings, by which no server known names a model.
_NO_MODELS: Final = frozenset(
    {
        *("messages", "input", "prompt", "suffix", "system", "instructions", "query", "text"),
        *("texts", "documents", "functions", "metadata", "stop", "stop_sequences", "user"),
        *("safety_identifier", "prompt_cache_key", "cache_salt", "session_id", "request_id"),
        *("litellm_session_id", "litellm_trace_id", "previous_response_id", "conversation"),
        *("response_format", "text_format", "output_config", "structured_outputs", "guided_json"),
        *("guided_choice", "guided_regex", "guided_grammar", "regex", "ebnf", "json_schema"),
        *("chat_template", "chat_template_kwargs", "bad_words", "prediction", "tool_choice"),
        *("function_call", "include", "reasoning", "thinking", "logit_bias", "voice"),
    }
)
# Definitions of tools are words, too, but a tool that makes pictures has a `model`.
_TOOLS: Final = "tools"
MODEL: Final = "model"
# LiteLLM hands on what is in these as if it stood beside them.
_BESIDE: Final = ("extra_body", "litellm_embedding_config")
# Also read there by LiteLLM's logging, which is told host and key by the fields.
_NOTES: Final = ("metadata", "litellm_metadata")
# As they end without their underscores, in small letters.
_PLACES: Final = (
    r"(?:api(?:base|url|key|token)|baseurl|(?:target|server|deployment|webhook|callback)url"
    r"|endpoint(?:url)?|secret(?:key)?|accesskey(?:id)?|sessiontoken|adtoken|identitytoken"
    r"|credentials?|credentialname|rolename|profilename|langfuse\w*host)"
)
_PLACE_IN_NOTES: Final = re.compile(rf".*{_PLACES}")
_PLACE: Final = re.compile(
    rf".*(?:{_PLACES}|host)|(?:extra|default)?(?:headers|query)"
    r"|userconfig|modellist|litellmparams|customllmprovider|proxies|userapikeyauth\w*"
)
# What is looked at by its name. Servers written in Go take it for a field's in capitals, too.
_LOOKED_AT: Final = frozenset(
    {
        *(MODEL, "messages", "input", "prompt", "metadata", "extra_body", "conversation"),
        *("previous_response_id", "request_id", "rid", "id", "response_id", "priority", _TOOLS),
    }
)
# Before which other request one is worked on.
PRIORITY: Final = "priority"
_MOST_NAMES: Final = 4096
_NESTED: Final = (dict, list)


def named_models(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each text by which fields may name a model, after the name of its field."""
    for name, value in fields.items():
        if isinstance(value, str):
            if name not in _NO_MODELS:
                yield name, value
        elif name == _TOOLS:
            yield from _of_tools(value)
        elif isinstance(value, _NESTED) and name not in _NO_MODELS:
            yield from ((name, text) for text in _texts(value))


def _of_tools(tools: object) -> Iterator[tuple[str, str]]:
    for tool in tools if isinstance(tools, list) else ():
        model = tool.get(MODEL) if isinstance(tool, dict) else None
        if isinstance(model, str):
            yield _TOOLS, model


def _texts(value: object) -> Iterator[str]:
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting.extend(one)
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def place_name(fields: Mapping[str, Any]) -> str | None:
    """Return the name of a field that sends a request elsewhere, or with another key; else None."""
    for name, value in fields.items():
        if value is not None and _is_place(name):
            return name
    for holder in _BESIDE:
        inner = fields.get(holder)
        place = place_name(inner) if isinstance(inner, dict) else None
        if place is not None:
            return place
    return _place_in_notes(fields)


def _place_in_notes(fields: Mapping[str, Any]) -> str | None:
    for holder in _NOTES:
        notes = fields.get(holder)
        for name in notes if isinstance(notes, dict) else ():
            if _PLACE_IN_NOTES.fullmatch(_plain(name)):
                return str(name)
    return None


@lru_cache(_MOST_NAMES)
def _is_place(name: str) -> bool:
    return _PLACE.fullmatch(_plain(name)) is not None


def _plain(name: str) -> str:
    """Return a name as it is compared: `apiBase`, `api-base` and `API_BASE` are alike."""
    return name.casefold().replace("_", "").replace("-", "")


def misspelt_name(fields: Mapping[str, Any]) -> str | None:
    """Return the name of a field that some servers take for another one's, or None."""
    for name in fields:
        if not (name.isascii() and name.islower()) and name.casefold() in _LOOKED_AT:
            return name
    return None


def goes_before(fields: Mapping[str, Any]) -> bool:
    """Return whether a request asks to be worked on before others, or after them."""
    return str(fields.get(PRIORITY) or 0) not in ("0", "0.0")
