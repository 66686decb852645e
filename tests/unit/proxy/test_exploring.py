"""Which episodes explore, what is changed of their calls, and that these can be learned from."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.exploring import Exploring, explore_request, is_chosen, with_changed_settings
from proxy.formats.base import read_request
from proxy.formats.raw_json import parse_object
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
from proxy.trainable import sampling_settings, why_not_replayed
from proxy.upstreams.upstreams import SamplingDefaults
from store.ids import new_id_with_text
from store.policy_table import Explore
from store.records import EXPLORED
from tests.support.recordings import PLAIN
from tests.support.records import captured


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["run-{}".format, "{}".format, lambda _: new_id_with_text()[1]])
def test_share_of_episodes_explores(share: float, name: Callable[[int], str]) -> None:
    many = 20_000
    chosen = sum(is_chosen(name(number), share) for number in range(many))
    # Five standard deviations.
    assert abs(chosen / many - share) < 5 * (share * (1 - share) / many) ** 0.5


@given(st.text(), st.floats(min_value=1e-9, max_value=1), st.floats(min_value=1e-9, max_value=1))
def test_larger_share_explores_every_episode_of_a_smaller_share(
    episode: str, one: float, other: float
) -> None:
    small, large = sorted((one, other))
    assert is_chosen(episode, small) <= is_chosen(episode, large)
    assert is_chosen(episode, 1.0)
    assert is_chosen(episode, one) == is_chosen(episode, one)


def test_episode_name_that_is_no_unicode_text_can_be_chosen_to_explore() -> None:
    assert is_chosen("\ud800", 1.0)


def test_choice_of_exploring_episodes_never_changes() -> None:
    """Another choice would change episodes under way."""
    chosen = [number for number in range(60) if is_chosen(f"episode-{number}", 0.1)]
    assert chosen == [1, 3, 5, 6, 23, 48]


BOTH = Explore(share=1.0, temperature=0.7, drop_strict=True)
WARMER = Explore(share=1.0, temperature=0.7)
LOOSER = Explore(share=1.0, drop_strict=True)
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "f", "parameters": SCHEMA, "strict": True}
STRICT: dict[str, Any] = {
    "chat": {"type": "function", "function": FUNCTION},
    "messages": {"name": "f", "input_schema": SCHEMA, "strict": True},
    "responses": {"type": "function", **FUNCTION},
}
FORMS = sorted(PLAIN)
WITH_TOOLS = sorted(STRICT)


def changes(
    name: str,
    rule: Explore = BOTH,
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008
    **fields: Any,
) -> Any:
    request = read_request(json.dumps(PLAIN[name] | fields).encode())
    found = explore_request(request, FORMATS[name], Exploring(rule, defaults))
    return None if found is None else found.changes


@pytest.mark.parametrize("name", FORMS)
def test_exploration_raises_only_a_temperature_below_the_minimum(name: str) -> None:
    assert changes(name, temperature=0) == {"temperature": 0.7}
    assert changes(name, temperature=0.3) == {"temperature": 0.7}
    assert changes(name, temperature=0.7) is None
    assert changes(name, temperature=1) is None
    assert changes(name) is None
    assert changes(name, LOOSER, temperature=0) is None


@pytest.mark.parametrize("name", FORMS)
def test_servers_default_temperature_counts_if_the_request_has_none(name: str) -> None:
    greedy = SamplingDefaults(temperature=0.0)
    assert changes(name, WARMER, greedy) == {"temperature": 0.7}
    assert changes(name, WARMER, greedy, temperature=None) == {"temperature": 0.7}
    assert changes(name, WARMER, greedy, temperature=0.9) is None


def test_exploration_removes_the_seed_if_it_raises_the_temperature() -> None:
    assert changes("chat", temperature=0, seed=7) == {"temperature": 0.7, "seed": None}
    assert changes("chat", temperature=1, seed=7) is None


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_exploration_drops_strict_tools_only_if_the_server_enforces_grammars(name: str) -> None:
    tools = [STRICT[name]]
    assert changes(name, tools=tools) == {"strict": None}
    assert changes(name, tools=tools, temperature=0) == {"temperature": 0.7, "strict": None}
    free = SamplingDefaults(tool_grammars=False)
    assert changes(name, BOTH, free, tools=tools) is None
    assert changes(name, BOTH, free, tools=tools, temperature=0) == {"temperature": 0.7}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_strict_tools_of_a_known_syntax_stay_strict_unless_loosened(name: str) -> None:
    tagged, tools = SamplingDefaults(tool_tag="hermes"), [STRICT[name]]
    assert changes(name, WARMER, tagged, tools=tools, temperature=0) == {"temperature": 0.7}
    assert changes(name, LOOSER, tagged, tools=tools) == {"strict": None}
    asked = {"tools": tools, "parallel_tool_calls": False}
    if name != "messages":
        assert changes(name, LOOSER, tagged, **asked) == {"strict": None}
        assert changes(name, LOOSER, tagged, tool_choice="required", **asked) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"top_k": 1},
        {"min_p": 1},
        {"allowed_token_ids": [5]},
        {"logits_processors": ["x"]},
        {"a_field_that_nobody_knows": 1},
        {"top_p": "often"},
        {"guided_regex": "a+"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"tools": [STRICT["chat"]], "parallel_tool_calls": False},
        {"tools": [STRICT["chat"]], "response_format": {"type": "json_object"}},
    ],
)
def test_call_that_exploring_cannot_make_trainable_is_left_alone(
    fields: dict[str, Any],
) -> None:
    assert changes("chat", **{"temperature": 0} | fields) is None


def test_exploration_makes_no_change_that_alone_leaves_a_call_untrainable() -> None:
    """A strict tool's call stays constrained, a cold one greedy."""
    tools = [STRICT["chat"]]
    assert changes("chat", WARMER, tools=tools, temperature=0) is None
    assert changes("chat", LOOSER, tools=tools, temperature=0) is None


def test_servers_top_k_of_1_prevents_exploring_unless_overridden() -> None:
    one = SamplingDefaults(others={"top_k": 1})
    assert changes("chat", BOTH, one, temperature=0) is None
    assert changes("chat", BOTH, one, temperature=0, top_k=20) == {"temperature": 0.7}


def test_exploration_keeps_response_format_and_strictness_of_forced_tool_calls() -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": SCHEMA, "strict": True},
    }
    assert changes("chat", response_format=form, temperature=0) == {"temperature": 0.7}
    forced = {"tools": [STRICT["chat"]], "tool_choice": "required"}
    assert changes("chat", temperature=0, **forced) == {"temperature": 0.7}


def test_exploration_leaves_a_request_body_alone_that_is_no_json_object() -> None:
    for body in (b"", b"[1]", b'"x"', b"\xff"):
        exploring = Exploring(BOTH, SamplingDefaults(temperature=0.0))
        assert explore_request(read_request(body), FORMATS["chat"], exploring) is None


@pytest.mark.parametrize("name", FORMS)
def test_exploration_leaves_all_other_bytes_of_the_request_unchanged(name: str) -> None:
    body = json.dumps(PLAIN[name])[:-1].encode()
    odd = b',"x": 1.50,"temperature" : 0e0, "user":"\\u00e9\\ud83d\\ude00 ", "seed":1,"y":[ 1e2 ]}'
    request = read_request(body + odd)
    made = with_changed_settings(request, {"temperature": 0.7, "seed": None})
    before, after = parse_object(request.body), parse_object(made.body)
    assert before is not None
    assert after is not None
    assert list(after) == [field for field in before if field != "seed"]
    assert bytes(after.pop("temperature")) == b"0.7"
    assert {n: bytes(v) for n, v in after.items()} == {
        n: bytes(v) for n, v in before.items() if n not in ("temperature", "seed")
    }
    assert made.fields["temperature"] == 0.7
    assert "seed" not in made.fields
    assert (made.model, made.stream) == (request.model, request.stream)
    assert request.fields["temperature"] == 0


def test_exploration_adds_a_missing_temperature() -> None:
    made = with_changed_settings(read_request(b'{"model":"m"}'), {"temperature": 0.5})
    assert made.body == b'{"model":"m","temperature":0.5}'


def test_strict_tools_lose_only_strict_and_other_tools_nothing() -> None:
    tools = (
        b'[{"type":"function","function":{"strict":true,"name":"a","parameters":{"strict": true}}},'
        b'{"type" : "function","function":{"name":"b","strict": false}},'
        b'{"strict":1,"name":"c","parameters":{ "x":1e0 }}, "no tool", {"function":null}]'
    )
    made = with_changed_settings(
        read_request(b'{"model":"m","tools":' + tools + b"}"), {"strict": None}
    )
    assert made.body == (
        b'{"model":"m","tools":'
        b'[{"type":"function","function":{"name":"a","parameters":{"strict": true}}},'
        b'{"type" : "function","function":{"name":"b","strict": false}},'
        b'{"name":"c","parameters":{ "x":1e0 }},"no tool",{"function":null}]}'
    )
    assert made.fields["tools"][0]["function"] == {"name": "a", "parameters": {"strict": True}}


@pytest.mark.parametrize("tools", [None, []], ids=["null", "empty"])
def test_call_with_a_strict_tool_added_by_a_message_is_left_alone(tools: Any) -> None:
    definition = {"name": "f", "input_schema": SCHEMA, "strict": True}
    tool = {"type": "tool_definition", "definition": definition}
    changes = [{"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}]
    asked = PLAIN["messages"] | {"messages": PLAIN["messages"]["messages"] + changes}
    for fields in (asked, asked | {"tools": tools}):
        request = read_request(msgspec.json.encode(fields))
        for tag in (None, "hermes"):
            exploring = Exploring(BOTH, SamplingDefaults(0.2, {}, True, tag))
            assert explore_request(request, FORMATS["messages"], exploring) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
NAMES = ["temperature", "top_k", "top_p", "seed", "n", "tools", "tool_choice", "min_p", "strict"]
TOOLS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"strict": VALUES, "function": VALUES, "name": st.text(), "type": st.text()}
    ),
    max_size=3,
)


@settings(max_examples=400)
@given(
    st.sampled_from(FORMS),
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), VALUES, max_size=5),
    st.none() | TOOLS,
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    st.sampled_from([(False, None), (True, None), (True, "hermes")]),
)
def test_any_exploring_call_is_recorded_as_it_is_sampled(
    name: str, fields: dict[str, Any], tools: Any, temperature: float, parser: tuple[bool, Any]
) -> None:
    """The ingester reads of the client's own request what the server reads of the changed one."""
    asked = PLAIN[name] | fields | ({} if tools is None else {"tools": tools})
    request = read_request(msgspec.json.encode(asked))
    grammars, tag = parser
    defaults = SamplingDefaults(temperature, {}, grammars, tag)
    spoken = FORMATS[name]
    found = explore_request(request, spoken, Exploring(BOTH, defaults))
    if found is None:
        return
    sent = spoken.rewrite(found.request, "m@1", want_ids=True)
    record = transcribe(
        captured(
            dialect=name,
            request=request.body,
            served_model="m@1",
            wanted_ids=bool(sent.injected),
            default_temperature=temperature,
            tool_grammars=grammars,
            tool_tag=tag,
            explored=found.changes,
        )
    )
    recorded = msgspec.json.decode(record.sampling)
    assert recorded.pop(EXPLORED) == found.changes
    served = sampling_settings(
        read_request(found.request.body).fields,
        temperature,
        spoken.sampling,
        tool_grammars=grammars,
        tool_tag=tag,
    )
    assert recorded == msgspec.json.decode(msgspec.json.encode(served))
    assert why_not_replayed(recorded, spoken.sampling, sure=True) is None
    assert record.request == request.body
    assert explore_request(found.request, spoken, Exploring(BOTH, defaults)) is None
