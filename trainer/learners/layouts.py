"""Choose the layout in which a model's rows are computed.

A model gets the first layout that its configuration allows and that agrees with the reference
(`trainer.learners.scoring`, layout `whole`) on a few short test rows. Other layouts are passed
over with a warning.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import structlog
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from trainer.batches import LAYOUTS, STRETCH_MULTIPLE, Layout, Row, bare_row
from trainer.errors import LearnerError
from trainer.learners.budget import is_out_of_memory
from trainer.learners.processes import Processes
from trainer.learners.scoring import score_rows, set_attention

log = structlog.get_logger()

# Largest difference from the reference, by precision: of log-probabilities, in nats a token, and of
# the gradient, as a share of the reference's norm.
TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2}
# Keys of a configuration for the number of tokens that a layer's attention reaches back.
WINDOWS: Final = ("sliding_window", "attention_chunk_size")


class Difference(NamedTuple):
    """The difference between a layout and the reference.

    Attributes:
        logprobs: mean absolute difference of log-probabilities, in nats a token.
        norm: norm of the difference of gradients, as a share of the norm of the reference's.
        largest: largest entry of that difference, as a share of the reference's largest entry.

    The gradients are those of the sum of log-probabilities.
    """

    logprobs: float
    norm: float
    largest: float


def choose_layout(model: Any, processes: Processes, layouts: Sequence[Layout] = LAYOUTS) -> Layout:
    """Return the first of `layouts` that is correct for `model`, a PEFT model, and prepare it.

    The last layout is taken untested. A warning says why a layout was passed over. All processes
    choose the same layout.
    """
    for layout in layouts[:-1]:
        failure: Exception | None = None
        try:
            why = why_no_tree(model) if layout == "tree" else None
            if why is None:
                why = _mismatch_reason(model, layout)
        except Exception as error:  # The next layout may still work.
            why, failure = f"{type(error).__name__}: {error}"[:500], error
        processes.regroup(failure)
        why = next((each for each in processes.gather(why) if each is not None), None)
        if why is None:
            return layout
        if processes.rank == 0:
            log.warning("layout_passed_over", layout=layout, reason=why)
    set_attention(model, layouts[-1])
    return layouts[-1]


def why_no_tree(model: Any) -> str | None:
    """Return why a model's configuration rules out the layout `tree`, or None if it does not.

    A tree needs attention with any mask. Sliding windows, recurrent layers (such as Mamba's),
    capped scores, or attention that transformers cannot replace rule it out.
    """
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    objections = {
        "its attention cannot be replaced": not model.get_base_model()._supports_attention_backend,
        f"it has layers of {', '.join(others)}": others,
        f"its attention has a window of {window} tokens": window,
        "its attention scores are capped": getattr(config, "attn_logit_softcapping", None),
    }
    return next((why for why, holds in objections.items() if holds), None)


def _mismatch_reason(model: Any, layout: Layout) -> str | None:
    """Return a message about how a layout differs from the reference, or None if they agree."""
    difference = compare_layout(
        model, _test_rows(model.config.get_text_config().vocab_size), layout
    )
    limit = TOLERANCE[model.dtype]
    if not difference.logprobs <= limit:
        return f"it differs from whole rows by {difference.logprobs:.2g} nats a token"
    if not difference.norm <= limit:
        return f"its gradient differs from that of whole rows by a share of {difference.norm:.2g}"
    return None


@contextmanager
def _shorten_windows(config: Any) -> Iterator[None]:
    """Shorten attention windows within the block, so that the short test rows exceed them."""
    own = {name: getattr(config, name, None) for name in WINDOWS}
    longer = {
        name: window for name, window in own.items() if window and window > STRETCH_MULTIPLE // 2
    }
    try:
        for name in longer:
            setattr(config, name, STRETCH_MULTIPLE // 2)
        yield
    finally:
        for name, window in longer.items():
            setattr(config, name, window)


def compare_layout(model: Any, rows: Sequence[Row], layout: Layout) -> Difference:
    """Return how far a layout is from the layout `whole`.

    Afterwards `model` is prepared for the layout, and has no gradients.
    """
    with _shorten_windows(model.config.get_text_config()):
        set_attention(model, layout)
        logprobs, gradient = _logprobs_and_gradient(model, rows, layout)
        set_attention(model, "whole")
        reference, reference_gradient = _logprobs_and_gradient(model, rows, "whole")
        set_attention(model, layout)
    error = gradient - reference_gradient
    return Difference(
        logprobs=float((logprobs - reference).abs().mean()),
        norm=float(error.norm() / reference_gradient.norm()),
        largest=float(error.abs().max() / reference_gradient.abs().max()),
    )


@torch.enable_grad()
def _logprobs_and_gradient(
    model: Any, rows: Sequence[Row], layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the rows' log-probabilities (M,), and the flattened gradient of their sum."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logprobs = score_rows(model, rows, layout=layout).logprobs
    gradients = torch.autograd.grad(logprobs.sum(), trained)
    return logprobs.detach(), torch.cat([part.flatten().float() for part in gradients])


def layers_without_gradient(model: Any) -> frozenset[str]:
    """Return the paths, in the base, of adapted layers that get no gradient on test rows.

    Model code that reads a layer's weights directly bypasses the layer's adapter.

    Raises:
        LearnerError: the model cannot be computed or differentiated.
    """
    layers = {
        name: list(module.lora_B.parameters())
        for name, module in model.get_base_model().named_modules()
        # An adapter of embeddings has other parts.
        if isinstance(module, LoraLayer) and len(module.lora_B)
    }
    trained = [parameter for parameters in layers.values() for parameter in parameters]
    if not trained:
        return frozenset()
    set_attention(model, "whole")
    rows = _test_rows(model.config.get_text_config().vocab_size)
    try:
        with torch.enable_grad():
            logprobs = score_rows(model, rows, layout="whole").logprobs
            gradients = torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
    except (RuntimeError, TypeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        raise LearnerError(
            f"{type(model.get_base_model()).__name__} cannot be trained: {error}"[:500]
        ) from error
    with_gradient = {
        id(parameter)
        for parameter, gradient in zip(trained, gradients, strict=True)
        if gradient is not None and bool(gradient.any())
    }
    return frozenset(
        name
        for name, parameters in layers.items()
        if not any(id(parameter) in with_gradient for parameter in parameters)
    )


def _test_rows(vocabulary: int) -> list[Row]:
    """Return four rows: two share a prompt, one extends the first, and one has half the prompt.

    The shared prompt is longer than a stretch.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (STRETCH_MULTIPLE + 44,), generator=generator).tolist()
    shared = STRETCH_MULTIPLE + 12
    extended = [*ids[: shared + 6], *ids[shared + 26 :]]
    prompts = [ids[:shared], ids[:shared], extended, ids[: shared // 2]]
    sampled = [ids[start : start + 6] for start in range(shared, shared + 24, 6)]
    return [bare_row(index, *row) for index, row in enumerate(zip(prompts, sampled, strict=True))]
