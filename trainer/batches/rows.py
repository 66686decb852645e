"""Give a transition its training form: the recorded tokens with their credit (pure).

Nothing is tokenised again: token ids and log-probabilities are the recorded ones.
"""

from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

from store.records import Record
from store.values.distribution import Distribution, distribution_of
from store.values.tokens import unpack_ids, unpack_logprobs
from trainer.credit.assign import TransitionCredit

# The key of a transition within an update: its episode's id and its call's index there.
RowKey = tuple[UUID, int]
PLAIN: Final = Distribution(temperature=1.0)


class Row(Record, frozen=True, kw_only=True):
    """Hold one transition in training form.

    Shapes: `prompt_ids` (P,), `sampled_ids` and `sampled_logprobs` (S,) in nats, S ≥ 1. `position`
    is the call's index among its episode's calls, `version` the policy version that sampled it,
    and `distribution` what the server made of that policy's logits before it sampled.
    `r_total` is its return, `advantage` the return against the baseline, `weight` its share of
    the update's loss. The server did not give the log-probabilities of a `recomputed` row: they
    are empty until the version that sampled it has computed them. They stay empty where nothing
    is compared with them (`imitated_rows`). `masks` (S,) are the packed masks
    of a grammar, if one held it (`trainer.learners.replay.grammars`); the learner makes them.
    """

    episode_id: UUID
    agent: str
    position: int

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    distribution: Distribution
    r_total: float
    advantage: float
    weight: float
    version: int
    recomputed: bool = False
    masks: tuple[bytes, ...] = ()

    @property
    def key(self) -> RowKey:
        """Return the key that identifies a row within its update."""
        return self.episode_id, self.position

    @property
    def ids(self) -> tuple[int, ...]:
        """Return prompt and sampled ids, (P + S,)."""
        return self.prompt_ids + self.sampled_ids

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return all ids but the last, (P + S − 1,): the ids that the model reads to score."""
        return self.ids[:-1]


def bare_row(number: int, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Row:
    """Return a row of no episode, of which nothing but log-probabilities is computed."""
    return Row(
        episode_id=UUID(int=number),
        agent="",
        position=0,
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(sampled_ids),
        sampled_logprobs=(0.0,) * len(sampled_ids),
        distribution=PLAIN,
        r_total=0.0,
        advantage=0.0,
        weight=0.0,
        version=0,
    )


def training_rows(credited: Iterable[TransitionCredit]) -> list[Row]:
    """Return the rows of the transitions that are trained (those without a `reason`)."""
    return [
        _row(
            credit,
            distribution_of(credit.call.sampling),
            tuple(unpack_logprobs(credit.call.tokens.sampled_logprobs)),
            recomputed=not credit.call.tokens.sampled_logprobs,
        )
        for credit in credited
        if credit.reason is None
    ]


def imitated_rows(credited: Iterable[TransitionCredit]) -> list[Row]:
    """Return the rows of the transitions that are trained, for a learner that imitates them.

    Its loss is of the plain softmax, whatever they were sampled from.
    """
    return [_row(credit, PLAIN, ()) for credit in credited if credit.reason is None]


def _row(
    credit: TransitionCredit,
    distribution: Distribution,
    logprobs: tuple[float, ...],
    *,
    recomputed: bool = False,
) -> Row:
    assert credit.advantage is not None
    assert credit.r_total is not None
    tokens = credit.call.tokens
    return Row(
        episode_id=credit.episode_id,
        agent=credit.call.agent,
        position=credit.position,
        prompt_ids=tuple(unpack_ids(tokens.prompt_ids)),
        sampled_ids=tuple(unpack_ids(tokens.sampled_ids)),
        sampled_logprobs=logprobs,
        distribution=distribution,
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        version=credit.call.policy_version or 0,
        recomputed=recomputed,
    )
