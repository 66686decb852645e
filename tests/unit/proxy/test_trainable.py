"""Which calls can carry loss, and the reason for each that cannot."""

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import NOTHING_SAMPLED, SampledTokens, read_request
from proxy.formats.registry import FORMATS
from proxy.trainable import judge_settings, sampling_settings, why_not_replayed
from store.values.sampling import distribution_of
from tests.support.proxy.grammars import why_not_trainable
from tests.support.records import captured

WHOLE = SampledTokens(
    prompt_ids=(1, 2),
    sampled_ids=(3, 4),
    sampled_logprobs=(-1.0, -2.0),
    choices=1,
    completion_tokens=2,
)

judged = partial(why_not_trainable, only_text=True)


def why(request: dict[str, Any] | None = None, api: str = "chat", **changes: Any) -> str | None:
    rules = FORMATS[api].sampling
    sampled = SampledTokens(
        **{**{f: getattr(WHOLE, f) for f in WHOLE.__struct_fields__}, **changes}
    )
    found = sampling_settings(request or {}, 1.0, rules)
    return judged("complete", 200, 3, found, sampled, rules)


def test_complete_call_with_consistent_tokens_is_trainable() -> None:
    assert why() is None
    assert why({"temperature": 0.7, "top_p": 1.0, "top_k": -1, "tool_choice": "auto"}) is None


def test_call_that_is_not_text_is_untrainable_with_any_tokens() -> None:
    rules = FORMATS["chat"].sampling
    settings = sampling_settings({}, 1.0, rules)
    for sampled in (WHOLE, NOTHING_SAMPLED):
        why_not = why_not_trainable("complete", 200, 3, settings, sampled, rules, only_text=False)
        assert why_not == "not_text"
    failed = why_not_trainable("complete", 400, 3, settings, WHOLE, rules, only_text=False)
    assert failed == "error_reply"


def test_call_with_token_ids_alone_is_trainable_if_its_policy_version_is_known() -> None:
    assert why(sampled_logprobs=None) is None
    assert why(sampled_logprobs=None, completion_tokens=None) is None
    rules = FORMATS["chat"].sampling
    silent = msgspec.structs.replace(WHOLE, sampled_logprobs=None)
    settings = sampling_settings({}, 1.0, rules)
    assert judged("complete", 200, None, settings, silent, rules) == "unknown_policy"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": None}, "no_token_ids"),
        ({"sampled_ids": None}, "no_token_ids"),
        ({"sampled_logprobs": (-1.0,)}, "length_mismatch"),
        ({"sampled_ids": (), "sampled_logprobs": ()}, "empty"),
        ({"completion_tokens": 3}, "usage_mismatch"),
        ({"choices": 2}, "several_choices"),
        ({"sampled_logprobs": None, "completion_tokens": 3}, "usage_mismatch"),
        ({"sampled_logprobs": None, "sampled_ids": ()}, "empty"),
        ({"sampled_logprobs": ()}, "length_mismatch"),
    ],
)
def test_call_with_inconsistent_tokens_is_untrainable(changes: dict[str, Any], reason: str) -> None:
    assert why(**changes) == reason


@pytest.mark.parametrize(
    ("api", "request_", "reason"),
    [
        ("chat", {"logit_bias": {"five": 1}}, "unreadable_sampling"),
        ("chat", {"bad_words": "a"}, "unreadable_sampling"),
        ("chat", {"logits_processors": ["mine"]}, "reshaped_distribution"),
        ("chat", {"tool_choice": "required"}, "constrained_sampling"),
        ("chat", {"guided_regex": "a+"}, "constrained_sampling"),
        ("messages", {"tool_choice": {"type": "any"}}, "constrained_sampling"),
        ("messages", {"tool_choice": {"type": "tool", "name": "x"}}, "constrained_sampling"),
        ("responses", {"tool_choice": {"type": "function", "name": "x"}}, "constrained_sampling"),
        ("chat", {"tool_choice": {}}, "constrained_sampling"),
        ("chat", {"tools": [{"name": "x", "strict": True}]}, "constrained_sampling"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "constrained_sampling"),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema"}}},
            "constrained_sampling",
        ),
        (
            "messages",
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            "reshaped_distribution",
        ),
        ("chat", {"thinking_token_budget": 100}, "reshaped_distribution"),
        ("completions", {"best_of": 3}, "reshaped_distribution"),
        ("chat", {"function_call": {"name": "x"}}, "constrained_sampling"),
        ("chat", {"tools": [{}], "parallel_tool_calls": False}, "constrained_sampling"),
        ("responses", {"tools": [{}], "parallel_tool_calls": "no"}, "constrained_sampling"),
        (
            "messages",
            {"tools": [{}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "constrained_sampling",
        ),
    ],
)
def test_call_is_untrainable_if_its_distribution_cannot_be_replayed(
    api: str, request_: dict[str, Any], reason: str
) -> None:
    assert why(request_, api) == reason


@pytest.mark.parametrize(
    ("api", "request_"),
    [
        ("chat", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ("chat", {"min_p": 0.1, "logit_bias": {"5": 1}, "bad_words": ["a"]}),
        ("chat", {"presence_penalty": 0.5, "frequency_penalty": 1, "repetition_penalty": 1.1}),
        ("chat", {"allowed_token_ids": [1, 2], "min_tokens": 3, "stop_token_ids": [2]}),
        ("completions", {"top_p": 0.9, "min_tokens": 3}),
        ("responses", {"top_p": 0.9, "top_k": 5, "presence_penalty": 1, "min_tokens": 0}),
        ("messages", {"top_p": 0.9, "top_k": 5}),
        ("chat", {"response_format": {"type": "json_object"}}),
    ],
)
def test_call_with_replayable_settings_is_trainable(api: str, request_: dict[str, Any]) -> None:
    assert why(request_, api) is None
    assert distribution_of(sampling_settings(request_, 1.0, FORMATS[api].sampling))


HARMLESS: list[tuple[str, dict[str, Any]]] = [
    # Words for plain sampling.
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ("messages", {"tool_choice": {"type": "none"}}),
    ("chat", {"tools": [], "parallel_tool_calls": False}),
    ("chat", {"tools": [{}], "parallel_tool_calls": True}),
    ("chat", {"tools": [{}], "tool_choice": "none", "parallel_tool_calls": False}),
    ("responses", {"tools": [{"name": "x", "strict": False}, "odd"]}),
    ("responses", {"text": {"format": {"type": "text"}}}),
    ("responses", {"text": {"verbosity": "low"}, "max_output_tokens": 5}),
    ("messages", {"output_config": {"effort": "low"}}),
    ("messages", {"thinking": {"type": "adaptive"}, "stop_sequences": ["x"]}),
    ("completions", {"best_of": 1}),
    # Fields that sample nothing.
    ("chat", {"messages": [], "model": "m", "user": "u", "metadata": {}, "store": True}),
    ("chat", {"stream": True, "stream_options": {}, "tools": [], "prompt_cache_key": "k"}),
    ("chat", {"reasoning_effort": "low", "chat_template_kwargs": {}, "session_id": "s"}),
    ("chat", {"conversation": "c1", "functions": [], "function_call": "auto"}),
    ("completions", {"prompt": "q", "echo": True, "suffix": "", "logprobs": 0}),
    ("responses", {"input": "q", "instructions": "i", "include": [], "reasoning": {}}),
    ("responses", {"previous_response_id": "r", "store": False, "truncation": "auto"}),
    ("responses", {"client_metadata": {"a": "b"}}),
    ("messages", {"messages": [], "system": "s", "metadata": {}, "service_tier": "auto"}),
]


@pytest.mark.parametrize(("api", "request_"), HARMLESS)
def test_field_without_effect_on_sampling_keeps_a_call_trainable(
    api: str, request_: dict[str, Any]
) -> None:
    assert why(request_, api) is None


@pytest.mark.parametrize("api", FORMATS)
def test_unknown_field_makes_the_sampling_unreadable(api: str) -> None:
    assert why({"mirostat": 2, "temperature": 1}, api) == "unreadable_sampling"
    assert why({"mirostat": None}, api) is None
    found = sampling_settings({"mirostat": {"tau": 5}}, 1.0, FORMATS[api].sampling)
    assert found == {"temperature": 1.0, "unreadable": ["mirostat"]}


def test_only_some_of_many_unknown_request_fields_are_recorded_by_name() -> None:
    found = sampling_settings({f"x{n}": 1 for n in range(50)}, 1.0, FORMATS["chat"].sampling)
    assert len(found["unreadable"]) == 8


def test_a_field_is_known_to_its_own_api_only() -> None:
    assert why({"prompt": "q"}, "completions") is None
    assert why({"prompt": "q"}, "messages") == "unreadable_sampling"


def test_incomplete_or_failed_call_or_call_of_unknown_policy_is_untrainable() -> None:
    rules = FORMATS["chat"].sampling
    settings = sampling_settings({}, 1.0, rules)
    assert judged("truncated", 200, 1, settings, WHOLE, rules) == "incomplete"
    assert judged("complete", 400, 1, settings, WHOLE, rules) == "error_reply"
    assert judged("complete", 200, None, settings, WHOLE, rules) == "unknown_policy"


@pytest.mark.parametrize(
    "unread",
    [
        {"guided_regex": "a+"},
        {"tools": [{"name": "x", "strict": True}]},
        {"tools": [{}], "parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema"}}},
    ],
)
def test_thoughtless_call_with_an_unreadable_grammar_stays_untrained(
    unread: dict[str, Any],
) -> None:
    found = why(unread, "responses", sampled_logprobs=None, thoughtless=True)
    assert found == "constrained_sampling"


def test_call_with_a_grammar_is_trainable_with_log_probabilities_or_without_a_thought() -> None:
    asked = {"response_format": {"type": "json_object"}}
    assert why(asked) is None
    assert why(asked, sampled_logprobs=None) == "constrained_sampling"
    assert why(asked, sampled_logprobs=None, thoughtless=True) is None
    assert why({"grammar": {"kind": "regex", "text": "a"}}) == "unreadable_sampling"


VALUES = st.sampled_from(
    [
        *(None, 0, 0.7, 1, "1", "x", True, False, [], ["a"], {"type": "json_object"}),
        *("required", [{"type": "function", "function": {"name": "f", "strict": True}}]),
    ]
)
NAMES = (
    *("temperature", "top_p", "min_tokens", "stop_token_ids", "tools", "tool_choice", "n", "user"),
    *("parallel_tool_calls", "response_format", "guided_json", "structured_outputs"),
    *("logit_bias", "metadata", "unknown"),
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)


@given(
    st.sampled_from(sorted(FORMATS)),
    FIELDS,
    st.sampled_from([{}, {"top_p": 0.9}, {"top_k": 3.0, "top_p": 1.0}]),
    st.sampled_from([(False, None), (True, None), (True, "hermes")]),
)
def test_sampling_settings_are_judged_by_the_calls_own_fields(
    dialect: str,
    fields: dict[str, Any],
    defaults: dict[str, float],
    parser: tuple[bool, str | None],
) -> None:
    known: dict[str, Any] = {"tool_grammars": parser[0], "tool_tag": parser[1]}
    call = captured(dialect=dialect, default_temperature=0.5, sampling_defaults=defaults, **known)
    rules = FORMATS[dialect].sampling
    settings = sampling_settings(fields, 0.5, rules, defaults, **known)
    request = read_request(msgspec.json.encode(fields))
    for _ in range(2):
        found = judge_settings(call, request)
        assert found.recorded == msgspec.json.encode(settings)
        for sure in (False, True):
            assert found.why_not_replayed(sure) == why_not_replayed(settings, rules, sure=sure)


def test_unreadable_request_has_unreadable_sampling_settings() -> None:
    found = judge_settings(captured(), read_request(b"["))
    assert found.recorded == b'{"unreadable":["request"]}'
    assert found.why_not_replayed(True) == found.why_not_replayed(False) == "unreadable_sampling"
