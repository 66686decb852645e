"""Training rows: the recorded tokens of one transition with its credit (pure).

Nothing is ever tokenised again: ids and log-probabilities are the store's (DESIGN §3.4).
"""

from collections.abc import Iterable
from uuid import UUID

from store.records import Record
from store.sampling import used_temperature
from store.tokens import unpack_ids, unpack_logprobs
from trainer.credit.assign import TransitionCredit

# A transition within an update: its episode, and its call's place there.
RowKey = tuple[UUID, int]


class Row(Record, frozen=True, kw_only=True):
    """One transition in training form.

    Shapes: `prompt_ids` (P,), `sampled_ids` and `sampled_logprobs` (S,), S ≥ 1. `weight`
    is its share of the update's loss. `position` is its call's place among its episode's
    calls, and `r_total` what credit assigned to it before any baseline.
    """

    episode_id: UUID
    agent: str
    position: int

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    temperature: float
    r_total: float
    advantage: float
    weight: float
    version: int

    @property
    def key(self) -> RowKey:
        """What tells a row from the others of its update."""
        return self.episode_id, self.position

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids, (P + S,)."""
        return self.prompt_ids + self.sampled_ids

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model must read to score the sampled ids: all but the last, (P + S − 1,)."""
        return self.ids[:-1]


def training_rows(credited: Iterable[TransitionCredit]) -> list[Row]:
    """Rows of the transitions that carry loss."""
    return [_row(credit) for credit in credited if credit.reason is None]


def _row(credit: TransitionCredit) -> Row:
    assert credit.advantage is not None
    assert credit.r_total is not None
    # Not always what was asked for, and that is what an earlier Pawl recorded.
    temperature = used_temperature(credit.call.sampling["temperature"])
    assert temperature
    tokens = credit.call.tokens
    return Row(
        episode_id=credit.episode_id,
        agent=credit.call.agent,
        position=credit.position,
        prompt_ids=tuple(unpack_ids(tokens.prompt_ids)),
        sampled_ids=tuple(unpack_ids(tokens.sampled_ids)),
        sampled_logprobs=tuple(unpack_logprobs(tokens.sampled_logprobs)),
        temperature=temperature,
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        version=credit.call.policy_version or 0,
    )
