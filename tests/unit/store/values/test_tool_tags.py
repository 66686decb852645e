"""What a structural tag is made of comes back as it was recorded, key order included."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.grammars import OfferedTool, ToolTag, tag_from, text_of

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
def test_nothing_else_is(text: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        tag_from(text)
