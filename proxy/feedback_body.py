"""Parse the body of POST /feedback; errors in a statement name the field (pure)."""

import math
from datetime import datetime
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec

from proxy.errors import BadRequest
from proxy.intake import check_depth, size_within
from store.ids import new_id
from store.records import REWARD, TOOL_STATUSES, FeedbackItem, FeedbackRecord, ToolEvent
from store.tenants import DEFAULT, scoped
from store.values.documents import Size
from store.values.rewards import LARGEST

TOOL_STATUS: Final = "tool_status"
TARGETS: Final = ("episode", "call", "response")
WITHDRAWN: Final = "withdrawn"
SOURCE: Final = "source"
CORRECTION: Final = "correction"
COMMON_FIELDS: Final = frozenset({"metric", "value", *TARGETS})
# Fields of a statement of any metric but `tool_status`.
METRIC_FIELDS: Final = COMMON_FIELDS | {WITHDRAWN, SOURCE, CORRECTION}
TOOL_FIELDS: Final = frozenset({"id", "name", "detail", "ms"})
MAX_ITEMS: Final = 10_000
MAX_TEXT: Final = 1024
MAX_CORRECTION: Final = 65_536
# A value that is a text is a label: a recipe has to name each label that counts.
MAX_LABEL: Final = 256
# Targets are in a B-tree index, whose rows PostgreSQL limits to 2,704 bytes in all.
MAX_TARGET_BYTES: Final = 2048
NO_NUL: Final = "must not have the character U+0000, which the database cannot store"
# Limits of a list of statements that hold only text and numbers.
MAX_SIZE: Final = Size(
    containers=MAX_ITEMS + 1, values=MAX_ITEMS * (len(METRIC_FIELDS | TOOL_FIELDS) + 1)
)


def parse_feedback(
    body: bytes, at: datetime, idempotency_key: str | None, tenant: str = DEFAULT
) -> FeedbackRecord:
    """Return the statements in a body: one JSON object, or a list of them.

    Targets and the idempotency key become names of `tenant`.

    Raises:
        BadRequest: the key or a statement is malformed; nothing of the body is taken.
    """
    parsed = _parsed(body)
    statements = parsed if isinstance(parsed, list) else [parsed]
    if not statements or len(statements) > MAX_ITEMS:
        raise BadRequest(f"Send 1 to {MAX_ITEMS} statements, not {len(statements)}")
    is_list = isinstance(parsed, list)
    items = tuple(
        _FeedbackParser(statement, f"[{index}]." if is_list else "", tenant).item()
        for index, statement in enumerate(statements)
    )
    return FeedbackRecord(
        id=new_id(),
        at=at,
        items=items,
        idempotency_key=_key(idempotency_key, tenant),
        body_hash=sha256(body).hexdigest() if idempotency_key else None,
    )


def _parsed(body: bytes) -> Any:
    size = size_within(body, MAX_SIZE)
    if size is None:
        raise BadRequest(
            f"The body holds more values than {MAX_ITEMS} feedback statements can: send fewer in"
            " one request, and no lists or objects within a statement",
            code="too_many_values",
        )
    check_depth(body, size)
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"The body is not valid JSON: it is not UTF-8 ({error.reason}, byte "
            f"0x{error.object[error.start]:02x}); encode it as UTF-8",
            code="invalid_json",
        ) from error


def _key(value: str | None, tenant: str) -> str | None:
    if value is None:
        return None
    if not (0 < len(value) <= 256 and value.isprintable()):
        raise BadRequest("Idempotency-Key must be 1 to 256 printable characters")
    return scoped(tenant, value)


def _shown(value: object) -> str:
    return repr(value)[:42]


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _reads_as_number(value: str) -> bool:
    """Return whether a text reads as a number, `true` or `false`."""
    if value.strip().lower() in ("true", "false"):
        return True
    try:
        float(value)
    except ValueError:
        return False
    return True


class _FeedbackParser:
    """Parse one statement; `where` names it in error messages."""

    def __init__(self, value: object, where: str, tenant: str) -> None:
        self._where = where
        self._tenant = tenant
        if not isinstance(value, dict):
            raise BadRequest(
                f"{where or 'The body'} must be an object such as "
                '{"metric": "reward", "value": 0.8, "episode": "…"}'
            )
        self._fields: dict[str, Any] = value

    def item(self) -> FeedbackItem:
        metric = self._text("metric") or REWARD
        self._refuse_unknown(metric)
        kind, target = self._target()
        if metric == TOOL_STATUS:
            event = self._tool_event()
            return FeedbackItem(
                id=event.id, metric=metric, value=None, target_kind=kind, target=target, tool=event
            )
        is_withdrawn = self._is_withdrawn()
        return FeedbackItem(
            id=new_id(),
            metric=metric,
            value=None if is_withdrawn else self._value(),
            target_kind=kind,
            target=target,
            source=self._source(),
            correction=self._correction(is_withdrawn=is_withdrawn),
        )

    def _error(self, field: str, message: str) -> BadRequest:
        return BadRequest(f"{self._where}{field} {message}", param=f"{self._where}{field}")

    def _refuse_unknown(self, metric: str) -> None:
        allowed = COMMON_FIELDS | TOOL_FIELDS if metric == TOOL_STATUS else METRIC_FIELDS
        for name in self._fields:
            if name not in allowed:
                known = ", ".join(sorted(allowed))
                raise self._error(name[:64], f"is not a field of a statement; use only {known}")

    def _target(self) -> tuple[Any, str]:
        named = [kind for kind in TARGETS if self._fields.get(kind) is not None]
        if len(named) != 1:
            targets = " and ".join(named) if named else "none"
            raise self._error(
                "target", f"must be exactly one of episode, call, response; found {targets}"
            )
        kind = named[0]
        target = self._text(kind)
        if not target:
            raise self._error(kind, "must not be empty")
        if len(target.encode()) > MAX_TARGET_BYTES:
            raise self._error(kind, f"must be at most {MAX_TARGET_BYTES} bytes long in UTF-8")
        target = self._call_id(target) if kind == "call" else target
        return kind, scoped(self._tenant, target)

    def _source(self) -> str | None:
        source = self._text(SOURCE)
        if source == "":
            raise self._error(SOURCE, "must not be empty; leave it out to state a fact")
        return source and scoped(self._tenant, source)

    def _call_id(self, target: str) -> str:
        try:
            return str(UUID(target))
        except ValueError as error:
            wanted = "must be the UUID that the reply carried as x-pawl-call"
            raise self._error("call", wanted) from error

    def _text(self, name: str, most: int = MAX_TEXT) -> str | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > most:
            raise self._error(name, f"must be a string of at most {most} characters")
        if "\x00" in value:
            raise self._error(name, NO_NUL)
        return value

    def _is_withdrawn(self) -> bool:
        value = self._fields.get(WITHDRAWN)
        if value is None or value is False:
            return False
        if value is not True:
            raise self._error(WITHDRAWN, f"must be true or false, not {_shown(value)}")
        if self._fields.get("value") is not None:
            raise self._error(
                "value", "must be left out where withdrawn is true: the statement is only removed"
            )
        return True

    def _correction(self, *, is_withdrawn: bool) -> str | None:
        """Return the right reply that the statement gives, or None if it gives none."""
        text = self._text(CORRECTION, MAX_CORRECTION)
        if text is not None and (is_withdrawn or not text.strip()):
            wanted = "must be the right reply, in full; it must be left out where withdrawn is true"
            raise self._error(CORRECTION, wanted)
        if text is not None and self._fields.get(SOURCE) is not None:
            raise self._error(CORRECTION, "is a fact, not a judge's opinion: leave out `source`")
        return text

    def _value(self) -> float | str:
        """Return a metric's value: a number (true is 1, false is 0) or a label."""
        value = self._fields.get("value")
        if isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            return self._label(value)
        number = _as_float(value)
        if number is None:
            raise self._error(
                "value",
                "must be a finite number, true, false or a short text, not "
                f'{_shown(value)}; to withdraw an earlier statement send "withdrawn": true instead',
            )
        if abs(number) > LARGEST:
            wanted = f"must be a number from {-LARGEST:g} to {LARGEST:g}, not {_shown(value)}"
            raise self._error("value", wanted)
        return number

    def _label(self, value: str) -> str:
        if not 0 < len(value) <= MAX_LABEL:
            raise self._error("value", f"must be a text of 1 to {MAX_LABEL} characters")
        if "\x00" in value:
            raise self._error("value", NO_NUL)
        if _reads_as_number(value):
            raise self._error("value", f"is the text {_shown(value)}: send it without quotes")
        return value

    def _number(self, name: str) -> float | None:
        value = self._fields.get(name)
        if value is None:
            return None
        number = _as_float(value)
        if number is None:
            raise self._error(name, f"must be a finite number, not {_shown(value)}")
        return number

    def _tool_event(self) -> ToolEvent:
        status = self._fields.get("value")
        if status not in TOOL_STATUSES:
            known = ", ".join(TOOL_STATUSES)
            raise self._error(
                "value", f"must be one of {known} for tool_status, not {_shown(status)}"
            )
        return msgspec.convert(
            {
                "id": new_id(),
                "tool_id": self._text("id"),
                "name": self._text("name"),
                "status": status,
                "detail": self._text("detail"),
                "ms": self._number("ms"),
                "source": "feedback",
            },
            ToolEvent,
        )
