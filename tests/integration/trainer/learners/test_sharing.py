"""Policies that share one base model in memory: each gets the bytes that it gets alone."""

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.support.training import ppo_recipe, recipe, rows
from trainer.batches import LAYOUTS, Row
from trainer.errors import Interrupted
from trainer.learners.learner import Learner
from trainer.learners.model import Base, is_checkpointed
from trainer.recipes.recipe import KlOptions, LoraOptions

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("measured_once")]

RECIPES = {
    "writer": recipe(steps=2),
    "checker": ppo_recipe(steps=2).model_copy(update={"lora": LoraOptions(rank=2, alpha=4)}),
    "editor": recipe().model_copy(
        update={"kl": KlOptions(coefficient=0.1), "lora": LoraOptions(rank=8, alpha=8)}
    ),
}
ROUNDS = 2


def batch(name: str, number: int) -> Sequence[Row]:
    return rows(number * len(RECIPES) + list(RECIPES).index(name))


def turn(made: Learner, name: str, folder: Path, number: int) -> None:
    """An update as the loop makes it: restored, computed, written."""
    made.restore(folder / str(number) if number else None)
    made.update(batch(name, number))
    made.logprobs(batch(name, number)[:2])
    written = folder / str(number + 1)
    written.mkdir(parents=True)
    made.save(written)
    made.mark_saved(written)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def learner(base: str | Base, name: str, folder: Path) -> Learner:
    """The learner of a policy; the editor's computes shared prefixes again for each row."""
    return Learner(
        base,
        RECIPES[name],
        seed=0,
        scratch=folder,
        layouts=("whole",) if name == "editor" else LAYOUTS,
    )


def alone(model: str, name: str, folder: Path) -> Learner:
    made = learner(model, name, folder)
    for number in range(ROUNDS):
        turn(made, name, folder / name, number)
    return made


@pytest.fixture(scope="module")
def base(tiny_model: str) -> Base:
    return Base(tiny_model, RECIPES["writer"])


@pytest.fixture(scope="module")
def by_themselves(
    tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    """What each policy comes to in a process of its own, by policy and file."""
    folder = tmp_path_factory.mktemp("alone")
    for name in RECIPES:
        alone(tiny_model, name, folder)
    return {name: bytes_of(folder / name) for name in RECIPES}


@pytest.mark.parametrize(
    "order",
    [
        ["writer", "checker", "editor"] * ROUNDS,
        ["editor", *["writer"] * 2, "checker", "editor", "checker"],
    ],
)
def test_policies_sharing_a_base_train_the_same_bytes_as_alone(
    base: Base, tmp_path: Path, by_themselves: dict[str, dict[str, bytes]], order: list[str]
) -> None:
    sharing = {name: learner(base, name, tmp_path) for name in RECIPES}
    for place, name in enumerate(order):
        turn(sharing[name], name, tmp_path / "shared" / name, order[:place].count(name))
    for name, expected in by_themselves.items():
        found = bytes_of(tmp_path / "shared" / name)
        assert any("optimizer.pt" in path for path in expected)
        assert found == expected, name


def test_failed_restore_leaves_no_trace_in_another_policy(
    base: Base, tmp_path: Path, by_themselves: dict[str, dict[str, bytes]]
) -> None:
    writer, checker = (
        Learner(base, RECIPES[name], seed=0, scratch=tmp_path) for name in ("writer", "checker")
    )
    folder = tmp_path / "shared"
    turn(writer, "writer", folder / "writer", 0)
    # An adapter that PEFT fails to read when it is half on the base.
    broken = folder / "checker" / "1"
    turn(checker, "checker", folder / "checker", 0)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    writer.restore(folder / "writer" / "1")
    with pytest.raises(SafetensorError):
        checker.restore(broken)
    turn(writer, "writer", folder / "writer", 1)
    assert bytes_of(folder / "writer") == by_themselves["writer"]


def test_update_that_is_stopped_half_way_leaves_no_trace_in_another_policy(
    base: Base, tmp_path: Path, by_themselves: dict[str, dict[str, bytes]]
) -> None:
    writer, checker = (
        Learner(base, RECIPES[name], seed=0, scratch=tmp_path) for name in ("writer", "checker")
    )
    folder = tmp_path / "shared"
    checker.interrupt()
    for number in range(ROUNDS):
        checker.restore(None)
        with pytest.raises(Interrupted):
            checker.update(batch("checker", number))
        turn(writer, "writer", folder / "writer", number)
    assert bytes_of(folder / "writer") == by_themselves["writer"]


def test_learner_without_the_shared_base_holds_no_adapter_or_optimizer_moments(
    base: Base, tmp_path: Path
) -> None:
    first = Learner(base, RECIPES["writer"], seed=0, scratch=tmp_path)
    first.update(rows(0))
    before = _tensors()
    others = [Learner(base, RECIPES["writer"], seed=0, scratch=tmp_path) for _ in range(3)]
    others[-1].update(rows(1))
    assert _tensors() <= before


def _tensors() -> int:
    """How many numbers are kept that are trained."""
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum(one.numel() for one in kept if one.requires_grad)


def test_smaller_micro_batches_hold_for_a_policy_whose_base_another_one_holds(
    base: Base, tmp_path: Path
) -> None:
    """As after two killed trainers, before any policy trains: its layers are checkpointed."""
    first, second = learner(base, "writer", tmp_path), learner(base, "checker", tmp_path)
    first.halve_micro_batches(1)
    assert not is_checkpointed(second._model.get_base_model())
    first.restore(None)
    assert is_checkpointed(first._model.get_base_model())
