"""JSON documents as they were said: compacted to the byte, or refused."""

import json
import string
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.documents import MAX_DEPTH, compact, nests_too_deep, parse

SPACE = st.text(" \t\r\n", max_size=3)
NUMBERS = st.sampled_from(["0", "-0.0", "1.10", "1e400", "-1E-400", "1" + "0" * 400, "12345678901"])
STRINGS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])).map(json.dumps),
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\')).map(
        lambda said: f'"{said}"'
    ),
    st.sampled_from(['"\\u2028\\n\\u0000"', '"\u2028\u0085"', '"[[{\\"}"', '"\\\\"', '"\\/"']),
)


def spaced(parts: list[str], between: str, spaces: list[str]) -> str:
    """The parts with whitespace on each side of each."""
    around = (spaces or [""]) * (len(parts) + 1)
    return between.join(f"{around[i]}{part}{around[i + 1]}" for i, part in enumerate(parts))


def members(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Arrays, and objects whose names may come twice."""
    pair = st.tuples(STRINGS, SPACE, values).map(lambda said: f"{said[0]}{said[1]}:{said[2]}")
    spaces = st.lists(SPACE, max_size=3)
    return st.one_of(
        st.tuples(st.lists(values, max_size=4), spaces).map(
            lambda s: f"[{spaced(s[0], ',', s[1])}]"
        ),
        st.tuples(st.lists(pair, max_size=4), spaces).map(
            lambda s: "{" + spaced(s[0], ",", s[1]) + "}"
        ),
    )


SCALARS = st.one_of(NUMBERS, STRINGS, st.sampled_from(["true", "false", "null"]))
DOCUMENTS = st.tuples(SPACE, st.recursive(SCALARS, members, max_leaves=12), SPACE).map("".join)


def tokens(text: str) -> list[str]:
    """What a document consists of, by the rules of RFC 8259 alone."""
    found, place = [], 0
    while place < len(text):
        start = place
        if text[place] in " \t\r\n":
            place += 1
            continue
        place += 1
        if text[start] == '"':
            while text[place] != '"':
                place += 2 if text[place] == "\\" else 1
            place += 1
        elif text[start] not in "[]{},:":
            while place < len(text) and text[place] not in " \t\r\n[]{},:":
                place += 1
        found.append(text[start:place])
    return found


@given(DOCUMENTS)
def test_only_insignificant_whitespace_goes(document: str) -> None:
    found = compact(document.encode())
    assert found.decode() == "".join(tokens(document))
    assert not any(byte < 32 for byte in found)
    assert compact(found) == found


@given(st.one_of(st.binary(), st.text(string.printable).map(str.encode), DOCUMENTS.map(str.encode)))
def test_anything_is_one_line_or_refused(text: bytes) -> None:
    try:
        found = compact(text)
    except ValueError:
        return
    assert b"\n" not in found
    assert b"\r" not in found
    json.loads(found)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"\\"[":'])
@pytest.mark.parametrize("deep", [MAX_DEPTH, MAX_DEPTH + 1, 979, 100_000])
def test_depth_is_bounded(opening: str, deep: int) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"\\"[":': "}]"}[opening]
    each = opening.count("[") - ('"[' in opening) + opening.count("{")
    times = deep // each
    text = (opening * times + "0" + closing * times).encode()
    assert nests_too_deep(text) == (times * each > MAX_DEPTH)
    for read in (compact, lambda text: parse(text, Any)):
        if nests_too_deep(text):
            with pytest.raises(ValueError, match="nests deeper"):
                read(text)
        else:
            read(text)


def test_brackets_in_strings_and_beside_each_other_are_no_depth() -> None:
    said = msgspec.json.encode(["[" * 1000, [[]] * 1000, {"{" * 1000: "\\" * 9}])
    assert compact(said) == said


@given(st.binary())
def test_any_bytes_are_parsed_or_refused(text: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(parse(text, dict[str, int]), dict)
