"""SFT on a tiny random model: the loss is a dense reference's, and only sampled tokens carry it."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.integration.trainer.learners.test_learner import gradients, plain_logprobs
from tests.support.trainer.reference import shake
from tests.support.training import PLAIN, Renew, by_every_layout, recipe, rows, sft_recipe
from trainer.batches import Row
from trainer.learners.learner import Learner
from trainer.learners.losses.stored import InitialValues
from trainer.recipes.recipe import KlOptions

pytestmark = pytest.mark.timeout(240)


def imitated(seed: int = 0) -> list[Row]:
    """Rows as an update of sft has them, with weights that differ: no log-probabilities."""
    made = [
        msgspec.structs.replace(
            row, distribution=PLAIN, sampled_logprobs=(), weight=row.weight * (1 + number)
        )
        for number, row in enumerate(rows(seed))
    ]
    whole = sum(row.weight for row in made)
    return [msgspec.structs.replace(row, weight=row.weight / whole) for row in made]


def shaken(made: Learner) -> Learner:
    shake(made)
    return made


def dense_loss(model: Any, batch: list[Row]) -> torch.Tensor:
    """The cross-entropy of whole sequences by torch itself, with the prompts' labels ignored."""
    total = torch.zeros(())
    for row in batch:
        labels = torch.tensor([-100] * len(row.prompt_ids) + list(row.sampled_ids))
        logits = model(input_ids=torch.tensor([row.ids])).logits[0]
        mean = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100)
        total = total + row.weight * mean
    return total


def test_sft_loss_and_gradient_equal_a_dense_reference(renew: Renew) -> None:
    made = shaken(renew(sft_recipe()))
    batch = imitated()
    ours = made._trainer.loss_of(batch)
    ours.backward()
    got = gradients(made)
    reference = dense_loss(made._model, batch)
    reference.backward()
    wanted = gradients(made)
    assert math.isclose(float(ours.detach()), float(reference.detach()), abs_tol=1e-5)
    assert float((got - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


def test_every_way_of_computing_rows_makes_the_same_sft_update(
    tiny_model: str, tmp_path: Path
) -> None:
    by_every_layout(tiny_model, sft_recipe(), imitated(), tmp_path)


def test_prompt_tokens_carry_no_gradient_of_the_sft_loss(tiny_model: str, tmp_path: Path) -> None:
    """At the LM head, whose input each token's loss goes through."""
    made = Learner(tiny_model, sft_recipe(), seed=0, scratch=tmp_path, layouts=("whole",))
    shake(made)
    (row,) = batch = [msgspec.structs.replace(imitated()[0], weight=1.0)]
    states: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        states.append(output)

    hook = made._model.get_base_model().get_decoder().norm.register_forward_hook(keep)
    made._trainer.loss_of(batch).backward()
    hook.remove()
    (state,) = states
    assert state.grad is not None
    moved = state.grad[0].abs().amax(dim=1) > 0
    prompt = len(row.prompt_ids) - 1
    assert moved.tolist() == [False] * prompt + [True] * len(row.sampled_ids)


def test_sft_loss_ignores_log_probabilities_and_advantages(renew: Renew) -> None:
    made = shaken(renew(sft_recipe()))
    batch = imitated()
    other = [
        msgspec.structs.replace(
            row, sampled_logprobs=(-9.0,) * len(row.sampled_ids), advantage=-3.0, version=-5
        )
        for row in batch
    ]
    assert torch.equal(made._trainer.loss_of(batch), made._trainer.loss_of(other))


def test_micro_batches_do_not_change_the_gradient(renew: Renew) -> None:
    made = shaken(renew(sft_recipe()))
    batch = imitated()
    made._trainer.loss_of(batch).backward()
    whole = gradients(made)
    for part in (batch[:5], batch[5:]):
        made._trainer.loss_of(part).backward()
    assert torch.allclose(gradients(made), whole, atol=1e-6)


def test_imitated_replies_become_likelier(renew: Renew) -> None:
    made = renew(sft_recipe(epochs=2, steps=2))
    batch = imitated()
    before = made.logprobs(batch)
    for _ in range(5):
        metrics = made.update(batch)
    after = made.logprobs(batch)
    assert all(sum(new) > sum(old) for old, new in zip(before, after, strict=True))
    assert metrics["optimizer_steps"] == 4
    assert metrics["entropy"] > 0
    assert "drift_kl" not in metrics


def test_kl_term_is_added_to_the_imitation_loss(renew: Renew) -> None:
    made = shaken(renew(sft_recipe(kl=KlOptions(coefficient=0.5))))
    batch = imitated()
    made._trainer.prepare(batch, InitialValues.merge([made._trainer.initial_values(batch)]))
    whole = float(made._trainer.loss_of(batch).detach())
    total = 0.0
    with torch.no_grad():
        for row in batch:
            here = plain_logprobs(made._model, row)
            with made._model.disable_adapter():
                gap = plain_logprobs(made._model, row) - here
            total += row.weight * float((gap.exp() - gap - 1).mean())
        plain = float(dense_loss(made._model, batch))
    assert whole == pytest.approx(plain + 0.5 * total, abs=1e-5)


def test_grpo_goes_on_from_a_version_of_sft(renew: Renew, tmp_path: Path) -> None:
    """A warm start: the adapter and the optimiser's moments are the policy's, not the learner's."""
    made = renew(sft_recipe())
    made.update(imitated())
    made.save(tmp_path / "1")
    wanted = made.logprobs(rows(1))
    continued = renew(recipe())
    continued.restore(tmp_path / "1")
    assert continued.logprobs(rows(1)) == wanted
    assert math.isfinite(continued.update(rows(1))["loss"])


def test_a_saved_version_is_continued_exactly(
    renew: Renew, tiny_model: str, tmp_path: Path
) -> None:
    straight = renew(sft_recipe(steps=2))
    straight.update(imitated(0))
    straight.save(tmp_path / "1")
    straight.update(imitated(1))
    resumed = Learner(tiny_model, sft_recipe(steps=2), seed=0, scratch=tmp_path)
    resumed.restore(tmp_path / "1")
    resumed.update(imitated(1))
    for one, other in zip(straight._model.parameters(), resumed._model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_sft_learner_can_rehearse(renew: Renew) -> None:
    made = renew(sft_recipe())
    made.rehearse()
    made.restore(None)
    assert math.isfinite(made.update(imitated(0))["loss"])
