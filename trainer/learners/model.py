"""Load the model to train: a frozen base, with the LoRA adapter of one policy at a time.

Policies share the base model, which is in memory once, in the recipe's precision. They train in
turns: the next policy's adapter replaces the previous policy's.
"""

import gc
import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from accelerate import PartialState
from huggingface_hub.errors import HFValidationError
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import is_bitsandbytes_available

from store import install_command
from store.values.sampling import Distribution
from trainer.batches import Row
from trainer.errors import CompanionFailed, LearnerError
from trainer.learners.adapter import attach_adapter, detach_adapters, layer_kind
from trainer.learners.budget import is_out_of_memory, report_short_memory
from trainer.learners.corrections import reply_ids
from trainer.learners.flops import Throughput, try_model_flops
from trainer.learners.kernels.layers import make_base_lean
from trainer.learners.kernels.process import (
    be_deterministic,
    fuse_wide_attention,
    total_memory,
)
from trainer.learners.layouts import layers_without_gradient
from trainer.learners.processes import Processes
from trainer.learners.replay.grammars import Grammars
from trainer.learners.replay.shaping import Vocabulary
from trainer.learners.scoring import attention_implementation, layers_of
from trainer.learners.steps import check_ids
from trainer.publishing.adapters import read_base_hash
from trainer.recipes.recipe import LoraOptions, Recipe

# So many values of each parameter are hashed to identify a model: training changes nearly all.
HASHED_VALUES: Final = 64
# Why a layer has no adapter.
NO_GRADIENT: Final = "it gets no gradient"
IGNORED_BY_SERVER: Final = "the model server ignores it"
# Most characters of an error of transformers that a message quotes.
MAX_ERROR_LENGTH: Final = 300
# Most weights that a message names.
MAX_NAMED_WEIGHTS: Final = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Methods of quantisation that transformers undoes while it reads the weights.
DEQUANTISED: Final[dict[str | None, Any]] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
# Bytes of a packed weight. With 4 bits there are also a scale of 8 bits for each 64 weights, and
# one of 32 bits for each 256 of these scales.
PACKED_BYTES: Final = {4: (4 + 8 / 64 + 32 / (64 * 256)) / 8, 8: 1.0}


def precision(recipe: Recipe, device: str) -> torch.dtype:
    """Return the dtype of the frozen base on `device`, which is "cpu" or "cuda:…"."""
    if recipe.dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return DTYPES[recipe.dtype]


def may_fit(model: str, recipe: Recipe) -> bool:
    """Return whether the weights of `model` fit into the device's memory, if it were all free."""
    base, device = empty_model(configuration(model, "planned")), _device()
    return weight_bytes(base, recipe, device) <= total_memory(device)


def weight_bytes(base: Any, recipe: Recipe, device: str) -> int:
    """Return the bytes that the weights of `base`, which need not be loaded, take on `device`.

    Packed layers (`base_bits`, or stored so) are unpacked one at a time to compute: the largest of
    them is counted unpacked as well.

    Raises:
        LearnerError: the weights cannot be packed as the recipe asks.
    """
    width = precision(recipe, device).itemsize
    whole: int = sum(parameter.numel() for parameter in base.parameters()) * width
    bits = recipe.base_bits
    if quantised_by(base.config) == "bitsandbytes":
        bits = 4 if base.config.quantization_config.get("load_in_4bit") else 8
    if bits is None:
        return whole
    sizes = packable_weights(base).values()
    saved = int(sum(sizes) * (width - PACKED_BYTES[bits]))
    return whole - saved + max(sizes) * width


def packable_weights(base: Any) -> dict[str, int]:
    """Return the layers that bitsandbytes can pack, each with its number of weights.

    These are all linear layers but the LM head.

    Raises:
        LearnerError: stacked experts, which cannot be packed, have at least as many weights.
    """
    head = base.get_output_embeddings()
    sizes = {
        name: layer.weight.numel()
        for name, layer in base.named_modules()
        if type(layer) is torch.nn.Linear and layer is not head
    }
    # The experts of a mixture are one parameter of three dimensions.
    stacked = sum(parameter.numel() for parameter in base.parameters() if parameter.ndim > 2)
    if stacked >= sum(sizes.values()):
        raise LearnerError(
            f"base_bits would pack {sum(sizes.values()) / 1e9:.2g} billion weights, and leave"
            f" {stacked / 1e9:.2g} billion of experts as they are, which bitsandbytes cannot pack:"
            " leave base_bits out of the recipe"
        )
    return sizes


def _device() -> str:
    # Each of several processes on one host has its own GPU.
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def loader_of(config: Any) -> Any:
    """Return the class of transformers that loads models with this configuration.

    A model that also reads images is loaded whole, so that its layers have the names that the model
    server uses; only the layers of its language model get an adapter.
    """
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def configuration(model: str, done: str = "loaded") -> Any:
    """Return the configuration of `model`, a folder or a hub name.

    `done` completes "cannot be …" in error messages.

    Raises:
        LearnerError: there is no configuration, or models of its kind cannot be trained.
    """
    with translate_loading_errors(model, done):
        config = AutoConfig.from_pretrained(model)
        if config.is_encoder_decoder:
            raise ValueError("it is an encoder-decoder, not a causal language model")
        method = quantised_by(config)
        if method not in (None, "bitsandbytes", *DEQUANTISED):
            raise ValueError(
                f"its weights are quantised by {method}, which training does not support: name the"
                " model that is not quantised, which base_bits in the recipe can pack"
            )
        return config


def quantised_by(config: Any) -> str | None:
    """Return the method that quantised a model's stored weights, or None if they are not."""
    stored = getattr(config, "quantization_config", None)
    return stored.get("quant_method") if isinstance(stored, dict) else None


def empty_model(config: Any) -> Any:
    """Return a model with this configuration on torch's meta device: shapes without values."""
    with torch.device("meta"):
        return loader_of(config).from_config(config)


def load_base(model: str, recipe: Recipe, processes: Processes | None = None) -> tuple[Any, Any]:
    """Return the causal LM, loaded onto the GPU if there is one, and its tokenizer.

    Its decoder layers are sharded over `processes`, unless the recipe packs them.

    Raises:
        LearnerError: the model cannot be loaded.
    """
    device = _device()
    dtype = precision(recipe, device)
    if recipe.base_bits is None:
        with processes.sharding() if processes is not None else nullcontext():
            base, tokenizer = _load_model(model, dtype)
        base.to(device)
    else:
        base, tokenizer = _load_packed(model, recipe.base_bits, dtype, device)
    base.set_attn_implementation(attention_implementation(base))
    encode_positions(base)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    make_base_lean(base, empty_model(base.config))
    return base, tokenizer


def _load_packed(model: str, bits: int, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Return the causal LM, with linear layers packed while they are read, and its tokenizer.

    Raises:
        LearnerError: bitsandbytes is not installed, or the model cannot be loaded or packed.
    """
    if not is_bitsandbytes_available():
        raise LearnerError(
            f"base_bits = {bits} needs bitsandbytes: install it with"
            f" `{install_command('trainer')}`, or leave base_bits out of the recipe"
        )
    shapes = empty_model(configuration(model))
    packed = packable_weights(shapes)
    linear = (name for name, part in shapes.named_modules() if type(part) is torch.nn.Linear)
    packing = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[name for name in linear if name not in packed],
    )
    with _collect_stored_weights(bits) as stored:
        base, tokenizer = _load_model(
            model, dtype, quantization_config=packing, device_map={"": device}
        )
    if not stored:
        raise LearnerError(
            f"the weights of {model!r} are stored packed already: leave base_bits out of the recipe"
        )
    base.stored_weights = stored
    # TRL rounds the adapter to bfloat16 if one of these is set.
    base.is_loaded_in_4bit = base.is_loaded_in_8bit = False
    return base, tokenizer


@contextmanager
def _collect_stored_weights(bits: int) -> Iterator[dict[str, tuple[Any, Tensor]]]:
    """Collect the shape and first values of each weight, by name, before it is packed.

    Yield a mapping, for `base_hash`, that loading a model within the block fills.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize, Bnb8bitQuantize

    stored = {}
    operation = Bnb4bitQuantize if bits == 4 else Bnb8bitQuantize
    own = operation.convert

    def convert(self: Any, weights: dict[str, Any], *more: Any, **named: Any) -> Any:
        for name, value in weights.items():
            weight = value[0] if isinstance(value, list) else value
            stored[name] = (weight.shape, weight.flatten()[:HASHED_VALUES].clone())
        return own(self, weights, *more, **named)

    operation.convert = convert
    try:
        yield stored
    finally:
        operation.convert = own


def _load_model(
    model: str, dtype: torch.dtype | Literal["auto"], **options: Any
) -> tuple[Any, Any]:
    """Return the causal LM and its tokenizer; the `dtype` "auto" keeps the stored precision.

    `options` are further arguments of transformers' `from_pretrained`.

    Raises:
        LearnerError: the model cannot be loaded, or its files lack weights.
    """
    config = configuration(model)
    if (method := quantised_by(config)) in DEQUANTISED and not options:
        options["quantization_config"] = DEQUANTISED[method](dequantize=True)
    with translate_loading_errors(model):
        base, report = loader_of(config).from_pretrained(
            model, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        # transformers initialises missing weights itself, and ignores unknown ones.
        of_other_shapes = (name for name, *_ in report["mismatched_keys"])
        faults = {"lack": report["missing_keys"], "have other shapes for": of_other_shapes}
        for fault, names in faults.items():
            if weights := sorted(names):
                more = (
                    f" and {len(weights) - MAX_NAMED_WEIGHTS} more"
                    if weights[MAX_NAMED_WEIGHTS:]
                    else ""
                )
                raise ValueError(
                    f"its files {fault} weights of {type(base).__name__}"
                    f" ({', '.join(weights[:MAX_NAMED_WEIGHTS])}{more})"
                )
        return base, AutoTokenizer.from_pretrained(model)


@contextmanager
def translate_loading_errors(model: str, done: str = "loaded") -> Iterator[None]:
    """Turn errors of the block, which loads `model`, into a LearnerError: "cannot be `done`"."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        # The hub's own message explains the syntax of names.
        is_no_name = HFValidationError in map(type, (error, error.__cause__, error.__context__))
        # Only the first sentence: transformers goes on to list the models that it knows.
        first = " ".join(str(error).split()).partition(". ")[0][:MAX_ERROR_LENGTH]
        why = "there is no such folder" if is_no_name else first
        raise LearnerError(
            f"the model {model!r} cannot be {done}: {why}; name"
            " one of the hub, or a folder with the config.json of a causal language model"
        ) from error


def save_merged(model: str, adapter: Path, folder: Path) -> None:
    """Write `model`, with the version in `adapter` merged into its weights, and its tokenizer.

    The model is merged in the CPU's memory, in the precision in which it is stored.

    Raises:
        LearnerError: the model cannot be loaded, or is not the version's base model.
        OSError: the disk refused a write.
    """
    base, tokenizer = _load_model(model, "auto")
    if read_base_hash(adapter) != base_hash(base):
        raise LearnerError(
            f"{model} is not the base model that the adapter in {adapter} was trained on: set"
            " PAWL_MODEL to the folder or name of that base model"
        )
    merged = attach_adapter(base, LoraOptions(), adapter, 0).merge_and_unload(safe_merge=True)
    try:
        merged.save_pretrained(str(folder))
    except SafetensorError as error:
        raise OSError(f"the weights were not written: {error}") from error
    tokenizer.save_pretrained(str(folder))


def encode_positions(base: Any, context: int | None = None) -> None:
    """Make `base` encode positions as a server with a context of `context` tokens does.

    Without `context` the server has the model's full context. transformers chooses LongRoPE's
    factors (arXiv:2402.13753), and scales dynamic NTK, by the longest row of a batch. vLLM chooses
    the factors once, by its context (`Phi3LongRoPEScaledRotaryEmbedding`), and scales nothing
    within a model's own context.
    """
    for module in base.modules():
        settings = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        kind = settings.get("rope_type")
        if not hasattr(module, "rope_type") or kind not in ("longrope", "dynamic"):
            continue
        frequencies, scale = module.original_inv_freq, module.attention_scaling
        if kind == "longrope":
            served = context or module.config.max_position_embeddings
            is_long = served > settings["original_max_position_embeddings"]
            make = ROPE_INIT_FUNCTIONS[kind]
            frequencies, scale = make(module.config, frequencies.device, seq_len=served)
            # Phi-3.5-MoE has scales of its own in its configuration.
            scale = settings.get("long_mscale" if is_long else "short_mscale", scale)
        module.forward = partial(_position_encoding, frequencies.clone(), scale)


@torch.no_grad()
def _position_encoding(
    frequencies: Tensor, scale: float, like: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for positions (B, T), each (B, T, D), in the dtype of `like`."""
    angles = position_ids[..., None].float() * frequencies.to(position_ids.device)
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * scale).to(like.dtype), (both.sin() * scale).to(like.dtype)


def checkpoint_layers(base: Any, share: float) -> None:
    """Use gradient checkpointing in the first `share` of the layers, and in no others.

    The backward pass reaches the first layers last, when the others have freed their activations.
    transformers' own checkpointing needs training mode, which these models are never in.
    """
    layers = layers_of(base)
    for layer in layers:
        vars(layer).pop("forward", None)
    for layer in layers[: math.ceil(share * len(layers))]:
        # Nothing in a layer is random.
        layer.forward = partial(
            torch_checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def is_checkpointed(base: Any) -> bool:
    """Return whether any layer uses gradient checkpointing."""
    return any("forward" in vars(layer) for layer in layers_of(base))


def base_hash(base: Any) -> str:
    """Return a hash of the parameters of `base`: of their names, shapes and first values.

    The hash does not depend on packing, nor on the precision that the weights are loaded in.
    """
    digest = sha256()
    stored = getattr(base, "stored_weights", {})
    for name, parameter in base.named_parameters():
        shape, values = stored.get(name) or (parameter.shape, _values(parameter))
        digest.update(f"{name} {tuple(shape)} ".encode())
        some = values[:HASHED_VALUES].to(torch.bfloat16).cpu()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _values(parameter: Tensor) -> Tensor:
    """Return a parameter's values, flattened; a sharded one is gathered from all processes."""
    values = parameter.detach()
    return (values.full_tensor() if isinstance(values, DTensor) else values).flatten()


def _layer_choice_key(recipe: Recipe) -> str:
    """Return a key that recipes share if they choose the same layers."""
    return f"{recipe.lora.target_modules} {recipe.lora.experts}"


class Holder(Protocol):
    """A learner, as `Base` sees it: one learner at a time holds the base model."""

    def forget_model(self) -> None:
        """Drop the adapted model and everything made for it: another learner gets the base."""


class Base:
    """A frozen base model in memory, shared by policies that attach their adapters in turn.

    Attributes:
        name: the folder or name that it was loaded from.
        tokenizer: the model's tokenizer.
        hash: identifies the model (`base_hash`).
        processes: the processes that compute together, over which the base is sharded.
        throughput: measures how fast the learners train.
    """

    @report_short_memory("while the base model was loaded")
    def __init__(self, model: str, recipe: Recipe) -> None:
        """Load `model` in the precision of `recipe`, which takes seconds to minutes.

        Raises:
            LearnerError: the model does not exist, or cannot be trained.
            ShortOfMemory: memory ran out.
        """
        # TRL writes to the logging module; Pawl has one log, structlog's.
        logging.getLogger("trl").setLevel(logging.ERROR)
        be_deterministic()
        fuse_wide_attention()
        self.name = model
        # Reads the number of processes that `accelerate launch` set; without it there is one.
        PartialState(cpu=not torch.cuda.is_available())
        self.processes = Processes()
        self._model, self.tokenizer = load_base(model, recipe, self.processes)
        self._grammars = Grammars(self.tokenizer, self._model.config.get_text_config().vocab_size)
        self.hash = base_hash(self._model)
        self.throughput = Throughput(
            try_model_flops(empty_model(self._model.config)),
            self._model.device,
            self.processes.count,
        )
        self._holder: Holder | None = None
        # For each choice of layers (`_layer_choice_key`): the paths of layers that get no adapter,
        # each with the reason.
        self._left_out: dict[str, dict[str, str]] = {}

    def attach(self, holder: Holder, recipe: Recipe, adapter: Path | None, seed: int) -> PeftModel:
        """Return the base with the adapter in the folder `adapter`, or with a new one (None).

        It replaces the previous adapter. The previous holder drops its model first.

        Raises:
            LearnerError: the model lacks layers that the recipe names.
            FilesUnread: a file of the adapter cannot be read for now.
        """
        if self._holder is not None and self._holder is not holder:
            self._holder.forget_model()
            # The other policy's adapter and moments refer to each other.
            gc.collect()
        self._holder = holder
        detach_adapters(self._model)
        choice = _layer_choice_key(recipe)
        left_out = self._left_out.get(choice, {})
        model = attach_adapter(self._model, recipe.lora, adapter, seed, left_out)
        if adapter is not None or choice in self._left_out:
            return model
        untrained = self._layers_without_gradient(model)
        if untrained is not None:
            self._left_out[choice] = dict.fromkeys(untrained, NO_GRADIENT)
        return self.attach(holder, recipe, adapter, seed) if untrained else model

    def _layers_without_gradient(self, model: PeftModel) -> frozenset[str] | None:
        """Return the layers that get no gradient, or None if memory ran out in finding them."""
        layers, failure = None, None
        try:
            layers = layers_without_gradient(model)
        except (RuntimeError, CompanionFailed) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            failure = error
        self.processes.regroup(failure)
        return layers if all(self.processes.gather(layers is not None)) else None

    def leave_out_kinds(self, recipe: Recipe, kinds: Collection[str]) -> None:
        """Leave layers of `kinds`, which the server ignores, out of the recipe's new adapters."""
        of_kinds = {
            name: IGNORED_BY_SERVER
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer) and layer_kind(name) in kinds
        }
        self._left_out.setdefault(_layer_choice_key(recipe), {}).update(of_kinds)

    def set_served_context(self, tokens: int) -> None:
        """Encode positions as a server with a context of `tokens` tokens does."""
        encode_positions(self._model, tokens)

    def prepare_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with grammar masks, and with token ids for the words in their settings.

        Raises:
            Unusable: some rows have ids of another vocabulary.
            Unreplayable: some row's grammar cannot be replayed.
        """
        rows = Vocabulary(self.tokenizer, self._model).with_token_ids(rows)
        check_ids(rows, self._model.get_input_embeddings().weight.shape[0])
        return self._grammars.with_masks(rows)

    def why_another_base(self, adapter: Path) -> str | None:
        """Return why the version in `adapter` is not of this base model, or None if it is.

        The name of a model does not identify it, because a folder may be replaced. So each version
        keeps a hash of its base model.

        Raises:
            AdapterError: the file with the hash is missing or damaged.
            FilesUnread: the file with the hash cannot be read for now.
        """
        if read_base_hash(adapter) == self.hash:
            return None
        return "it was trained on another base model"

    def why_unreplayable(
        self, distribution: Distribution, sampled_ids: Sequence[int]
    ) -> str | None:
        """Return why a call's grammar cannot be replayed as masks, or None if it can."""
        settings = Vocabulary(self.tokenizer, self._model).settings_with_token_ids(distribution)
        return self._grammars.why_no_masks(settings, sampled_ids)

    def reply_ids(
        self, request: bytes | None, prompt_ids: Sequence[int], text: str
    ) -> tuple[int, ...] | str:
        """Return a correction's token ids, (S,), or the reason why it cannot be trained."""
        ends = self._model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        return reply_ids(self.tokenizer, ends, request, prompt_ids, text)
