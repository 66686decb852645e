"""Read from a tool's result how the tool ended, by rules that the user chose (pure).

`PAWL_TOOL_RESULTS` names them tool by tool: `search=json_error,shell=exit_code+timeout`. A rule
that recognises nothing in a result gives no verdict.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from store.records import Record, ToolStatus

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
_TIMEOUT: Final = re.compile(
    r"\btim(?:ed|e)[ _-]?out\s*(?:$|[.:!(]|after\b|expired\b|exceeded\b|reached\b|error\b)",
    re.IGNORECASE | re.ASCII,
)
_LINE: Final = 300


class Reading(Record, frozen=True, kw_only=True):
    """Give a rule's verdict on how a tool ended, with the detail that it rests on."""

    status: ToolStatus
    detail: str | None = None


Rule = Callable[[str, Any], Reading | None]


class BadReaders(ValueError):
    """Report that `PAWL_TOOL_RESULTS` is invalid; the message says where, and what is allowed."""


class ResultReaders(Record, frozen=True, kw_only=True):
    """Read the results of tools by each one's rules; `*` is for tools without their own.

    `give_verdicts` says whether any tool has a rule that can give a verdict.
    """

    rules: Mapping[str, tuple[str, ...]] = {}
    give_verdicts: bool = False

    def read(self, name: str | None, text: str) -> Reading | None:
        """Return how the tool of that name ended, or None if no rule gives a verdict.

        If several rules give one, the worst counts.
        """
        rules = self._of(name)
        if not rules:
            return None
        parsed = _parsed(text)
        verdicts = [reading for rule in rules if (reading := RULES[rule](text, parsed)) is not None]
        return max(verdicts, key=_badness, default=None)

    def ignores(self, name: str | None) -> bool:
        """Return whether a result of that tool must not be assumed `ok` when it states nothing."""
        return IGNORE in self._of(name)

    def _of(self, name: str | None) -> tuple[str, ...]:
        own = None if name is None else self.rules.get(name)
        return self.rules.get(ANY_TOOL, ()) if own is None else own


def parse_readers(value: str) -> ResultReaders:
    """Return the rules that the setting's value names.

    Raises:
        BadReaders: a part is not TOOL=RULE, names a tool again, or its rule is unknown.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, equals, rule_names = (piece.strip() for piece in part.rpartition("="))
        if not equals or not name:
            raise BadReaders(f"{part!r} is not TOOL=RULE, such as search=json_error")
        if name in rules:
            raise BadReaders(
                f"{part!r} names {name} again; join its rules, as in a=exit_code+timeout"
            )
        rules[name] = tuple(_rule(rule.strip(), part) for rule in rule_names.split("+"))
        if IGNORE in rules[name] and len(rules[name]) > 1:
            raise BadReaders(f"{part!r}: {IGNORE} cannot be combined with other rules")
    give_verdicts = any(rule != IGNORE for of_tool in rules.values() for rule in of_tool)
    return ResultReaders(rules=rules, give_verdicts=give_verdicts)


def _rule(rule: str, part: str) -> str:
    if rule not in RULES:
        known = ", ".join(RULES)
        raise BadReaders(f"{part!r}: {rule!r} is not a rule; the rules are {known}")
    return rule


def json_error(text: str, parsed: Any) -> Reading | None:
    """Read a JSON object's `error`: the tool failed unless that is null, false or empty."""
    if not isinstance(parsed, dict):
        return None
    error = parsed.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    detail = _detail(message if isinstance(message, str) else None)
    if _says_timed_out(parsed) or (detail is not None and _TIMEOUT.search(detail)):
        return Reading(status="timeout", detail=detail)
    return Reading(status="error" if error else "ok", detail=detail)


def exit_code(text: str, parsed: Any) -> Reading | None:
    """Read the exit code in a JSON object, or in a text's first or last line: only 0 is success."""
    code = _json_code(parsed) if isinstance(parsed, dict) else _text_code(text)
    if isinstance(parsed, dict) and _says_timed_out(parsed):
        return Reading(status="timeout", detail=None if code is None else f"exit code {code}")
    if code is None:
        return None
    return Reading(status="ok" if code == 0 else "error", detail=f"exit code {code}")


def timeout(text: str, parsed: Any) -> Reading | None:
    """Read from a JSON object, or a text's first or last line, that the tool ran out of time."""
    if isinstance(parsed, dict):
        timed_out = _says_timed_out(parsed)
        return Reading(status="timeout") if timed_out else None
    line = next((line for line in _outer_lines(text) if _TIMEOUT.search(line)), None)
    return None if line is None else Reading(status="timeout", detail=_detail(line))


def ignore(text: str, parsed: Any) -> Reading | None:
    """Give no verdict on any result."""
    return None


RULES: Final[Mapping[str, Rule]] = {
    "json_error": json_error,
    "exit_code": exit_code,
    "timeout": timeout,
    IGNORE: ignore,
}
_WORST: Final = ("ok", "error", "timeout")


def _badness(reading: Reading) -> int:
    return _WORST.index(reading.status)


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _json_code(parsed: dict[str, Any]) -> int | None:
    inner = parsed.get(_WRAPPED)
    for known in (parsed, inner if isinstance(inner, dict) else {}):
        for key in _CODES:
            code = known.get(key)
            if isinstance(code, int) and not isinstance(code, bool):
                return code
    return None


def _text_code(text: str) -> int | None:
    """Return the exit code of the first or last line; if both give one, prefer the failing one.

    A command can print such a line of its own.
    """
    matches = filter(None, map(_EXIT_LINE.match, _outer_lines(text)))
    codes = [int(match.group(1) or match.group(2)) for match in matches]
    return max(codes, key=abs, default=None)


def _outer_lines(text: str) -> tuple[str, ...]:
    """Return the first and the last line; the tool's own output stands between them."""
    stripped = text.strip()
    return stripped.split("\n", 1)[0][:_LINE], stripped.rpartition("\n")[2][:_LINE]


def _says_timed_out(parsed: dict[str, Any]) -> bool:
    return any(parsed.get(key) is True for key in _TIMED_OUT)


def _detail(text: str | None) -> str | None:
    """Return the beginning of a text, in a form that the ledger can store."""
    return text.replace("\x00", "")[:MAX_DETAIL] if text else None
