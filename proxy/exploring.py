"""Sample a share of a policy's episodes with changed settings, so that something is learned (pure).

The episodes are chosen by their names alone: every worker and proxy makes the same choice, also
after a restart. `Changes` map a setting's name to its new value, or to None if it is removed. The
worker sends and records the changes; the ingester applies them again, and reads the sampling
settings from the changed request.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from proxy.formats.base import ModelRequest, WireFormat
from proxy.formats.raw_json import Object, parse_object, readable_value
from proxy.formats.sampling import SamplingRules
from proxy.trainable import STRICT_TOOLS, UNREAD_SETTINGS, sampling_settings, why_not_replayed
from proxy.upstreams.upstreams import SamplingDefaults
from store.policy_table import Explore
from store.values.sampling import distribution_of, number_of

# Makes this choice independent of other choices by an episode's name.
_PURPOSE: Final = b"pawl.explore"
_DIGEST_BYTES: Final = 6
_DIGEST_VALUES: Final = 2 ** (8 * _DIGEST_BYTES)


class Exploring(msgspec.Struct, frozen=True):
    """The rule for an exploring episode, and the model server's sampling defaults."""

    rule: Explore
    defaults: SamplingDefaults


def is_chosen(episode: str, share: float) -> bool:
    """Return whether an episode belongs to the share of episodes that explores."""
    name = episode.encode(errors="surrogatepass")
    digest = blake2b(name, digest_size=_DIGEST_BYTES, person=_PURPOSE).digest()
    return int.from_bytes(digest) < share * _DIGEST_VALUES


Changes = Mapping[str, float | None]

# Not a field of the request, but of its tools.
STRICT: Final = "strict"
TOOLS: Final = "tools"
FUNCTION: Final = "function"

_list: Final = msgspec.json.Decoder(list[msgspec.Raw])


def with_changed_settings(request: ModelRequest, changes: Changes) -> ModelRequest:
    """Return the request with the changed settings; other fields keep their bytes and order."""
    if request.parsed is None:
        return request
    parsed, fields = dict(request.parsed), dict(request.fields)
    for change, value in changes.items():
        name = TOOLS if change == STRICT else change
        if name == TOOLS and isinstance(fields.get(name), list):
            tools = [_without_strict(tool) for tool in _list.decode(parsed[name])]
            parsed[name] = msgspec.Raw(msgspec.json.encode(tools))
        elif value is not None:
            parsed[name] = msgspec.Raw(msgspec.json.encode(value))
        else:
            parsed.pop(name, None)
        fields.pop(name, None)
        if name in parsed:
            fields[name] = readable_value(parsed[name])
    body = msgspec.json.encode(parsed)
    return msgspec.structs.replace(request, body=body, parsed=parsed, fields=fields)


def _without_strict(tool: msgspec.Raw) -> msgspec.Raw | Object:
    """Return a tool without its and its function's `strict`; unchanged if neither is set."""
    parsed = parse_object(bytes(tool))
    if parsed is None:
        return tool
    function = parsed.get(FUNCTION)
    inner = None if function is None else parse_object(bytes(function))
    if inner is not None and _is_strict(inner):
        del inner[STRICT]
        parsed[FUNCTION] = msgspec.Raw(msgspec.json.encode(inner))
    elif not _is_strict(parsed):
        return tool
    if _is_strict(parsed):
        del parsed[STRICT]
    return parsed


def _is_strict(holder: Object) -> bool:
    return STRICT in holder and readable_value(holder[STRICT]) not in (None, False)


TEMPERATURE: Final = "temperature"
SEED: Final = "seed"


class ExploredRequest(NamedTuple):
    """A request as exploration changed it, and the changes."""

    request: ModelRequest
    changes: Changes


def explore_request(
    request: ModelRequest, wire_format: WireFormat, exploring: Exploring
) -> ExploredRequest | None:
    """Return an exploring episode's request with its changes, or None if it needs none.

    None also if the call could not be trained on even with the changes.
    """
    if request.parsed is None:
        return None
    settings = _settings(request, wire_format, exploring)
    if UNREAD_SETTINGS in settings:
        return None
    changes = _wanted_changes(settings, exploring.rule, wire_format.sampling)
    if not changes:
        return None
    changed = with_changed_settings(request, changes)
    settings = _settings(changed, wire_format, exploring)
    if STRICT in changes and STRICT_TOOLS in settings:
        # A message added the strict tool; messages are not changed.
        return None
    is_useful = not _has_several_prompts(request) and _is_useful(settings, wire_format.sampling)
    is_trainable = is_useful and wire_format.turns.only_text(request.parsed)
    return ExploredRequest(changed, changes) if is_trainable else None


def changes_header(changes: Changes) -> bytes:
    """Return changes as a header value; in `temperature=0.7, strict`, `strict` was removed."""
    shown = (name if value is None else f"{name}={value:g}" for name, value in changes.items())
    return ", ".join(shown).encode()


def _settings(
    request: ModelRequest, wire_format: WireFormat, exploring: Exploring
) -> dict[str, Any]:
    defaults = exploring.defaults
    return sampling_settings(
        request.fields,
        defaults.temperature,
        wire_format.sampling,
        defaults.others,
        tool_grammars=defaults.tool_grammars,
        tool_tag=defaults.tool_tag,
    )


def _wanted_changes(
    settings: Mapping[str, Any], rule: Explore, rules: SamplingRules
) -> dict[str, float | None]:
    """Return the changes that a policy's rule makes to a call with these settings."""
    changes: dict[str, float | None] = {}
    if rule.temperature is not None and settings[TEMPERATURE] < rule.temperature:
        changes[TEMPERATURE] = rule.temperature
        if SEED in settings:
            # With a seed, all episodes would get the same reply to the same prompt.
            changes[SEED] = None
    # A grammar constrains a forced call whether its tool is strict or not.
    if rule.drop_strict and STRICT_TOOLS in settings and not rules.constrains(settings):
        changes[STRICT] = None
    return changes


def _has_several_prompts(request: ModelRequest) -> bool:
    """Return whether a completion asks for a reply to each of several prompts."""
    prompt = request.fields.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _is_useful(settings: Mapping[str, Any], rules: SamplingRules) -> bool:
    """Return whether a call with these settings can be trained on, and its reply can vary."""
    has_several_choices = number_of(settings.get("n", 1)) != 1
    if has_several_choices or why_not_replayed(settings, rules, sure=True) is not None:
        return False
    sampled = distribution_of(settings)
    # The most likely token is sampled at any temperature.
    greedy = len(sampled.allowed_token_ids) == 1 or sampled.top_k == 1 or sampled.min_p == 1
    return not greedy
