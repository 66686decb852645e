"""Check whether a model can be trained on merged prefixes: by its configuration, then tried."""

from typing import Any, Final

import structlog
import torch

from trainer.batches import Row, bare_row
from trainer.learners.kernels.tree_attention import NAME
from trainer.learners.scoring import score_rows

log = structlog.get_logger()

DEFAULT_ATTENTION: Final = "sdpa"
# Largest mean difference between merged and separate, in nats per token, by precision.
TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2}


def can_merge(model: Any) -> bool:
    """Prepare `model` for merged prefixes if that is possible; return whether it is."""
    why = why_separate(model)
    if why is not None:
        log.warning("prefixes_not_merged", reason=why)
    return why is None


def why_separate(model: Any) -> str | None:
    """Prepare `model` (a PEFT model) for merged prefixes, or return why that is impossible.

    Merged log-probabilities are compared with separate ones on a few rows. If they differ, or
    the configuration rules merging out, the model keeps its own attention.
    """
    why = _unsupported_reason(model)
    if why is None:
        attend(model, merge=True)
        why = _mismatch_reason(model)
    if why is not None:
        attend(model, merge=False)
    return why


def attend(model: Any, *, merge: bool) -> None:
    """Let the base of `model` attend along trees, or as it does by itself."""
    wanted = NAME if merge else DEFAULT_ATTENTION
    if model.config._attn_implementation != wanted:
        model.get_base_model().set_attn_implementation(wanted)


def _unsupported_reason(model: Any) -> str | None:
    """Return why the configuration rules merging out, or None: a tree needs arbitrary masks.

    That is: attention without a window, no state that runs along the sequence, and scores that
    are neither capped nor dropped.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    against = {
        "its attention cannot be replaced": not model.get_base_model()._supports_attention_backend,
        f"it has layers of {', '.join(others)}": others,
        f"its attention has a window of {window} tokens": window,
        "its attention scores are capped": getattr(config, "attn_logit_softcapping", None),
        "its attention has dropout": getattr(config, "attention_dropout", 0.0),
        "its LM head is no plain matrix": type(head) is not torch.nn.Linear
        or head.bias is not None,
    }
    return next((why for why, holds in against.items() if holds), None)


@torch.no_grad()
def _mismatch_reason(model: Any) -> str | None:
    """Return how far merged and separate log-probabilities differ, or None if they agree."""
    model.eval()
    rows = _trial_rows(model.config.get_text_config().vocab_size)
    merged = score_rows(model, rows).logprobs
    separate = score_rows(model, rows, merge=False).logprobs
    difference = float((merged - separate).abs().mean())
    if difference <= TOLERANCE[model.dtype]:
        return None
    return f"merged and separate differ by {difference:.2g} nats a token"


def _trial_rows(vocabulary: int) -> list[Row]:
    """Return three rows: two that share a prompt, and one that shares half of it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (32,), generator=generator).tolist()
    prompts = [ids[:12], ids[:12], ids[:6]]
    return [
        bare_row(index, prompt, ids[14 + 6 * index : 20 + 6 * index])
        for index, prompt in enumerate(prompts)
    ]
