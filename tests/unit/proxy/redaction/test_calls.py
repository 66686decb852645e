"""A redacted call: nothing that was made of its texts tells them."""

import msgspec
import pytest

from proxy.redaction.calls import redact_call, redact_feedback
from proxy.redaction.rules import parse_rules
from proxy.redaction.withheld import withheld_call
from proxy.spool.segments import decode_payload, encode_payload
from store.ids import new_id
from store.records import CallRecord, Tokens, ToolCall, ToolEvent
from tests.support.records import call, captured, statement

CANARY = "canary-4711"
PATTERN = "[[rule]]\nname = 'canary'\npattern = 'canary-[0-9]{4}'\n"
FIELD = "[[rule]]\nname = 'user'\nfield = 'request.user'\n"
REPLY = "[[rule]]\nname = 'said'\nfield = 'reply.choices.*.message'\n"


def a_call() -> CallRecord:
    return call(
        request=b'{"model":"m","user":"u","stop":"canary-4711","messages":[]}',
        reply=b'{"id":"r","choices":[{"message":{"content":"hi"},"logprobs":{"content":[]}}]}',
        sampling=b'{"temperature":1.0,"stop":"canary-4711","explored":{"temperature":0.2}}',
        tool_calls=(ToolCall(id="t1", name="f", arguments='{"k":"canary-4711"}'),),
        tool_events=(
            ToolEvent(
                id=new_id(),
                tool_id="t",
                name="f",
                status="error",
                detail=f"exit {CANARY}",
                quotes=(new_id(),),
            ),
        ),
        provides=(b"\x01" + bytes(15), b"\x03" + bytes(15), b"\x04" + bytes(15)),
        needs=(b"\x02" + bytes(15), b"\x03" + bytes(15)),
        text_digest=new_id(),
    )


def test_a_pattern_takes_its_finds_out_of_every_text_and_what_was_made_of_them_goes() -> None:
    record, by, withheld = redact_call(a_call(), parse_rules(PATTERN, "r"))
    assert CANARY.encode() not in msgspec.json.encode(record)
    assert (by, withheld) == (frozenset({"canary"}), False)
    assert (record.trainable, record.reason) == (False, "redacted")
    assert record.tokens == Tokens()
    assert record.tool_calls[0].arguments == '{"k":"[redacted]"}'
    assert record.tool_events[0].detail == "exit [redacted]"
    assert record.tool_events[0].quotes == ()
    assert record.text_digest is None
    # Those of ids stay, those of words go.
    assert [one[0] for one in (*record.provides, *record.needs)] == [1, 2]
    assert record.reply == b'{"id":"r","choices":[{"message":{"content":"hi"}}]}'


@pytest.mark.parametrize(("rule", "name"), [(FIELD, "user"), (REPLY, "said")])
def test_a_field_takes_the_copies_of_texts_along(rule: str, name: str) -> None:
    record, by, _ = redact_call(a_call(), parse_rules(rule, "r"))
    assert by == {name}
    assert CANARY not in record.tool_calls[0].arguments
    assert record.tool_events[0].detail is None
    assert record.sampling == b'{"temperature":1.0,"stop":null,"explored":{"temperature":0.2}}'


def test_a_call_in_which_nothing_is_found_is_the_same_object() -> None:
    record = call(request=b'{"model": "m"}')
    assert redact_call(record, parse_rules(PATTERN + FIELD + REPLY, "r")).record is record


def test_a_body_that_is_no_json_is_withheld() -> None:
    raw = call(request=None, request_raw=b"canary", reply=None, reply_raw=b"x")
    record, by, withheld = redact_call(raw, parse_rules(PATTERN, "r"))
    assert (record.request_raw, record.reply_raw, withheld, by) == (None, None, True, frozenset())
    assert record.reason == "redacted"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "user": "canary-4711", "user": null}',
        b'{"model": "m", "us\\u0065r": "canary-4711", "user": "u"}',
    ],
)
def test_a_field_that_a_body_has_twice_is_not_kept(body: bytes) -> None:
    record, _, withheld = redact_call(call(request=body), parse_rules(FIELD, "r"))
    assert withheld
    assert CANARY.encode() not in msgspec.json.encode(record)
    # A pattern finds it in each of the two.
    assert not redact_call(call(request=body), parse_rules(PATTERN, "r")).withheld


def test_names_of_tools_are_texts() -> None:
    asked = ToolCall(id="t1", name=CANARY, arguments="{}")
    event = ToolEvent(id=new_id(), tool_id="t", name=CANARY, status="ok")
    record = redact_call(
        call(tool_calls=(asked,), tool_events=(event,)), parse_rules(PATTERN, "r")
    ).record
    assert (record.tool_calls[0].name, record.tool_events[0].name) == ("[redacted]",) * 2


def test_a_redacted_call_goes_through_the_spool_as_it_is() -> None:
    record = redact_call(a_call(), parse_rules(PATTERN, "r")).record
    assert decode_payload(encode_payload(record)) == record


def test_a_call_that_cannot_be_redacted_keeps_no_word() -> None:
    before = captured(request=b'{"messages":"canary"}', reply=b"canary")
    record = withheld_call(before)
    assert b"canary" not in encode_payload(record)
    assert (record.episode, record.status, record.reason) == ("e1", "complete", "redacted")
    assert (record.request, record.request_raw, record.reply, record.reply_raw) == (None,) * 4


def test_values_in_words_are_texts() -> None:
    stated = statement("verdict", f"as {CANARY} says", episode="e1")
    left, by = redact_feedback(stated, parse_rules(PATTERN, "r"))
    assert by == {"canary"}
    assert CANARY.encode() not in msgspec.json.encode(left)


def test_details_of_tools_in_feedback_are_texts() -> None:
    event = ToolEvent(id=new_id(), tool_id="t", name=None, status="error", detail=CANARY)
    stated = statement("reward", 1.0, episode="e1")
    stated = msgspec.structs.replace(
        stated, items=tuple(msgspec.structs.replace(one, tool=event) for one in stated.items)
    )
    left, by = redact_feedback(stated, parse_rules(PATTERN, "r"))
    assert by == {"canary"}
    assert CANARY.encode() not in msgspec.json.encode(left)
