"""Read how tool executions ended, from a call's headers and the results in its request (pure).

A client may state how a tool ended: in the header `x-pawl-tool-status`, an RFC 9651 list such as
`ok;id="call_1", error;id="call_2";detail="exit 2"`, or with the result, where the API has a field
for it. `PAWL_TOOL_RESULTS` names rules that read results, tool by tool:
`search=json_error,shell=exit_code+timeout`. In some APIs a result that states no error means that
the tool succeeded. Each event stores its source (docs/decisions/019-tool-event-sources.md).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from hashlib import blake2b
from itertools import islice
from typing import Any, Final
from uuid import UUID, uuid5

import http_sf
import msgspec

from proxy.formats.conversation import ToolResult, Turns
from proxy.formats.raw_json import Object
from store.ids import new_id
from store.records import TOOL_STATUSES, Record, ToolCall, ToolEvent, ToolSource, ToolStatus

# A text that is a single fenced code block: agents execute what is inside the fence.
_FENCED: Final = re.compile(r"```[^\n`]*\n((?:(?!```).)*)```", re.DOTALL)
MOST_QUOTES: Final = 4


def text_digest(text: str) -> UUID | None:
    """Return the digest of a text without outer whitespace and code fence, or None if empty."""
    bare = text.strip()
    if fenced := _FENCED.fullmatch(bare):
        bare = fenced.group(1).strip()
    if not bare.strip("`"):
        return None
    return UUID(bytes=blake2b(bare.encode(errors="surrogatepass"), digest_size=16).digest())


def quoted_digests(texts: Iterable[str]) -> tuple[UUID, ...]:
    """Return the distinct digests of the first `MOST_QUOTES` texts that are not empty."""
    digests = filter(None, map(text_digest, texts))
    # Further texts are not digested: a tool call may have a million arguments.
    return tuple(dict.fromkeys(islice(digests, MOST_QUOTES)))


ANY_TOOL: Final = "*"
IGNORE: Final = "ignore"
MAX_DETAIL: Final = 200

_CODES: Final = ("exit_code", "exitCode", "returncode", "returnCode")
# Some tools put the exit code of their process into an object under this key.
_WRAPPED: Final = "metadata"
_TIMED_OUT: Final = ("timed_out", "timedOut", "timeout")
_CODE: Final = r"(?:(?:exit|return)[ _-]?|exited with )(?:code|status)[\s:=]{0,3}(-?\d{1,10})\b"
# At a line's beginning ("Exit code 2", "exit_code: 0 (done)"), or at its end ("… exit code 1.").
_EXIT_LINE: Final = re.compile(rf"\W*{_CODE}|.*\b{_CODE}\W*\Z", re.IGNORECASE | re.ASCII)
# Frames that coding agents write around a command's output. They are matched as a whole, since the
# output may have similar lines. A frame has no code if the command still runs, or was killed.
_CODEX: Final = re.compile(
    r"(?:Chunk ID: \w+\n)?Wall time: \d+\.\d+ seconds\n"
    r"Process (?:exited with code (-?\d{1,10})|running with session ID \d+)\n"
    r"(?:Original token count: \d+\n)?Output:(?:\n|\Z)",
    re.ASCII,
)
# The output comes before the last `Error`, `Exit Code` and further lines. A result that was too
# long begins with a notice.
_QWEN_CODE: Final = re.compile(
    r"(?:Tool output was too large and has been truncated\.\n(?:.+\n)*\n"
    r"Truncated part of the output:\n)?"
    r"(?:Command|Directory): (?s:.*)"
    r"\nError: .*\nExit Code: (?:(-?\d{1,10})|\(none\))\nSignal: \S+\nProcess Group PGID: \S+"
    r"(?:\n\nNote: this foreground command ran for .*)?\Z",
    re.ASCII,
)
_QWEN_CODE_TIMEOUT: Final = re.compile(r"Command timed out after \d+ms before it could complete\.")
_TIMEOUT: Final = re.compile(
    r"\btim(?:ed|e)[ _-]?out\s*(?:$|[.:!(]|after\b|expired\b|exceeded\b|reached\b|error\b)",
    re.IGNORECASE | re.ASCII,
)
_MAX_LINE: Final = 300


class ToolVerdict(Record, frozen=True, kw_only=True):
    """A rule's verdict on how a tool ended, with an explanation if the result has one."""

    status: ToolStatus
    detail: str | None = None


Rule = Callable[[str, Any], ToolVerdict | None]


class _ClineResult(msgspec.Struct):
    query: str
    result: Any
    success: bool


_CLINE: Final = list[_ClineResult]


class BadReaders(ValueError):
    """Report that `PAWL_TOOL_RESULTS` is invalid; the message quotes the invalid part."""


class ResultReaders(Record, frozen=True, kw_only=True):
    """Rules for reading results, by tool; `*` applies to tools without rules of their own.

    `give_verdicts` says whether any tool has a rule that can give a verdict.
    """

    rules: Mapping[str, tuple[str, ...]] = {}
    give_verdicts: bool = False

    def read(self, name: str | None, text: str) -> ToolVerdict | None:
        """Return the worst verdict on a result `text` of the tool, or None if no rule gives one."""
        rules = self._rules_for(name)
        if not rules:
            return None
        parsed = _parsed(text)
        verdicts = [reading for rule in rules if (reading := RULES[rule](text, parsed)) is not None]
        return max(verdicts, key=lambda reading: _WORST.index(reading.status), default=None)

    def ignores(self, name: str | None) -> bool:
        """Return whether the tool has the rule `ignore`: its results are never assumed `ok`."""
        return IGNORE in self._rules_for(name)

    def _rules_for(self, name: str | None) -> tuple[str, ...]:
        own = None if name is None else self.rules.get(name)
        return self.rules.get(ANY_TOOL, ()) if own is None else own


def parse_readers(value: str) -> ResultReaders:
    """Return the rules that the value of `PAWL_TOOL_RESULTS` names.

    Raises:
        BadReaders: a part is not TOOL=RULE, names a tool again, or its rule is unknown.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, equals, rule_names = (piece.strip() for piece in part.rpartition("="))
        if not equals or not name:
            raise BadReaders(f"{part!r:.80} is not TOOL=RULE, such as search=json_error")
        if name in rules:
            raise BadReaders(
                f"{part!r:.80} names {name:.80} again; join its rules, as in a=exit_code+timeout"
            )
        rules[name] = tuple(_rule(rule.strip(), part) for rule in rule_names.split("+"))
        if IGNORE in rules[name] and len(rules[name]) > 1:
            raise BadReaders(f"{part!r:.80}: {IGNORE} cannot be combined with other rules")
    give_verdicts = any(rule != IGNORE for of_tool in rules.values() for rule in of_tool)
    return ResultReaders(rules=rules, give_verdicts=give_verdicts)


def _rule(rule: str, part: str) -> str:
    if rule not in RULES:
        known = ", ".join(RULES)
        raise BadReaders(f"{part!r:.80}: {rule!r:.80} is not a rule; the rules are {known}")
    return rule


def json_error(text: str, parsed: Any) -> ToolVerdict | None:
    """Judge by the `error` of a JSON object: the tool failed unless it is null, false or empty."""
    if not isinstance(parsed, dict):
        return None
    error = parsed.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    detail = _detail(message if isinstance(message, str) else None)
    if _says_timed_out(parsed) or (detail is not None and _TIMEOUT.search(detail)):
        return ToolVerdict(status="timeout", detail=detail)
    return ToolVerdict(status="error" if error else "ok", detail=detail)


def exit_code(text: str, parsed: Any) -> ToolVerdict | None:
    """Judge by the exit code in a JSON object, or in a text's first or last line: 0 is success."""
    code = _exit_code_in_json(parsed) if isinstance(parsed, dict) else _exit_code_in_text(text)
    if isinstance(parsed, dict) and _says_timed_out(parsed):
        return ToolVerdict(status="timeout", detail=None if code is None else f"exit code {code}")
    return _verdict_of_exit_code(code)


def codex(text: str, parsed: Any) -> ToolVerdict | None:
    """Judge by the exit code in the header that Codex writes before a command's output."""
    return _verdict_of_exit_code(_exit_code_in_frame(_CODEX.match(text)))


def qwen_code(text: str, parsed: Any) -> ToolVerdict | None:
    """Judge by the exit code in the lines that Qwen Code writes around a command's output."""
    if _QWEN_CODE_TIMEOUT.match(text):
        return ToolVerdict(status="timeout")
    return _verdict_of_exit_code(_exit_code_in_frame(_QWEN_CODE.match(text)))


def cline(text: str, parsed: Any) -> ToolVerdict | None:
    """Judge by Cline's JSON, a result or a list of them: `ok` if `success` is true in each."""
    try:
        results = msgspec.convert(parsed if isinstance(parsed, list) else [parsed], _CLINE)
    except msgspec.ValidationError:
        return None
    succeeded = all(result.success for result in results)
    return ToolVerdict(status="ok" if succeeded else "error") if results else None


def timeout(text: str, parsed: Any) -> ToolVerdict | None:
    """Judge whether a JSON object, or a text's first or last line, states a timeout."""
    if isinstance(parsed, dict):
        timed_out = _says_timed_out(parsed)
        return ToolVerdict(status="timeout") if timed_out else None
    line = next((line for line in _outer_lines(text) if _TIMEOUT.search(line)), None)
    return None if line is None else ToolVerdict(status="timeout", detail=_detail(line))


def ignore(text: str, parsed: Any) -> ToolVerdict | None:
    """Give no verdict on any result."""
    return None


RULES: Final[Mapping[str, Rule]] = {
    "json_error": json_error,
    "exit_code": exit_code,
    "timeout": timeout,
    "codex": codex,
    "qwen_code": qwen_code,
    "cline": cline,
    IGNORE: ignore,
}
_WORST: Final = ("ok", "error", "timeout")


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _exit_code_in_json(parsed: dict[str, Any]) -> int | None:
    inner = parsed.get(_WRAPPED)
    for known in (parsed, inner if isinstance(inner, dict) else {}):
        for key in _CODES:
            code = known.get(key)
            if isinstance(code, int) and not isinstance(code, bool):
                return code
    return None


def _exit_code_in_text(text: str) -> int | None:
    """Return the exit code in the first or last line, that of a failure if both have a code.

    A command may print such a line itself, so in a coding agent's frame only its code counts.
    """
    if framed := _CODEX.match(text) or _QWEN_CODE.match(text):
        return _exit_code_in_frame(framed)
    matches = filter(None, map(_EXIT_LINE.match, _outer_lines(text)))
    codes = [int(match.group(1) or match.group(2)) for match in matches]
    return max(codes, key=abs, default=None)


def _exit_code_in_frame(frame: re.Match[str] | None) -> int | None:
    return None if frame is None or frame[1] is None else int(frame[1])


def _verdict_of_exit_code(code: int | None) -> ToolVerdict | None:
    if code is None:
        return None
    return ToolVerdict(status="ok" if code == 0 else "error", detail=f"exit code {code}")


def _outer_lines(text: str) -> tuple[str, ...]:
    """Return the first and the last line, where a tool's wrapper states how the tool ended."""
    stripped = text.strip()
    return stripped.split("\n", 1)[0][:_MAX_LINE], stripped.rpartition("\n")[2][:_MAX_LINE]


def _says_timed_out(parsed: dict[str, Any]) -> bool:
    return any(parsed.get(key) is True for key in _TIMED_OUT)


def _detail(text: str | None) -> str | None:
    """Return the beginning of a text, without U+0000, which the database cannot store."""
    return text.replace("\x00", "")[:MAX_DETAIL] if text else None


def result_events(
    call_id: UUID, turns: Turns, parsed: Object | None, readers: ResultReaders
) -> tuple[ToolEvent, ...]:
    """Return the tool events of the results in a call's request.

    `parsed` has the request's fields, unparsed. The same call always gives the same event ids.
    """
    events: list[ToolEvent] = []
    for result in turns.results(parsed):
        verdict = _surest_verdict(turns, result, readers)
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


def not_offered_events(
    call_id: UUID, tools: Any, tool_calls: Iterable[ToolCall]
) -> tuple[ToolEvent, ...]:
    """Return a `malformed` event for each tool call whose tool the request does not offer.

    `tools` is the request's field of that name. If any tool has no name, or is a set of tools, not
    all names are known, and no events are returned. Of tool calls that share an id the last counts.
    """
    names = {_tool_name(tool) for tool in tools} if isinstance(tools, list) else set()
    if not names or None in names:
        return ()
    # `result_events` uses `call_id` as the namespace for a result of the same tool call.
    namespace = uuid5(call_id, "not_offered")
    unknown = {call.id: call.name for call in tool_calls if call.name not in names}
    return tuple(
        ToolEvent(
            id=uuid5(namespace, tool_id),
            tool_id=tool_id,
            name=name,
            status="malformed",
            source="not_offered",
        )
        for tool_id, name in unknown.items()
    )


def _tool_name(tool: Any) -> str | None:
    if not isinstance(tool, dict) or "tools" in tool:
        return None
    inner = tool.get(tool["type"]) if tool.get("type") in ("function", "custom") else None
    name = (inner if isinstance(inner, dict) else tool).get("name")
    return name if isinstance(name, str) else None


def _surest_verdict(
    turns: Turns, result: ToolResult, readers: ResultReaders
) -> tuple[ToolStatus, ToolSource, str | None] | None:
    """Return the surest verdict (stated in the result, read by a rule, assumed `ok`), or None."""
    if result.is_error is not None:
        return ("error" if result.is_error else "ok"), "is_error", None
    read = readers.read(result.name, result.text)
    if read is not None:
        return read.status, "reader", read.detail
    if turns.states_errors and not readers.ignores(result.name):
        return "ok", "assumed", None
    return None


STATUS_HEADER: Final = "x-pawl-tool-status"
MAX_TEXT: Final = 1024
PARAMETERS: Final = ("id", "name", "detail", "ms")


class ToolStatusError(ValueError):
    """Report that the header breaks RFC 9651 or docs/howto/tool-status.md; the message says how."""


def parse_tool_status(value: str) -> tuple[ToolEvent, ...]:
    """Return the tool events that the header states.

    Raises:
        ToolStatusError: some part of the header is invalid; none of it is used.
    """
    try:
        members = http_sf.parse(value.encode(), tltype="list")
    except (http_sf.StructuredFieldError, UnicodeEncodeError) as error:
        raise ToolStatusError(f"{STATUS_HEADER} is not an RFC 9651 list: {error}") from error
    return tuple(_event(member, parameters) for member, parameters in members)


def _event(member: Any, parameters: dict[str, Any]) -> ToolEvent:
    status = str(member) if isinstance(member, http_sf.Token) else None
    if status not in TOOL_STATUSES:
        known = ", ".join(TOOL_STATUSES)
        raise ToolStatusError(
            f"{STATUS_HEADER}: {member!s} is not a tool status; use one of {known}"
        )
    unknown = next((name for name in parameters if name not in PARAMETERS), None)
    if unknown is not None:
        allowed = ", ".join(PARAMETERS)
        raise ToolStatusError(
            f"{STATUS_HEADER}: unknown parameter {unknown!r}; allowed are {allowed}"
        )
    if "id" not in parameters:
        raise ToolStatusError(f'{STATUS_HEADER}: {status} has no id; write {status};id="call_…"')
    return msgspec.convert(
        {
            "id": new_id(),
            "tool_id": _text(parameters, "id"),
            "name": _text(parameters, "name"),
            "status": status,
            "detail": _text(parameters, "detail"),
            "ms": _number(parameters, "ms"),
        },
        ToolEvent,
    )


def _text(parameters: dict[str, Any], name: str) -> str | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, str) and not isinstance(value, http_sf.Token):
        if len(value) > MAX_TEXT or "\x00" in value:
            raise ToolStatusError(
                f"{STATUS_HEADER}: {name} must be at most {MAX_TEXT} characters without U+0000"
            )
        return value
    raise ToolStatusError(f'{STATUS_HEADER}: {name} must be a string in quotes, such as {name}="x"')


def _number(parameters: dict[str, Any], name: str) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise ToolStatusError(f"{STATUS_HEADER}: {name} must be a number of milliseconds, 0 or more")
