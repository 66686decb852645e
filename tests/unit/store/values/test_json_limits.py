"""How deep and how large JSON is, told without parsing it; compared with a slow reference."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store.values import documents
from store.values.documents import MAX_DEPTH, Size, most_of, nests_too_deep

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


def nested(depth: int, kind: str = "[") -> bytes:
    opening, closing = {"[": ("[", "]"), "{": ('{"a":', "}")}[kind]
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize("kind", ["[", "{"])
def test_the_limit_is_exact(kind: str) -> None:
    assert not nests_too_deep(nested(MAX_DEPTH, kind))
    assert nests_too_deep(nested(MAX_DEPTH + 1, kind))


def test_what_stands_in_strings_does_not_count() -> None:
    text = json.dumps({"a": "[" * 5000, "b": '\\"[' * 900, "c\\": "{" * 2000}).encode()
    assert not nests_too_deep(text)
    assert size_of(text).containers == 1
    assert nests_too_deep(b'{"a":"\\\\",' + b'"b":' + nested(MAX_DEPTH) + b"}")


def test_many_siblings_are_not_deep() -> None:
    assert not nests_too_deep(b"[" + b",".join([nested(MAX_DEPTH - 1)] * 500) + b"]")
    assert nests_too_deep(b"[" + b",".join([nested(MAX_DEPTH)] * 500) + b"]")


def test_brackets_that_are_never_closed_count() -> None:
    assert nests_too_deep(b"[" * 5000)
    assert nests_too_deep(b"[" * 60 + nested(60))


def test_strings_across_windows_are_kept_apart() -> None:
    """More than one window of strings that hold what looks like structure."""
    text = json.dumps(["[", "],", '"'] * 60_000).encode()
    assert size_of(text).containers == 1
    assert size_of(text).values == 180_000


def test_what_is_too_large_is_not_counted_to_its_end() -> None:
    size = documents.size_of(b"[" + b"{}," * 10**6, Size(1000, 10**9))
    assert 1000 < size.containers < 10**5


@pytest.mark.parametrize("piece", range(1, 12))
def test_no_cut_changes_what_is_counted(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PIECE", piece)
    texts = ['a"[', "\\", "\\\\", '\\"', '\\\\"{', "]" * 9, "\\" * 40, '"""', ""]
    data = json.dumps([{text: text} for text in texts] + [[texts]]).encode()
    deepest, containers, commas = reference(data)
    assert size_of(data) == (containers, containers + commas)
    brackets = data.count(b"[") + data.count(b"{")
    assert most_of(data) == Size(brackets, brackets + data.count(b","))
    assert nests_too_deep(data + nested(MAX_DEPTH + 1))
    assert not nests_too_deep(data + nested(MAX_DEPTH))
    assert deepest < MAX_DEPTH


PIECES = st.sampled_from(
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
@given(st.lists(PIECES, max_size=40).map(b"".join).filter(without_stray_backslashes))
@example(b'"\\\\"' + b"[" * 101)
@example(b'"\\\\\\""' + b"[" * 101)
def test_any_bytes_are_counted_as_a_parser_would(data: bytes) -> None:
    deepest, containers, commas = reference(data)
    assert nests_too_deep(data) == (deepest > MAX_DEPTH)
    assert size_of(data) == (containers, containers + commas)
    most = most_of(data)
    assert most.containers >= containers
    assert most.values >= containers + commas


@settings(max_examples=200)
@given(VALUES, st.integers(0, 130))
def test_json_is_counted_exactly(value: Any, around: int) -> None:
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
def test_what_is_called_flat_is_flat(parts: list[bytes], limit: int, piece: int) -> None:
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
