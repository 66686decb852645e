"""Put an adapter onto a base model and take it off again: a new one, or one from its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import transformers_weight_conversion
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers.pytorch_utils import Conv1D

from trainer.errors import LearnerError
from trainer.learners.adapted.choice import ModelModule, choose
from trainer.learners.kernels.lean import make_adapter_lean
from trainer.publishing.adapters import reading
from trainer.recipes.recipe import AUTO, LoraOptions

TASK: Final = "CAUSAL_LM"
LINEAR: Final = (torch.nn.Linear, Conv1D)
# What PEFT calls every linear layer but the LM head.
ALL_LINEAR: Final = "all-linear"


def attach_adapter(base: Any, lora: LoraOptions, adapter: Path | None, seed: int) -> PeftModel:
    """Return `base` with the adapter in `adapter`, or with a new one, whose effect is zero.

    Raises:
        LearnerError: the recipe's layers are not those of the model.
        FilesUnread: a file in `adapter` cannot be read for now.
    """
    model = _new(base, lora, seed) if adapter is None else _restored(base, adapter)
    for config in model.peft_config.values():
        if isinstance(config.target_modules, set):
            # A set is written in an order that differs between processes: the same update would
            # have other bytes.
            config.target_modules = sorted(config.target_modules)
    make_adapter_lean(model)
    return model


def detach(base: Any) -> None:
    """Take all adapters off `base`, in place; one whose files could not be read is half on."""
    for name, layer in list(base.named_modules()):
        # An adapter of several parameters of one module is several around each other: the outer
        # one gives way to the module itself.
        if isinstance(layer, LoraLayer) and not name.endswith(".base_layer"):
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, layer.get_base_layer())
    if hasattr(base, "peft_config"):
        del base.peft_config


def parts_of(base: Any) -> list[ModelModule]:
    """Return what the choice of layers depends on, of each module of `base`."""
    head = base.get_output_embeddings()
    return [
        ModelModule(
            name=name,
            kind=type(module).__name__,
            linear=isinstance(module, LINEAR),
            head=module is head,
        )
        for name, module in base.named_modules()
    ]


def _restored(base: Any, adapter: Path) -> PeftModel:
    with reading(adapter):
        return _read(base, adapter)


def _read(base: Any, adapter: Path) -> PeftModel:
    config = LoraConfig.from_pretrained(str(adapter))
    # An adapter from elsewhere may have others. Pawl trains without dropout, and whatever the
    # weights began as, they are read now.
    config.lora_dropout, config.init_lora_weights, config.task_type = 0.0, True, TASK
    with _names_as_they_are():
        return PeftModel.from_pretrained(base, str(adapter), config=config, is_trainable=True)


def _new(base: Any, lora: LoraOptions, seed: int) -> PeftModel:
    torch.manual_seed(seed)
    parts = parts_of(base)
    try:
        config = _config(base, lora, parts)
        with _names_as_they_are():
            return get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise LearnerError(
            f"no adapter can be made: {error}; set lora.target_modules to names of linear layers of"
            f" the model ({_leaves(parts)}), or leave it out"
        ) from error


def _config(base: Any, lora: LoraOptions, parts: list[ModelModule]) -> LoraConfig:
    """Return PEFT's configuration of a new adapter, with names of modules that there are."""
    by_architecture = lora.target_modules == AUTO
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=choose(parts) or ALL_LINEAR if by_architecture else lora.target_modules,
        task_type=TASK,
    )
    if not by_architecture:
        convert_peft_config_for_transformers(config, base, None)
        _check_names(config.target_modules, parts)
    return config


def _check_names(names: Any, parts: list[ModelModule]) -> None:
    """Refuse names of layers that the model does not have; PEFT passes over single ones.

    Raises:
        LearnerError: there is one.
    """
    # A text is one expression, and PEFT says if it matches nothing.
    for name in [] if isinstance(names, str) else sorted(names):
        if not any(part.name == name or part.name.endswith(f".{name}") for part in parts):
            raise LearnerError(
                f"lora.target_modules names {name!r}, and no layer of the model is called so: set"
                f" it to names of its linear layers ({_leaves(parts)}), or leave it out"
            )


def _leaves(parts: list[ModelModule]) -> str:
    """Return what the linear layers of a model are called, without repetition."""
    names = (part.name.rpartition(".")[2] for part in parts if part.linear and not part.head)
    return ", ".join(dict.fromkeys(name for name in names if not name.isdigit()))


@contextmanager
def _names_as_they_are() -> Iterator[None]:
    """Let PEFT adapt the layers that a configuration names, and no others.

    PEFT reads `gate_proj`, `w1` and so on as the experts that were called so before transformers 5,
    also where a dense layer or a shared expert is meant; and every linear layer as all experts and
    routers besides. What a recipe names is converted before, what was chosen or saved never.
    """
    own = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = _leave
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = own


def _leave(config: LoraConfig, model: Any, conversions: Any) -> None:
    """Stand in for PEFT's conversion of a configuration: it is as it should be."""
