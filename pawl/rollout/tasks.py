"""Read a file of tasks: one JSON object a line (pure)."""

import codecs
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from pawl.rollout.errors import RolloutError
from store.records import Record
from store.values.documents import parse

ID_FIELD: Final = "id"
# What the proxy takes as a name; see `proxy.identity.names`.
MOST_NAME_CHARS: Final = 256


class Task(Record, frozen=True, kw_only=True):
    """Hold one task: its name, by which episodes are compared, and its fields."""

    name: str
    fields: dict[str, Any]


def parse_tasks(text: bytes, file: str, needed: str | None = None) -> tuple[Task, ...]:
    """Return the tasks of a file, in its order; empty lines are passed over.

    A task is named by its field `id`, or else by a hash of what it says, so that its name is the
    same on every machine.

    Args:
        text: the file's content.
        file: its name, for messages.
        needed: a field that each task must have.

    Raises:
        RolloutError: a line is no task, or two are of one name; the message names the line.
    """
    tasks: dict[str, Task] = {}
    lines: dict[str, int] = {}
    # Some editors put a mark before the first line, which nobody sees and JSON does not have.
    whole = text.removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line.strip():
            continue
        task = _task(line, f"{file}, line {number}")
        if needed is not None and needed not in task.fields:
            raise RolloutError(
                f"{file}, line {number}: the task has no field {needed!r}, which --answer names"
            )
        if task.name in tasks:
            raise RolloutError(
                f"{file}, line {number}: the task {task.name!r} stands in line "
                f"{lines[task.name]} already; give each task an `id` of its own, or use -n to "
                "run one several times"
            )
        tasks[task.name], lines[task.name] = task, number
    if not tasks:
        raise RolloutError(f"{file} has no tasks: write one JSON object a line into it")
    return tuple(tasks.values())


def _task(line: bytes, where: str) -> Task:
    try:
        fields = parse(line, dict[str, Any])
    except ValueError as error:
        raise RolloutError(
            f"{where} is no task ({error}): each line must be a JSON object such as "
            '{"id": "t1", "question": "…"}'
        ) from error
    return Task(name=_name(fields, where), fields=fields)


def _name(fields: Mapping[str, Any], where: str) -> str:
    value = fields.get(ID_FIELD)
    if value is None:
        return "task-" + sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name.strip():
        raise RolloutError(f"{where}: the field `id` must be a text or a whole number")
    if len(name) > MOST_NAME_CHARS or not name.isprintable():
        raise RolloutError(
            f"{where}: the field `id` must be at most {MOST_NAME_CHARS} printable characters"
        )
    if name in (".", ".."):
        raise RolloutError(
            f"{where}: the field `id` must not be {name!r}, which clients drop from an address"
        )
    return name


def check_hidden(tasks: Iterable[Task], hidden: Iterable[str], file: str) -> None:
    """Check that some task has each field that is to be hidden: a wrong name would hide nothing.

    Raises:
        RolloutError: none has it.
    """
    there = {name for task in tasks for name in task.fields}
    for name in hidden:
        if name not in there:
            raise RolloutError(f"--hide: no task of {file} has a field {name!r}")


def digest(tasks: tuple[Task, ...]) -> str:
    """Return a hash of the tasks, by which a resumed rollout knows that they are the same."""
    return sha256(msgspec.json.encode(tasks, order="sorted")).hexdigest()[:16]
