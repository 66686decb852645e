"""A version's files: whole or not there, and never changed."""

from pathlib import Path
from typing import Any

import pytest

from store.claims import Outcome
from store.ids import new_id
from trainer.errors import AdapterError
from trainer.publishing.adapters import (
    NewVersion,
    find_update,
    read_manifest,
    remove,
    sweep,
    version_folder,
    write_version,
)
from trainer.publishing.probe import ProbeRow


def save(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "trainer").mkdir()
    (folder / "trainer" / "optimizer.pt").write_bytes(b"state")


def new_version(policy: str = "org/m", version: int = 1, **changes: Any) -> NewVersion:
    values = {
        "update_id": new_id(),
        "parent_version": 0,
        "outcomes": (Outcome(episode_id=new_id(), trained=True),),
        "metrics": {"loss": 0.5},
        "probe": (ProbeRow(ids=(1, 2), logprobs=(-0.5,)),),
    } | changes
    return NewVersion(policy=policy, version=version, **values)


def write(root: Path, version: int = 1, **changes: Any) -> Path:
    return write_version(root, new_version(version=version, **changes), save)


def test_what_is_written_is_found_by_its_update(tmp_path: Path) -> None:
    update_id = new_id()
    folder = write(tmp_path, update_id=update_id)
    assert folder == version_folder(tmp_path, "org/m", 1)
    found = find_update(tmp_path, "org/m", update_id)
    assert found is not None
    assert found[1].metrics == {"loss": 0.5}
    assert found[1].probe[0].logprobs == (-0.5,)
    assert find_update(tmp_path, "org/m", new_id()) is None


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AdapterError, match="never change"):
        write(tmp_path)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(AdapterError, match="not the file"):
        read_manifest(folder)


def test_a_save_that_breaks_off_leaves_no_version(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        save(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_version(tmp_path, new_version("m"), broken)
    assert read_manifest(version_folder(tmp_path, "m", 1)) is None
    sweep(tmp_path, "m")
    assert list((tmp_path / "m").iterdir()) == []


def test_sweeping_keeps_every_version_whole(tmp_path: Path) -> None:
    for version in range(1, 12):
        write(tmp_path, version)
    (tmp_path / "org--m" / ".3-removed").mkdir()
    sweep(tmp_path, "org/m")
    for version in range(1, 12):
        folder = version_folder(tmp_path, "org/m", version)
        assert (folder / "adapter_model.safetensors").exists()
        assert (folder / "trainer").exists()
    assert not list((tmp_path / "org--m").glob(".*"))


def test_a_removed_version_is_not_seen_half_removed(tmp_path: Path) -> None:
    folder = write(tmp_path)
    parent = folder.parent
    remove(folder)
    assert list(parent.iterdir()) == []
    # A second one does nothing.
    remove(folder)
