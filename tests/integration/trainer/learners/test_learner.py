"""The learner on a tiny random model: merged equals separate; rewarded replies get likelier."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from peft.tuners.lora import LoraLayer

from store.values.packing import unpack_logprobs
from tests.support.trainer.reference import shake
from tests.support.training import Renew, recipe, rows, write_tiny_model
from trainer.batches import Row, computed_tokens
from trainer.errors import LearnerError
from trainer.learners.kl import measured_rows
from trainer.learners.learner import Learner
from trainer.learners.losses.grpo import collate
from trainer.learners.model import is_checkpointed, load_base, precision, save_merged
from trainer.learners.scoring import score_rows
from trainer.recipes.recipe import LoraOptions, OptimizerOptions, Recipe


def learner(model: str, folder: Path, **batch: Any) -> Learner:
    return Learner(model, recipe(**batch), seed=0, scratch=folder)


def plain_logprobs(model: Any, row: Row) -> torch.Tensor:
    """One unpadded sequence at a time, no sharing: the reference."""
    ids = torch.tensor([row.ids])
    logits = model(input_ids=ids).logits[0].float() / row.distribution.temperature
    chosen = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    return chosen[-len(row.sampled_ids) :]


def plain_loss(model: Any, batch: list[Row], cap: float) -> torch.Tensor:
    total = torch.zeros(())
    for row in batch:
        logp = plain_logprobs(model, row)
        ratio = torch.exp(logp.detach() - torch.tensor(row.sampled_logprobs)).clamp(max=cap)
        total = total - (ratio * logp).mean() * row.advantage * row.weight
    return total


def gradients(made: Learner) -> torch.Tensor:
    found = [p.grad.flatten() for p in made._model.parameters() if p.grad is not None]
    for parameter in made._model.parameters():
        parameter.grad = None
    return torch.cat(found)


def test_shared_prefixes_give_the_log_probabilities_of_separate_sequences(renew: Renew) -> None:
    made = renew(recipe())
    shake(made)
    batch = rows()
    with torch.no_grad():
        merged, entropy, _ = score_rows(made._model, batch)
        separate = torch.cat([plain_logprobs(made._model, row) for row in batch])
    assert torch.allclose(merged, separate, atol=1e-5)
    assert float(entropy.min()) > 0


def test_grpo_loss_and_gradient_equal_a_plain_loop(renew: Renew) -> None:
    made = renew(recipe())
    shake(made)
    batch = rows()
    ours = made._trainer.loss_of(batch)
    ours.backward()
    got = gradients(made)
    reference = plain_loss(made._model, batch, made._recipe.off_policy.ratio_cap)
    reference.backward()
    wanted = gradients(made)
    assert math.isclose(float(ours.detach()), float(reference.detach()), abs_tol=1e-6)
    assert float((got - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


def test_micro_batches_do_not_change_the_gradient(renew: Renew) -> None:
    made = renew(recipe())
    shake(made)
    batch = rows()
    made._trainer.loss_of(batch).backward()
    whole = gradients(made)
    for part in (batch[:5], batch[5:]):
        made._trainer.loss_of(part).backward()
    assert torch.allclose(gradients(made), whole, atol=1e-6)


def test_share_of_a_row_in_the_loss_depends_on_weight_and_not_on_length() -> None:
    tensors = collate(rows(), Accelerator(cpu=True))
    shares = tensors["advantages"].sum(1)
    wanted = torch.tensor([row.advantage * row.weight for row in rows()])
    assert torch.allclose(shares, wanted)


def test_rewarded_replies_become_likelier(renew: Renew) -> None:
    made = renew(recipe())
    batch = rows(members=2)
    before = made.logprobs(batch)
    for _ in range(4):
        metrics = made.update(batch)
    after = made.logprobs(batch)
    assert metrics["computed_tokens"] < metrics["row_tokens"]
    assert metrics["tokens_per_second"] > 0
    assert 0.0 < metrics["idle_share"] < 1.0
    for row, old, new in zip(batch, before, after, strict=True):
        better = sum(new) > sum(old)
        assert better == (row.advantage > 0.5)


def test_update_keeps_the_log_probabilities_of_the_policy_in_training_before_each_step(
    renew: Renew,
) -> None:
    made = renew(recipe(steps=2))
    batch = rows(members=2)
    before = made.version_logprobs(None, batch)
    made.restore(None)
    made.update(batch)
    compared = made.policy_logprobs()
    assert compared.keys() == {row.key for row in batch}
    same = [
        unpack_logprobs(compared[row.key]) == pytest.approx(logprobs, abs=1e-5)
        for row, logprobs in zip(batch, before, strict=True)
    ]
    # The second step begins with another policy.
    assert any(same)
    assert not all(same)
    made.update(batch[:1])
    assert compared.keys() != made.policy_logprobs().keys() == {batch[0].key}


def test_a_saved_version_is_continued_exactly(
    renew: Renew, tiny_model: str, tmp_path: Path
) -> None:
    straight = renew(recipe(steps=2))
    straight.update(rows(0))
    saved = tmp_path / "1"
    straight.save(saved)
    straight.update(rows(1))

    # A trainer that was started again.
    resumed = learner(tiny_model, tmp_path, steps=2)
    resumed.restore(saved)
    resumed.update(rows(1))
    for one, other in zip(straight._model.parameters(), resumed._model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_restoring_the_base_model_removes_the_adapter(renew: Renew) -> None:
    made = renew(recipe())
    batch = rows()
    base = made.logprobs(batch)
    made.update(batch)
    assert made.logprobs(batch) != base
    made.restore(None)
    assert made.logprobs(batch) == base


def test_half_precision_training_makes_rewarded_replies_likelier(
    tiny_model: str, tmp_path: Path
) -> None:
    half = recipe().model_copy(update={"dtype": "bfloat16"})
    made = Learner(tiny_model, half, seed=0, scratch=tmp_path)
    batch = rows(members=2)
    before = made.logprobs(batch)
    for _ in range(4):
        assert math.isfinite(made.update(batch)["grad_norm"])
    after = made.logprobs(batch)
    gains = [
        (sum(new) - sum(old)) * (1 if row.advantage > 0.5 else -1)
        for row, old, new in zip(batch, before, after, strict=True)
    ]
    assert sum(gains) > 0


@pytest.mark.parametrize(
    ("dtype", "on_a_cpu", "on_a_gpu"),
    [
        ("auto", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_auto_follows_the_device_and_recipe_dtype_is_kept(
    tiny_model: str, dtype: str, on_a_cpu: torch.dtype, on_a_gpu: torch.dtype
) -> None:
    made = recipe().model_copy(update={"dtype": dtype})
    assert (precision(made, "cpu"), precision(made, "cuda:1")) == (on_a_cpu, on_a_gpu)
    here = on_a_gpu if torch.cuda.is_available() else on_a_cpu
    assert load_base(tiny_model, made)[0].dtype == here


def test_checkpointing_changes_no_gradient(renew: Renew) -> None:
    found = []
    for checkpointing in (False, True):
        made = renew(recipe(gradient_checkpointing=checkpointing))
        shake(made)
        made._trainer.loss_of(rows()).backward()
        found.append(gradients(made))
        assert is_checkpointed(made._model.get_base_model()) is checkpointing
    assert torch.allclose(found[0], found[1], atol=1e-7)


def test_micro_batch_that_does_not_fit_is_retried_smaller(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = learner(tiny_model, tmp_path, micro_batch_tokens=256)
    tight = learner(tiny_model, tmp_path, micro_batch_tokens=256)
    loss_of, most = tight._trainer.loss_of, 80

    def no_room_for_many(batch: Sequence[Row]) -> torch.Tensor:
        loss = loss_of(batch)
        if computed_tokens(batch) > most:
            loss.backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    monkeypatch.setattr(tight._trainer, "loss_of", no_room_for_many)
    for made in (roomy, tight):
        made.update(rows())
    for one, other in zip(roomy._model.parameters(), tight._model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    most = 0
    with pytest.raises(LearnerError, match="micro_batch_tokens"):
        tight.update(rows(1))


@pytest.mark.parametrize("rslora", [False, True])
def test_merged_weights_score_as_the_adapter_does(
    tiny_model: str, tmp_path: Path, rslora: bool
) -> None:
    lora = LoraOptions(rank=4, alpha=8, rslora=rslora)
    made = Learner(tiny_model, recipe().model_copy(update={"lora": lora}), 0, tmp_path)
    scales = {m.scaling["default"] for m in made._model.modules() if isinstance(m, LoraLayer)}
    assert scales == {8 / 2 if rslora else 8 / 4}
    shake(made)
    (tmp_path / "1").mkdir()
    made.save(tmp_path / "1")
    save_merged(tiny_model, tmp_path / "1", tmp_path / "merged")
    whole, tokenizer = load_base(str(tmp_path / "merged"), recipe())
    assert tokenizer.get_vocab() == made._tokenizer.get_vocab()
    ids = torch.tensor([rows()[0].ids])
    with torch.no_grad():
        ours, merged = made._model(input_ids=ids).logits, whole(input_ids=ids).logits
        with made._model.disable_adapter():
            assert not torch.allclose(made._model(input_ids=ids).logits, merged, atol=1e-2)
    assert torch.allclose(ours, merged, atol=1e-5)


def test_adapter_is_not_merged_into_another_base_model(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    learner(tiny_model, tmp_path).save(tmp_path / "1")
    other = write_tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(LearnerError, match=r"not the base model .*: set PAWL_MODEL to"):
        save_merged(other, tmp_path / "1", tmp_path / "merged")


def within(least: float, rate: float) -> Recipe:
    """The recipe with a learning rate, and with the least overlap of an update."""
    made = recipe()
    rule = made.off_policy.model_copy(update={"min_overlap": least})
    options = {"optimizer": OptimizerOptions(learning_rate=rate), "off_policy": rule}
    return made.model_copy(update=options)


def common(
    after: Sequence[Sequence[float]], before: Sequence[Sequence[float]], part: int = 4
) -> float:
    """What two policies have in common: the mean of min(1, ratio) over parts of replies."""
    moved = [
        [new - old for new, old in zip(own, was, strict=True)]
        for own, was in zip(after, before, strict=True)
    ]
    parts = [own[at : at + part] for own in moved for at in range(0, len(own), part)]
    return fmean(math.exp(min(0.0, sum(part))) for part in parts)


def test_update_step_is_shortened_if_its_overlap_with_the_old_policy_is_too_small(
    renew: Renew,
) -> None:
    batch = rows()
    free = renew(within(0.0, rate=0.1)).update(batch)
    assert free["step_kept"] == 1.0

    made = renew(within(0.98, rate=0.1))
    before = made.version_logprobs(None, batch)
    metrics = made.update(batch)
    after = made._row_logprobs(batch)
    assert free["overlap"] < 0.98 <= metrics["overlap"]
    assert metrics["step_kept"] < 1.0
    assert common(after, before) == pytest.approx(metrics["overlap"])


def test_overlap_with_the_old_policy_counts_long_replies_in_parts(renew: Renew) -> None:
    batch = rows()
    made = renew(within(0.0, rate=0.1))
    before = made.version_logprobs(None, batch)
    metrics = made.update(batch)
    after = made._row_logprobs(batch)
    by_part, whole, by_token = (common(after, before, part) for part in (4, 100, 1))
    assert metrics["overlap"] == pytest.approx(by_part, abs=1e-4)
    assert whole < by_part - 1e-3 < by_token - 2e-3


def test_overlap_with_the_old_policy_is_measured_on_short_replies_behind_long_prompts(
    renew: Renew,
) -> None:
    """Two of these rows have as many tokens as the KL to the base is measured on."""
    batch = [
        msgspec.structs.replace(row, prompt_ids=row.prompt_ids * 20)
        for row in rows(groups=8, members=4)
    ]
    assert len(measured_rows(batch)) == 2
    made = renew(within(0.0, rate=0.1))
    before = made.version_logprobs(None, batch)
    metrics = made.update(batch)
    assert metrics["overlap"] == pytest.approx(common(made._row_logprobs(batch), before), abs=1e-4)


def test_update_step_with_enough_overlap_is_not_shortened(renew: Renew) -> None:
    made = renew(within(0.98, rate=1e-4))
    metrics = made.update(rows())
    assert metrics["step_kept"] == 1.0
    assert metrics["overlap"] > 0.99
