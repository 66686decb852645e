"""Redact records in the keeper, before they go to the database or become dead letters.

Workers have applied the rules already, except to what they recorded before a rule was set. The
program of the user's is asked here alone: no reply waits for it.
"""

from typing import Final

import structlog

from proxy.calls.capture import CapturedCall
from proxy.errors import ProgramFails
from proxy.keeper.transcribe import CANNOT_BE_READ, Entry, raised_at
from proxy.redaction.calls import REDACTED, Rules, redact_call, redact_feedback
from proxy.redaction.program import Program, open_program
from proxy.redaction.redactor import count_redacted
from proxy.redaction.rules import open_rules
from proxy.redaction.withheld import withheld_call, without_content
from proxy.settings import ProxySettings
from proxy.spool.segments import decode_payload, encode_payload
from store.records import CallRecord, FeedbackRecord, GapRecord, SpoolRecord

log = structlog.get_logger()

NOTHING: Final = b""


class Redaction:
    """Redact what is about to be stored."""

    def __init__(self, rules: Rules | None, program: Program | None) -> None:
        """Store the rules and the program; either may be missing."""
        self._rules = rules
        self._program = program

    async def record(self, record: SpoolRecord) -> SpoolRecord:
        """Return a record as it may be stored; of a call that cannot be redacted, no content.

        Raises:
            ProgramFails: the program does not work, so that no call can be stored now.
        """
        if isinstance(record, FeedbackRecord):
            return self._feedback(record)
        if not isinstance(record, CallRecord):
            return record
        try:
            # What the worker redacted is not redacted again: a replacement may match a pattern.
            if record.reason != REDACTED:
                record = self._by_rules(record)
            return record if self._program is None else await self._program.redacted(record)
        except ProgramFails:
            raise
        except Exception as error:
            count_redacted((), "unreadable")
            cause = f"{type(error).__name__} at {raised_at(error)}"
            log.error("call_withheld", call=str(record.id), error=cause)
            return without_content(record)

    def _by_rules(self, record: CallRecord) -> CallRecord:
        if self._rules is None:
            return record
        redacted = redact_call(record, self._rules)
        count_redacted(redacted.by, "not_json" if redacted.withheld else "")
        return redacted.record

    def _feedback(self, record: FeedbackRecord) -> FeedbackRecord:
        if self._rules is None:
            return record
        redacted, by = redact_feedback(record, self._rules)
        count_redacted(by)
        return redacted

    def letter(self, entry: Entry) -> tuple[bytes, str]:
        """Return what a dead letter holds of an entry, and its reason.

        Nothing in it was not redacted: of what cannot be read, it says who called whom, or nothing.
        """
        # Why a record cannot be read may quote it; the place in the code does not.
        reason = entry.reason
        if reason.startswith(CANNOT_BE_READ):
            reason = ": ".join(reason.split(": ")[:2])
        if isinstance(entry.record, CallRecord | FeedbackRecord):
            return encode_payload(entry.record), reason
        if isinstance(entry.record, GapRecord):
            return entry.piece.data, reason
        try:
            frame = decode_payload(entry.piece.data)
            if isinstance(frame, CapturedCall):
                frame = withheld_call(frame)
            elif isinstance(frame, CallRecord):
                frame = without_content(frame)
            elif isinstance(frame, FeedbackRecord):
                frame = self._feedback(frame)
            return encode_payload(frame), reason
        except Exception:
            # Damaged bytes hold anything.
            return NOTHING, reason

    async def close(self) -> None:
        """End the program."""
        if self._program is not None:
            await self._program.close()


def open_redaction(settings: ProxySettings) -> Redaction | None:
    """Return what redacts records before they are stored, or None where nothing is set.

    Raises:
        BadRedaction: the file of rules cannot be used, or there is no such program.
    """
    rules, program = open_rules(settings.redaction), open_program(settings)
    return None if rules is None and program is None else Redaction(rules, program)
