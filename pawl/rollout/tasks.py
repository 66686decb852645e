"""Read a file of tasks: one JSON object a line (pure)."""

import codecs
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from store.records import Record
from store.values.documents import parse

ID_FIELD: Final = "id"
# The longest name that the proxy accepts; see `proxy.identity.identify`.
MAX_NAME_CHARS: Final = 256


class RolloutError(Exception):
    """The rollout cannot start or go on; the message names the option or line, and the remedy."""


class Task(Record, frozen=True, kw_only=True):
    """A task: its fields, and the name by which its episodes are grouped."""

    name: str
    fields: dict[str, Any]


def parse_tasks(
    text: bytes, file: str, answer: str | None = None, hidden: Iterable[str] = ()
) -> tuple[Task, ...]:
    """Return the tasks of a file in order; skip empty lines.

    A task's name is its field `id`, or else a hash of its content. Every task must have the field
    `answer`, and at least one task each field of `hidden`.

    Raises:
        RolloutError: a line is not a task, two tasks share a name, or a field is missing.
    """
    tasks: dict[str, Task] = {}
    lines: dict[str, int] = {}
    # Some editors begin a file with a byte order mark.
    for number, line in enumerate(text.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        task = _parse_task(line, where)
        if answer is not None and answer not in task.fields:
            raise RolloutError(f"{where}: the task has no field {answer!r}, which --answer names")
        if task.name in tasks:
            raise RolloutError(
                f"{where}: the task {task.name!r} is already in line {lines[task.name]}; give "
                "each task an `id` of its own, or use -n to run one several times"
            )
        tasks[task.name], lines[task.name] = task, number
    if not tasks:
        raise RolloutError(f"{file} has no tasks: write one JSON object a line into it")
    fields = {name for task in tasks.values() for name in task.fields}
    for name in hidden:
        # A misspelt name would hide nothing.
        if name not in fields:
            raise RolloutError(f"--hide: no task of {file} has a field {name!r}")
    return tuple(tasks.values())


def _parse_task(line: bytes, where: str) -> Task:
    try:
        fields = parse(line, dict[str, Any])
    except ValueError as error:
        raise RolloutError(
            f"{where} is no task ({error}): each line must be a JSON object such as "
            '{"id": "t1", "question": "…"}'
        ) from error
    return Task(name=_task_name(fields, where), fields=fields)


def _task_name(fields: Mapping[str, Any], where: str) -> str:
    value = fields.get(ID_FIELD)
    if value is None:
        return "task-" + sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name.strip():
        raise RolloutError(f"{where}: the field `id` must be a text or a whole number")
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise RolloutError(
            f"{where}: the field `id` must be at most {MAX_NAME_CHARS} printable characters"
        )
    if name in (".", ".."):
        raise RolloutError(f"{where}: the field `id` must not be {name!r}: clients drop it in URLs")
    return name


def tasks_digest(tasks: tuple[Task, ...]) -> str:
    """Return a hash of the tasks; a resumed rollout must have the same."""
    return sha256(msgspec.json.encode(tasks, order="sorted")).hexdigest()[:16]
