"""Read a call's sampling settings, and decide whether the call is trainable (pure).

A trainable call has ids that the policy sampled under a distribution that the trainer can compute
again (`store.values.sampling`). Their log-probabilities are recorded, or the trainer computes them
with the version that sampled the ids.

vLLM accepts more than it documents, such as a number in a string, or true for 1, and it never
samples at a temperature between 0 and 0.01. The value that it used is recorded. A setting whose
meaning is unclear is recorded as it was sent, and named in `unreadable`. An unknown field is named
there, too: a server may take it for a constraint.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from proxy.formats.base import ModelRequest, SampledTokens
from proxy.formats.raw_json import Object, readable_value
from proxy.formats.registry import FORMATS
from proxy.formats.sampling import SamplingRules
from proxy.spool.segments import CapturedCall
from store.records import SIDE, CallStatus
from store.values.grammars import GRAMMAR
from store.values.packing import may_be_sampled
from store.values.sampling import REPLAYED, distribution_of, number_of, used_temperature

Reason = Literal[
    "incomplete",
    "error_reply",
    "side",
    "not_text",
    "no_token_ids",
    "length_mismatch",
    "impossible_logprobs",
    "usage_mismatch",
    "empty",
    "several_choices",
    "unreadable_sampling",
    "greedy",
    "reshaped_distribution",
    "constrained_sampling",
    "unknown_policy",
    "fixed_policy",
    "nested_too_deep",
    "reply_too_long",
    "redacted",
]

# For each setting that the trainer cannot replay, the values that leave the distribution unchanged.
NEUTRAL_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "logits_processors": (),
    # Past the budget the end of the thinking is forced, and so not sampled.
    "thinking_token_budget": (),
    # The best of several replies is shown; a beam search does not sample; the others change the
    # distribution.
    "best_of": (1,),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "vllm_xargs": ({},),
}
# Fields that constrain a reply by a grammar. vLLM ignores all but the first; others may not.
STRUCTURED: Final = "structured_outputs"
GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
GRAMMARS: Final = frozenset({STRUCTURED, *GUIDED})
# Marks that `proxy.trainable` adds to the settings.
STRICT_TOOLS: Final = "strict_tools"
ONE_CALL: Final = "one_call"
UNREAD_SETTINGS: Final = "unreadable"
# Settings that may have constrained a reply by a grammar.
MAY_CONSTRAIN: Final = GRAMMARS | {STRICT_TOOLS, ONE_CALL}


class JudgedSettings(msgspec.Struct, frozen=True):
    """A call's settings as they are recorded (JSON), and why they prevent training, if they do.

    `sure` is the reason, or None, if it is known which tokens a grammar constrained; `unsure` is
    the reason, or None, if it is not.
    """

    recorded: bytes
    sure: Reason | None
    unsure: Reason | None

    def why_not_replayed(self, sure: bool) -> Reason | None:
        """Return `sure` or `unsure`: the reason of the function `why_not_replayed`, or None."""
        return self.sure if sure else self.unsure

    def with_setting(self, name: str, value: Any) -> "JudgedSettings":
        """Return a copy that records one more setting; the reasons stay the same."""
        recorded = msgspec.json.decode(self.recorded) | {name: value}
        return msgspec.structs.replace(self, recorded=msgspec.json.encode(recorded))


def why_untrainable(
    status: CallStatus,
    http_status: int | None,
    policy_version: int | None,
    sampled: SampledTokens,
    judge: Callable[[bool], Reason | None],
    *,
    only_text: bool,
    is_side: bool = False,
) -> Reason | None:
    """Return the first reason why a call cannot be trained on, or None if it can.

    `judge` is `why_not_replayed` for the call's settings, given `sure`. `only_text` says whether
    the call's prompt and reply are text alone, and `is_side` whether it is a side call.
    """
    if status != "complete":
        return "incomplete"
    if http_status is None or http_status >= 400:
        return "error_reply"
    if is_side or not only_text:
        return SIDE if is_side else "not_text"
    if sampled.choices > 1:
        return "several_choices"
    sure = sampled.sampled_logprobs is not None or sampled.thoughtless
    reason = _why_tokens_unusable(sampled) or judge(sure)
    if reason is None and policy_version is None:
        return "unknown_policy"
    return reason


def _why_tokens_unusable(sampled: SampledTokens) -> Reason | None:
    prompt_ids, sampled_ids, logprobs = (
        sampled.prompt_ids,
        sampled.sampled_ids,
        sampled.sampled_logprobs,
    )
    if prompt_ids is None or sampled_ids is None:
        return "no_token_ids"
    if logprobs is not None and len(sampled_ids) != len(logprobs):
        return "length_mismatch"
    if not prompt_ids or not sampled_ids:
        return "empty"
    if sampled.completion_tokens not in (None, len(sampled_ids)):
        return "usage_mismatch"
    return None if may_be_sampled(logprobs or ()) else "impossible_logprobs"


def why_not_replayed(
    sampling: Mapping[str, Any], rules: SamplingRules, *, sure: bool
) -> Reason | None:
    """Return why the trainer cannot compute the settings' distribution again, or None if it can.

    `sure` says whether it is known which tokens a grammar constrained, if any: all of a reply
    without thoughts, or those that the server's log-probabilities show.
    """
    if UNREAD_SETTINGS in sampling:
        return "unreadable_sampling"
    if sampling["temperature"] == 0:
        return "greedy"
    reshaped = _why_not_replayable(sampling, rules)
    if reshaped is not None:
        return reshaped
    if GRAMMAR in sampling:
        return None if sure else "constrained_sampling"
    may_constrain = not MAY_CONSTRAIN.isdisjoint(sampling) or rules.constrains(sampling)
    return "constrained_sampling" if may_constrain else None


def _why_not_replayable(sampling: Mapping[str, Any], rules: SamplingRules) -> Reason | None:
    """Return why the trainer cannot replay the settings, grammars aside, or None if it can."""
    for name, value in sampling.items():
        if name in NEUTRAL_VALUES and value not in NEUTRAL_VALUES[name]:
            return "reshaped_distribution"
    if rules.prevents_replay(sampling):
        return "reshaped_distribution"
    try:
        distribution_of(sampling)
    except ValueError:
        return "unreadable_sampling"
    return None


# Settings that a model server understands in every format; formats have more of their own.
COMMON_SETTINGS: Final = frozenset(
    {*("max_tokens", "stop", "seed", "n", "tool_choice"), *REPLAYED, *NEUTRAL_VALUES, *GRAMMARS}
)
NUMERIC_SETTINGS: Final = frozenset(
    {
        *("top_p", "top_k", "min_p", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
NO_DEFAULTS: Final[Mapping[str, float]] = {}
# Marks by which a grammar in a known syntax may constrain tool calls although none is forced.
TAGGED: Final = frozenset({STRICT_TOOLS, ONE_CALL})
# At most so many unknown fields are named in `unreadable`.
MOST_UNKNOWN: Final = 8
# Most cached settings, and most bytes of request fields that serve as a cache key.
MOST_KNOWN: Final = 256
MOST_FIELD_BYTES: Final = 32 * 1024
# Memory of a field's objects besides its characters (approximate).
FIELD_BYTES: Final = 200
Fields = tuple[tuple[str, bytes], ...]


def judge_settings(captured: CapturedCall, request: ModelRequest) -> JudgedSettings:
    """Return the settings of a captured call; `request` was parsed without its large fields.

    The results are cached: an agent sends the same settings and tools with each of its calls.
    """
    wire_format = FORMATS[captured.dialect]
    parsed = request.parsed
    defaults = tuple(captured.sampling_defaults.items())
    conditions = (
        captured.dialect,
        captured.default_temperature,
        defaults,
        captured.tool_grammars,
        captured.tool_tag,
    )
    if parsed is None or not wire_format.unneeded_fields or _memory_size(parsed) > MOST_FIELD_BYTES:
        return _judge(None if parsed is None else request.fields, *conditions)
    return _judge_once(tuple((name, bytes(raw)) for name, raw in parsed.items()), *conditions)


def _memory_size(parsed: Object) -> int:
    """Estimate the memory that the fields take as a key of the cache, in bytes."""
    return sum(FIELD_BYTES + len(name) + len(memoryview(raw)) for name, raw in parsed.items())


@lru_cache(maxsize=MOST_KNOWN)
def _judge_once(
    fields: Fields,
    dialect: str,
    temperature: float,
    defaults: tuple[tuple[str, float], ...],
    tool_grammars: bool,
    tool_tag: str | None,
) -> JudgedSettings:
    read = {name: readable_value(msgspec.Raw(raw)) for name, raw in fields}
    return _judge(read, dialect, temperature, defaults, tool_grammars, tool_tag)


def _judge(
    fields: Mapping[str, Any] | None,
    dialect: str,
    temperature: float,
    defaults: tuple[tuple[str, float], ...],
    tool_grammars: bool,
    tool_tag: str | None,
) -> JudgedSettings:
    rules = FORMATS[dialect].sampling
    settings = sampling_settings(
        fields,
        temperature,
        rules,
        dict(defaults),
        tool_grammars=tool_grammars,
        tool_tag=tool_tag,
    )
    sure = why_not_replayed(settings, rules, sure=True)
    unsure = why_not_replayed(settings, rules, sure=False) if GRAMMAR in settings else sure
    return JudgedSettings(msgspec.json.encode(settings), sure, unsure)


def sampling_settings(
    request: Mapping[str, Any] | None,
    default_temperature: float,
    rules: SamplingRules,
    defaults: Mapping[str, float] = NO_DEFAULTS,
    *,
    tool_grammars: bool = True,
    tool_tag: str | None = None,
) -> dict[str, Any]:
    """Return a request's sampling settings, always with a temperature, and marks for tools.

    If `request` is None, its body could not be parsed, and only `unreadable` is returned.
    `default_temperature` and `defaults` are the server's, for settings that the request does not
    name. `tool_grammars` says whether the server may constrain tool calls by a grammar, and
    `tool_tag` in which syntax, if known.
    """
    if request is None:
        return {UNREAD_SETTINGS: ["request"]}
    settings: dict[str, Any] = {"temperature": default_temperature, **defaults}
    unknown = []
    for name, value in request.items():
        if value is None:
            continue
        if name in COMMON_SETTINGS or name in rules.settings:
            settings[name] = value
        elif name not in rules.harmless:
            unknown.append(name)
    unreadable = _to_numbers(settings)
    # A value that our parsers cannot read (such as one with 1e400) is a text here.
    unreadable += [n for n in rules.objects if not isinstance(settings.get(n, {}), dict)]
    unreadable += unknown[:MOST_UNKNOWN]
    tools = rules.tools(request)
    if not isinstance(tools, list | None):
        unreadable.append("tools")
    elif tools and tool_grammars:
        if _has_strict_tool(tools):
            settings[STRICT_TOOLS] = True
        if _allows_one_call(request):
            settings[ONE_CALL] = True
    grammar = _grammar(request, settings, rules, tool_tag)
    if grammar is not None:
        settings[GRAMMAR] = grammar
    if unreadable:
        settings[UNREAD_SETTINGS] = unreadable
    return settings


def _grammar(
    request: Mapping[str, Any],
    settings: Mapping[str, Any],
    rules: SamplingRules,
    tool_tag: str | None,
) -> Mapping[str, str] | None:
    """Return the grammar that constrained the reply, or None if there is none or it is unclear."""
    tagged = tool_tag is not None and not TAGGED.isdisjoint(settings)
    is_constrained = tagged or STRUCTURED in settings or rules.constrains(settings)
    if not is_constrained or not settings.keys().isdisjoint(GUIDED):
        return None
    return rules.grammar(request, tool_tag)


def _to_numbers(settings: dict[str, Any]) -> list[str]:
    """Replace numeric settings in place by the numbers that vLLM uses.

    Returns:
        The names of settings that are not numbers.
    """
    unreadable = []
    used = used_temperature(settings["temperature"])
    if used is None:
        unreadable.append("temperature")
    else:
        settings["temperature"] = used
    for name, value in settings.items():
        if name in NUMERIC_SETTINGS:
            number = number_of(value)
            if number is None:
                unreadable.append(name)
            elif isinstance(value, str | bool):
                settings[name] = number
    return unreadable


def _allows_one_call(request: Mapping[str, Any]) -> bool:
    """Return whether a request with tools allows at most one tool call.

    vLLM enforces that by a grammar if its tool parser has one for the model's syntax
    (`DelegatingParser._apply_structural_tag`), even if no call is required.
    """
    choice = request.get("tool_choice")
    as_object = choice if isinstance(choice, dict) else {}
    several = request.get("parallel_tool_calls") in (None, True)
    limited = not several or as_object.get("disable_parallel_tool_use") not in (None, False)
    return limited and "none" not in (choice, as_object.get("type"))


def _has_strict_tool(tools: list[Any]) -> bool:
    """Return whether any of the tools is strict.

    vLLM constrains calls of strict tools to their schema by a grammar, which changes the
    distribution. In a chat `strict` is a field of the tool's function, in the other APIs of the
    tool itself. Any value but false and null counts as true: the server may read it as true.
    """
    return any(
        holder.get("strict") not in (None, False)
        for tool in tools
        if isinstance(tool, dict)
        for holder in (tool, tool.get("function"))
        if isinstance(holder, dict)
    )
