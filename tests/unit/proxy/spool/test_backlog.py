"""A segment that its worker seals, and so renames, while the keeper reads it."""

from pathlib import Path
from typing import Any

import pytest

from proxy.keeper.backlog import BEGIN, Segment
from proxy.spool.segments import encode_frame
from tests.support.records import captured


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.open"
    made.write_bytes(encode_frame(captured("e")))
    return made


@pytest.mark.parametrize("name", ["open", "stat"])
def test_one_that_is_renamed_after_its_path_was_looked_up_is_read_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    segment = Segment(path)
    real = getattr(Path, name)

    def renamed_before(self: Path, *args: Any, **more: Any) -> Any:
        # `exists` asks `stat` too: the rename comes after it.
        if self == path and seen.append(1) is None and len(seen) > (name == "stat"):
            monkeypatch.undo()
            path.rename(path.with_suffix(".seg"))
        return real(self, *args, **more)

    seen: list[int] = []
    monkeypatch.setattr(Path, name, renamed_before)
    assert segment.grown()
    [piece] = segment.pieces(BEGIN, None, sealed=True)
    assert not piece.damage
    assert not path.exists()


def test_one_that_is_gone_is_an_error(path: Path) -> None:
    segment = Segment(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        segment.grown()
