"""What is kept of a record that cannot be stored, where redaction is set."""

import msgspec

from proxy.keeper.transcribe import Entry, read_entry
from proxy.redaction.rules import parse_rules
from proxy.redaction.storing import Redaction
from proxy.spool.segments import Piece, decode_payload, encode_payload
from store.records import CallRecord
from tests.support.records import call, captured

RULES = "[[rule]]\nname = 'canary'\npattern = 'canary'\n"


def piece(data: bytes, damage: str = "") -> Piece:
    return Piece(0, 0, len(data), data, 1, 1, damage)


def letter(entry: Entry) -> tuple[bytes, str]:
    return Redaction(parse_rules(RULES, "r"), None).letter(entry)


def test_what_the_database_refuses_is_kept_as_it_was_to_be_stored() -> None:
    redacted = call(request=b'{"a":"[redacted]"}')
    data, reason = letter(Entry(piece(b"canary"), redacted, "refused"))
    assert (decode_payload(data), reason) == (redacted, "refused")


def test_a_call_that_cannot_be_read_is_kept_without_its_content() -> None:
    payload = encode_payload(captured(request=b'{"a":"canary"}', reply=b"canary"))
    reason = "cannot be read: ValueError at x.py:1: canary: is odd"
    data, said = letter(Entry(piece(payload), None, reason))
    record = decode_payload(data)
    assert isinstance(record, CallRecord)
    assert (record.episode, record.request, record.reply) == ("e1", None, None)
    assert b"canary" not in data
    assert said == "cannot be read: ValueError at x.py:1"


def test_of_damaged_bytes_nothing_is_kept() -> None:
    entry = read_entry(piece(b"canary", "6 damaged bytes at 0"))
    assert letter(entry) == (b"", "6 damaged bytes at 0")


def test_a_redacted_call_in_a_letter_has_its_content_withheld() -> None:
    payload = encode_payload(call(request=b'{"a":"b"}'))
    data, _ = letter(Entry(piece(payload), None, "failed"))
    assert msgspec.structs.asdict(decode_payload(data))["request"] is None  # type: ignore[arg-type]
