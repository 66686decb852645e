"""PPO and KL on a tiny random model: each term equals a plain loop; the critic is kept apart."""

import math
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import torch
from safetensors import safe_open

from tests.integration.trainer.learners.test_learner import (
    gradients,
    plain_logprobs,
    plain_loss,
)
from tests.support.trainer.reference import shake
from tests.support.training import PLAIN, Renew, ppo_recipe, recipe, rows
from trainer.batches import Row, bare_row
from trainer.credit.advantages import SMALLEST_SPREAD
from trainer.learners.learner import Learner
from trainer.learners.losses.ppo import critic_values, normalise_advantages, row_advantages
from trainer.learners.losses.stored import InitialValues
from trainer.recipes.recipe import (
    KlOptions,
    OptimizerOptions,
    PublishOptions,
    Recipe,
    load_recipe,
)


def two_calls_an_episode(batch: list[Row]) -> list[Row]:
    """Neighbours joined to episodes of two calls with one return."""
    return [
        msgspec.structs.replace(
            row, episode_id=UUID(int=index // 2), position=index % 2, r_total=float(index % 4 < 2)
        )
        for index, row in enumerate(batch)
    ]


def stir(made: Learner) -> None:
    """Give adapter and critic an effect."""
    shake(made)
    torch.nn.init.normal_(made._model.value_head.weight, std=0.5)
    torch.nn.init.constant_(made._model.value_head.bias, 0.3)


def begin(made: Learner, batch: list[Row]) -> list[Row]:
    parts = [part for part in (batch[:5], batch[5:]) if part]
    return made._trainer.prepare(
        batch, InitialValues.merge(map(made._trainer.initial_values, parts))
    )


def plain_values(model: Any, row: Row) -> torch.Tensor:
    """V before each sampled token, one unpadded sequence at a time."""
    states = model(input_ids=torch.tensor([row.ids]), output_hidden_states=True).hidden_states[-1]
    head, unit = model.value_head, states[0].detach() / states[0].detach().norm(dim=1, keepdim=True)
    values = unit @ head.weight[0] + head.bias
    return values[len(row.prompt_ids) - 1 : -1]


def plain_base_logprobs(model: Any, row: Row) -> torch.Tensor:
    with torch.no_grad(), model.disable_adapter():
        return plain_logprobs(model, row)


def plain_targets(model: Any, batch: list[Row], chosen: Recipe) -> tuple[Any, Any, Any]:
    """Old log-probabilities, returns and normalised advantages; λ = γ = 1, no KL."""
    with torch.no_grad():
        old = [plain_logprobs(model, row) for row in batch]
        values = [plain_values(model, row) for row in batch]
    raw = [row.r_total - value for row, value in zip(batch, values, strict=True)]
    returns = [
        torch.full_like(value, row.r_total) for row, value in zip(batch, values, strict=True)
    ]
    share = torch.cat(
        [torch.full_like(a, row.weight / len(a)) for row, a in zip(batch, raw, strict=True)]
    )
    flat = torch.cat(raw)
    mean = (share * flat).sum() / share.sum()
    spread = ((share * (flat - mean) ** 2).sum() / share.sum()).sqrt()
    return old, returns, [(a - mean) / max(float(spread), SMALLEST_SPREAD) for a in raw]


def plain_ppo_loss(model: Any, batch: list[Row], chosen: Recipe, targets: Any) -> torch.Tensor:
    clip, total = chosen.ppo.clip, torch.zeros(())
    for row, old, returns, advantages in zip(batch, *targets, strict=True):
        logp = plain_logprobs(model, row)
        trust = torch.exp(old - torch.tensor(row.sampled_logprobs))
        trust = trust.clamp(max=chosen.off_policy.ratio_cap)
        ratio = torch.exp(logp - old)
        least = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        critic = 0.5 * (plain_values(model, row) - returns) ** 2
        total = total - row.weight * (trust * least).mean()
        total = total + row.weight * critic.mean()
    return total


def test_ppo_loss_and_gradient_equal_a_plain_loop(tiny_model: str, tmp_path: Path) -> None:
    chosen = ppo_recipe(gae_lambda=1.0)
    made = Learner(tiny_model, chosen, seed=0, scratch=tmp_path)
    made._model.double()
    made._trainer.critic.double()
    stir(made)
    batch = begin(made, two_calls_an_episode(rows()))
    targets = plain_targets(made._model, batch, chosen)
    # Another policy than the one that the update began with: some ratios are clipped.
    with torch.no_grad():
        for name, parameter in made._model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(3.0)
    ours = made._trainer.loss_of(batch)
    ours.backward()
    got = gradients(made)
    reference = plain_ppo_loss(made._model, batch, chosen, targets)
    reference.backward()
    wanted = gradients(made)
    assert math.isclose(float(ours.detach()), float(reference.detach()), abs_tol=1e-5)
    # TRL's ratio and norms are in float32 inside.
    assert float((got - wanted).abs().max()) < 1e-6 * float(wanted.abs().max())
    assert 0 < made._take_metrics()["clip_share"] < 1


def test_micro_batches_do_not_change_the_gradient(renew: Renew) -> None:
    made = renew(ppo_recipe(kl=KlOptions(coefficient=0.1)))
    stir(made)
    batch = begin(made, two_calls_an_episode(rows()))
    made._trainer.loss_of(batch).backward()
    whole = gradients(made)
    for part in (batch[:5], batch[5:]):
        made._trainer.loss_of(part).backward()
    assert torch.allclose(gradients(made), whole, atol=1e-6)


def test_untrained_critic_gives_all_tokens_of_a_success_equal_advantage() -> None:
    """Of two episodes of 20 calls of 200 tokens, before the critic knows anything."""
    rule = load_recipe("ppo").ppo
    calls = [
        msgspec.structs.replace(
            bare_row(episode, [1], range(200)), position=call, r_total=float(episode), weight=1 / 40
        )
        for episode in (0, 1)
        for call in range(20)
    ]
    nothing = [[0.0] * 200 for _ in calls]
    found = row_advantages(calls, nothing, nothing, trace=rule.gae_lambda, by_agent=False)
    found = normalise_advantages(found, [row.weight for row in calls], SMALLEST_SPREAD)
    assert all(value == pytest.approx(-1.0) for own in found[:20] for value in own)
    assert all(value == pytest.approx(1.0) for own in found[20:] for value in own)


def test_critic_loss_has_no_gradient_in_the_policys_weights(renew: Renew) -> None:
    made = renew(ppo_recipe())
    stir(made)
    batch = begin(made, rows())
    made._trainer.loss_of(batch)
    made._trainer._critic_loss(batch).backward()
    moved = {name for name, p in made._model.named_parameters() if p.grad is not None}
    assert moved == {"value_head.weight", "value_head.bias"}


def test_rewarded_replies_become_likelier(renew: Renew) -> None:
    made = renew(ppo_recipe(epochs=2))
    batch = rows(members=2)
    before = made.logprobs(batch)
    for _ in range(4):
        metrics = made.update(batch)
    after = made.logprobs(batch)
    assert metrics["optimizer_steps"] == 2
    for row, old, new in zip(batch, before, after, strict=True):
        assert (sum(new) > sum(old)) == (row.r_total > 0.5)


def test_critic_learns_to_predict_returns(renew: Renew) -> None:
    chosen = ppo_recipe(epochs=2, gae_lambda=1.0, value_learning_rate=3e-2)
    still = chosen.model_copy(update={"optimizer": OptimizerOptions(learning_rate=1e-6)})
    made = renew(still)
    figures = [made.update(rows(members=2)) for _ in range(8)]
    assert figures[0]["explained_variance"] == 0.0
    assert figures[-1]["explained_variance"] > 0.5
    assert figures[-1]["value_loss"] < 0.5 * figures[0]["value_loss"]


def test_scale_of_rewards_with_their_range_does_not_change_ppo_training(renew: Renew) -> None:
    seen = {}
    for scale in (0.05, 1.0, 100.0):
        publish = PublishOptions(reward_range=(0.0, scale), margin=scale / 20)
        made = renew(ppo_recipe().model_copy(update={"publish": publish}))
        batch = [
            msgspec.structs.replace(row, r_total=scale * row.r_total) for row in rows(members=2)
        ]
        explained = [made.update(batch)["explained_variance"] for _ in range(3)]
        seen[scale] = explained, made.logprobs(batch)
    for explained, logprobs in seen.values():
        assert explained == pytest.approx(seen[1.0][0], abs=1e-4)
        for own, wanted in zip(logprobs, seen[1.0][1], strict=True):
            assert own == pytest.approx(wanted, abs=1e-3)


def test_the_critic_is_resumed_exactly_and_never_served(renew: Renew, tmp_path: Path) -> None:
    chosen = ppo_recipe(steps=2, epochs=2)
    straight = renew(chosen)
    straight.update(rows(0))
    saved = tmp_path / "1"
    straight.save(saved)
    straight.update(rows(1))
    wanted = {name: one.detach().clone() for name, one in straight._model.named_parameters()}
    assert float(wanted["value_head.weight"].abs().max()) > 0
    assert straight._trainer.optimizer.param_groups[-1]["lr"] == chosen.ppo.value_learning_rate

    resumed = renew(chosen)
    resumed.update(rows(2))
    resumed.restore(saved)
    resumed.update(rows(1))
    found = dict(resumed._model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(one, found[name]), name

    with safe_open(saved / "adapter_model.safetensors", "pt") as served:
        assert all("lora_" in name for name in served.keys())  # noqa: SIM118
    assert "value_head" not in (saved / "adapter_config.json").read_text()


@pytest.mark.parametrize("first", ["grpo", "ppo"])
def test_grpo_and_ppo_continue_each_others_versions(
    renew: Renew, tmp_path: Path, first: str
) -> None:
    recipes = {"grpo": recipe(), "ppo": ppo_recipe()}
    made = renew(recipes.pop(first))
    made.update(rows(0))
    made.save(tmp_path / "1")
    wanted = made.logprobs(rows(1))
    (other,) = recipes.values()
    continued = renew(other)
    continued.restore(tmp_path / "1")
    assert continued.logprobs(rows(1)) == wanted
    assert math.isfinite(continued.update(rows(1))["loss"])


def test_restoring_the_base_model_resets_the_critic(renew: Renew) -> None:
    made = renew(ppo_recipe())
    made.update(rows())
    made.restore(None)
    assert float(made._model.value_head.weight.detach().abs().max()) == 0
    assert "lora_A" not in " ".join(name for name, _ in made._model.value_head.named_modules())


def test_reference_log_probabilities_of_kl_are_the_base_models(renew: Renew) -> None:
    made = renew(ppo_recipe(kl=KlOptions(coefficient=0.1)))
    batch = rows()
    base = made.logprobs([msgspec.structs.replace(row, distribution=PLAIN) for row in batch])
    stir(made)
    at_one = [msgspec.structs.replace(row, distribution=PLAIN) for row in batch]
    begin(made, at_one)
    assert made.logprobs(batch) != base
    for row, wanted in zip(at_one, base, strict=True):
        found = made._trainer.kl._reference[row.key]
        assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_kl_in_the_loss_is_k3_weighted_by_rows_and_ratios(renew: Renew, name: str) -> None:
    rule = KlOptions(coefficient=0.5)
    chosen = {"grpo": recipe().model_copy(update={"kl": rule}), "ppo": ppo_recipe(kl=rule)}[name]
    made = renew(chosen)
    shake(made)
    batch = [msgspec.structs.replace(r, weight=r.weight * (1 + i)) for i, r in enumerate(rows())]
    begin(made, batch)
    whole = float(made._trainer.loss_of(batch).detach())
    term = made._trainer.kl.loss(batch, made._trainer.scored.logprobs)
    term.backward()
    got = gradients(made)
    total = torch.zeros(())
    cap = made._trainer.off_policy.ratio_cap
    for row in batch:
        policy = plain_logprobs(made._model, row)
        gap = plain_base_logprobs(made._model, row) - policy
        # Others sampled these rows than the policy.
        ratio = (policy.detach() - torch.tensor(row.sampled_logprobs)).exp().clamp(max=cap)
        total = total + row.weight * (ratio * (gap.exp() - gap - 1)).mean()
    (0.5 * total).backward()
    wanted = gradients(made)
    assert float((got - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    made._trainer.kl.rule = KlOptions()
    surrogate = float(made._trainer.loss_of(batch).detach())
    assert whole - surrogate == pytest.approx(float(0.5 * total.detach()), abs=1e-5)
    weight = sum(row.weight for row in batch)
    assert made._trainer.figures()["kl_penalised"] == pytest.approx(
        float(total.detach()) / weight, rel=1e-4
    )


def test_grpo_subtracts_the_kl_cost_from_its_advantages(renew: Renew) -> None:
    rule = KlOptions(coefficient=0.3, place="reward")
    made = renew(recipe().model_copy(update={"kl": rule}))
    shake(made)
    batch = rows()
    ready = begin(made, batch)
    with torch.no_grad():
        costs = [
            float((plain_logprobs(made._model, r) - plain_base_logprobs(made._model, r)).sum())
            for r in batch
        ]
    mean = sum(costs) / len(costs)
    for row, prepared, cost in zip(batch, ready, costs, strict=True):
        assert prepared.advantage == pytest.approx(row.advantage - 0.3 * (cost - mean), abs=1e-4)
    loss = float(made._trainer.loss_of(ready).detach())
    plain = plain_loss(made._model, ready, made._recipe.off_policy.ratio_cap)
    assert loss == pytest.approx(float(plain.detach()), abs=1e-5)


def test_ppo_subtracts_the_kl_cost_from_the_reward_token_by_token(renew: Renew) -> None:
    rule = KlOptions(coefficient=0.3, place="reward")
    chosen = ppo_recipe(kl=rule, gae_lambda=1.0)
    made = renew(chosen)
    shake(made)
    batch = begin(made, rows())
    for row in batch:
        with torch.no_grad():
            cost = plain_logprobs(made._model, row) - plain_base_logprobs(made._model, row)
        still = cost.flip(0).cumsum(0).flip(0)
        wanted = row.r_total - 0.3 * still
        assert made._trainer._targets.returns[row.key] == pytest.approx(wanted.tolist(), abs=1e-4)


def test_critic_values_the_state_before_each_token(renew: Renew) -> None:
    made = renew(ppo_recipe())
    stir(made)
    batch = begin(made, rows())
    made._trainer.loss_of(batch)
    found = critic_values(made._trainer.critic, made._trainer.scored, 1.0).detach()
    wanted = torch.cat([plain_values(made._model, row) for row in batch]).detach()
    assert torch.allclose(found, wanted, atol=1e-5)
