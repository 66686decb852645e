"""Check whether an adapter from elsewhere can be a version (pure, but for `read_config`).

The adapter must be one that training could have written and the model server accepts: plain LoRA on
layers that the recipe trains, up to the recipe's rank, on the policy's base model. Each check
returns why the adapter does not fit, with the remedy, or None.

PEFT gets a new configuration that lists the layers named by the weights: matching the regular
expressions of the adapter's own configuration may take hours.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from trainer.errors import AdapterError
from trainer.publishing.adapters import SERVED_FILES
from trainer.recipes.recipe import LoraOptions

CONFIG, WEIGHTS = SERVED_FILES
SIDES: Final = (".lora_A.weight", ".lora_B.weight")
# Keys that PEFT's configuration of a plain LoRA adapter may set. Any other key must be empty: it
# makes another kind of adapter (`use_dora`, `modules_to_save`, `rank_pattern`), or is unknown here.
PLAIN_KEYS: Final = (
    *("peft_type", "task_type", "peft_version", "auto_mapping", "inference_mode", "runtime_config"),
    *("base_model_name_or_path", "revision", "bias"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    "layers_pattern",
    *("init_lora_weights", "eva_config", "lora_ga_config"),
    # These have no effect without a key that must be empty.
    *("megatron_core", "qalora_group_size"),
)
# Initialisations that leave the base model unchanged. With others (PiSSA, OLoRA, LoftQ …) the
# adapter fits only a changed base model, unless PEFT converted the adapter when it was saved.
PLAIN_INITIALISATIONS: Final = ("gaussian", "orthogonal", "eva", "mica", "lora_ga")
# The alpha that PEFT assumes if the configuration has none.
USUAL_ALPHA: Final = 8


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the PEFT adapter in `folder`.

    Raises:
        AdapterError: there is no adapter, or it cannot be read.
    """
    for name in SERVED_FILES:
        # Unlike `Path.is_file`, this never raises, whatever the name.
        if not os.path.isfile(folder / name):
            raise AdapterError(
                f"{folder} is no PEFT adapter: it has no {name}; name the folder that"
                " `save_pretrained` wrote (with safe_serialization, PEFT's default)"
            )
    path = folder / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; save the adapter again") from error


def refusal(folder: Path, why: str) -> AdapterError:
    """Return the error that says, in one line, why the adapter in `folder` is not imported."""
    # The reason quotes values of the adapter's configuration, which may have any length.
    line = "".join(character if character.isprintable() else " " for character in why[:600])
    return AdapterError(f"{folder} cannot be imported: {line}")


def why_not_plain(config: Mapping[str, Any], lora: LoraOptions) -> str | None:
    """Return why a configuration is not plain LoRA of at most the recipe's rank, or None if it is.

    The model server's `--max-lora-rank` follows from the recipe's rank.
    """
    kind, rank = config.get("peft_type"), config.get("r")
    if kind != "LORA" or config.get("task_type") not in (None, "CAUSAL_LM"):
        return (
            f"its peft_type is {kind!r:.80} and its task_type {config.get('task_type')!r:.80}, but"
            " only LORA for CAUSAL_LM is trained and served: train such an adapter"
        )
    if type(rank) is not int or not 0 < rank <= lora.rank:
        return (
            f"its rank (r) is {rank!r:.80}, and the recipe's lora.rank is {lora.rank}: train an"
            " adapter of a rank up to that, or set lora.rank and the model server's"
            " --max-lora-rank higher"
        )
    alpha, scaled = config.get("lora_alpha", USUAL_ALPHA), config.get("use_rslora")
    is_scale = type(alpha) in (int, float) and 0 < alpha <= 1e6
    if not is_scale or not isinstance(scaled, bool | None):
        return (
            f"its lora_alpha is {alpha!r:.80} and its use_rslora {scaled!r:.80}, and a number above"
            " 0 (to a million) and true or false are needed: save the adapter again"
        )
    # Keys with values that a plain LoRA adapter cannot have.
    odd = sorted(name for name in config.keys() - set(PLAIN_KEYS) if config[name])
    if config.get("bias", "none") != "none":
        odd.append("bias")
    initialisation = config.get("init_lora_weights", True)
    if isinstance(initialisation, str) and initialisation.lower() not in PLAIN_INITIALISATIONS:
        odd.append("init_lora_weights")
    if odd:
        return (
            f"it has {odd[0]:.80} = {config[odd[0]]!r:.80}, but only plain LoRA is trained and"
            f" served: train an adapter without it, or remove the key from its {CONFIG} if it"
            " changes nothing"
        )
    return None


def why_another_base(config: Mapping[str, Any], model: str) -> str | None:
    """Return why an adapter's base is not `model` (a name or a folder), or None if it is."""
    named = config.get("base_model_name_or_path")
    named_path = named if isinstance(named, str) and named and "\0" not in named else None
    if named_path and os.path.realpath(named_path) == os.path.realpath(model):
        return None
    return (
        f"its base model is {named!r:.80}, and the policy's is {model!r}: train it on that model;"
        f" if they are the same, write the latter as base_model_name_or_path into its {CONFIG}"
    )


def why_other_layers(
    shapes: Mapping[str, Sequence[int]], rank: int, layers: Mapping[str, tuple[int, int, int]]
) -> str | None:
    """Return why weights of these shapes do not fit these layers, or None if they do.

    Args:
        shapes: the shape of each tensor in the file, by name.
        rank: the configuration's rank.
        layers: inputs, outputs, and number of matrices (one for each expert) of each layer that the
            recipe trains, by name.
    """
    for name in shapes:
        layer = name.removesuffix(SIDES[0]).removesuffix(SIDES[1])
        if layer == name:
            return f"its {name} is no matrix of plain LoRA: train an adapter without it"
        if layer not in layers:
            return (
                f"its {name} is of a layer that the recipe's lora.target_modules does not train"
                " or the base model does not have: add the layer to the recipe, or train without it"
            )
        inputs, outputs, count = layers[layer]
        wanted = [rank * count, inputs], [outputs, rank * count]
        for side, shape in zip(SIDES, wanted, strict=True):
            own = shapes.get(layer + side)
            if own is None or list(own) != shape:
                return (
                    f"its {layer + side} is {'missing' if own is None else list(own)} and"
                    f" {shape} is needed: is it of this base model and of rank {rank}?"
                )
    return None if shapes else "it has no weights: save the adapter again"
