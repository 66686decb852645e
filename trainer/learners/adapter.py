"""Choose an adapter's layers, put it onto a base model, take it off, and write and read its files.

    <version>/adapter_config.json, adapter_model.safetensors    what the model server reads
    <version>/base.json              which base model it was trained on; kept for good
    <version>/trainer/optimizer.pt   moments; kept by the versions' states (`publishing.cleaning`)
    <version>/trainer/<name>.pt      what a learner adds: a value head

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
from trainer.publishing.adapters import BASE_FILE, STATE, read_base, reading, write_base
from trainer.publishing.foreign import (
    SIDES,
    USUAL_ALPHA,
    WEIGHTS,
    read_config,
    refused,
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
# Inputs or outputs of a gate.
NARROW: Final = 4
# Model servers multiply it into attention's other matrices as they load the model, where they see
# no adapter of it.
FOLDED: Final = frozenset({"kv_b_proj"})
# What PEFT puts before a layer's name in a file of weights.
OF_PEFT: Final = "base_model.model."
# What PEFT puts behind a layer's name that is adapted a second time, for another parameter.
INNER: Final = ".base_layer"
# The parameters of stacked experts that get an adapter. In this order PEFT puts one around the
# other, and model servers know them by it.
STACKED: Final = ("gate_up_proj", "down_proj")
# The name of the optimiser's state.
OPTIMIZER: Final = "optimizer"


class ModelModule(Record, frozen=True, kw_only=True):
    """Describe a module of a model.

    Attributes:
        name: its path in the model.
        kind: the name of its class.
        width: of a linear layer, which LoRA can adapt, its inputs or outputs, whichever are fewer.
        head: whether it is the LM head.
        stacked: whether it holds experts, each a matrix of two parameters that LoRA can adapt.
    """

    name: str
    kind: str
    width: int | None = None
    head: bool = False
    stacked: bool = False


def choose(parts: Sequence[ModelModule]) -> list[str]:
    """Return the paths of the linear layers that get an adapter if the recipe names none (pure).

    Attention and dense layers get one, the shared experts of a mixture among them. Routers never
    do: where a changed router sends a token is a jump that no gradient sees, and the least
    difference in arithmetic between server and trainer makes it another jump. Nor do very narrow
    layers: they are gates, and the mixing coefficients of Gemma 3n. Experts are no linear layers
    (`ModelModule.stacked`).
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
    """Return the paths of the modules that hold experts among which tokens are divided."""
    return frozenset(
        part.name
        for part in parts
        if _leaf(part.name) == EXPERTS
        or (part.kind.endswith("Experts") and "Shared" not in part.kind)
    )


def _routers(parts: Sequence[ModelModule], holders: Collection[str]) -> frozenset[str]:
    """Return the paths of routers: of such a class or name, or gates that stand beside experts."""
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

    A new one has not the layers in `left_out`, by their paths why.

    Raises:
        LearnerError: the recipe's layers are not those of the model, or one is in `left_out`.
        FilesUnread: a file in `adapter` cannot be read for now.
    """
    model = _new(base, lora, seed, left_out) if adapter is None else _restored(base, adapter)
    _name_layers(model)
    make_adapter_lean(model)
    # The frozen base computes as it serves: in training mode it would drop units and shake routers,
    # and kernels of Mamba would go past adapters.
    model.eval()
    return model


def _name_layers(model: PeftModel) -> None:
    """Write the paths of its layers into the configuration of an adapter."""
    for config in model.peft_config.values():
        config.target_modules, config.target_parameters = _targets(model)
        config.exclude_modules = None


def _targets(
    model: PeftModel, layers: Collection[str] | None = None
) -> tuple[list[str], list[str] | None]:
    """Return the paths of the linear layers with an adapter, and those of parameters of experts.

    Whole paths: PEFT reads the ends of them as other layers, too, and those of a mixture as its
    experts. Sorted, so that the same update has the same bytes in each process. `layers` are all
    that count, or None.
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


def detach(base: Any, kind: str | None = None) -> None:
    """Take adapters off `base`, in place: all, or those of the layers of other kinds than `kind`.

    One whose files could not be read is half on.
    """
    for name, layer in list(base.named_modules()):
        # An adapter of several parameters of one module is several around each other: the outer
        # one gives way to the module itself.
        if (
            isinstance(layer, LoraLayer)
            and not name.endswith(INNER)
            and (kind is None or layer_kind(name) != kind)
        ):
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, layer.get_base_layer())
    if kind is None and hasattr(base, "peft_config"):
        del base.peft_config


def keep_kind(model: PeftModel, kind: str) -> None:
    """Take the layers of all other kinds than `kind` out of an adapter, in place."""
    detach(model.get_base_model(), kind)
    _name_layers(model)


def layer_kind(name: str) -> str:
    """Return what the layers are called together that stand where layer `name` does in a block."""
    path = name.removeprefix(OF_PEFT).partition(".lora_")[0].removesuffix(INNER)
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def parts_of(base: Any) -> list[ModelModule]:
    """Return what the choice of layers depends on, of each module of `base`."""
    head = base.get_output_embeddings()
    return [
        ModelModule(
            name=name,
            kind=type(module).__name__,
            width=_width(module) if _takes_adapter(base, name) else None,
            head=module is head,
            # Of transformers' one form of experts.
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


def _restored(base: Any, adapter: Path) -> PeftModel:
    with reading(adapter), _names_as_they_are():
        return PeftModel.from_pretrained(base, str(adapter), is_trainable=True)


def _new(base: Any, lora: LoraOptions, seed: int, left_out: Mapping[str, str]) -> PeftModel:
    torch.manual_seed(seed)
    parts = parts_of(base)
    try:
        config = _config(base, lora, parts, left_out)
        with _names_as_they_are():
            return get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise LearnerError(
            f"no adapter can be made: {error}; set lora.target_modules to names of linear layers of"
            f" the model ({_leaves(parts)}), or leave it out"
        ) from error


def _config(
    base: Any, lora: LoraOptions, parts: list[ModelModule], left_out: Mapping[str, str]
) -> LoraConfig:
    """Return PEFT's configuration of a new adapter, with names of modules that there are."""
    by_architecture = lora.target_modules == AUTO
    without = {name.removesuffix(INNER) for name in left_out}
    chosen = [name for name in choose(parts) if name not in without]
    outside = _outside_of_text(base, parts)
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
        _check_names(config.target_modules, parts)
    return config


def _outside_of_text(base: Any, parts: Sequence[ModelModule]) -> str | None:
    """Return an expression for the modules beside the language model, None if none is linear.

    They read images: what a policy is rewarded for is text.
    """
    language = next(name for name, module in base.named_modules() if module is decoder_of(base))
    inside = f"{language}."
    if all(part.name.startswith(inside) for part in parts if part.width and not part.head):
        return None
    return rf"(?!{re.escape(inside)}).*"


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
    names = (part.name.rpartition(".")[2] for part in parts if part.width and not part.head)
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

    One whose file was swept starts anew, with a warning in the log: a roll-back may go
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
            with reading(path):
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


def write_checked(model: PeftModel, base_hash: str, adapter: Path, folder: Path) -> None:
    """Write the adapter in `adapter`, of the layers of `model`, into `folder`, for `_restored`.

    `model` has a new adapter of the recipe's; `base_hash` is that of its base.

    Raises:
        AdapterError: it cannot be a version; the message says why, and what to do.
    """
    if (adapter / BASE_FILE).exists() and read_base(adapter) != base_hash:
        raise refused(
            adapter,
            f"it was trained on another base model, says its {BASE_FILE}: import one of this",
        )
    config, path = read_config(adapter), adapter / WEIGHTS
    try:
        with safe_open(str(path), "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            why = why_other_layers(shapes, config["r"], _layers(model))
            weights = {name: file.get_tensor(name) for name in shapes} if why is None else {}
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; save the adapter again") from error
    if why := why or _why_no_numbers(weights):
        raise refused(adapter, why)
    save_file(weights, folder / WEIGHTS)
    layers = {name.removeprefix(OF_PEFT).rpartition(".lora_")[0] for name in weights}
    modules, parameters = _targets(model, layers)
    LoraConfig(
        r=config["r"],
        lora_alpha=config.get("lora_alpha", USUAL_ALPHA),
        use_rslora=bool(config.get("use_rslora")),
        target_modules=modules,
        target_parameters=parameters,
        task_type=TASK,
    ).save_pretrained(str(folder))


def _layers(model: PeftModel) -> dict[str, tuple[int, int, int]]:
    return {
        name: (module.in_features, module.out_features, getattr(module, "num_experts", 1))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def _why_no_numbers(weights: Mapping[str, Tensor]) -> str | None:
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return f"its {name} is {tensor.dtype}: save it in 16 or 32 bits"
        if not bool(torch.isfinite(tensor).all()):
            return f"its {name} has values that are not finite: its training failed"
    if not any(bool(tensor.any()) for name, tensor in weights.items() if name.endswith(SIDES[1])):
        return "all its lora_B are zero, so that it changes nothing: was it trained at all?"
    return None
