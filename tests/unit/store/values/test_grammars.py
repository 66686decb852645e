"""A recorded grammar is a part of what a call was sampled from."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.grammars import (
    KINDS,
    Grammar,
    OfferedTool,
    ToolTag,
    read_grammar,
    tag_from,
    text_of,
)
from store.values.sampling import Distribution, distribution_of


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_read(kind: Any) -> None:
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
def test_nothing_else_is_a_recorded_grammar(value: Any) -> None:
    assert read_grammar(value) is None


def test_it_makes_a_distribution_that_looks_back_and_knows_its_stops() -> None:
    asked = {"kind": "regex", "text": "a+"}
    found = distribution_of({"temperature": 1.0, "grammar": asked, "stop_token_ids": [9, 4]})
    assert found.grammar == Grammar(kind="regex", text="a+")
    assert found.stop_token_ids == (4, 9)
    assert found.needs_history
    assert not found.is_plain
    assert hash(found) == hash(
        distribution_of({"temperature": 1.0, "grammar": dict(asked), "stop_token_ids": [4, 9]})
    )


def test_none_is_no_grammar() -> None:
    assert distribution_of({"temperature": 1.0, "grammar": None}) == Distribution(temperature=1.0)


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
def test_what_is_written_is_read(tag: ToolTag) -> None:
    read = tag_from(text_of(tag))
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
def test_nothing_else_is_a_recorded_tool_tag(text: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        tag_from(text)
