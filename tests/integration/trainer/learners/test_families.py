"""Models of the families that people train: each loads, and its update is that of whole rows."""

from pathlib import Path

import pytest
from torch import Tensor

from tests.support.trainer.families import FAMILIES, write_family
from tests.support.trainer.merging import gradient, largest_difference
from tests.support.training import growing_rows, recipe
from trainer.batches import computed_tokens, plan_micro_batches
from trainer.learners.learner import Learner


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_is_trained_by_its_way(tmp_path: Path, kind: str) -> None:
    model, (_, way) = write_family(tmp_path / "model", kind), FAMILIES[kind]
    batch = growing_rows()
    longest = max(len(row.ids) for row in batch)
    few = recipe(micro_batch_tokens=longest // 4)
    made = Learner(model, few, seed=0, scratch=tmp_path)
    assert made._way == way
    adapted = [name for name, _ in made._model.named_modules() if name.endswith("lora_A")]
    assert adapted
    assert not [name for name in adapted if "vision" in name or "visual" in name]

    whole = Learner(model, few, seed=0, scratch=tmp_path, ways=("whole",))
    assert largest_difference(step_gradient(made), step_gradient(whole)) < 1e-5
    assert made.update(batch)["computed_tokens"] <= 1.2 * computed_tokens(batch)


def step_gradient(made: Learner) -> Tensor:
    for rows in plan_micro_batches(growing_rows(), 64, way=made._trainer.way):
        made._trainer.loss_of(rows).backward()
    return gradient(made._model)
