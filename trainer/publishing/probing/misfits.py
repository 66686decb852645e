"""Tell from a trial's figures what does not fit between trainer and model server (pure)."""

from typing import Final

from store.records import Record

# Of what an adapter changes, the share that a server may miss and still be said to apply it.
HALF: Final = 0.5


class Compared(Record, frozen=True, kw_only=True):
    """Hold log-probabilities of the same tokens by server and trainer, in nats.

    `…_base` and `…_adapter` (T,) are of ordinary text under the base model and under the trial's
    adapter. `…_sampled` (S,) are of tokens that the server sampled, as it reports them; `own_raw`
    are the trainer's for these before any setting is applied.
    """

    served_base: tuple[float, ...]
    own_base: tuple[float, ...]
    served_adapter: tuple[float, ...]
    own_adapter: tuple[float, ...]
    served_sampled: tuple[float, ...]
    own_sampled: tuple[float, ...]
    own_raw: tuple[float, ...]


def why_misfit(compared: Compared, tolerance: float) -> str | None:
    """Return what does not fit, and what to do, or None if all fits.

    `tolerance` bounds the mean difference, in nats a token, as in `publish.tolerance`.
    """
    base = _difference(compared.served_base, compared.own_base)
    if not base <= tolerance:
        return (
            f"the model server's base model and the trainer's differ by {base:.3g} nats a token,"
            f" more than publish.tolerance = {tolerance:g}: serve the model that PAWL_MODEL names,"
            " in the recipe's dtype"
        )
    adapter = _difference(compared.served_adapter, compared.own_adapter)
    if not adapter <= tolerance:
        missed = adapter / max(1e-9, _difference(compared.own_adapter, compared.own_base))
        what = "does not apply" if missed > HALF else "applies otherwise than the trainer"
        return (
            f"the model server loads an adapter that it {what} (its log-probabilities differ by"
            f" {adapter:.3g} nats a token, more than publish.tolerance = {tolerance:g}): does it"
            " support LoRA in the layers of lora.target_modules and lora.experts?"
        )
    sampled = _difference(compared.served_sampled, compared.own_sampled)
    if sampled <= tolerance:
        return None
    if _difference(compared.served_sampled, compared.own_raw) <= tolerance:
        return (
            "the model server reports log-probabilities as they were before temperature and the"
            " other settings: start vLLM with --logprobs-mode processed_logprobs"
        )
    return (
        f"the log-probabilities that the model server reports of what it samples differ from the"
        f" trainer's by {sampled:.3g} nats a token, more than publish.tolerance = {tolerance:g}:"
        " start vLLM with --logprobs-mode processed_logprobs, and without options that change what"
        " is sampled"
    )


def _difference(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    pairs = list(zip(left, right, strict=True))
    return sum(abs(one - other) for one, other in pairs) / len(pairs)
