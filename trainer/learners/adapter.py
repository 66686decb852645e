"""Choose an adapter's layers, put it onto a base model, take it off, and write and read its files.

    <version>/adapter_config.json, adapter_model.safetensors    what the model server reads
    <version>/base.json              which base model it was trained on; kept for good
    <version>/trainer/optimizer.pt   optimiser's moments, until `publishing.cleaning` deletes them
    <version>/trainer/<name>.pt      a module that a learner adds, such as PPO's value head

Nothing else is needed to resume: dropout is off, and randomness is used only for a first adapter's
weights, which are seeded. `publishing.adapters.write_version` syncs the files to disk.
"""

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import structlog
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils import transformers_weight_conversion
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from store.records import Record
from trainer.errors import AdapterError, FilesUnread, LearnerError
from trainer.learners.kernels.layers import make_adapter_lean
from trainer.learners.scoring import decoder_of
from trainer.publishing.adapters import (
    BASE_FILE,
    STATE_FOLDER,
    read_base_hash,
    translate_errors,
    write_base_hash,
)
from trainer.publishing.foreign import (
    SIDES,
    USUAL_ALPHA,
    WEIGHTS,
    read_config,
    refusal,
    why_other_layers,
)
from trainer.recipes.recipe import AUTO, LoraOptions

log = structlog.get_logger()

TASK: Final = "CAUSAL_LM"
# The name of a layer's module of experts in all of transformers, and in models' own code.
EXPERTS: Final = "experts"
ROUTER_NAMES: Final = re.compile(r"(.*_)?router")
# Beside experts, modules with these names are routers, too; elsewhere they may be anything.
GATE_NAMES: Final = re.compile(r"(.*_)?gate")
ROUTER_KINDS: Final = re.compile(r".*(Router|Gating)")
# A layer with at most so many inputs or outputs is a gate.
MAX_GATE_WIDTH: Final = 4
# Model servers multiply this layer into other matrices of attention as they load the model, and
# ignore an adapter of it.
FOLDED_LAYERS: Final = frozenset({"kv_b_proj"})
# PEFT's prefix of a layer's name in a file of weights.
PEFT_PREFIX: Final = "base_model.model."
# PEFT's suffix of the name of a layer that is adapted a second time, for another parameter.
INNER_SUFFIX: Final = ".base_layer"
# The parameters of stacked experts that get an adapter. PEFT nests their adapters in this order, by
# which model servers tell them apart.
STACKED_PARAMETERS: Final = ("gate_up_proj", "down_proj")
# The name of the optimiser's state.
OPTIMIZER: Final = "optimizer"


class ModelModule(Record, frozen=True, kw_only=True):
    """A module of a model.

    Attributes:
        name: its path in the model.
        kind: the name of its class.
        width: the smaller of its numbers of inputs and outputs; None if LoRA cannot adapt it as a
            linear layer.
        head: whether it is the LM head.
        stacked: whether it holds experts in two stacked parameters, which LoRA can adapt.
    """

    name: str
    kind: str
    width: int | None = None
    head: bool = False
    stacked: bool = False


def choose_layers(modules: Sequence[ModelModule]) -> list[str]:
    """Return the paths of the linear layers that get an adapter if the recipe names none (pure).

    These are the layers of attention and dense blocks, including the shared experts of a mixture.
    Routers get no adapter: a changed router sends a token to other experts in a jump that no
    gradient sees, and the least difference in arithmetic between server and trainer may send it to
    others again. Very narrow layers get none either, such as gates and the mixing coefficients of
    Gemma 3n. Routed experts are chosen elsewhere (`ModelModule.stacked`).
    """
    holders = _expert_holders(modules)
    without = [*holders, *_routers(modules, holders)]
    return [
        module.name
        for module in modules
        if module.width is not None
        and module.width > MAX_GATE_WIDTH
        and not module.head
        and not _is_inside(module.name, without)
        and _leaf(module.name) not in FOLDED_LAYERS
    ]


def _expert_holders(modules: Sequence[ModelModule]) -> frozenset[str]:
    """Return the paths of the modules that hold routed experts."""
    return frozenset(
        module.name
        for module in modules
        if _leaf(module.name) == EXPERTS
        or (module.kind.endswith("Experts") and "Shared" not in module.kind)
    )


def _routers(modules: Sequence[ModelModule], holders: Collection[str]) -> frozenset[str]:
    """Return the paths of routers, found by class, by name, or as gates beside experts."""
    blocks = {_parent(holder) for holder in holders}
    return frozenset(
        module.name
        for module in modules
        if ROUTER_KINDS.fullmatch(module.kind)
        or ROUTER_NAMES.fullmatch(_leaf(module.name))
        or (_parent(module.name) in blocks and GATE_NAMES.fullmatch(_leaf(module.name)))
    )


def _is_inside(name: str, roots: Collection[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def attach_adapter(
    base: Any,
    lora: LoraOptions,
    adapter: Path | None,
    seed: int,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> PeftModel:
    """Return `base` with the adapter in the folder `adapter`, or a new one without effect (None).

    `left_out` has the paths of layers that a new adapter must not have, each with the reason.

    Raises:
        LearnerError: the recipe names layers that the model lacks, or any layers if `left_out` is
            not empty.
        FilesUnread: a file in `adapter` cannot be read for now.
    """
    model = _add_new(base, lora, seed, left_out) if adapter is None else _restore(base, adapter)
    _store_layer_paths(model)
    make_adapter_lean(model)
    # The frozen base computes as it is served: training mode would add dropout and router noise,
    # and kernels of Mamba would bypass adapters.
    model.eval()
    return model


def _store_layer_paths(model: PeftModel) -> None:
    """Store the paths of the adapted layers in the adapter's configuration."""
    for config in model.peft_config.values():
        config.target_modules, config.target_parameters = _adapted_paths(model)
        config.exclude_modules = None


def _adapted_paths(
    model: PeftModel, layers: Collection[str] | None = None
) -> tuple[list[str], list[str] | None]:
    """Return the paths of adapted linear layers, and of adapted parameters of experts or None.

    The paths are whole, because PEFT would match the end of a path with other layers, too, and with
    a mixture's experts. They are sorted, so that each process writes the same bytes. If `layers` is
    given, only layers with these names count.
    """
    modules, parameters = [], []
    for name, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer) or (layers is not None and name not in layers):
            continue
        if isinstance(layer, ParamWrapper):
            parameters.append(f"{name.removesuffix(INNER_SUFFIX)}.{layer.parameter_name}")
        else:
            modules.append(name)
    return sorted(modules), sorted(parameters) or None


def detach_adapters(base: Any, kind: str | None = None) -> None:
    """Remove the adapters from the layers of `base`, in place; layers of `kind` keep theirs.

    If the files of an adapter could not be read, only some of the layers may have one.
    """
    for name, layer in list(base.named_modules()):
        # Adapters of several parameters of one module are nested: the outer one is replaced by the
        # module itself.
        if (
            isinstance(layer, LoraLayer)
            and not name.endswith(INNER_SUFFIX)
            and (kind is None or layer_kind(name) != kind)
        ):
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, layer.get_base_layer())
    if kind is None and hasattr(base, "peft_config"):
        del base.peft_config


def keep_layers_of_kind(model: PeftModel, kind: str) -> None:
    """Remove the layers of all other kinds from an adapter, in place."""
    detach_adapters(model.get_base_model(), kind)
    _store_layer_paths(model)


def layer_kind(name: str) -> str:
    """Return the kind of layer `name`: its path with `*` in place of the block's number."""
    path = name.removeprefix(PEFT_PREFIX).partition(".lora_")[0].removesuffix(INNER_SUFFIX)
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def describe_modules(base: Any) -> list[ModelModule]:
    """Describe each module of `base`, for the choice of layers."""
    head = base.get_output_embeddings()
    return [
        ModelModule(
            name=name,
            kind=type(module).__name__,
            width=_width(module) if _takes_adapter(base, name) else None,
            head=module is head,
            # transformers' common form of experts.
            stacked=bool(getattr(module, "has_gate", False)) and hasattr(module, "is_transposed"),
        )
        for name, module in base.named_modules()
    ]


def _width(module: torch.nn.Module) -> int | None:
    if isinstance(module, torch.nn.Linear):
        return min(module.in_features, module.out_features)
    return min(module.weight.shape) if isinstance(module, Conv1D) else None


def _takes_adapter(base: Any, name: str) -> bool:
    """Return whether PEFT can adapt the layer `name`: it refuses some names in Mamba models."""
    try:
        _check_lora_target_modules_mamba(LoraConfig(), base, _leaf(name))
    except ValueError:
        return False
    return True


def _restore(base: Any, adapter: Path) -> PeftModel:
    with translate_errors(adapter), _adapt_named_layers_only():
        return PeftModel.from_pretrained(base, str(adapter), is_trainable=True)


def _add_new(base: Any, lora: LoraOptions, seed: int, left_out: Mapping[str, str]) -> PeftModel:
    torch.manual_seed(seed)
    modules = describe_modules(base)
    try:
        config = _new_config(base, lora, modules, left_out)
        with _adapt_named_layers_only():
            return get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise LearnerError(
            f"no adapter can be made: {error}; set lora.target_modules to names of linear layers of"
            f" the model ({_leaf_names(modules)}), or leave it out"
        ) from error


def _new_config(
    base: Any, lora: LoraOptions, modules: list[ModelModule], left_out: Mapping[str, str]
) -> LoraConfig:
    """Return PEFT's configuration of a new adapter, which names only modules that exist."""
    by_architecture = lora.target_modules == AUTO
    without = {name.removesuffix(INNER_SUFFIX) for name in left_out}
    chosen = [name for name in choose_layers(modules) if name not in without]
    outside = _non_text_modules(base, modules)
    experts = [
        module.name
        for module in modules
        if module.stacked and lora.experts and by_architecture and module.name not in without
        if outside is None or not re.fullmatch(outside, module.name)
    ]
    if left_out and not by_architecture:
        name, why = min(left_out.items())
        raise LearnerError(
            f"lora.target_modules names {len(left_out)} layers that cannot be trained, such as"
            f" {name}: {why}"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
        target_modules=chosen if by_architecture else lora.target_modules,
        target_parameters=[f"{name}.{stack}" for name in experts for stack in STACKED_PARAMETERS]
        or None,
        exclude_modules=outside,
        task_type=TASK,
    )
    if not by_architecture:
        convert_peft_config_for_transformers(config, base, None)
        _check_layer_names(config.target_modules, modules)
    return config


def _non_text_modules(base: Any, modules: Sequence[ModelModule]) -> str | None:
    """Return a regular expression for modules outside the language model.

    They read images, and get no adapter, because a policy is rewarded for text. Return None if no
    linear layer is outside.
    """
    language = next(name for name, module in base.named_modules() if module is decoder_of(base))
    inside = f"{language}."
    if all(
        module.name.startswith(inside) for module in modules if module.width and not module.head
    ):
        return None
    return rf"(?!{re.escape(inside)}).*"


def _check_layer_names(names: Any, modules: list[ModelModule]) -> None:
    """Check that the model has a layer of every name; PEFT ignores single wrong names.

    Raises:
        LearnerError: it lacks one.
    """
    # A string is a regular expression, and PEFT reports if it matches nothing.
    for name in [] if isinstance(names, str) else sorted(names):
        if not any(module.name == name or module.name.endswith(f".{name}") for module in modules):
            raise LearnerError(
                f"lora.target_modules names {name!r}, but the model has no such layer: set it to"
                f" names of the model's linear layers ({_leaf_names(modules)}), or leave it out"
            )


def _leaf_names(modules: list[ModelModule]) -> str:
    """Return the last parts of the paths of a model's linear layers, for a message."""
    names = (
        module.name.rpartition(".")[2] for module in modules if module.width and not module.head
    )
    return ", ".join(dict.fromkeys(name for name in names if not name.isdigit()))


@contextmanager
def _adapt_named_layers_only() -> Iterator[None]:
    """Within the block, let PEFT adapt the layers that a configuration names, and no others.

    By itself, PEFT reads names such as `gate_proj` and `w1` as the experts that had them before
    transformers 5, even if a dense layer or a shared expert is meant, and adds all experts and
    routers to "every linear layer". Names in a recipe are converted before; other names never.
    """
    own = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = _convert_nothing
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = own


def _convert_nothing(config: LoraConfig, model: Any, conversions: Any) -> None:
    """Do nothing, in place of PEFT's conversion of a configuration."""


def save_state(objects: Mapping[str, Any], base_hash: str, version_folder: Path) -> None:
    """Write the `state_dict` of each object, and the base model's hash, into a version's folder.

    `objects` has the objects by the names of their files.

    Raises:
        OSError: the disk refused a write.
    """
    folder = version_folder / STATE_FOLDER
    folder.mkdir(exist_ok=True)
    for name, stateful in objects.items():
        # Serialised in memory: torch's own file writer hides the reason of a failed write.
        written = io.BytesIO()
        torch.save(stateful.state_dict(), written)
        (folder / f"{name}.pt").write_bytes(written.getvalue())
    write_base_hash(version_folder, base_hash)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of `model`, a PEFT model, into `folder`, as a model server reads it.

    Raises:
        OSError: the disk refused a write.
    """
    try:
        model.save_pretrained(str(folder), safe_serialization=True)
    except SafetensorError as error:
        raise OSError(f"the adapter was not written: {error}") from error
    (folder / "README.md").unlink(missing_ok=True)


def load_state(objects: Mapping[str, Any], version_folder: Path) -> None:
    """Restore the state of `objects`, by the names of their files, from a version's folder.

    An object whose file was deleted starts anew, with a warning in the log: a roll-back may go
    further back than states are kept.

    Raises:
        AdapterError: a file is damaged; the message names it and the remedy.
        FilesUnread: a file cannot be read for now.
    """
    for name, stateful in objects.items():
        path = version_folder / STATE_FOLDER / f"{name}.pt"
        if not path.exists():
            log.warning("state_starts_anew", part=name, version=version_folder.name)
            continue
        try:
            with translate_errors(path):
                state = torch.load(path, weights_only=True)
            stateful.load_state_dict(_with_recipe_settings(stateful, state))
        except FilesUnread:
            raise
        except Exception as error:
            raise AdapterError(
                f"{path} cannot be read ({type(error).__name__}): remove it, so that this state"
                " starts anew"
            ) from error


def _with_recipe_settings(restored: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state`; for an optimiser, take rates and decay from the recipe."""
    if isinstance(restored, torch.optim.Optimizer):
        return state | {"param_groups": restored.state_dict()["param_groups"]}
    return state


def write_foreign_adapter(model: PeftModel, base_hash: str, adapter: Path, folder: Path) -> None:
    """Check an adapter that was trained elsewhere, and write it into `folder` as Pawl reads it.

    `model` has a new adapter of the recipe, which must have all layers of the foreign one.
    `base_hash` is the hash of its base.

    Raises:
        AdapterError: the adapter cannot be a version; the message says why, and what to do.
    """
    if (adapter / BASE_FILE).exists() and read_base_hash(adapter) != base_hash:
        raise refusal(
            adapter,
            f"it was trained on another base model, says its {BASE_FILE}: import an adapter of this"
            " base model",
        )
    config, path = read_config(adapter), adapter / WEIGHTS
    try:
        with safe_open(str(path), "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            why = why_other_layers(shapes, config["r"], _adapted_shapes(model))
            weights = {name: file.get_tensor(name) for name in shapes} if why is None else {}
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; save the adapter again") from error
    if why := why or _why_bad_weights(weights):
        raise refusal(adapter, why)
    save_file(weights, folder / WEIGHTS)
    layers = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in weights}
    modules, parameters = _adapted_paths(model, layers)
    LoraConfig(
        r=config["r"],
        lora_alpha=config.get("lora_alpha", USUAL_ALPHA),
        use_rslora=bool(config.get("use_rslora")),
        target_modules=modules,
        target_parameters=parameters,
        task_type=TASK,
    ).save_pretrained(str(folder))


def _adapted_shapes(model: PeftModel) -> dict[str, tuple[int, int, int]]:
    return {
        name: (module.in_features, module.out_features, getattr(module, "num_experts", 1))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def _why_bad_weights(weights: Mapping[str, Tensor]) -> str | None:
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return f"its {name} is {tensor.dtype}: save it in 16 or 32 bits"
        if not bool(torch.isfinite(tensor).all()):
            return f"its {name} has values that are not finite: its training failed"
    if not any(bool(tensor.any()) for name, tensor in weights.items() if name.endswith(SIDES[1])):
        return "all its lora_B are zero, so that it changes nothing: was it trained at all?"
    return None
