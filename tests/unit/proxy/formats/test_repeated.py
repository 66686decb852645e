"""A name that comes twice in an object is found, however it is written, and nothing else is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.repeated import repeated_name

TWICE: list[tuple[bytes, str]] = [
    (b'{"model": "a", "model": "b"}', "model"),
    (b'{"model": "a", "mod\\u0065l": "b"}', "model"),
    (b'{"model" : "a",\r\n"model"\t: "a"}', "model"),
    (b'{"m": [{"a": {"id": 1, "x": 2, "id": null}}]}', "id"),
    (b'{"a\\\\": 1, "b": "\\\\", "a\\\\": 2}', "a\\"),
    # What is made up for is not: a text that looks like a name, a number that is hard to read.
    (b'{"model": "a", "model": "b", "x": "\\":"}', "model"),
    (b'{"model": "a", "model": "b", "x": [":", ": "]}', "model"),
    (b'{"model": "a", "model": "b", "x": [1e400, {"y": 1}]}', "model"),
    (b'{"x": [1e400, {"y": 1, "y": 2}]}', "y"),
    # Blanks of all kinds before the colon.
    (b'{"a":1,"a"\n\t:2,"x" \r:"y"}', "a"),
]
ONCE = [
    b"{}",
    b'{"model": "a", "x": "\\"model\\": \\"b\\", :", "y": [{"model": "\\\\"}, {"model": ":"}]}',
    b'{"x": [1e400, {"y": 1}], "y": {"x": {"y": 1}}}',
    b'{"Model": "a", "model": "b"}',
    b"[1]",
    b"no JSON",
]


@pytest.mark.parametrize(("body", "name"), TWICE)
def test_what_comes_twice_is_found(body: bytes, name: str) -> None:
    assert repeated_name(read_request(body)) == name


@pytest.mark.parametrize("body", ONCE)
def test_what_comes_once_is_not(body: bytes) -> None:
    assert repeated_name(read_request(body)) is None


texts = st.text(st.sampled_from('":\\{}[], a\u00e9'), max_size=6)
values = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


# What may stand before a colon (RFC 8259, section 2).
blanks = st.text(st.sampled_from(" \t\n\r"), max_size=2)


def written(pairs: list[tuple[str, Any]], ascii_only: bool, blank: str) -> bytes:
    members = (
        f"{json.dumps(name, ensure_ascii=ascii_only)}{blank}: {json.dumps(value)}"
        for name, value in pairs
    )
    return ("{" + ",".join(members) + "}").encode()


@given(st.lists(st.tuples(texts, values), max_size=6), st.booleans(), blanks)
def test_any_object_has_a_name_twice_or_has_not(
    pairs: list[tuple[str, Any]], ascii_only: bool, blank: str
) -> None:
    names = [name for name, _ in pairs]
    found = repeated_name(read_request(written(pairs, ascii_only, blank)))
    assert (found is None) == (len(set(names)) == len(names))
    assert found is None or names.count(found) > 1
