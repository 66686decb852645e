"""Compute an update's gradient with plain transformers in float64, row by row: none of our code."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn
from transformers import AutoConfig

from trainer.batches import Row
from trainer.learners.learner import Learner
from trainer.learners.model import loader_of

Gradients = dict[str, Tensor]


def shake(made: Learner, std: float = 0.3) -> None:
    """Give the adapter an effect: LoRA starts as nothing."""
    torch.manual_seed(1)
    for name, parameter in made._model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=std)


def gradients_of_update(made: Learner, rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what an update on `rows` would step along, by layer and matrix; it takes no step."""
    found: Gradients = {}

    def keep() -> float:
        for path, layer in adapted(made).items():
            for side in ("lora_A", "lora_B"):
                weight = getattr(layer, side)["default"].weight
                # As a layer that training goes past.
                grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                found[f"{path}.{side}"] = grad.double().clone()
        made._trainer.optimizer.zero_grad()
        return 0.0

    monkeypatch.setattr(made._step, "_apply_gradients", keep)
    made.update(rows)
    return found


def adapted(made: Learner) -> dict[str, Any]:
    """Return the layers that have an adapter, by their paths in the base."""
    base = made._model.get_base_model()
    return {n: part for n, part in base.named_modules() if isinstance(part, LoraLayer)}


def reference_gradients(folder: str, made: Learner, rows: Sequence[Row]) -> Gradients:
    """Return the gradient of −Σ weight · mean log π, with LoRA as hooks on the model's layers."""
    config = AutoConfig.from_pretrained(folder)
    # Read as it is trained, so that figures of the configuration are rounded alike.
    base = loader_of(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    base.double().eval().requires_grad_(False)
    # Grouped products of experts have no double precision.
    base.set_experts_implementation("eager")
    weights: Gradients = {}
    for path, layer in adapted(made).items():
        a, b = (getattr(layer, side)["default"].weight for side in ("lora_A", "lora_B"))
        a, b = (w.detach().double().requires_grad_() for w in (a, b))
        weights |= {f"{path}.lora_A": a, f"{path}.lora_B": b}
        module, scale = (
            base.get_submodule(path.removesuffix(".base_layer")),
            layer.scaling["default"],
        )
        if isinstance(layer, ParamWrapper):
            _adapt_experts(module, layer.parameter_name, a, b, scale)
        else:
            _adapt(module, a, b, scale)
    for row in rows:
        first = len(row.prompt_ids) - 1
        logits = base(input_ids=torch.tensor([row.inputs]), use_cache=False).logits[0, first:]
        logprobs = torch.log_softmax(logits.double(), -1)
        sampled = logprobs[range(len(row.sampled_ids)), list(row.sampled_ids)]
        (-row.weight * sampled.mean()).backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in weights.items()
    }


def _adapt(layer: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * (inputs[0].double() @ a.T @ b.T)

    layer.register_forward_hook(add)


def _adapt_experts(experts: nn.Module, name: str, a: Tensor, b: Tensor, scale: float) -> None:
    """Add B_e · A_e to the matrix of each expert e, at each forward pass."""
    own = experts._parameters.pop(name)
    assert own is not None
    of_expert = a.unflatten(0, (len(own), -1)), b.unflatten(1, (-1, len(own)))

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        deltas = scale * torch.einsum("erk,mre->emk", *of_expert)
        setattr(module, name, own + (deltas.mT if module.is_transposed else deltas))

    experts.register_forward_pre_hook(add)


def distance(found: Gradients, wanted: Gradients) -> float:
    """Return the norm of the gradients' difference as a share of the wanted one's."""
    assert found.keys() == wanted.keys()
    off, whole = (
        torch.sqrt(sum((value**2).sum() for value in each))
        for each in ([found[n] - wanted[n] for n in wanted], wanted.values())
    )
    return float(off / whole)
