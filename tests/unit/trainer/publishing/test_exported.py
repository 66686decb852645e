"""A version's adapter outside: whole, as it was written, and over nothing that is there."""

from pathlib import Path

import pytest

from store.ids import new_id
from tests.unit.trainer.publishing.test_adapters import new_version, save
from trainer.errors import AdapterError
from trainer.publishing import adapters
from trainer.publishing.adapters import export_adapter, write_base, write_version


def saved(folder: Path) -> None:
    save(folder)
    write_base(folder, "hash of the base")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version as training leaves it."""
    return write_version(tmp_path / "adapters", new_version(update_id=new_id()), saved)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_adapter_is_copied_and_the_trainers_own_files_are_not(
    version: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    export_adapter(version, out)
    assert names(out) == ["adapter_config.json", "adapter_model.safetensors", "base.json"]
    assert all((out / name).read_bytes() == (version / name).read_bytes() for name in names(out))
    assert names(out.parent) == ["out"]


def test_an_empty_folder_is_filled_and_a_full_one_refused(version: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_adapter(version, out)
    assert len(names(out)) == 3
    with pytest.raises(AdapterError, match="there already and not empty: name a new folder"):
        export_adapter(version, out)
    with pytest.raises(AdapterError, match="not empty"):
        export_adapter(version, out / "base.json")


def test_files_that_changed_or_are_gone_are_not_exported(version: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no version any more: restore it"):
        export_adapter(tmp_path / "gone", tmp_path / "out")
    (version / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(AdapterError, match="not the file that was written"):
        export_adapter(version, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_that_breaks_off_leaves_nothing(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapters, "copyfile", full)
    with pytest.raises(AdapterError, match=r"cannot be written: No space left .*make room"):
        export_adapter(version, tmp_path / "out")
    assert names(tmp_path) == ["adapters"]
