"""Redaction: patterns and fields, and what of a call and a dead letter is left."""

import json
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import BadRedaction
from proxy.ingester.transcribe import Entry, read_entry
from proxy.redaction import (
    RedactedCall,
    Redactor,
    open_redactor,
    parse_rules,
    redact_call,
    replace_field,
    without_ids,
)
from proxy.settings import ProxySettings
from proxy.spool.segments import Piece, decode_payload, encode_payload
from store.ids import new_id
from store.records import CallRecord, FeedbackRecord, Tokens, ToolCall, ToolEvent
from tests.support.records import call, captured, statement

CANARY = "canary-4711"
PATTERN = "[[rule]]\nname = 'canary'\npattern = 'canary-[0-9]{4}'\n"
SHORT = f"{PATTERN}replacement = '[c]'\n"
FIELD = "[[rule]]\nname = 'user'\nfield = 'request.user'\n"
REPLY = "[[rule]]\nname = 'said'\nfield = 'reply.choices.*.message'\n"
GONE = b'"[redacted]"'
REDACTOR = Redactor(parse_rules(PATTERN, "r"), ProxySettings())


# The file of rules


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no table [[rule]]; write one for each rule"),
        ("[[rule]", "r.toml is not TOML"),
        ("[[rule]]\npattern = 'x'", 'rule number 1: name: Field required; write name = "cards"'),
        ("[[rule]]\nname = 'a b'\npattern = 'x'", 'name = "cards", of letters, digits'),
        ("[[rule]]\nname = 'a'", "rule 'a': write either pattern or field"),
        ("[[rule]]\nname = 'a'\npattern = 'x'\nfield = 'request.y'", "either pattern or field"),
        ("[[rule]]\nname = 'a'\npatern = 'x'", "unknown key 'patern': did you mean pattern?"),
        ("[[rule]]\nname = 'a'\npattern = '('", "rule 'a': pattern: RE2 cannot read '('"),
        ("[[rule]]\nname = 'a'\npattern = '(?<=x)y'", "no look-around and no back-references"),
        ("[[rule]]\nname = 'a'\npattern = '(x)\\1'", "no look-around and no back-references"),
        ("[[rule]]\nname = 'a'\npattern = 'x*'", "pattern: it matches the empty text"),
        ("[[rule]]\nname = 'a'\nfield = 'messages'", "a path from request. or reply. on"),
        ("[[rule]]\nname = 'a'\nfield = 'request..x'", "rule 'a': field: String should match"),
        ("[[rule]]\nname = 'a'\nfield = 'request'", "rule 'a': field: String should match"),
        (
            "[[rule]]\nname = 'a'\npattern = 'x'\n[[rule]]\nname = 'a'\npattern = 'y'",
            "two tables [[rule]] are named 'a'; give each a name of its own",
        ),
    ],
)
def test_unusable_redaction_rule_is_an_error_that_names_it_and_the_remedy(
    text: str, says: str
) -> None:
    with pytest.raises(BadRedaction, match=r"^r\.toml") as raised:
        parse_rules(text, "r.toml")
    assert says in str(raised.value)


def test_missing_redaction_rules_are_an_error_only_if_a_file_is_configured(tmp_path: Path) -> None:
    assert open_redactor(ProxySettings(redaction=None)) is None
    with pytest.raises(BadRedaction, match=r"PAWL_REDACTION names .*Unset it to store calls as"):
        open_redactor(ProxySettings(redaction=tmp_path / "none.toml"))


# Patterns


def redacted(document: str, rules: str = SHORT) -> tuple[str, set[str]]:
    hits: set[str] = set()
    return parse_rules(rules, "r").redact_document(document.encode(), hits).decode(), hits


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
def test_redaction_pattern_is_found_in_every_string_of_a_document(
    document: str, expected: str
) -> None:
    assert redacted(document) == (expected, {"canary"})


@pytest.mark.parametrize(
    "document",
    [
        '{"a": 1e400, "b": 12345678901234567890123, "c" : "\\u0041\\/", "d":"\\ud800", "e": ""}',
        '{"ids": [4711], "n": null}',
        "[]",
    ],
)
def test_document_without_a_redaction_match_stays_byte_for_byte(document: str) -> None:
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
def test_redacted_document_keeps_no_match_of_a_pattern(value: Any, ascii_only: bool) -> None:
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


def test_redaction_patterns_apply_in_order_and_every_matching_rule_is_named() -> None:
    second = "[[rule]]\nname = 'mark'\npattern = '\\[c\\]'\nreplacement = 'd'\n"
    assert redacted('["canary-4711"]', SHORT + second) == ('["d"]', {"canary", "mark"})


def test_no_text_makes_a_redaction_pattern_slow() -> None:
    evil = "[[rule]]\nname = 'evil'\npattern = '(a+)+$'\n"
    before = process_time()
    redacted(json.dumps("a" * 200_000 + "b"), evil)
    assert process_time() - before < 5


# Fields


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        (b'{"user": "u", "n": 1e400}', "user", b'{"user":"[redacted]","n":1e400}'),
        (b'{"a": {"b": {"c": 1}}}', "a.b", b'{"a":{"b":"[redacted]"}}'),
        (b'{"m": [{"c": "x"}, {"d": 1}]}', "m.*.c", b'{"m":[{"c":"[redacted]"},{"d": 1}]}'),
        (b'{"m": [{"c": "x"}, {"c": "y"}]}', "m.1.c", b'{"m":[{"c": "x"},{"c":"[redacted]"}]}'),
        (b'{"a": {"x": 1, "y": "2"}}', "a.*", b'{"a":{"x":"[redacted]","y":"[redacted]"}}'),
    ],
)
def test_field_to_redact_is_replaced_with_any_value_or_nesting(
    document: bytes, path: str, expected: bytes
) -> None:
    assert replace_field(document, path.split("."), GONE) == expected


@pytest.mark.parametrize(
    "document", [b'{"b": 1}', b'{"a": null}', b'{"a": "[redacted]"}', b'"a"', b"[1, 2]", b"{}"]
)
def test_document_without_the_field_to_redact_is_returned_unchanged(document: bytes) -> None:
    assert replace_field(document, ["a"], GONE) is document


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            b'{"prompt":[1,2],"logprobs":true,"top_logprobs":3,"prompt_token_ids":[1],"choices":'
            b'[{"token_ids":[4],"logprobs":{"content":[]},"text":"a {"}],"n":[1,2]}',
            b'{"logprobs":true,"top_logprobs":3,"choices":[{"text":"a {"}],"n":[1,2]}',
        ),
        (b'{"prompt":["a","b"]}', b'{"prompt":["a","b"]}'),
    ],
)
def test_redaction_removes_token_ids_and_logprobs_but_not_the_requests_for_them(
    document: bytes, expected: bytes
) -> None:
    assert without_ids(document) == expected


# Calls and feedback


def a_call() -> CallRecord:
    event = ToolEvent(id=new_id(), tool_id="t", name="f", status="error", detail=f"exit {CANARY}")
    return call(
        request=b'{"model":"m","user":"u","stop":"canary-4711","messages":[]}',
        reply=b'{"id":"r","choices":[{"message":{"content":"hi"},"logprobs":{"content":[]}}]}',
        sampling=b'{"temperature":1.0,"stop":"canary-4711","explored":{"temperature":0.2}}',
        tool_calls=(ToolCall(id="t1", name="f", arguments='{"k":"canary-4711"}'),),
        tool_events=(msgspec.structs.replace(event, quotes=(new_id(),)),),
        provides=(b"\x01" + bytes(15), b"\x03" + bytes(15), b"\x04" + bytes(15)),
        needs=(b"\x02" + bytes(15), b"\x03" + bytes(15)),
        text_digest=new_id(),
    )


def by_rules(record: CallRecord, rules: str = PATTERN) -> RedactedCall:
    return redact_call(record, parse_rules(rules, "r"))


def test_match_is_removed_with_all_data_derived_from_its_text() -> None:
    record, by, withheld = by_rules(a_call())
    assert CANARY.encode() not in msgspec.json.encode(record)
    assert (by, withheld) == (frozenset({"canary"}), False)
    assert (record.trainable, record.reason) == (False, "redacted")
    assert record.tokens == Tokens()
    assert record.tool_calls[0].arguments == '{"k":"[redacted]"}'
    assert record.tool_events[0].detail == "exit [redacted]"
    assert record.tool_events[0].quotes == ()
    assert record.text_digest is None
    # Fingerprints of ids stay, those of words go.
    assert [digest[0] for digest in (*record.provides, *record.needs)] == [1, 2]
    assert record.reply == b'{"id":"r","choices":[{"message":{"content":"hi"}}]}'
    assert decode_payload(encode_payload(record)) == record


@pytest.mark.parametrize(("rule", "name"), [(FIELD, "user"), (REPLY, "said")])
def test_copies_of_a_redacted_field_are_removed(rule: str, name: str) -> None:
    record, by, _ = by_rules(a_call(), rule)
    assert by == {name}
    assert CANARY not in record.tool_calls[0].arguments
    assert record.tool_events[0].detail is None
    assert record.sampling == b'{"temperature":1.0,"stop":null,"explored":{"temperature":0.2}}'


def test_call_without_a_redaction_match_is_returned_unchanged() -> None:
    record = call(request=b'{"model": "m"}')
    assert by_rules(record, PATTERN + FIELD + REPLY).record is record


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "user": "canary-4711", "user": null}',
        b'{"model": "m", "us\\u0065r": "canary-4711", "user": "u"}',
    ],
)
def test_body_that_repeats_a_json_name_is_withheld_under_a_field_rule(body: bytes) -> None:
    record, _, withheld = by_rules(call(request=body), FIELD)
    assert withheld
    assert CANARY.encode() not in msgspec.json.encode(record)
    # A pattern is found in each of the two.
    assert not by_rules(call(request=body)).withheld


def test_names_of_tools_are_redacted() -> None:
    asked = ToolCall(id="t1", name=CANARY, arguments="{}")
    event = ToolEvent(id=new_id(), tool_id="t", name=CANARY, status="ok")
    record = by_rules(call(tool_calls=(asked,), tool_events=(event,))).record
    assert (record.tool_calls[0].name, record.tool_events[0].name) == ("[redacted]",) * 2


def of_a_tool(stated: FeedbackRecord) -> FeedbackRecord:
    event = ToolEvent(id=new_id(), tool_id="t", name=None, status="error", detail=CANARY)
    items = tuple(msgspec.structs.replace(item, tool=event) for item in stated.items)
    return msgspec.structs.replace(stated, items=items)


@pytest.mark.parametrize(
    "stated",
    [
        statement("verdict", f"as {CANARY} says", episode="e1"),
        of_a_tool(statement("reward", 1.0, episode="e1")),
    ],
)
def test_text_values_and_tool_details_of_feedback_are_redacted(stated: FeedbackRecord) -> None:
    assert CANARY.encode() not in msgspec.json.encode(REDACTOR.redact_feedback(stated))


def test_correction_with_a_match_is_left_out_and_the_value_beside_it_kept() -> None:
    said = statement("reward", 0.0, episode="e1", correction=f"Ask {CANARY}.")
    [item] = REDACTOR.redact_feedback(said).items
    assert (item.value, item.correction) == (0.0, None)
    plain = statement("reward", 0.0, episode="e1", correction="Ask him.")
    assert REDACTOR.redact_feedback(plain).items[0].correction == "Ask him."


# Failures, and dead letters


async def test_call_that_cannot_be_redacted_is_recorded_without_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("canary")

    monkeypatch.setattr("proxy.redaction.redact_call", fail)
    before = captured(request=b'{"messages":"canary"}', reply=b"canary")
    for record in (await REDACTOR.redact_captured(before), REDACTOR.redact_record(a_call())):
        assert isinstance(record, CallRecord)
        assert b"canary" not in encode_payload(record)
        assert (record.episode, record.reason) == ("e1", "redacted")
        assert (record.request, record.request_raw, record.reply, record.reply_raw) == (None,) * 4


def piece(data: bytes, damage: str = "") -> Piece:
    return Piece(0, 0, len(data), data, 1, 1, damage)


def test_dead_letter_of_a_refused_record_holds_the_redacted_record() -> None:
    record = call(request=b'{"a":"[redacted]"}')
    data, reason = REDACTOR.redact_letter(Entry(piece(b"canary"), record, "refused"))
    assert (decode_payload(data), reason) == (record, "refused")


@pytest.mark.parametrize(
    "frame",
    [captured(request=b'{"a":"canary"}', reply=b"canary"), call(request=b'{"a":"canary"}')],
)
def test_dead_letter_of_an_unreadable_call_has_no_content(frame: Any) -> None:
    reason = "cannot be read: ValueError at x.py:1: canary: is odd"
    data, reason = REDACTOR.redact_letter(Entry(piece(encode_payload(frame)), None, reason))
    record = decode_payload(data)
    assert isinstance(record, CallRecord)
    assert (record.episode, record.request, record.reply) == ("e1", None, None)
    assert b"canary" not in data
    assert reason == "cannot be read: ValueError at x.py:1"


def test_dead_letter_of_damaged_bytes_is_empty() -> None:
    entry = read_entry(piece(b"canary", "6 damaged bytes at 0"))
    assert REDACTOR.redact_letter(entry) == (b"", "6 damaged bytes at 0")
