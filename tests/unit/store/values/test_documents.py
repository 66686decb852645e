"""JSON documents as they were said: compacted to the byte, or refused; their depth and size."""

import json
import string
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store.values import documents
from store.values.documents import MAX_DEPTH, Size, compact, nests_too_deep, parse, size_bound

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
def test_compacting_json_removes_only_insignificant_whitespace(document: str) -> None:
    found = compact(document.encode())
    assert found.decode() == "".join(tokens(document))
    assert not any(byte < 32 for byte in found)
    assert compact(found) == found


@given(st.one_of(st.binary(), st.text(string.printable).map(str.encode), DOCUMENTS.map(str.encode)))
def test_any_text_is_compacted_to_a_single_line_or_refused(text: bytes) -> None:
    try:
        found = compact(text)
    except ValueError:
        return
    assert b"\n" not in found
    assert b"\r" not in found
    json.loads(found)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"\\"[":'])
@pytest.mark.parametrize("deep", [MAX_DEPTH, MAX_DEPTH + 1, 979, 100_000])
def test_nesting_depth_of_json_is_bounded(opening: str, deep: int) -> None:
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
def test_any_bytes_are_parsed_as_json_or_refused(text: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(parse(text, dict[str, int]), dict)


UNLIMITED = Size(10**9, 10**9)


def size_of(data: bytes) -> Size:
    return documents.size_of(data, UNLIMITED)


def reference(data: bytes) -> tuple[int, int, int]:
    """The greatest depth, the containers and the commas outside of strings, byte by byte."""
    depth = deepest = containers = commas = 0
    inside = escaped = False
    for byte in data:
        sign = bytes([byte])
        if inside:
            if escaped:
                escaped = False
            elif sign == b"\\":
                escaped = True
            elif sign == b'"':
                inside = False
        elif sign == b'"':
            inside = True
        elif sign in (b"[", b"{"):
            depth, containers = depth + 1, containers + 1
            deepest = max(deepest, depth)
        elif sign in (b"]", b"}"):
            depth -= 1
        elif sign == b",":
            commas += 1
    return deepest, containers, commas


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


def test_many_siblings_are_not_deep() -> None:
    assert not nests_too_deep(b"[" + b",".join([nested(MAX_DEPTH - 1)] * 500) + b"]")
    assert nests_too_deep(b"[" + b",".join([nested(MAX_DEPTH)] * 500) + b"]")


def test_json_strings_across_read_windows_are_not_counted_as_structure() -> None:
    """More than one window of strings that hold what looks like structure."""
    text = json.dumps(["[", "],", '"'] * 60_000).encode()
    assert size_of(text).containers == 1
    assert size_of(text).values == 180_000


def test_counting_stops_once_a_document_is_too_large() -> None:
    size = documents.size_of(b"[" + b"{}," * 10**6, Size(1000, 10**9))
    assert 1000 < size.containers < 10**5


@pytest.mark.parametrize("piece", range(1, 12))
def test_counts_of_json_containers_and_values_are_the_same_however_it_is_cut(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PIECE", piece)
    texts = ['a"[', "\\", "\\\\", '\\"', '\\\\"{', "]" * 9, "\\" * 40, '"""', ""]
    data = json.dumps([{text: text} for text in texts] + [[texts]]).encode()
    deepest, containers, commas = reference(data)
    assert size_of(data) == (containers, containers + commas)
    brackets = data.count(b"[") + data.count(b"{")
    assert size_bound(data) == Size(brackets, brackets + data.count(b","))
    assert nests_too_deep(data + nested(MAX_DEPTH + 1))
    assert not nests_too_deep(data + nested(MAX_DEPTH))
    assert deepest < MAX_DEPTH


PARTS = st.sampled_from(
    [
        *(b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"a", b'""', b'\\"', b'"['),
        *(b"[" * 60, b"]" * 60, b"[]" * 40, nested(30), nested(97)),
    ]
)
VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='[]{}",\\ab\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='[]{}",\\a', max_size=4), inner, max_size=3)
    ),
    max_leaves=20,
)


def without_stray_backslashes(data: bytes) -> bool:
    """Whether backslashes stand in strings alone; elsewhere a parser stops at the first."""
    inside = escaped = False
    for byte in data:
        sign = bytes([byte])
        if sign == b"\\" and not inside:
            return False
        if inside and escaped:
            escaped = False
        elif inside and sign == b"\\":
            escaped = True
        elif sign == b'"':
            inside = not inside
    return True


@settings(max_examples=500)
@given(st.lists(PARTS, max_size=40).map(b"".join).filter(without_stray_backslashes))
@example(b'"\\\\"' + b"[" * 101)
@example(b'"\\\\\\""' + b"[" * 101)
def test_containers_values_and_depth_of_any_bytes_are_counted_as_by_a_parser(data: bytes) -> None:
    deepest, containers, commas = reference(data)
    assert nests_too_deep(data) == (deepest > MAX_DEPTH)
    assert size_of(data) == (containers, containers + commas)
    most = size_bound(data)
    assert most.containers >= containers
    assert most.values >= containers + commas


@settings(max_examples=200)
@given(VALUES, st.integers(0, 130))
def test_containers_values_and_depth_of_json_are_counted_exactly(value: Any, around: int) -> None:
    for _ in range(around):
        value = [value, "]"]
    data = json.dumps(value).encode()
    deepest, containers, commas = reference(data)
    assert nests_too_deep(data) == (deepest > MAX_DEPTH)
    assert size_of(data) == (containers, containers + commas)


@given(
    st.lists(st.sampled_from([b"[", b"]", b"{", b"}", b'"', b",", b"1", b'\\"']), max_size=60),
    st.integers(0, 6),
    st.integers(1, 20),
)
def test_document_called_flat_is_within_the_depth_limit(
    parts: list[bytes], limit: int, piece: int
) -> None:
    data = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "MAX_DEPTH", limit)
        patch.setattr(documents, "_PIECE", piece)
        if documents._certainly_flat(data):
            assert reference(data)[0] <= limit


def test_a_long_reply_with_log_probabilities_is_called_flat() -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97, 98], "top_logprobs": []}
    reply = json.dumps({"content": [token] * 2000, "token_ids": list(range(2000))}).encode()
    assert documents._certainly_flat(reply)
