"""Leave the content of a call out of its record, where it cannot be redacted (pure)."""

import msgspec

from proxy.calls.capture import CapturedCall
from proxy.keeper.transcribe import unread_call
from proxy.redaction.calls import without_derived
from store.records import CallRecord


def withheld_call(captured: CapturedCall) -> CallRecord:
    """Return the record of a captured call: who called whom, and how it ended."""
    return without_content(unread_call(captured))


def without_content(record: CallRecord) -> CallRecord:
    """Return a call whose request and reply are left out, with all that was made of them."""
    bare = msgspec.structs.replace(record, request=None, reply=None, tool_calls=())
    return without_derived(bare, texts=True)
