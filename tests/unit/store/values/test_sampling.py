"""What a call was sampled from as vLLM uses it: temperatures, settings, grammars, tool tags."""

import json
import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.grammars import (
    KINDS,
    Grammar,
    OfferedTool,
    ToolTag,
    parse_tag,
    read_grammar,
    text_of_tag,
)
from store.values.packing import are_logprobs, may_be_sampled, pack_logprobs
from store.values.sampling import (
    LEAST_TEMPERATURE,
    REPLAYED,
    WITH_DEFAULTS,
    Distribution,
    distribution_of,
    number_of,
    parse_server_defaults,
    used_temperature,
)
from tests.support.stored import transition
from trainer.batches import training_rows
from trainer.credit.assign import TransitionCredit


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        *((1, 1.0), (0.7, 0.7), ("0.7", 0.7), (" 0.7\n", 0.7), (True, 1.0), ("1e-1", 0.1)),
        *((0, 0.0), (-0.0, 0.0), ("0", 0.0), (False, 0.0), ("-0", 0.0)),
        *((1e-3, 0.01), (1e-6, 0.01), ("1e-6", 0.01), (5e-324, 0.01), (0.01, 0.01), (0.011, 0.011)),
        *((-1, None), (None, None), ("hot", None), ("", None), ([], None), ({}, None)),
        *((math.inf, None), (math.nan, None), ("inf", None), ("1_0", None), (10**400, None)),
    ],
)
def test_temperature_is_read_as_vllm_uses_it(asked: object, used: float | None) -> None:
    assert used_temperature(asked) == used


@given(st.one_of(st.text(), st.integers(), st.floats(), st.from_regex(r"[ +\-.0-9eE_]{0,8}")))
def test_any_value_of_a_setting_is_read_as_a_finite_number_or_as_none(value: object) -> None:
    found = number_of(value)
    assert found is None or math.isfinite(found)
    used = used_temperature(value)
    assert used is None or used == 0 or used >= LEAST_TEMPERATURE


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -9999.0, 0.5, -1e30])
def test_bytes_with_an_impossible_log_probability_are_not_accepted(value: float) -> None:
    assert not are_logprobs(pack_logprobs([-1.0, value, -2.0]))
    assert are_logprobs(pack_logprobs([-1.0, 0.0, -9998.0, 1e-7]))


@given(st.binary(max_size=64))
def test_accepted_bytes_hold_only_possible_log_probabilities(data: bytes) -> None:
    whole = data[: len(data) // 4 * 4]
    if are_logprobs(whole):
        assert all(-9999 < value <= 1e-3 for value in array("f", whole))


@pytest.mark.parametrize(("recorded", "used"), [(1e-3, 0.01), ("0.5", 0.5), (0.7, 0.7)])
def test_row_has_the_temperature_that_was_used(recorded: object, used: float) -> None:
    """An earlier Pawl recorded what was asked for."""
    call = transition(sampling={"temperature": recorded})
    credit = TransitionCredit(
        episode_id=call.episode_id,
        episode="e",
        call=call,
        position=0,
        r_final=1.0,
        r_air=0.0,
        r_total=1.0,
        advantage=1.0,
        weight=1.0,
        reason=None,
    )
    [row] = training_rows([credit])
    assert row.distribution.temperature == used


@given(st.lists(st.floats() | st.floats(-10001, -9998) | st.floats(-1, 1.5e-3), max_size=6))
def test_list_is_accepted_as_log_probabilities_if_each_of_its_values_is(
    values: list[float],
) -> None:
    each = all(-9999.0 < value <= 1e-3 for value in values)
    assert may_be_sampled(values) is each


def read(**settings: Any) -> Distribution:
    return distribution_of({"temperature": 1.0} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        *({"top_p": 1}, {"top_p": "1.0"}, {"top_p": True}, {"top_k": 0}, {"top_k": -1.0}),
        *({"min_p": 0}, {"presence_penalty": False}, {"frequency_penalty": -0.0}),
        *({"repetition_penalty": "1"}, {"logit_bias": {}}, {"logit_bias": {"5": 0}}),
        *({"bad_words": []}, {"min_tokens": 0}, {"stop_token_ids": [7]}, {"top_p": None}),
        *({"max_tokens": 5}, {"seed": 3}, {"stop_token_ids": "odd"}, {"grammar": None}),
    ],
)
def test_sampling_settings_without_effect_give_a_plain_distribution(
    settings: dict[str, Any],
) -> None:
    found = read(**settings)
    assert found == Distribution(temperature=1.0)
    assert found.is_plain
    assert not found.needs_history


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"temperature": "1e-6"}, {"temperature": 0.01}),
        ({"top_p": "0.5"}, {"top_p": 0.5}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"min_p": 1}, {"min_p": 1.0}),
        ({"logit_bias": {"7": 150, "3": "-2"}}, {"logit_bias": ((3, -2.0), (7, 100.0))}),
        ({"allowed_token_ids": [4, 2, 4]}, {"allowed_token_ids": (2, 4)}),
        ({"bad_words": ["b", "a", "b"]}, {"bad_words": ("a", "b")}),
        (
            {"min_tokens": "3", "stop_token_ids": [9, 1]},
            {"min_tokens": 3, "stop_token_ids": (1, 9)},
        ),
    ],
)
def test_sampling_settings_with_effect_are_in_the_distribution(
    settings: dict[str, Any], found: dict[str, Any]
) -> None:
    wanted = msgspec.structs.replace(Distribution(temperature=1.0), **found)
    assert read(**settings) == wanted
    assert hash(read(**settings)) == hash(wanted)
    assert wanted.is_plain == ("temperature" in found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", 0), ("temperature", "hot"), ("temperature", None), ("temperature", -1)),
        *(("top_p", 0), ("top_p", 1.1), ("top_p", []), ("top_k", -2), ("top_k", 1.5)),
        ("top_k", 10**30),
        *(("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1), ("frequency_penalty", "x")),
        *(("repetition_penalty", 0), ("repetition_penalty", -1), ("logit_bias", [])),
        *(("logit_bias", {"a": 1}), ("logit_bias", {"05": 1}), ("logit_bias", {"5": "x"})),
        *(("allowed_token_ids", []), ("allowed_token_ids", [True]), ("allowed_token_ids", ["5"])),
        *(("bad_words", ["a", ""]), ("bad_words", "a"), ("min_tokens", -1), ("min_tokens", 1.5)),
    ],
)
def test_impossible_sampling_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} = "):
        read(**{name: value})


def test_invalid_stop_token_ids_are_refused_if_min_tokens_masks_them() -> None:
    with pytest.raises(ValueError, match="stop_token_ids = "):
        read(min_tokens=1, stop_token_ids=["x"])


def test_penalties_bad_words_and_min_tokens_need_history() -> None:
    back: list[dict[str, Any]] = [
        *({"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1}),
        *({"bad_words": ["a"]}, {"min_tokens": 1}),
    ]
    assert all(read(**one).needs_history for one in back)
    assert not read(top_p=0.5, top_k=3, logit_bias={"1": 1}, allowed_token_ids=[1]).needs_history


def test_token_ids_of_a_distribution_are_all_ids_in_its_settings() -> None:
    found = read(
        logit_bias={"3": 1},
        allowed_token_ids=[5],
        bad_words=["a"],
        min_tokens=1,
        stop_token_ids=[8],
    )
    assert msgspec.structs.replace(found, banned_ids=((6, 7),)).token_ids == {3, 5, 6, 7, 8}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("0123456789a", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(REPLAYED)), JSON))
def test_any_sampling_settings_are_read_or_refused(settings: dict[str, Any]) -> None:
    try:
        found = distribution_of(settings)
    except ValueError:
        return
    assert found.temperature > 0
    assert 0 < found.top_p <= 1
    assert hash(found) == hash(distribution_of(settings))


def test_servers_sampling_defaults_are_read_or_refused_by_name() -> None:
    card = {"temperature": 0.6, "top_p": "0.95", "top_k": 20}
    assert parse_server_defaults(card) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert parse_server_defaults({"temperature": 0}) == {"temperature": 0.0}
    with pytest.raises(ValueError, match="unknown setting 'bad_words'; known: temperature, top_p"):
        parse_server_defaults({"bad_words": ["a"]})
    for name in WITH_DEFAULTS:
        with pytest.raises(ValueError, match=f"{name} = 'x'"):
            parse_server_defaults({name: "x"})


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_grammar_of_every_kind_is_read(kind: Any) -> None:
    assert read_grammar({"kind": kind, "text": "x"}) == Grammar(kind=kind, text="x")


@pytest.mark.parametrize(
    "value",
    [
        *(None, "a", [], {}, {"kind": "regex"}, {"kind": "odd", "text": ""}),
        *(
            {"kind": "json", "text": 7},
            {"kind": "json", "text": "", "x": 1},
            {"kind": [], "text": ""},
        ),
    ],
)
def test_invalid_grammar_is_not_read_and_settings_with_it_are_refused(value: Any) -> None:
    assert read_grammar(value) is None
    if value is not None:
        with pytest.raises(ValueError, match="grammar"):
            read(grammar=value)


def test_grammar_gives_a_distribution_with_history_and_stops() -> None:
    asked = {"kind": "regex", "text": "a+"}
    found = read(grammar=asked, stop_token_ids=[9, 4])
    assert found.grammar == Grammar(kind="regex", text="a+")
    assert found.stop_token_ids == (4, 9)
    assert found.needs_history
    assert not found.is_plain
    assert hash(found) == hash(read(grammar=dict(asked), stop_token_ids=[4, 9]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.none() | st.dictionaries(st.text(), VALUES, max_size=3)
TAGS = st.builds(
    ToolTag,
    model=st.text(),
    choice=st.sampled_from(["auto", "required", "forced"]),
    tools=st.lists(
        st.builds(OfferedTool, name=st.text(), parameters=SCHEMAS), min_size=1, max_size=3
    ).map(tuple),
    one_call=st.booleans(),
)


@given(TAGS)
def test_tool_tag_survives_writing_and_reading(tag: ToolTag) -> None:
    read = parse_tag(text_of_tag(tag))
    assert read == tag
    schemas = [[tool.parameters for tool in one.tools] for one in (read, tag)]
    # Dictionaries are equal in any order, their texts are not.
    assert json.dumps(schemas[0]) == json.dumps(schemas[1])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "7", "[]", "{}", '{"model": "hermes", "choice": "auto"}'),
        '{"model": "hermes", "choice": "any", "tools": []}',
        '{"model": "hermes", "choice": "auto", "tools": [{"name": 7}]}',
    ],
)
def test_invalid_text_of_a_tool_tag_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_tag(text)
