"""Count the floating-point operations that an update must do, and say what a GPU could do.

Their ratio is the model FLOPs utilisation, MFU (PaLM, arXiv:2204.02311, appendix B). What a trainer
does beyond what the mathematics asks for, such as computing activations or shared prefixes a second
time, takes seconds and earns nothing.
"""

from typing import Any, Final

import torch

from store.records import Record
from trainer.learners.model import loader_of
from trainer.learners.scoring import decoder_of

# Dense bfloat16 operations a second, by a part of the GPU's name as CUDA says it; the first that
# fits counts. From NVIDIA's data sheets, whose larger figures are of sparse matrices.
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
    """Return the bfloat16 operations a second that a GPU could do at most, or None if unknown."""
    return next((peak for name, peak in PEAKS if name in device_name), None)


class ModelFlops(Record, frozen=True, kw_only=True):
    """Hold what a model multiplies.

    Attributes:
        matrices: the parameters that a token is multiplied with; of experts, those it is sent to.
        head: those of the LM head.
        attention: what a (query, key) pair multiplies in a layer, all heads together.
        windows: how many keys a token sees at most in each layer with attention; None: no bound.
    """

    matrices: int
    head: int
    attention: int
    windows: tuple[int | None, ...]

    def trained(self, tokens: int, pairs: int, scored: int) -> float:
        """Return the operations of one forward and backward pass that trains an adapter.

        A parameter costs 2 a token in the forward pass and 2 for the gradient of its input. The
        base is frozen: the other 2, for the gradient of the weights, which make the usual 6, are
        not spent. Attention has no weights, and costs 2 and 4 whatever is trained. The adapter's
        own, below one per cent, and the recurrences of linear layers are left out.

        Args:
            tokens: the distinct ones, each computed once.
            pairs: of a token and one that it sees, itself among them (`trainer.batches.tree_size`).
            scored: how many tokens the head is computed for.
        """
        seen = sum(
            pairs if window is None else min(pairs, tokens * window) for window in self.windows
        )
        return 4.0 * (self.matrices * tokens + self.head * scored) + 6.0 * self.attention * seen


def model_flops(config: Any) -> ModelFlops:
    """Return what the text model of a transformers `config` multiplies; no weights are needed."""
    with torch.device("meta"):
        base = loader_of(config).from_config(config)
    text = config.get_text_config()
    decoder = decoder_of(base)
    embedding = decoder.get_input_embeddings().weight
    matrices = sum(
        parameter.numel() * _share(name, text)
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
        windows=tuple(_windows(text)),
    )


def _share(name: str, text: Any) -> float:
    """Return the share of a parameter that one token is multiplied with."""
    if ".experts." not in name:
        return 1.0
    experts = next(
        count
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if (count := getattr(text, key, None))
    )
    return float(text.num_experts_per_tok / experts)


def _windows(text: Any) -> list[int | None]:
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    width = {
        "full_attention": None,
        "attention": None,
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    return [width[kind] for kind in kinds if kind in width]
