"""Which calls can carry loss, and the reason for each that cannot."""

from typing import Any

import pytest

from proxy.calls.trainable import Sampled, why_not_trainable
from proxy.keeper.sampling import sampling_settings

WHOLE = Sampled(
    prompt_ids=(1, 2),
    sampled_ids=(3, 4),
    sampled_logprobs=(-1.0, -2.0),
    choices=1,
    completion_tokens=2,
)


def why(request: dict[str, Any] | None = None, **changes: Any) -> str | None:
    sampled = Sampled(**{**{f: getattr(WHOLE, f) for f in WHOLE.__struct_fields__}, **changes})
    return why_not_trainable("complete", 200, 3, sampling_settings(request or {}, 1.0), sampled)


def test_a_whole_call_is_trainable() -> None:
    assert why() is None
    assert why({"temperature": 0.7, "top_p": 1.0, "top_k": -1, "tool_choice": "auto"}) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": None}, "no_token_ids"),
        ({"sampled_ids": None}, "no_token_ids"),
        ({"sampled_logprobs": None}, "no_logprobs"),
        ({"sampled_logprobs": (-1.0,)}, "length_mismatch"),
        ({"sampled_ids": (), "sampled_logprobs": ()}, "empty"),
        ({"completion_tokens": 3}, "usage_mismatch"),
        ({"choices": 2}, "several_choices"),
    ],
)
def test_tokens_that_do_not_add_up(changes: dict[str, Any], reason: str) -> None:
    assert why(**changes) == reason


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9}, "reshaped_distribution"),
        ({"top_k": 20}, "reshaped_distribution"),
        ({"min_p": 0.1}, "reshaped_distribution"),
        ({"presence_penalty": 0.5}, "reshaped_distribution"),
        ({"logit_bias": {"5": 1}}, "reshaped_distribution"),
        ({"response_format": {"type": "json_object"}}, "constrained_sampling"),
        ({"tool_choice": "required"}, "constrained_sampling"),
        ({"guided_regex": "a+"}, "constrained_sampling"),
        ({"tool_choice": {"type": "any"}}, "constrained_sampling"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "constrained_sampling"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "constrained_sampling"),
        ({"tool_choice": {}}, "constrained_sampling"),
        ({"tools": [{"name": "x", "strict": True}]}, "constrained_sampling"),
        ({"text": {"format": {"type": "json_schema"}}}, "constrained_sampling"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "constrained_sampling"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "reshaped_distribution"),
        ({"thinking_token_budget": 100}, "reshaped_distribution"),
    ],
)
def test_distributions_that_cannot_be_computed_again(request_: dict[str, Any], reason: str) -> None:
    assert why(request_) == reason


@pytest.mark.parametrize(
    "request_",
    [
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "none"}},
        {"tools": [{"name": "x", "strict": False}, "odd"], "text": {"format": {"type": "text"}}},
        {"text": {"verbosity": "low"}, "output_config": {"effort": "low"}},
        {"thinking": {"type": "adaptive"}, "stop_sequences": ["x"], "max_output_tokens": 5},
    ],
)
def test_the_other_apis_words_for_plain_sampling(request_: dict[str, Any]) -> None:
    assert why(request_) is None


def test_incomplete_failed_and_unknown() -> None:
    settings = sampling_settings({}, 1.0)
    assert why_not_trainable("truncated", 200, 1, settings, WHOLE) == "incomplete"
    assert why_not_trainable("complete", 400, 1, settings, WHOLE) == "error_reply"
    assert why_not_trainable("complete", 200, None, settings, WHOLE) == "unknown_policy"
    strict = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
    assert why(strict) == "constrained_sampling"


def test_the_servers_temperature_is_recorded_where_none_is_named() -> None:
    assert sampling_settings({}, 0.6) == {"temperature": 0.6}
    assert sampling_settings({"temperature": 0.2}, 0.6)["temperature"] == 0.2
