"""Training rows: the recorded tokens of one transition with its credit (pure).

Nothing is ever tokenised again: ids and log-probabilities are the store's (DESIGN §3.4).
"""

from collections.abc import Iterable

from store.records import Record
from store.tokens import unpack_ids, unpack_logprobs
from trainer.credit import TransitionCredit


class Row(Record, frozen=True, kw_only=True):
    """One transition in training form.

    Shapes: `prompt_ids` (P,), `sampled_ids` and `sampled_logprobs` (S,), S ≥ 1. `weight`
    is its share of the update's loss.
    """

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    temperature: float
    advantage: float
    weight: float
    version: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids, (P + S,)."""
        return self.prompt_ids + self.sampled_ids


def training_rows(credited: Iterable[TransitionCredit]) -> list[Row]:
    """Rows of the transitions that carry loss."""
    return [_row(credit) for credit in credited if credit.reason is None]


def _row(credit: TransitionCredit) -> Row:
    assert credit.advantage is not None
    tokens = credit.call.tokens
    return Row(
        prompt_ids=tuple(unpack_ids(tokens.prompt_ids)),
        sampled_ids=tuple(unpack_ids(tokens.sampled_ids)),
        sampled_logprobs=tuple(unpack_logprobs(tokens.sampled_logprobs)),
        temperature=float(credit.call.sampling["temperature"]),
        advantage=credit.advantage,
        weight=credit.weight,
        version=credit.call.policy_version or 0,
    )
