"""Check the weights of an adapter from elsewhere against the base model and what PEFT loads."""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import AdapterError
from trainer.publishing.adapters import BASE_FILE, read_base
from trainer.publishing.foreign import SIDES, WEIGHTS, read_config, why_other_layers


def check_weights(model: PeftModel, base_hash: str, folder: Path) -> None:
    """Refuse the adapter in `folder` unless it is one of the layers of `model`, and does something.

    `model` has a new adapter of the recipe's; `base_hash` is that of its base.

    Raises:
        AdapterError: it cannot be a version; the message says why, and what to do.
    """
    if (folder / BASE_FILE).exists() and read_base(folder) != base_hash:
        raise _refused(
            folder,
            f"it was trained on another base model, says its {BASE_FILE}: import one of this",
        )
    weights = _read(folder / WEIGHTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    rank = int(read_config(folder)["r"])
    why = why_other_layers(shapes, rank, _layers(model)) or _why_no_numbers(weights)
    if why is not None:
        raise _refused(folder, why)


def check_loaded(model: PeftModel, folder: Path) -> None:
    """Refuse the adapter in `folder`, which `model` was given, if PEFT passed over some of it.

    Raises:
        AdapterError: the layers in its configuration are not those that it has weights of.
    """
    # It would ask the model hub whether embeddings are to be saved as well.
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    odd = sorted(loaded.keys() ^ _read(folder / WEIGHTS).keys())
    if odd:
        raise _refused(
            folder,
            f"its target_modules and its weights name different layers ({odd[0]}): save the"
            " adapter again",
        )


def _layers(model: PeftModel) -> dict[str, tuple[int, int]]:
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; save the adapter again") from error


def _why_no_numbers(weights: Mapping[str, Tensor]) -> str | None:
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return f"its {name} is {tensor.dtype}: save it in 16 or 32 bits"
        if not bool(torch.isfinite(tensor).all()):
            return f"its {name} has values that are not finite: its training failed"
    if not any(bool(tensor.any()) for name, tensor in weights.items() if name.endswith(SIDES[1])):
        return "all its lora_B are zero, so that it changes nothing: was it trained at all?"
    return None


def _refused(folder: Path, why: str) -> AdapterError:
    return AdapterError(f"{folder} cannot be imported: {why}")
