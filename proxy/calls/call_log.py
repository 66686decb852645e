"""Log and count a call that has ended: one log line, and its metrics.

The line never holds a prompt, a key or a body.
"""

import structlog

from proxy.calls.capture import CapturedCall
from proxy.metrics import CALL_SECONDS, CALLS, EXPLORED, labelled

log = structlog.get_logger()


def note_call(record: CapturedCall, call: str, model: str | None, warnings: int) -> None:
    """Count a call and log its line.

    Args:
        record: the call's capture.
        call: its id.
        model: the model that the client asked for.
        warnings: how many warnings the client was given.
    """
    stream = "true" if record.streamed else "false"
    version = "" if record.policy_version is None else str(record.policy_version)
    labelled(CALLS, record.policy or "", version, record.status, stream).inc()
    labelled(CALL_SECONDS, stream).observe(record.total_ms / 1000)
    if record.explored is not None:
        for kind in record.explored:
            labelled(EXPLORED, record.policy or "", kind).inc()
    first = record.first_chunk_ms
    log.info(
        "call",
        call=call,
        episode=record.episode,
        method=record.method,
        agent=record.agent,
        model=model,
        served=record.served_model,
        status=record.status,
        http_status=record.http_status,
        stream=record.streamed,
        first_chunk_ms=None if first is None else round(first, 1),
        total_ms=round(record.total_ms, 1),
        ids=record.wanted_ids,
        bytes=len(record.request) + len(record.reply),
        retry=record.retry,
        warnings=warnings,
    )
