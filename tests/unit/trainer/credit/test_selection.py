"""Which episodes are kept for imitation: by their reward, by task, and none that cannot be."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from store.values.rewards import Reward
from tests.support.lines import credited, episode
from trainer.credit.advantages import EpisodeReturns
from trainer.credit.assign import LOW_REWARD, NOT_BEST, withhold_not_best
from trainer.credit.returns import (
    CallAccount,
    ClaimScale,
    EpisodeAccount,
    call_returns,
    mean_return,
)
from trainer.recipes.recipe import CreditOptions, SftOptions

RULE = CreditOptions(baseline="none", normalisation="none")


def account(reward: float | None, **changes: Any) -> EpisodeAccount:
    call = CallAccount(agent="a", trainable=True, reason=None, sampled=2)
    fields: dict[str, Any] = {
        "task": "t",
        "failed": False,
        "earned": Reward(value=reward),
        "calls": (call,),
    }
    return EpisodeAccount(**(fields | changes))


def of_groups(*groups: list[EpisodeAccount]) -> list[EpisodeReturns]:
    return [
        EpisodeReturns(
            group=number, account=one, returns=tuple(call_returns(one, RULE, ClaimScale()))
        )
        for number, group in enumerate(groups)
        for one in group
    ]


def reasons(made: list[EpisodeReturns], **rule: Any) -> list[str | None]:
    return [one.account.withheld for one in withhold_not_best(made, SftOptions(**rule))]


untrainable = CallAccount(agent="a", trainable=False, reason="not_text", sampled=2)
accounts = st.builds(
    account,
    st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    failed=st.booleans(),
    withheld=st.none() | st.just("stale"),
    excluded=st.none() | st.just("doubtful"),
    earlier=st.booleans(),
    calls=st.lists(
        st.sampled_from([account(1.0).calls[0], untrainable]), min_size=1, max_size=3
    ).map(tuple),
)
some_groups = st.lists(st.lists(accounts, min_size=1, max_size=6), min_size=1, max_size=4)
rules = st.builds(
    SftOptions,
    min_reward=st.sampled_from([-0.5, 0.5, 1.0]),
    most_per_task=st.none() | st.integers(1, 4),
)


def may_be_kept(one: EpisodeReturns) -> bool:
    own = one.account
    is_out = own.excluded is not None or own.earlier or own.withheld is not None
    is_scored = mean_return(one.returns).r_final is not None
    return not is_out and is_scored and any(call.trainable for call in own.calls)


def final(one: EpisodeReturns) -> float:
    found = mean_return(one.returns).r_final
    assert found is not None
    return found


def total(one: EpisodeReturns) -> float:
    return final(one) + mean_return(one.returns).r_air


@given(some_groups, rules)
def test_best_episodes_of_each_task_are_imitated(
    groups: list[list[EpisodeAccount]], rule: SftOptions
) -> None:
    before = of_groups(*groups)
    after = withhold_not_best(before, rule)
    for number in range(len(groups)):
        pairs = [(b, a) for b, a in zip(before, after, strict=True) if b.group == number]
        could = [(b, a) for b, a in pairs if may_be_kept(b)]
        reach = [(b, a) for b, a in could if final(b) >= rule.min_reward]
        kept = [b for b, a in could if a.account.withheld is None]
        most = len(reach) if rule.most_per_task is None else rule.most_per_task
        assert len(kept) == min(most, len(reach))
        left = [b for b, a in reach if a.account.withheld is not None]
        assert all(total(one) >= total(other) for one in kept for other in left)


@given(some_groups, rules)
def test_selection_for_imitation_changes_only_the_episodes_that_it_withholds(
    groups: list[list[EpisodeAccount]], rule: SftOptions
) -> None:
    before = of_groups(*groups)
    after = withhold_not_best(before, rule)
    assert [one.returns for one in after] == [one.returns for one in before]
    for one, other in zip(before, after, strict=True):
        if one.account.withheld == other.account.withheld:
            assert one == other
        else:
            assert may_be_kept(one)
            assert other.account.withheld in (LOW_REWARD, NOT_BEST)


@given(some_groups, rules)
def test_episode_that_cannot_be_imitated_displaces_no_other(
    groups: list[list[EpisodeAccount]], rule: SftOptions
) -> None:
    before = of_groups(*groups)
    could = [may_be_kept(one) for one in before]
    found = [one for one, may in zip(withhold_not_best(before, rule), could, strict=True) if may]
    assert found == withhold_not_best(
        [one for one, may in zip(before, could, strict=True) if may], rule
    )


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6))
def test_lower_min_reward_and_more_per_task_withhold_no_episode_imitated_before(
    rewards: list[float],
) -> None:
    made = of_groups([account(reward) for reward in rewards])
    for least, less in pairwise([1.0, 0.5, 0.0]):
        for most in (1, 2, None):
            narrow = reasons(made, min_reward=least, most_per_task=most)
            wide = reasons(made, min_reward=less, most_per_task=None)
            assert not [1 for n, w in zip(narrow, wide, strict=True) if n is None and w is not None]


def test_later_episodes_of_equal_returns_are_imitated() -> None:
    made = of_groups([account(1.0), account(1.0), account(1.0)], [account(1.0)])
    assert reasons(made, most_per_task=2) == [NOT_BEST, None, None, None]


def test_episode_with_a_reward_just_below_min_reward_is_not_imitated() -> None:
    assert reasons(of_groups([account(0.99), account(1.0)])) == [LOW_REWARD, None]


def test_pawl_credit_gives_weight_only_to_the_episodes_to_imitate() -> None:
    lines = [episode("bad", 0.0), episode("good", 1.0), episode("nobody")]
    found = credited(lines, SftOptions(), baseline="none", normalisation="none")
    assert {key: (line.weight, line.reason) for (key, _), line in found.items()} == {
        "bad": (0.0, LOW_REWARD),
        "good": (1.0, None),
        "nobody": (0.0, "unscored"),
    }
