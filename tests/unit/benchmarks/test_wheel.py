"""The cache of compiled modules keeps what is used."""

import os
from pathlib import Path

from benchmarks.wheel import _forget_unused


def test_what_was_not_used_for_long_is_deleted(tmp_path: Path) -> None:
    for name, used in (("old", 100), ("new", 300)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (used, used))
    _forget_unused(tmp_path, 200)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_no_cache_is_an_empty_one(tmp_path: Path) -> None:
    _forget_unused(tmp_path / "none", 200)
    assert not (tmp_path / "none").exists()
