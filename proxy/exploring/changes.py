"""Choose what exploration changes of a call, where the call can be learned from then (pure).

A change maps a setting's name to its new value, or to None if it is left out. The worker sends and
records it; the ingester makes it again, and reads of the changed request what was sampled with.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from proxy.calls.trainable import STRICT_TOOLS, UNREADABLE, why_not_replayed
from proxy.exploring.choice import Exploring
from proxy.exploring.requests import STRICT, Changes, with_explored
from proxy.formats.base import ModelRequest, WireFormat
from proxy.formats.sampling import SamplingRules
from proxy.ingester.sampling import sampling_settings
from store.policy_table import Explore
from store.values.distribution import distribution_of
from store.values.sampling import number_of

TEMPERATURE: Final = "temperature"
SEED: Final = "seed"


class Explored(NamedTuple):
    """Hold a request as it explores, and what was changed of the client's."""

    request: ModelRequest
    changes: Changes


def explored(
    request: ModelRequest, wire_format: WireFormat, exploring: Exploring
) -> Explored | None:
    """Return an exploring episode's request with its changes, or None if nothing is changed.

    A call is left alone that could not be trained on all the same.
    """
    if request.parsed is None:
        return None
    settings = _settings(request, wire_format, exploring)
    if UNREADABLE in settings:
        return None
    changes = _wanted(settings, exploring.rule, wire_format.sampling)
    if not changes:
        return None
    changed = with_explored(request, changes)
    useful = not _has_several_prompts(request) and _is_useful(
        _settings(changed, wire_format, exploring), wire_format.sampling
    )
    text = useful and wire_format.turns.only_text(request.parsed)
    return Explored(changed, changes) if text else None


def header_of(changes: Changes) -> bytes:
    """Return changes as a header's value, such as `temperature=0.7, strict`."""
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


def _wanted(
    settings: Mapping[str, Any], rule: Explore, rules: SamplingRules
) -> dict[str, float | None]:
    """Return the changes that a policy's rule makes of settings as they were understood."""
    changes: dict[str, float | None] = {}
    if rule.temperature is not None and settings[TEMPERATURE] < rule.temperature:
        changes[TEMPERATURE] = rule.temperature
        if SEED in settings:
            # With it, all episodes would explore the same reply to the same prompt.
            changes[SEED] = None
    # A forced call is held to a grammar whether its tool is strict or not.
    if rule.drop_strict and STRICT_TOOLS in settings and not rules.constrains(settings):
        changes[STRICT] = None
    return changes


def _has_several_prompts(request: ModelRequest) -> bool:
    """Return whether a completion asks for a reply to each of several prompts."""
    prompt = request.fields.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _is_useful(settings: Mapping[str, Any], rules: SamplingRules) -> bool:
    """Return whether a call with these settings can be trained on, and have several outcomes."""
    several = number_of(settings.get("n", 1)) != 1
    if several or why_not_replayed(settings, rules, sure=True) is not None:
        return False
    sampled = distribution_of(settings)
    # The most likely token is sampled at any temperature.
    greedy = len(sampled.allowed_token_ids) == 1 or sampled.top_k == 1 or sampled.min_p == 1
    return not greedy
