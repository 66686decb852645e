"""Plan the memory that training takes, from a model's configuration alone.

The model is built on torch's meta device, where tensors have shapes and no values: no weights and
no GPU are needed. One layer of each kind is run there forward and backward, as it trains (with its
adapter, and attention that keeps what a fused kernel keeps), and the bytes of all living tensors
are counted.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from store.records import Record
from trainer.errors import LearnerError
from trainer.learners.adapter import attach_adapter
from trainer.learners.kernels.head import CHUNK
from trainer.learners.kernels.layers import make_base_lean
from trainer.learners.layouts import why_no_tree
from trainer.learners.model import (
    configuration,
    encode_positions,
    loader_of,
    precision,
    quantised_by,
    translate_loading_errors,
    weight_bytes,
)
from trainer.learners.scoring import decoder_of, layers_of
from trainer.recipes.recipe import Recipe

GIB: Final = 2**30
# The names, in transformers, of attention that computes only shapes: the usual one, and one that
# repeats grouped heads (`kernels.process.fuse_wide_attention`).
PLANNED_ATTENTION: Final = "pawl_planned"
PLANNED_WIDE_ATTENTION: Final = "pawl_planned_wide"
# A layer is measured on so many tokens that bytes which do not grow with the tokens hardly count.
MEASURED_TOKENS: Final = 4096
# Bytes of a trained parameter, in float32: its value, its gradient, AdamW's two moments, and its
# value before the update (`off_policy.min_overlap`).
TRAINED_BYTES: Final = 20
# CUDA's context, the workspaces of its libraries, and memory that the allocator cannot use.
OVERHEAD_BYTES: Final = GIB


class Footprint(Record, frozen=True, kw_only=True):
    """The memory that training a model takes, in bytes unless another unit is named.

    Attributes:
        family: the model's type, as its configuration names it.
        architecture: the class of the model, which model servers call the same.
        why_no_tree: why the configuration rules out the layout `tree`; None if it does not, and
            test rows decide once the model is loaded.
        context: the most tokens that the model has positions for; None if unknown.
        parameters: count of the base's parameters.
        trained: count of the adapter's parameters.
        weights: weights of the base; if they are packed, the largest layer counts unpacked, too.
        packed: `weights` with `base_bits = 4`; None if they cannot be packed.
        layers: each decoder layer; empty if the base is packed, as processes cannot shard it then.
        gathered: if layers are sharded, two copies of the largest layer: its parts as received from
            the other processes, and the layer to compute with; else 0.
        quantised: the method that the stored weights are quantised by, or None.
        served: weights in a model server: 32 bits on a CPU; on a GPU 16, or as stored in fp8 and
            mxfp4.
        cached: keys and values of a token in a model server.
        optimizer: the adapter before and after the step, its gradient and the optimiser's moments.
        head: the LM head's logits, which are computed in chunks.
        plain: the peak for each token of a micro-batch: the activations that all layers keep, and
            the most that the backward pass of one layer or of the head adds.
        checkpointed: the same with gradient checkpointing: the inputs of all layers, the
            activations of the one layer that is computed again, and the same addition.
    """

    family: str
    architecture: str
    why_no_tree: str | None
    context: int | None
    parameters: int
    trained: int
    weights: int
    packed: int | None
    layers: tuple[int, ...]
    quantised: str | None
    served: int
    cached: int
    optimizer: int
    head: int
    plain: int
    checkpointed: int
    gathered: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that do not depend on how many tokens are computed at once."""
        return self.weights + self.gathered + self.optimizer + self.head + OVERHEAD_BYTES

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes that the loaded model takes before it is trained."""
        return self.weights + OVERHEAD_BYTES

    def needed_bytes(self, tokens: int, *, checkpointing: bool) -> int:
        """Return the bytes that it takes to train on `tokens` tokens at once."""
        return self.fixed_bytes + tokens * (self.checkpointed if checkpointing else self.plain)

    def tokens_that_fit(self, room: int, *, checkpointing: bool) -> int:
        """Return how many tokens fit into `room` bytes at once; 0 if the model does not fit."""
        token_bytes = self.checkpointed if checkpointing else self.plain
        return max(0, room - self.fixed_bytes) // token_bytes

    def per_process(self, processes: int) -> "Footprint":
        """Return the footprint of each of `processes` processes, which shard a base that can be."""
        if processes == 1 or not self.layers:
            return self
        saved = sum(self.layers) * (processes - 1) // processes
        return msgspec.structs.replace(
            self, weights=self.weights - saved, gathered=2 * max(self.layers)
        )

    def checkpointed_share(self, tokens: int, room: int) -> float:
        """Return the share of layers to checkpoint so that `tokens` tokens fit in `room` bytes.

        It is 1 also if they do not fit even then.
        """
        lacking = self.needed_bytes(tokens, checkpointing=False) - room
        if lacking <= 0:
            return 0.0
        return min(1.0, lacking / max(1, tokens * (self.plain - self.checkpointed)))

    def corrected(self, tokens: int, peak: int | None, *, checkpointing: bool) -> "Footprint":
        """Return the footprint with bytes a token from the measured `peak` of `tokens` tokens.

        If memory ran out (`peak` is None), the bytes a token are doubled.
        """
        kind = "checkpointed" if checkpointing else "plain"
        own: int = getattr(self, kind)
        token_bytes = (
            2 * own if peak is None else max(1, (peak - self.head - self.gathered) // tokens)
        )
        return msgspec.structs.replace(self, **{kind: token_bytes})


def footprint(model: str, recipe: Recipe, device: str = "cuda") -> Footprint:
    """Return the footprint of training `model` by `recipe` on a `device`, "cpu" or "cuda".

    `model` is a folder, a `config.json`, or a hub name; nothing but the configuration is read.

    Raises:
        LearnerError: there is no such configuration, a layer cannot be run, or the recipe asks to
            pack a base that cannot be packed.
    """
    config = configuration(model, "planned")
    with translate_loading_errors(model, "planned"):
        with torch.device("meta"):
            # bfloat16, because some operations of experts support no wider numbers.
            base = loader_of(config).from_config(config, dtype=torch.bfloat16)
        wide = precision(recipe, device) == torch.float32 and device == "cuda"
        base.set_attn_implementation(PLANNED_WIDE_ATTENTION if wide else PLANNED_ATTENTION)
        encode_positions(base)
    make_base_lean(base)
    parameters = sum(parameter.numel() for parameter in base.parameters())
    weights, quantised = weight_bytes(base, recipe, device), quantised_by(config)
    is_sharded = recipe.base_bits is None and quantised != "bitsandbytes"
    packed = _packed_bytes(base, recipe, device)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(base)]
    adapted = attach_adapter(base, recipe.lora, None, 0)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    text = config.get_text_config()
    hidden, width = text.hidden_size, precision(recipe, device).itemsize
    served_width = 4 if device == "cpu" else 2
    kept, peak = _measure_layers(base)
    wider = width // torch.bfloat16.itemsize
    # The head's inputs, gathered, and the expected output embeddings; then the gradients of both.
    at_head = hidden * (2 * width + 2 * 4)
    return Footprint(
        family=config.model_type,
        architecture=type(base).__name__,
        why_no_tree=why_no_tree(adapted),
        context=getattr(text, "max_position_embeddings", None),
        parameters=parameters,
        trained=trained,
        weights=weights,
        packed=packed,
        layers=tuple(width * size for size in layers) if is_sharded else (),
        quantised=quantised,
        served=_served_bytes(base) if device == "cuda" else parameters * served_width,
        cached=_cached_numbers(text) * served_width,
        optimizer=TRAINED_BYTES * trained,
        # A chunk's logits and log-probabilities in float32; probabilities in the head's precision.
        head=CHUNK[device] * (4 + 4 + width),
        plain=wider * sum(kept) + max(wider * peak, at_head),
        checkpointed=len(kept) * hidden * width + max(wider * (max(kept) + peak), at_head),
    )


def _served_bytes(base: Any) -> int:
    """Return the bytes of the weights on a server's GPU: fp8 and mxfp4 as stored, else 16 bits."""
    method = quantised_by(base.config)
    embeddings = {id(base.get_input_embeddings().weight), id(base.get_output_embeddings().weight)}

    def width(parameter: Any) -> float:
        """Return a number's bytes: 1 in fp8 matrices; 4 bits and 1/32 scale in mxfp4 experts."""
        if method == "fp8" and parameter.ndim > 1 and id(parameter) not in embeddings:
            return 1
        return 17 / 32 if method == "mxfp4" and parameter.ndim > 2 else 2

    return int(sum(parameter.numel() * width(parameter) for parameter in base.parameters()))


def _packed_bytes(base: Any, recipe: Recipe, device: str) -> int | None:
    """Return the bytes of weights packed to 4 bits; None if quantised already, or not packable."""
    if quantised_by(base.config) is not None:
        return None
    try:
        return weight_bytes(base, recipe.model_copy(update={"base_bits": 4}), device)
    except LearnerError:
        return None


def _cached_numbers(text: Any) -> int:
    """Return how many numbers a server caches for each token: its keys and values.

    Layers with an attention window do not count. DeepSeek's attention caches a latent vector and
    the rotated part of a key instead.
    """
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    attends = [kind for kind in kinds or () if kind in ("full_attention", "attention", "hybrid")]
    layers = len(attends) if kinds else text.num_hidden_layers
    if latent := getattr(text, "kv_lora_rank", None):
        return int(layers * (latent + text.qk_rope_head_dim))
    heads = getattr(text, "num_attention_heads", 0)
    width = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return int(layers * 2 * (getattr(text, "num_key_value_heads", None) or heads) * width)


def _measure_layers(base: Any) -> tuple[list[int], int]:
    """Return each layer's activations, and the most that a layer's backward pass adds.

    Both are in bytes a token.

    Raises:
        LearnerError: a layer cannot be run on the meta device.
    """
    layers = layers_of(base)
    if not layers:
        raise LearnerError(f"{type(base).__name__} has no list of layers: it cannot be trained")
    kinds = [_kind(layer) for layer in layers]
    calls: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def note(layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.setdefault(_kind(layer), (layer, inputs, named))
        if len(calls) == len(set(kinds)):
            raise _EachKindCalled

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    base.eval()
    known = [*base.parameters(), *base.buffers()]
    try:
        with torch.no_grad(), suppress(_EachKindCalled):
            decoder_of(base)(
                input_ids=torch.zeros(1, MEASURED_TOKENS, dtype=torch.long, device="meta"),
                position_ids=torch.arange(MEASURED_TOKENS, device="meta")[None],
                use_cache=False,
            )
        for hook in hooks:
            hook.remove()
        by_kind = {kind: _measure_layer(*call, known) for kind, call in calls.items()}
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise LearnerError(
            f"the memory of {type(base).__name__} cannot be planned: a layer does not run on"
            f" torch's meta device: {error}"
        ) from error
    # A listed layer that the pass does not call keeps nothing.
    kept = [by_kind[kind][0] for kind in kinds if kind in by_kind]
    return kept, max(peak for _, peak in by_kind.values())


class _EachKindCalled(Exception):
    """A layer of each kind was called: what the others are called with is the same."""


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return what layers have in common that take the same memory."""
    return type(layer), *((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _measure_layer(
    layer: Any, inputs: tuple[Any, ...], named: dict[str, Any], known: Sequence[Tensor]
) -> tuple[int, int]:
    """Return a layer's activations, and what its backward pass adds, both in bytes a token."""
    states = [given.detach().requires_grad_() for given in inputs[:1]]
    known = [*known, *states, *(t for t in tree_leaves((inputs, named)) if isinstance(t, Tensor))]
    with LivingBytes(known) as living:
        outputs = layer(*states, *inputs[1:], **named)
        out = outputs[0] if isinstance(outputs, tuple) else outputs
        kept = living.now
        out.backward(torch.empty_like(out))
    layer.zero_grad()
    return kept // MEASURED_TOKENS, max(0, living.most - kept) // MEASURED_TOKENS


def peak_bytes_of(device: torch.device, run: Callable[[], bool]) -> int | None:
    """Return the peak of the GPU memory that `run` takes; None if `run` returns False."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return torch.cuda.max_memory_allocated(device) - before if run() else None


class LivingBytes(TorchDispatchMode):
    """Count the bytes of tensors that were made within the context and are still alive.

    Attributes:
        now: bytes of the tensors alive now.
        most: the most bytes that were ever alive at once.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        """Start at zero; the tensors in `known` and views of them are not counted."""
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._living: dict[int, Any] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count the tensors that it made."""
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._living:
            return

        def end(_: object) -> None:
            del self._living[key]
            self.now -= size

        self._living[key] = weakref.ref(storage, end)
        self.now += size
        self.most = max(self.most, self.now)


class _PlannedAttention(Function):
    """Save the tensors that fused attention saves; (1, H, N, D) to (1, N, H, D), without values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size, heads, tokens, _ = q.shape
        out = q.new_empty(size, tokens, heads, v.shape[-1])
        normalisers = q.new_empty(size, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, normalisers)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _planned_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    return _PlannedAttention.apply(query, key, value), None


def _planned_wide_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    repeated = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    return _PlannedAttention.apply(query, *repeated), None


# No mask function is registered, so that transformers makes no mask.
AttentionInterface.register(PLANNED_ATTENTION, _planned_attention)
AttentionInterface.register(PLANNED_WIDE_ATTENTION, _planned_wide_attention)
