"""Decide whether a call can carry loss, and give the reason if it cannot (pure).

A trainable call has ids that the policy sampled under a distribution that the trainer can compute
again (`store.values.distribution`). The log-probabilities that they had are recorded, or left to
the trainer, which computes them with the version that sampled the ids.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from proxy.formats.base import Sampled
from proxy.formats.sampling import SamplingRules
from store.records import CallStatus
from store.values.distribution import distribution_of
from store.values.grammars import GRAMMAR
from store.values.tokens import may_be_sampled

Reason = Literal[
    "incomplete",
    "error_reply",
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
    "redacted",
]

# For each setting that the trainer cannot replay, the values that leave the distribution unchanged.
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
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
# Fields that hold a reply to a grammar. vLLM ignores all but the first; another server may not.
STRUCTURED: Final = "structured_outputs"
GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
GRAMMARS: Final = frozenset({STRUCTURED, *GUIDED})
# Marks that `proxy.ingester.sampling` adds to the settings.
STRICT_TOOLS: Final = "strict_tools"
ONE_CALL: Final = "one_call"
UNREADABLE: Final = "unreadable"
# What may have held a reply to a grammar that the request alone does not tell.
HELD: Final = GRAMMARS | {STRICT_TOOLS, ONE_CALL}


class Judged(msgspec.Struct, frozen=True):
    """Hold a call's settings as they are recorded (JSON), and why they forbid to train on it.

    The reason may be another where it is not sure which tokens a grammar held: `unsure` is that.
    """

    recorded: bytes
    sure: Reason | None
    unsure: Reason | None

    def why_not(self, sure: bool) -> Reason | None:
        """Return why what was sampled from cannot be computed again, or None if it can."""
        return self.sure if sure else self.unsure

    def with_setting(self, name: str, value: Any) -> "Judged":
        """Return the same settings with one more recorded, which changes no reason."""
        recorded = msgspec.json.decode(self.recorded) | {name: value}
        return msgspec.structs.replace(self, recorded=msgspec.json.encode(recorded))


def why_not_trainable(
    status: CallStatus,
    http_status: int | None,
    policy_version: int | None,
    sampling: Mapping[str, Any],
    sampled: Sampled,
    rules: SamplingRules,
    *,
    only_text: bool,
) -> Reason | None:
    """Return the first reason why a call cannot be trained on, or None if it can.

    `rules` are those of the call's format, by which its settings are judged. `only_text` says
    whether it neither shows nor asks for anything else.
    """

    def judge(sure: bool) -> Reason | None:
        return why_not_replayed(sampling, rules, sure=sure)

    return first_reason(status, http_status, policy_version, sampled, judge, only_text=only_text)


def first_reason(
    status: CallStatus,
    http_status: int | None,
    policy_version: int | None,
    sampled: Sampled,
    judge: Callable[[bool], Reason | None],
    *,
    only_text: bool,
) -> Reason | None:
    """Return what `why_not_trainable` does; `judge` does what `why_not_replayed` does."""
    if status != "complete":
        return "incomplete"
    if http_status is None or http_status >= 400:
        return "error_reply"
    if not only_text:
        return "not_text"
    if sampled.choices > 1:
        return "several_choices"
    sure = sampled.sampled_logprobs is not None or sampled.thoughtless
    reason = _tokens(sampled) or judge(sure)
    if reason is None and policy_version is None:
        return "unknown_policy"
    return reason


def _tokens(sampled: Sampled) -> Reason | None:
    if sampled.prompt_ids is None or sampled.sampled_ids is None:
        return "no_token_ids"
    return _counts(sampled, sampled.prompt_ids, sampled.sampled_ids, sampled.sampled_logprobs)


def _counts(
    sampled: Sampled,
    prompt_ids: tuple[int, ...],
    sampled_ids: tuple[int, ...],
    logprobs: tuple[float, ...] | None,
) -> Reason | None:
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
    """Return why what was sampled from cannot be computed again, or None if it can.

    `sure` says whether it is known which tokens a grammar held: all, as none is of a thought, or
    those that the server's log-probabilities show.
    """
    if UNREADABLE in sampling:
        return "unreadable_sampling"
    if sampling["temperature"] == 0:
        return "greedy"
    reshaped = _reshaped(sampling, rules)
    if reshaped is not None:
        return reshaped
    if GRAMMAR in sampling:
        return None if sure else "constrained_sampling"
    held = not HELD.isdisjoint(sampling) or rules.constrains(sampling)
    return "constrained_sampling" if held else None


def _reshaped(sampling: Mapping[str, Any], rules: SamplingRules) -> Reason | None:
    """Return why the trainer cannot replay the settings, or None if it can."""
    for name, value in sampling.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            return "reshaped_distribution"
    if rules.reshapes(sampling):
        return "reshaped_distribution"
    try:
        distribution_of(sampling)
    except ValueError:
        return "unreadable_sampling"
    return None
