"""Redact a worker's records before they reach its disk.

What a pattern looks for may be split over the events of a stream, so that a captured call is read
as the keeper reads it. If the rules find nothing, the capture is recorded as it is; otherwise, the
ledger's record is. A call that cannot be redacted is recorded without its content: nothing that the
rules would have taken out is ever on disk.

Without a rule no worker has a redactor, and nothing is done.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from uuid import UUID

import structlog

from proxy.calls.capture import CapturedCall, Frame
from proxy.keeper.transcribe import raised_at, transcribe
from proxy.metrics import REDACTED, WITHHELD, labelled
from proxy.redaction.calls import Rules, redact_call, redact_feedback
from proxy.redaction.withheld import withheld_call
from proxy.spool.segments import encode_payload
from proxy.tools.result_readers import ResultReaders
from store.records import CallRecord, FeedbackRecord

log = structlog.get_logger()


class _Done(NamedTuple):
    """Hold what is to be recorded of a call, the rules that hit, and why content is withheld."""

    frame: CapturedCall | CallRecord
    by: frozenset[str] = frozenset()
    withheld: str = ""
    failed: str = ""


class Redactor:
    """Apply the rules to the records of one worker, beside its event loop."""

    def __init__(self, rules: Rules, readers: ResultReaders, most_reply: int) -> None:
        """Store the rules, and how calls are read, as `transcribe` takes it."""
        self._rules = rules
        self._readers = readers
        self._most_reply = most_reply
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pawl-redaction")

    async def call(self, captured: CapturedCall) -> Frame:
        """Return what is to be recorded of a call; a call that cannot be redacted has no content.

        This raises no error of the rules, and none over what the call says.
        """
        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(self._beside, self._redacted, captured)
        count_redacted(done.by, done.withheld)
        if done.failed:
            # Neither the error's text nor its values: they may quote the call.
            log.error("call_withheld", call=str(UUID(bytes=captured.id)), error=done.failed)
        return done.frame

    def feedback(self, record: FeedbackRecord) -> FeedbackRecord:
        """Return what is to be recorded of feedback: the details of tools are texts."""
        redacted, by = redact_feedback(record, self._rules)
        count_redacted(by)
        return redacted

    def _redacted(self, captured: CapturedCall) -> _Done:
        try:
            record = transcribe(captured, self._readers, self._most_reply)
            redacted = redact_call(record, self._rules)
            if redacted.record is not record:
                # What no frame can hold (half of a surrogate pair, say) must not cost the record.
                encode_payload(redacted.record)
        except Exception as error:
            cause = f"{type(error).__name__} at {raised_at(error)}"
            return _Done(withheld_call(captured), frozenset(), "unreadable", cause)
        if redacted.record is record:
            return _Done(captured)
        return _Done(redacted.record, redacted.by, "not_json" if redacted.withheld else "")

    def close(self) -> None:
        """End the thread; call it once no call is being redacted."""
        self._beside.shutdown(wait=False)


def count_redacted(by: Iterable[str], withheld: str = "") -> None:
    """Count a redacted record by the rules that hit, and one without content by the reason."""
    for name in by:
        labelled(REDACTED, name).inc()
    if withheld:
        labelled(WITHHELD, withheld).inc()
