"""Tell whether an adapter belongs to the base model in training.

A name tells nothing: a folder may be moved, and another model put in its place. So each version
keeps a hash of its base. Where none is known, the shapes must fit.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import AdapterError
from trainer.publishing.adapters import SERVED, read_base, reading

# How many values of each parameter count: models that were trained differ in nearly all.
VALUES: Final = 64
WRAPPED: Final = "base_model.model."
# The axis of a LoRA matrix that is as long as the module's inputs or outputs.
SIDES: Final = {".lora_A.weight": (1, "in_features"), ".lora_B.weight": (0, "out_features")}


def base_hash(base: Any) -> str:
    """Return a hash of the parameters of `base`: of their names, shapes, and some of their values.

    It is the same in every precision that the weights are loaded in.
    """
    digest = sha256()
    for name, parameter in base.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(_first_values(parameter))
    return digest.hexdigest()


def _first_values(parameter: Tensor) -> bytes:
    some = parameter.detach().flatten()[:VALUES].to(torch.bfloat16).cpu()
    return some.view(torch.uint8).numpy().tobytes()


def why_misfit(base: Any, own: str, adapter: Path) -> str | None:
    """Return why the adapter in a version's folder is not one of `base`, or None if it may be.

    `own` is the hash of `base`.

    Raises:
        AdapterError: a file is missing or damaged.
        FilesUnread: a file cannot be read for now.
    """
    theirs = read_base(adapter)
    if theirs is not None:
        return None if theirs == own else "it was trained on another base model"
    weights = adapter / SERVED[1]
    try:
        with reading(weights), safe_open(str(weights), "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise AdapterError(f"{weights} cannot be read: {error}") from error
    odd = [name for name, shape in shapes.items() if not _fits(base, name, shape)]
    return f"its {odd[0]} does not fit the base model" if odd else None


def _fits(base: Any, name: str, shape: list[int]) -> bool:
    for suffix, (axis, side) in SIDES.items():
        if name.endswith(suffix):
            try:
                module = base.get_submodule(name.removeprefix(WRAPPED).removesuffix(suffix))
            except AttributeError:
                return False
            return getattr(module, side, None) == shape[axis]
    return True
