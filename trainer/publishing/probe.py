"""Compare a model server's log-probabilities with the trainer's (pure).

A version is probed before it serves, and once its server was away (`compare_served`). The server
itself is tested before the first update, with an adapter that gets no traffic (`why_misfit`).
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

from store.records import Record


class ProbeRow(Record, frozen=True, kw_only=True):
    """A token sequence, and the trainer's log-probabilities of its last tokens.

    Shapes: `ids` (P + S,), `logprobs` (S,) in nats, at temperature one; `base_logprobs` are the
    base model's, () if unknown.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...] = ()


class ProbeResult(Record, frozen=True, kw_only=True):
    """Differences between log-probabilities over all probe tokens, in nats per token.

    `mean_difference` and `largest_difference` are of |served − trainer|; `base_difference` is the
    mean of |served − trainer| under the base model, 0 if unknown; `moved` is the largest |served by
    the version − served by the base model|. `tokens` counts the probe tokens.
    """

    mean_difference: float
    largest_difference: float
    base_difference: float
    moved: float
    tokens: int


def compare_served(
    rows: Sequence[ProbeRow], served: Sequence[Sequence[float]], base: Sequence[Sequence[float]]
) -> ProbeResult:
    """Compare a server's log-probabilities of `rows` with the trainer's.

    `served` and `base` are what the server gives under the version and under its base model.
    Shapes: each is (rows, S), the log-probabilities of each row's last tokens.
    """
    differences = _differences(chain(*served), chain(*(row.logprobs for row in rows)))
    moved = _differences(chain(*served), chain(*base))
    of_base = [
        difference
        for row, values in zip(rows, base, strict=True)
        if row.base_logprobs
        for difference in _differences(values, row.base_logprobs)
    ]
    return ProbeResult(
        mean_difference=sum(differences) / len(differences),
        largest_difference=max(differences),
        base_difference=sum(of_base) / len(of_base) if of_base else 0.0,
        moved=max(moved),
        tokens=len(differences),
    )


def rejection_reason(probe: ProbeResult, tolerance: float) -> str | None:
    """Return why a version must not serve, or None if it may.

    `tolerance` bounds the mean difference. A NaN difference is rejected too. If the values are
    exactly those of the base model, the version was not loaded: an update always moves the policy.
    """
    if not probe.mean_difference <= tolerance:
        return (
            "served log-probabilities differ from the trainer's by"
            f" {probe.mean_difference:.4f} nats per token in the mean, more than"
            f" publish.tolerance = {tolerance}: does the server use the same base model and dtype?"
        )
    if probe.moved == 0.0:
        return (
            "the server answers under the version's name exactly as under its base model's: it did"
            " not load the adapter"
        )
    return None


def why_another_base(probe: ProbeResult, tolerance: float) -> str | None:
    """Return why the server's base model is not the one trained on, or None if it may be."""
    if probe.base_difference <= tolerance:
        return None
    return (
        "its base model's log-probabilities differ from the trainer's by"
        f" {probe.base_difference:.4f} nats per token in the mean, more than publish.tolerance ="
        f" {tolerance}: serve the model that PAWL_MODEL names, in the recipe's dtype"
    )


# A server applies an adapter if it shows at least this share of the adapter's effect.
APPLIED_SHARE: Final = 0.85
# A server ignores an adapter if it shows at most this share of the adapter's effect.
IGNORED_SHARE: Final = 0.15


class Effects(Record, frozen=True, kw_only=True):
    """Log-probabilities of the same T tokens of ordinary text, by server and trainer, in nats.

    `served_…` (T,) are the server's and `own_…` (T,) the trainer's, under the base model (`…_base`)
    and under an adapter of the self-test (`…_adapter`).
    """

    served_base: tuple[float, ...]
    own_base: tuple[float, ...]
    served_adapter: tuple[float, ...]
    own_adapter: tuple[float, ...]

    @property
    def base_difference(self) -> float:
        """Return the mean |served − own| under the base model, in nats."""
        return _difference(self.served_base, self.own_base)

    @property
    def effect_share(self) -> float:
        """Return the share of the adapter's effect that the server shows: 1 if it fully applies it.

        It is the server's effect projected onto the trainer's, divided by the latter's length.
        """
        own = _effect(self.own_adapter, self.own_base)
        served = _effect(self.served_adapter, self.served_base)
        projection = sum(
            served_effect * own_effect
            for served_effect, own_effect in zip(served, own, strict=True)
        )
        return projection / sum(own_effect * own_effect for own_effect in own)

    @property
    def is_ignored(self) -> bool:
        """Return whether the server computes as if it had no adapter."""
        return abs(self.effect_share) <= IGNORED_SHARE


class Compared(Effects, frozen=True, kw_only=True):
    """Effects, and log-probabilities (S,) of tokens that the server sampled.

    `served_sampled` are those that the server reported; `own_sampled` and `own_raw` are the
    trainer's with and without the sampling settings.
    """

    served_sampled: tuple[float, ...]
    own_sampled: tuple[float, ...]
    own_raw: tuple[float, ...]


def why_misfit(compared: Compared, tolerance: float) -> str | None:
    """Return how server and trainer differ, and what to do about it, or None if they agree.

    `tolerance` (`publish.tolerance`) bounds each mean difference, in nats a token.
    """
    base = compared.base_difference
    if not base <= tolerance:
        return (
            f"the model server's base model and the trainer's differ by {base:.3g} nats a token,"
            f" more than publish.tolerance = {tolerance:g}: serve the model that PAWL_MODEL names,"
            " in the recipe's dtype"
        )
    if not APPLIED_SHARE <= compared.effect_share <= 1 / APPLIED_SHARE:
        fault = "does not apply" if compared.is_ignored else "applies differently from the trainer"
        return (
            f"the model server loads an adapter that it {fault} ({compared.effect_share:.0%} of its"
            " effect arrives): does it support LoRA in the layers of lora.target_modules?"
        )
    adapter = _difference(compared.served_adapter, compared.own_adapter)
    if not adapter <= tolerance:
        return (
            "the model server applies an adapter differently from the trainer (log-probabilities"
            f" differ by {adapter:.3g} nats a token, more than publish.tolerance = {tolerance:g}):"
            " does it compute in the recipe's dtype?"
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
        f"the log-probabilities that the model server reports of tokens it samples differ from the"
        f" trainer's by {sampled:.3g} nats a token, more than publish.tolerance = {tolerance:g}:"
        " start vLLM with --logprobs-mode processed_logprobs, and without options that change what"
        " is sampled"
    )


def _effect(adapter: tuple[float, ...], base: tuple[float, ...]) -> list[float]:
    return [after - before for after, before in zip(adapter, base, strict=True)]


def _difference(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    return sum(_differences(left, right)) / len(left)


def _differences(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(left, right, strict=True)]
