"""Extract executed tool calls from an episode's export line, in any wire format (pure)."""

from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import msgspec

from proxy.formats.conversation import canonical_arguments
from proxy.formats.raw_json import parse_object
from proxy.formats.registry import FORMATS
from proxy.tool_events import ANY_TOOL, ResultReaders
from store.records import Record, ToolStatus

_RULES: Final = ("exit_code", "qwen_code")
_EXIT_CODE: Final = ResultReaders(rules={ANY_TOOL: _RULES}, give_verdicts=True)


class Execution(Record, frozen=True, kw_only=True):
    """An executed tool call: its arguments, and the text of its result.

    `arguments` is an object, or a text for a custom tool. `succeeded` is None after a timeout, and
    if neither an exit code in the result nor the recorded tool events tell.
    """

    arguments: Any
    text: str
    succeeded: bool | None


class _Event(msgspec.Struct):
    id: str | None
    status: ToolStatus


class _Call(msgspec.Struct):
    call: UUID
    request: msgspec.Raw
    tool_events: list[_Event]


class Line(msgspec.Struct):
    """An episode's line of `pawl export`, with only the fields that are read here."""

    calls: list[_Call]


def executions(line: Line) -> list[Execution]:
    """Return an episode's tool calls whose results came back, in the order of their results.

    A call that was denied or malformed was not executed.
    """
    statuses = {event.id: event.status for call in line.calls for event in call.tool_events}
    executed: dict[tuple[str, bytes], Execution] = {}
    for call in line.calls:
        parsed = parse_object(bytes(call.request))
        for wire_format in FORMATS.values():
            for asked, result in wire_format.turns.executions(parsed):
                status = statuses.get(result.tool_id)
                if asked is None or status in ("denied", "malformed"):
                    continue
                reading = _EXIT_CODE.read(None, result.text)
                status = reading.status if reading else status
                arguments = asked.arguments
                with suppress(msgspec.MsgspecError, UnicodeEncodeError, RecursionError, TypeError):
                    arguments = msgspec.json.decode(arguments)
                # Some servers use counters as ids, which a sub-agent's calls may repeat.
                executed[result.tool_id, canonical_arguments(asked.arguments)] = Execution(
                    arguments=arguments,
                    text=result.text,
                    succeeded=None if status in (None, "timeout") else status == "ok",
                )
    return list(executed.values())
