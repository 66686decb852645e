"""What a learner continues from is all there: moments, rates, and nothing of what failed."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.support.faults.unreadable import unreadable
from tests.support.training import recipe, rows
from trainer.batches import Row
from trainer.errors import AdapterError, FilesUnread, Interrupted, LearnerError
from trainer.learners.learner import Learner
from trainer.publishing import adapters
from trainer.recipes.recipe import OptimizerOptions

RATE = 1e-2


def learner(model: str, folder: Path, rate: float = RATE) -> Learner:
    rule = OptimizerOptions(learning_rate=rate)
    chosen = recipe(steps=2).model_copy(update={"optimizer": rule})
    return Learner(model, chosen, seed=0, scratch=folder)


def save(made: Learner, folder: Path) -> Path:
    folder.mkdir()
    made.save(folder)
    return folder


def same(one: Path, other: Path) -> bool:
    names = ("adapter_model.safetensors", "adapter_config.json", "base.json")
    names += ("trainer/optimizer.pt",)
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.fixture(scope="module")
def two_updates(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates by one learner, each saved: folders `1` and `2`."""
    folder = tmp_path_factory.mktemp("straight")
    made = learner(tiny_model, folder)
    made.update(rows(0))
    save(made, folder / "1")
    made.update(rows(1))
    save(made, folder / "2")
    return folder


@pytest.fixture
def straight(two_updates: Path, tmp_path: Path) -> Path:
    """Copy both versions into the test's folder, and return the second."""
    for name in ("1", "2"):
        shutil.copytree(two_updates / name, tmp_path / name)
    return tmp_path / "2"


def test_adapter_config_lists_its_modules_in_sorted_order(straight: Path) -> None:
    """PEFT keeps the modules' names as a set, whose order comes from the process's hash seed."""
    written = json.loads((straight / "adapter_config.json").read_text())["target_modules"]
    assert len(written) > 1
    assert written == sorted(written)


def test_resumed_learner_writes_the_same_files(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    resumed = learner(tiny_model, tmp_path)
    resumed.restore(tmp_path / "1")
    resumed.update(rows(1))
    assert same(save(resumed, tmp_path / "again"), straight)


def test_step_share_scales_the_learning_rate_of_that_update_only(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(tmp_path / "1")
    rates = [made.update(rows(1), share)["learning_rate"] for share in (0.25, 1.0)]
    assert rates == [0.25 * RATE, RATE]
    made.restore(tmp_path / "1")
    made.update(rows(1))
    assert same(save(made, tmp_path / "again"), straight)


def not_finite(batch: list[Row]) -> list[Row]:
    import msgspec

    broken = msgspec.structs.replace(batch[0], advantage=float("nan"))
    return [broken, *batch[1:]]


def test_failed_update_leaves_no_trace_in_the_next_version(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(tmp_path / "1")
    with pytest.raises(LearnerError, match="was not applied"):
        made.update(not_finite(rows(1)))
    made.restore(tmp_path / "1")
    made.update(rows(1))
    assert same(save(made, tmp_path / "again"), straight)


def test_update_stopped_after_its_first_step_leaves_no_trace_in_the_next_version(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(tmp_path / "1")
    real = made._step.take

    def take(*args: Any) -> Any:
        taken = real(*args)
        made.interrupt()
        return taken

    made._step.take = take  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        made.update(rows(1))
    made._interrupted.clear()
    made.restore(tmp_path / "1")
    made.update(rows(1))
    assert same(save(made, tmp_path / "again"), straight)


def test_rejected_version_leaves_no_trace_in_the_next_version(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.update(rows(0))
    made.mark_saved(save(made, tmp_path / "7"))
    made.update(rows(2))
    made.mark_saved(save(made, tmp_path / "8"))
    made.restore(tmp_path / "7")
    made.update(rows(1))
    assert same(save(made, tmp_path / "again"), straight)


def test_update_and_restore_change_no_weight_of_the_base_model(
    tiny_model: str, tmp_path: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    before = {k: v.clone() for k, v in made._model.get_base_model().state_dict().items()}
    made.update(rows(0))
    made.restore(None)
    after = made._model.get_base_model().state_dict()
    frozen = [name for name in before if "lora_" not in name]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)


def test_fresh_adapter_depends_on_the_seed_alone(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(straight)
    torch.rand(7)
    made.restore(None)
    made.update(rows(0))
    assert same(save(made, tmp_path / "again"), tmp_path / "1")


def test_changed_recipe_sets_the_learning_rate_and_keeps_the_optimizer_moments(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    made = learner(tiny_model, tmp_path, 1e-4)
    made.restore(tmp_path / "1")
    group = made._trainer.optimizer.param_groups[0]
    assert group["lr"] == 1e-4
    moments = made._trainer.optimizer.state_dict()["state"]
    assert {float(state["step"]) for state in moments.values()} == {2.0}


def test_deleted_optimiser_state_starts_anew_and_is_logged(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    for path in (straight / adapters.STATE_FOLDER).iterdir():
        path.unlink()
    made = learner(tiny_model, tmp_path)
    with capture_logs() as log:
        made.restore(straight)
    assert [(line["event"], line["part"]) for line in log] == [("state_starts_anew", "optimizer")]
    assert not made._trainer.optimizer.state_dict()["state"]


def test_damaged_optimizer_state_is_an_error_that_names_the_file(
    tiny_model: str, tmp_path: Path, straight: Path
) -> None:
    (straight / adapters.STATE_FOLDER / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(AdapterError, match=r"optimizer\.pt cannot be read .* remove it"):
        learner(tiny_model, tmp_path).restore(straight)


FILES = ("adapter_config.json", "adapter_model.safetensors", "trainer/optimizer.pt")


@pytest.mark.parametrize("name", FILES)
def test_a_version_that_cannot_be_read_for_now_is_restored_later(
    tiny_model: str, tmp_path: Path, straight: Path, name: str
) -> None:
    made = learner(tiny_model, tmp_path)
    with unreadable(straight / name), pytest.raises(FilesUnread, match="may be temporary"):
        made.restore(straight)
    made.restore(straight)
    assert same(save(made, tmp_path / "again"), straight)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What is longer cannot be written: as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The adapter does not fit; the adapter does, and the optimiser's state does not.
@pytest.mark.parametrize("size", [2_000, 40_000])
def test_full_disk_while_saving_a_version_raises_an_os_error_and_saving_can_be_repeated(
    tiny_model: str, tmp_path: Path, straight: Path, size: int
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(tmp_path / "1")
    made.update(rows(1))
    with files_of_at_most(size), pytest.raises(OSError, match="too large"):
        save(made, tmp_path / "full")
    fits = (straight / "adapter_model.safetensors").stat().st_size <= size
    assert (tmp_path / "full" / "trainer").exists() == fits
    assert same(save(made, tmp_path / "again"), straight)
