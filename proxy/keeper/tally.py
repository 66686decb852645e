"""Count stored records in the metrics, by their content."""

from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

import structlog

from proxy.metrics import (
    KEY_CONFLICTS,
    NOT_TRAINABLE,
    TOKENS,
    TOOL_STATUS,
    WITHOUT_LOGPROBS,
    labelled,
)
from store.records import CallRecord, SpoolRecord
from store.values.tokens import ITEM_BYTES

log = structlog.get_logger()


def count_calls(records: Iterable[SpoolRecord]) -> None:
    """Count the calls among stored records.

    This never raises: the records are stored, and must not be treated as failed.
    """
    try:
        tokens: Counter[tuple[str, str]] = Counter()
        for record in records:
            if isinstance(record, CallRecord):
                policy = record.policy or ""
                tokens[policy, "prompt"] += len(record.tokens.prompt_ids) // ITEM_BYTES
                tokens[policy, "sampled"] += len(record.tokens.sampled_ids) // ITEM_BYTES
                _count_call(record)
        # Once for a batch: counting in shared memory takes longer than adding up.
        for labels, number in tokens.items():
            labelled(TOKENS, *labels).inc(number)
    except Exception:
        log.exception("calls_not_counted")


def count_conflicts(requests: Sequence[UUID]) -> None:
    """Count feedback that was stored although its idempotency key belongs to another body."""
    KEY_CONFLICTS.inc(len(requests))
    log.warning("idempotency_key_reused", stored=[str(request) for request in requests[:10]])


def _count_call(record: CallRecord) -> None:
    if record.reason is not None:
        labelled(NOT_TRAINABLE, record.reason).inc()
    elif not record.tokens.sampled_logprobs:
        WITHOUT_LOGPROBS.inc()
    for event in record.tool_events:
        labelled(TOOL_STATUS, event.status).inc()
