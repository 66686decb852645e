"""Measure how fast a learner trains: tokens a second, share of the GPU's peak, share of idle time.

The share of the peak is the model FLOPs utilisation, MFU (PaLM, arXiv:2204.02311, appendix B): the
operations that an update needs, divided by those that the GPU could do in that time. Operations
that the mathematics does not need, such as computing activations or shared prefixes a second time,
take time and do not count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

import structlog
import torch

from store.records import Record
from trainer.batches import Row, tokens_and_pairs
from trainer.learners.scoring import decoder_of

log = structlog.get_logger()

# Dense bfloat16 operations a second, by a part of the GPU's name in CUDA; the first match counts.
# From NVIDIA's data sheets, whose larger figures are for sparse matrices.
PEAKS: Final = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
)


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's most bfloat16 operations a second, or None if the GPU is unknown."""
    return next((peak for name, peak in PEAKS if name in device_name), None)


class ModelFlops(Record, frozen=True, kw_only=True):
    """The sizes of a model from which its floating-point operations are computed.

    Attributes:
        matrices: parameters of the matrices that multiply each token: of experts, the active ones.
        head: parameters of the LM head.
        attention: multiplications for each (query, key) pair in a layer, over all heads.
        windows: the attention window of each layer with attention, in tokens; None if unbounded.
    """

    matrices: int
    head: int
    attention: int
    windows: tuple[int | None, ...]

    def training_flops(self, tokens: int, pairs: int, scored: int) -> float:
        """Return the operations of one forward and backward pass that trains an adapter.

        For each token, a parameter costs 2 operations in the forward pass and 2 for the gradient of
        its input. There is no gradient of the weights (the usual further 2), as the base is frozen.
        A multiplication of attention costs 2 operations forward and 4 backward. The adapter's own
        operations, below one per cent, and the recurrences of linear layers are left out.

        Args:
            tokens: number of distinct tokens, each computed once.
            pairs: number of (query, key) pairs, a token with itself included (`tokens_and_pairs`).
            scored: number of tokens that the LM head is computed for.
        """
        attended = sum(
            pairs if window is None else min(pairs, tokens * window) for window in self.windows
        )
        return 4.0 * (self.matrices * tokens + self.head * scored) + 6.0 * self.attention * attended


def try_model_flops(base: Any) -> ModelFlops | None:
    """Return `model_flops(base)`; if it fails, log a warning and return None."""
    try:
        return model_flops(base)
    except Exception as error:  # Architectures name their sizes differently.
        log.warning("flops_not_counted", reason=f"{type(error).__name__}: {error}"[:500])
        return None


def model_flops(base: Any) -> ModelFlops:
    """Return the sizes of the text model of `base`, which need not be loaded."""
    text = base.config.get_text_config()
    decoder = decoder_of(base)
    embedding = decoder.get_input_embeddings().weight
    matrices = sum(
        parameter.numel() * _active_share(name, text)
        for name, parameter in decoder.named_parameters()
        if parameter.dim() > 1 and parameter is not embedding
    )
    heads = text.num_attention_heads
    of_keys = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    of_keys = of_keys or text.hidden_size // heads
    return ModelFlops(
        matrices=round(matrices),
        head=base.get_output_embeddings().weight.numel(),
        attention=heads * (of_keys + (getattr(text, "v_head_dim", None) or of_keys)),
        windows=tuple(_layer_windows(text)),
    )


class Throughput:
    """Measure the speed of updates, for all learners of one base model together."""

    def __init__(self, flops: ModelFlops | None, device: torch.device, processes: int) -> None:
        """Start to measure `processes` processes, each on a device like `device`.

        Without `flops` the share of the peak is unknown.
        """
        self._flops = flops
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_flops(name)
        self._peak = None if peak is None else peak * processes
        self._busy = 0.0
        self._ended: float | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block's time as busy: it computes forward or backward passes, or a step."""
        began = perf_counter()
        try:
            yield
        finally:
            self._busy += perf_counter() - began

    def figures(self, rows: Sequence[Row], epochs: int, seconds: float) -> dict[str, float]:
        """Return the speed metrics of an update that ends now, after `seconds` of training.

        `mfu` is missing if the peak is unknown. `idle_share` is the share of the time since the
        previous update's end in which nothing was computed; the first update has none.
        """
        tokens, pairs = tokens_and_pairs(rows)
        figures: dict[str, float] = {"tokens_per_second": round(epochs * tokens / seconds)}
        if self._peak is not None and self._flops is not None:
            scored = sum(len(row.sampled_ids) for row in rows)
            trained = epochs * self._flops.training_flops(tokens, pairs, scored)
            figures["mfu"] = trained / (seconds * self._peak)
        now = perf_counter()
        if self._ended is not None:
            figures["idle_share"] = 1.0 - self._busy / (now - self._ended)
        self._busy, self._ended = 0.0, now
        return figures


def _active_share(name: str, text: Any) -> float:
    """Return the share of a parameter that multiplies one token: below 1 for experts."""
    if ".experts." not in name:
        return 1.0
    experts = next(
        count
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if (count := getattr(text, key, None))
    )
    return float(text.num_experts_per_tok / experts)


def _layer_windows(text: Any) -> list[int | None]:
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    width = {
        "full_attention": None,
        "attention": None,
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    return [width[kind] for kind in kinds if kind in width]
