"""Choose an adapter's layers, put it onto a base model, take it off, and write and read its files.

    <version>/adapter_config.json, adapter_model.safetensors    what the model server reads
    <version>/base.json              which base model it was trained on; kept for good
    <version>/trainer/optimizer.pt   moments; `publishing.cleaning` says for how long
    <version>/trainer/<name>.pt      a module that a learner adds: a value head

Nothing else is needed to resume: dropout is off, and randomness is used only for a first adapter's
weights, which are seeded. `adapters.write_version` syncs the files.
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
from trainer.publishing.adapters import BASE_FILE, STATE, read_base, translate_errors, write_base
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
# Names that hold in all architectures of transformers, and in models' own code.
EXPERTS: Final = "experts"
ROUTER_NAMES: Final = re.compile(r"(.*_)?router")
# Beside experts these are routers, too; elsewhere they may be any layer.
GATE_NAMES: Final = re.compile(r"(.*_)?gate")
ROUTER_KINDS: Final = re.compile(r".*(Router|Gating)")
# A layer with at most so many inputs or outputs is a gate.
NARROW: Final = 4
# Model servers multiply this layer into other matrices of attention as they load the model, and
# ignore an adapter of it.
FOLDED: Final = frozenset({"kv_b_proj"})
# PEFT's prefix of a layer's name in a file of weights.
OF_PEFT: Final = "base_model.model."
# PEFT's suffix of the name of a layer that is adapted a second time, for another parameter.
INNER: Final = ".base_layer"
# The parameters of stacked experts that get an adapter. PEFT nests their adapters in this order, by
# which model servers tell them apart.
STACKED: Final = ("gate_up_proj", "down_proj")
# The name of the optimiser's state.
OPTIMIZER: Final = "optimizer"


class ModelModule(Record, frozen=True, kw_only=True):
    """A module of a model.

    Attributes:
        name: its path in the model.
        kind: the name of its class.
        width: the smaller of its numbers of inputs and outputs, if LoRA can adapt it as a layer.
        head: whether it is the LM head.
        stacked: whether it holds experts in two stacked parameters, which LoRA can adapt.
    """

    name: str
    kind: str
    width: int | None = None
    head: bool = False
    stacked: bool = False


def choose_layers(parts: Sequence[ModelModule]) -> list[str]:
    """Return the paths of the linear layers that get an adapter if the recipe names none (pure).

    Attention and dense layers get one, including the shared experts of a mixture. Routers never do:
    a changed router sends a token elsewhere in a jump that no gradient sees, and the least
    difference in arithmetic between server and trainer may send it somewhere else again. Nor do
    very narrow layers, such as gates and the mixing coefficients of Gemma 3n. Experts are no linear
    layers (`ModelModule.stacked`).
    """
    holders = _expert_holders(parts)
    without = [*holders, *_routers(parts, holders)]
    return [
        part.name
        for part in parts
        if part.width is not None
        and part.width > NARROW
        and not part.head
        and not _is_inside(part.name, without)
        and _leaf(part.name) not in FOLDED
    ]


def _expert_holders(parts: Sequence[ModelModule]) -> frozenset[str]:
    """Return the paths of the modules that hold routed experts."""
    return frozenset(
        part.name
        for part in parts
        if _leaf(part.name) == EXPERTS
        or (part.kind.endswith("Experts") and "Shared" not in part.kind)
    )


def _routers(parts: Sequence[ModelModule], holders: Collection[str]) -> frozenset[str]:
    """Return the paths of routers: by class, by name, or as gates beside experts."""
    blocks = {_parent(holder) for holder in holders}
    return frozenset(
        part.name
        for part in parts
        if ROUTER_KINDS.fullmatch(part.kind)
        or ROUTER_NAMES.fullmatch(_leaf(part.name))
        or (_parent(part.name) in blocks and GATE_NAMES.fullmatch(_leaf(part.name)))
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
    """Return `base` with the adapter in `adapter`, or with a new one, whose effect is zero.

    A new adapter lacks the layers in `left_out`, which has the reasons by the layers' paths.

    Raises:
        LearnerError: the recipe names layers that the model lacks, or names layers itself while
            `left_out` has some.
        FilesUnread: a file in `adapter` cannot be read for now.
    """
    model = _add_new(base, lora, seed, left_out) if adapter is None else _restore(base, adapter)
    _name_layers(model)
    make_adapter_lean(model)
    # The frozen base computes as it is served: training mode would add dropout and router noise,
    # and kernels of Mamba would bypass adapters.
    model.eval()
    return model


def _name_layers(model: PeftModel) -> None:
    """Write the paths of its layers into the configuration of an adapter."""
    for config in model.peft_config.values():
        config.target_modules, config.target_parameters = _adapted_paths(model)
        config.exclude_modules = None


def _adapted_paths(
    model: PeftModel, layers: Collection[str] | None = None
) -> tuple[list[str], list[str] | None]:
    """Return the paths of linear layers with an adapter, and of experts' parameters with one.

    Whole paths, because PEFT would match the ends of paths with other layers, too, and with a
    mixture's experts. Sorted, so that an update has the same bytes in each process. Only `layers`
    count, or all if it is None.
    """
    modules, parameters = [], []
    for name, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer) or (layers is not None and name not in layers):
            continue
        if isinstance(layer, ParamWrapper):
            parameters.append(f"{name.removesuffix(INNER)}.{layer.parameter_name}")
        else:
            modules.append(name)
    return sorted(modules), sorted(parameters) or None


def detach_adapters(base: Any, kind: str | None = None) -> None:
    """Take adapters off `base`, in place: all, or those of the layers of other kinds than `kind`.

    An adapter whose files could not be read may be attached to a part of the layers.
    """
    for name, layer in list(base.named_modules()):
        # Adapters of several parameters of one module are nested: the outer one is replaced by the
        # module itself.
        if (
            isinstance(layer, LoraLayer)
            and not name.endswith(INNER)
            and (kind is None or layer_kind(name) != kind)
        ):
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, layer.get_base_layer())
    if kind is None and hasattr(base, "peft_config"):
        del base.peft_config


def keep_layers_of_kind(model: PeftModel, kind: str) -> None:
    """Remove all layers but those of `kind` from an adapter, in place."""
    detach_adapters(model.get_base_model(), kind)
    _name_layers(model)


def layer_kind(name: str) -> str:
    """Return the kind of layer `name`: its path with `*` in place of the block's number."""
    path = name.removeprefix(OF_PEFT).partition(".lora_")[0].removesuffix(INNER)
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
    """Return whether PEFT adapts a layer: it refuses some of Mamba's by their names."""
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
    parts = describe_modules(base)
    try:
        config = _new_config(base, lora, parts, left_out)
        with _adapt_named_layers_only():
            return get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise LearnerError(
            f"no adapter can be made: {error}; set lora.target_modules to names of linear layers of"
            f" the model ({_leaf_names(parts)}), or leave it out"
        ) from error


def _new_config(
    base: Any, lora: LoraOptions, parts: list[ModelModule], left_out: Mapping[str, str]
) -> LoraConfig:
    """Return PEFT's configuration of a new adapter, which names only modules that exist."""
    by_architecture = lora.target_modules == AUTO
    without = {name.removesuffix(INNER) for name in left_out}
    chosen = [name for name in choose_layers(parts) if name not in without]
    outside = _non_text_modules(base, parts)
    experts = [
        part.name
        for part in parts
        if part.stacked and lora.experts and by_architecture and part.name not in without
        if outside is None or not re.fullmatch(outside, part.name)
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
        target_parameters=[f"{name}.{stack}" for name in experts for stack in STACKED] or None,
        exclude_modules=outside,
        task_type=TASK,
    )
    if not by_architecture:
        convert_peft_config_for_transformers(config, base, None)
        _check_layer_names(config.target_modules, parts)
    return config


def _non_text_modules(base: Any, parts: Sequence[ModelModule]) -> str | None:
    """Return a regular expression of the modules outside the language model; None without layers.

    These modules read images, and a policy is rewarded for text.
    """
    language = next(name for name, module in base.named_modules() if module is decoder_of(base))
    inside = f"{language}."
    if all(part.name.startswith(inside) for part in parts if part.width and not part.head):
        return None
    return rf"(?!{re.escape(inside)}).*"


def _check_layer_names(names: Any, parts: list[ModelModule]) -> None:
    """Refuse names of layers that the model does not have; PEFT passes over single ones.

    Raises:
        LearnerError: there is such a name.
    """
    # A string is a regular expression, and PEFT reports if it matches nothing.
    for name in [] if isinstance(names, str) else sorted(names):
        if not any(part.name == name or part.name.endswith(f".{name}") for part in parts):
            raise LearnerError(
                f"lora.target_modules names {name!r}, and no layer of the model is called so: set"
                f" it to names of its linear layers ({_leaf_names(parts)}), or leave it out"
            )


def _leaf_names(parts: list[ModelModule]) -> str:
    """Return the last parts of the names of a model's linear layers, each once."""
    names = (part.name.rpartition(".")[2] for part in parts if part.width and not part.head)
    return ", ".join(dict.fromkeys(name for name in names if not name.isdigit()))


@contextmanager
def _adapt_named_layers_only() -> Iterator[None]:
    """Let PEFT adapt the layers that a configuration names, and no others.

    PEFT takes `gate_proj`, `w1` and so on for the experts with these names before transformers 5,
    even if a dense layer or a shared expert is meant, and adds all experts and routers to "every
    linear layer". Names in a recipe are converted beforehand; chosen or saved names never are.
    """
    own = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = _keep_config
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = own


def _keep_config(config: LoraConfig, model: Any, conversions: Any) -> None:
    """Replace PEFT's conversion of a configuration, which needs none."""


def save_state(objects: Mapping[str, Any], base: str, version_folder: Path) -> None:
    """Write the state of `objects` (with `state_dict`, by name) into a version's folder.

    `base` is the base model's hash.

    Raises:
        OSError: the disk refused a write.
    """
    folder = version_folder / STATE
    folder.mkdir(exist_ok=True)
    for name, stateful in objects.items():
        # Serialised in memory: torch's own file writer hides the reason of a failed write.
        written = io.BytesIO()
        torch.save(stateful.state_dict(), written)
        (folder / f"{name}.pt").write_bytes(written.getvalue())
    write_base(version_folder, base)


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
    """Restore `objects` from a version's folder.

    An object whose file was deleted starts anew, with a warning in the log: a roll-back may go
    further back than states are kept.

    Raises:
        AdapterError: a file is damaged; the message names it and the remedy.
        FilesUnread: a file cannot be read for now.
    """
    for name, stateful in objects.items():
        path = version_folder / STATE / f"{name}.pt"
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
                f"{path} cannot be read ({type(error).__name__}): remove it to start anew there"
            ) from error


def _with_recipe_settings(restored: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with the recipe's current rates and decay, if `restored` is an optimiser."""
    if isinstance(restored, torch.optim.Optimizer):
        return state | {"param_groups": restored.state_dict()["param_groups"]}
    return state


def write_foreign_adapter(model: PeftModel, base_hash: str, adapter: Path, folder: Path) -> None:
    """Check the foreign adapter in `adapter`, and write it into `folder`, for `_restore`.

    Its layers must be among those of `model`, which has a new adapter of the recipe; `base_hash` is
    the hash of the base of `model`.

    Raises:
        AdapterError: it cannot be a version; the message says why, and what to do.
    """
    if (adapter / BASE_FILE).exists() and read_base(adapter) != base_hash:
        raise refusal(
            adapter,
            f"it was trained on another base model, says its {BASE_FILE}: import one of this",
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
    layers = {name.removeprefix(OF_PEFT).rpartition(".lora_")[0] for name in weights}
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
