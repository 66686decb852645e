"""A file is there as a whole, or as it was."""

import os
from pathlib import Path
from threading import Thread

import pytest

from store.files import atomic_file, write_private


def test_interrupted_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.writelines([b"half", None])
    assert path.read_bytes() == b"before"
    with atomic_file(path) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


def test_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "f", tmp_path / "link"
    link.symlink_to(path)
    with atomic_file(link) as file:
        file.write(b"x")
    assert link.is_symlink()
    assert path.read_bytes() == b"x"


def test_pipe_is_written_to_directly_and_not_replaced(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    with atomic_file(pipe) as file:
        file.write(b"x")
    reader.join(10)
    assert found == [b"x"]
    assert list(tmp_path.iterdir()) == [pipe]


def test_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    with atomic_file(path) as file:
        file.write(b"x")
    assert path.stat().st_mode & 0o777 == 0o600


def test_private_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"")
    path.chmod(0o644)
    write_private(path, b"x")
    assert path.stat().st_mode & 0o777 == 0o600
