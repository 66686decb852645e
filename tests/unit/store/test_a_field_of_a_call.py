"""A field of a call is added in two places, as docs/howto/add-a-field-of-a-call.md says."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from store.records import CallFacts, CallRecord, Record, StoredColumn, column_fields
from store.schema.tables import call_columns, transitions
from store.write.rows import TRANSITION_COLUMNS
from tests.support.docs.documents import split_blocks

ROOT = Path(__file__).parents[3]
NOT_SOURCES = shutil.ignore_patterns("__pycache__")
PAGE = ROOT / "docs/howto/add-a-field-of-a-call.md"
# The two lines, as the page has them.
LINES = [one.text for one in split_blocks(PAGE, PAGE.read_text())[1] if one.language == "python"]
# The two places, each with the line before which a line is added.
DEFINITION = ("store/records.py", "    trainable: Annotated[bool, ", f"    {LINES[0]}")
VALUE = ("proxy/ingester/transcribe.py", "        finish=facts.finish,\n", f"        {LINES[1]}")
# Records a call, writes its row, and reads the row back as an episode's call.
WRITE_AND_READ = """
from datetime import UTC, datetime
from types import SimpleNamespace

from proxy.ingester.transcribe import transcribe
from store.read.assembly import assemble, full_texts
from store.schema.tables import transitions
from store.write.rows import storable_call
from store.write.bases import BaseCache
from store.write.rows import TRANSITION_COLUMNS, transition_row
from tests.support.records import captured

record = transcribe(captured("e", request=b'{"model":"m"}'))
call = storable_call(record)
values = transition_row(call, call.id, BaseCache().store(call))
row = SimpleNamespace(**dict(zip(TRANSITION_COLUMNS, values, strict=True)))
part = SimpleNamespace(
    id=call.id, key="e", root=None, task=None, joined_task=None, method="header",
    last_call_at=datetime.now(UTC), quarantined_reason=None, split="train", joined_split=None,
)
[read] = assemble([part], [row], [], [], full_texts([row])).calls
column = transitions.c.request_bytes
print(record.request_bytes, row.request_bytes, read.request_bytes)
print(column.type, column.nullable, column.doc)
"""


def test_call_field_added_in_two_places_is_written_and_read_back(tmp_path: Path) -> None:
    for package in ("store", "proxy"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=NOT_SOURCES)
    for path, before, line in (DEFINITION, VALUE):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1, path
        (tmp_path / path).write_text(text.replace(before, line + before))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    said = subprocess.run(
        [sys.executable, "-c", WRITE_AND_READ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert said.stdout == "13 13 13\nINTEGER True Length of the request's body.\n", said.stderr


def test_every_transition_column_is_written_and_every_call_field_has_a_column() -> None:
    by_updates = {"policy_logprobs"}
    columns = {column.name for column in transitions.c}
    assert sorted(TRANSITION_COLUMNS) == sorted(columns - by_updates)
    elsewhere = {"episode", "task", "request", "tokens", "tool_events", "trace"}
    fields = {*CallRecord.__struct_fields__} - elsewhere
    kept = {field.name for field in column_fields(CallRecord)}
    assert len(fields - kept) == 2, "the fingerprints, which have tables of their own"
    assert kept <= fields


def test_every_field_of_call_facts_has_a_column() -> None:
    assert {*CallFacts.__struct_fields__} <= {field.name for field in column_fields(CallRecord)}


class Odd(Record, frozen=True, kw_only=True):
    """A record with a field that no column can hold."""

    parts: Annotated[complex, StoredColumn("A type that no column is known for.")]


def test_call_field_of_a_type_without_a_column_type_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Odd\.parts .*complex.*TYPES"):
        call_columns(Odd)
