"""Patterns over the strings of JSON: all of them, and nothing else."""

import json
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.redaction.calls import Rules
from proxy.redaction.rules import parse_rules

CANARY = "canary-4711"
RULE = "[[rule]]\nname = 'canary'\npattern = 'canary-[0-9]{4}'\nreplacement = '[c]'\n"


def rules(text: str = RULE) -> Rules:
    return parse_rules(text, "r.toml")


def redacted(document: str, text: str = RULE) -> tuple[str, set[str]]:
    hits: set[str] = set()
    return rules(text).patterns.document(document.encode(), hits).decode(), hits


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"a": "canary-4711"}', '{"a": "[c]"}'),
        (
            '{"canary-4711": [1, {"b": "x canary-4711 y canary-4712"}]}',
            '{"[c]": [1, {"b": "x [c] y [c]"}]}',
        ),
        # However the client escapes it.
        (r'{"a": "\u0063anary-4711"}', '{"a": "[c]"}'),
        # JSON within a text, twice.
        (r'{"arguments": "{\"k\": \"\\u0063anary-4711\"}"}', r'{"arguments": "{\"k\": \"[c]\"}"}'),
        (r'["[\"[\\\"canary-4711\\\"]\"]"]', r'["[\"[\\\"[c]\\\"]\"]"]'),
        # What only looks like JSON.
        (r'["{ he said \"canary-4711\" and {"]', r'["{ he said \"[c]\" and {"]'),
        ('{"a": "{\\"b\\": \\"canary-4711"}', '{"a": "{\\"b\\": \\"[c]"}'),
    ],
)
def test_what_a_pattern_finds_is_replaced(document: str, expected: str) -> None:
    assert redacted(document) == (expected, {"canary"})


@pytest.mark.parametrize(
    "document",
    [
        '{"a": 1e400, "b": 12345678901234567890123, "c" : "\\u0041\\/", "d":"\\ud800", "e": ""}',
        '{"ids": [4711], "n": null}',
        "[]",
    ],
)
def test_what_no_pattern_finds_stays_byte_for_byte(document: str) -> None:
    assert redacted(document) == (document, set())


texts = st.text() | st.sampled_from(
    [CANARY, f'"{CANARY}"', f"\\{CANARY}\n", f'{{"x": "{CANARY}"}}']
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@given(values, st.booleans())
def test_no_document_keeps_what_a_pattern_finds(value: Any, ascii_only: bool) -> None:
    document = (
        json.dumps(value, ensure_ascii=ascii_only)
        .encode(errors="surrogatepass")
        .decode(errors="replace")
    )
    left, hits = redacted(document)
    assert CANARY not in left
    assert CANARY not in str(json.loads(left))
    assert bool(hits) == (CANARY in document)
    if not hits:
        assert left == document


def test_patterns_apply_in_their_order_and_all_that_hit_are_named() -> None:
    second = "[[rule]]\nname = 'mark'\npattern = '\\[c\\]'\nreplacement = 'd'\n"
    assert redacted('["canary-4711"]', RULE + second) == ('["d"]', {"canary", "mark"})


def test_no_text_makes_a_pattern_slow() -> None:
    evil = "[[rule]]\nname = 'evil'\npattern = '(a+)+$'\n"
    before = process_time()
    redacted(json.dumps("a" * 200_000 + "b"), evil)
    assert process_time() - before < 5
