"""The packaged model is unpacked once, whoever asks for it."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pawl.stack import model

# Unpacks as slowly as the real one does beside another, and says that it did.
SLOW = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[-1])
folder.mkdir()
time.sleep(0.3)
(folder / "config.json").write_text("{}")
with (folder.parent / "unpacked").open("a") as said:
    said.write("once ")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is not there yet, with a slow program in place of the real one."""
    monkeypatch.setattr(model, "run_module", lambda _: [sys.executable, "-c", SLOW])
    monkeypatch.setattr(model, "packaged_gguf", lambda: Path("model.gguf"))
    return tmp_path / "var" / "models"


def test_of_several_at_once_one_unpacks_and_the_others_wait(models: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: model.unpacked_model(models), range(4)))
    assert set(folders) == {models / model.PACKAGED}
    assert (models / "unpacked").read_text() == "once "


def test_what_a_killed_one_has_left_is_unpacked_again(models: Path) -> None:
    (models / f"{model.PACKAGED}.part").mkdir(parents=True)
    assert (model.unpacked_model(models) / "config.json").exists()
