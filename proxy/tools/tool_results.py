"""Read the tool events of a call's request: how each tool ended whose result it brings (pure).

Where a format's requests hold results is known to its `Turns`. A client may state how a tool ended;
where it does not, some APIs mean that the tool succeeded. The ledger keeps the two apart
(`docs/decisions/019-tool-event-sources.md`).
"""

from uuid import UUID, uuid5

from proxy.formats.conversation import ToolResult, Turns
from proxy.formats.raw_json import Object
from proxy.tools.quotes import quoted_digests
from proxy.tools.result_readers import ResultReaders
from store.records import ToolEvent, ToolSource, ToolStatus


def result_events(
    call_id: UUID, turns: Turns, parsed: Object | None, readers: ResultReaders
) -> tuple[ToolEvent, ...]:
    """Return the tool events of the results in a call's request.

    `parsed` is the request's top level. The same call gives the same events, ids included.
    """
    events: list[ToolEvent] = []
    for result in turns.results(parsed):
        verdict = _judged(turns, result, readers)
        if verdict is not None:
            status, source, detail = verdict
            events.append(
                ToolEvent(
                    id=uuid5(call_id, result.tool_id),
                    tool_id=result.tool_id,
                    name=result.name,
                    status=status,
                    detail=detail,
                    source=source,
                    quotes=quoted_digests(result.texts),
                )
            )
    return tuple(events)


def _judged(
    turns: Turns, result: ToolResult, readers: ResultReaders
) -> tuple[ToolStatus, ToolSource, str | None] | None:
    """Return the surest verdict on a result: stated, read by a rule, or assumed by default."""
    if result.is_error is not None:
        return ("error" if result.is_error else "ok"), "is_error", None
    read = readers.read(result.name, result.text)
    if read is not None:
        return read.status, "reader", read.detail
    if turns.states_errors and not readers.ignores(result.name):
        return "ok", "assumed", None
    return None
