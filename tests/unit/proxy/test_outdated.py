"""What runs is what the sources say: a source that was changed after it was compiled is found."""

import json
from pathlib import Path

import pytest

from proxy.outdated import NOTED, hashes, outdated


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    (tmp_path / "http").mkdir()
    (tmp_path / "relay.py").write_text("a = 1\n")
    (tmp_path / "http" / "wire.py").write_text("b = 1\n")
    (tmp_path / NOTED).write_text(json.dumps(hashes(tmp_path)))
    return tmp_path


def test_what_was_compiled_as_it_stands_is_not_outdated(compiled: Path) -> None:
    (compiled / "relay.py").touch()
    assert outdated(compiled) == []


def test_a_source_that_changed_is(compiled: Path) -> None:
    changed = compiled / "http" / "wire.py"
    changed.write_text("b = 2\n")
    assert outdated(compiled) == [changed]


def test_and_one_that_is_new(compiled: Path) -> None:
    new = compiled / "new.py"
    new.write_text("")
    assert outdated(compiled) == [new]


def test_and_one_that_is_gone(compiled: Path) -> None:
    (compiled / "relay.py").unlink()
    assert outdated(compiled) == [compiled / "relay.py"]


def test_where_nothing_was_compiled_nothing_is(compiled: Path) -> None:
    (compiled / NOTED).unlink()
    (compiled / "relay.py").write_text("a = 3\n")
    assert outdated(compiled) == []


def test_after_a_compilation_that_did_not_end_all_are(compiled: Path) -> None:
    (compiled / NOTED).unlink()
    (compiled / "relay.cpython-311-x86_64-linux-gnu.so").touch()
    assert outdated(compiled) == [compiled / "http" / "wire.py", compiled / "relay.py"]
