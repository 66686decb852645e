"""An update's plan: its rows, what becomes of each episode, what is left out, and its figures."""

import math
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.claims import Claim
from store.ids import new_id
from store.records import Episode, Group, Tokens, ToolCall, ToolEvent, ToolStatus, TransitionRow
from tests.support.records import tokens
from tests.support.stored import episode, said, transition
from trainer.batches import PLAIN_SOFTMAX, Row, bare_row, with_logprobs
from trainer.recipes.recipe import CreditOptions, Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import (
    LeftOut,
    Plan,
    calls_with_grammar,
    effective_share,
    episodes_too_far,
    plan_update,
    refused_corrections,
    rows_to_compute,
    shares_by_episode,
    smallest_share_metric,
    taught_plan,
    versions_to_ask,
)

DEFAULT = Recipe()


def claimed(*groups: tuple[Episode, ...], **changes: Any) -> Claim:
    """A claim of policy `m` with these groups, each of a task of its own."""
    made = tuple(Group(task=f"t{number}", episodes=own) for number, own in enumerate(groups))
    claim = Claim(update_id=new_id(), policy="m", parent_version=0, groups=made)
    return msgspec.structs.replace(claim, **changes)


def of_calls(reward: float | None, *calls: TransitionRow) -> Episode:
    return msgspec.structs.replace(episode(reward), calls=calls)


def rewarded(*rewards: float | None) -> tuple[Episode, ...]:
    return tuple(map(episode, rewards))


def recipe(**tables: Any) -> Recipe:
    return Recipe.model_validate(tables)


def test_each_episode_is_accounted_for_once() -> None:
    greedy = transition(trainable=False, reason="greedy")
    broken = transition(http_status=400, trainable=False, reason="incomplete")
    group = (
        *(episode(1.0), episode(0.0, 3), of_calls(None, transition(), greedy)),
        *(of_calls(None, transition(), broken), of_calls(0.5, greedy)),
    )
    found = plan_update(claimed(group), DEFAULT)
    assert [(one.trained, one.reason) for one in found.outcomes] == [
        (True, None),
        (True, None),
        (False, "unscored"),
        # It is the lowest.
        (True, None),
        (False, "no_trainable_call"),
    ]
    assert len(found.rows) == 5
    assert found.metrics["dropped"] == {"unscored": 1, "no_trainable_call": 1}


def test_mean_reward_of_an_update_is_reported_by_task_family() -> None:
    claim = claimed(rewarded(1.0, 0.0), rewarded(0.5), rewarded(0.0, None), rewarded(None))
    tasks = ("shipping/1", "own\x1fshipping/2", "account-3", "billing/4")
    groups = tuple(
        msgspec.structs.replace(group, task=task)
        for group, task in zip(claim.groups, tasks, strict=True)
    )
    found = plan_update(msgspec.structs.replace(claim, groups=groups), DEFAULT).metrics
    assert found["families"] == {
        "shipping": {"reward": 0.5, "episodes": 3},
        "account": {"reward": 0.0, "episodes": 1},
    }


def test_mean_reward_and_air_of_an_update_are_means_over_episodes() -> None:
    found = plan_update(claimed((episode(1.0, 5), episode(0.0, 1))), DEFAULT).metrics
    assert (found["reward_mean"], found["air_mean"]) == (0.5, 0.0)
    assert found["trained_episodes"] == 2


def test_calls_of_another_policy_are_not_trained_and_make_no_episode_stale() -> None:
    """A checker that stays on the base model, beside a writer that is trained."""
    checker = transition(policy="base", policy_version=0, agent="checker")
    made = of_calls(1.0, transition(policy_version=5), checker)
    other = of_calls(0.0, transition(policy_version=5))
    found = plan_update(claimed((made, other), parent_version=5, oldest_version=3), DEFAULT)
    assert [(one.reason, one.weight) for one in found.credited] == [
        (None, 0.5),
        ("other_policy", 0.0),
        (None, 0.5),
    ]
    assert [row.version for row in found.rows] == [5, 5]


# The step


def with_tool(reward: float, status: ToolStatus) -> Episode:
    call = transition(
        tool_calls=(ToolCall(id="c1", name="search", arguments="{}"),),
        tool_events=(ToolEvent(id=new_id(), tool_id="c1", name="search", status=status),),
    )
    return of_calls(reward, call)


IMITATES = {"learner": "sft", "credit": {"baseline": "none", "normalisation": "none"}}
OF_ONE = {"group_size": 1, "groups": 8}


@pytest.mark.parametrize(
    ("groups", "tables", "share"),
    [
        pytest.param(
            # Of the family's six rewards four are 1: 1/3 above the mean, by a spread of √(2/9).
            [rewarded(1.0, 0.0), rewarded(1.0, 1.0), rewarded(0.0, 1.0)],
            {"claim": {"groups": 1}},
            ((4 + 2 * (1 / 3) / (2 / 9) ** 0.5) / 8) ** 0.5,
            id="a group that earned the same counts for its advantage over its family",
        ),
        pytest.param(
            [rewarded(1.0, 0.0), rewarded(1.0, 0.5), rewarded(0.0, 0.5)],
            {"claim": {"groups": 1, "group_size": 4}},
            1.0,
            id="no more than a whole step",
        ),
        pytest.param(
            # λ 0.2 against a spread of 0.5, and half of that as the reward is half a success.
            [(with_tool(0.5, "ok"), with_tool(0.5, "malformed")) for _ in range(8)],
            {"claim": {"groups": 8, "group_size": 2}},
            0.2**0.5,
            id="groups whose tools alone differ count for what AIR weighs",
        ),
        pytest.param(
            [rewarded(1.0, 0.0, None)],
            {"claim": OF_ONE},
            (2 / 8) ** 0.5,
            id="each single episode counts",
        ),
        pytest.param(
            [rewarded(1.0, 0.0), rewarded(0.0), rewarded(1.0)],
            IMITATES | {"claim": {"groups": 8}},
            (2 / 8) ** 0.5,
            id="of imitation each group with a success counts",
        ),
        pytest.param(
            [rewarded(1.0, 0.0, 1.0)],
            IMITATES | {"claim": OF_ONE},
            (2 / 8) ** 0.5,
            id="of imitation of groups of one each success counts",
        ),
    ],
)
def test_step_of_an_update_is_the_root_of_the_share_of_episodes_with_a_signal(
    groups: list[tuple[Episode, ...]], tables: dict[str, Any], share: float
) -> None:
    found = plan_update(claimed(*groups), recipe(**tables))
    assert found.step_share == found.metrics["step_share"] == pytest.approx(share)
    assert found.rows


# The rule of claims


@pytest.mark.parametrize(
    ("credit", "needed"),
    [
        ({}, True),
        ({"baseline": "leave_one_out"}, True),
        ({"baseline": "none"}, False),
        ({"assignment": "call"}, False),
    ],
)
def test_claim_needs_spread_only_if_a_groups_episodes_are_compared(
    credit: dict[str, Any], needed: bool
) -> None:
    rule = claim_rule(Recipe(credit=CreditOptions.model_validate(credit)), "m")
    assert rule.needs_spread is needed


def test_an_update_that_imitates_waits_for_successes_and_not_for_spread() -> None:
    rule = claim_rule(recipe(**IMITATES, sft={"min_reward": 0.5}), "m")
    assert (rule.needs_spread, rule.least_reward) == (False, 0.5)
    assert claim_rule(DEFAULT, "m").least_reward is None
    # What single calls were given is not known in the store.
    credit = IMITATES["credit"] | {"assignment": "call"}  # type: ignore[operator]
    assert claim_rule(recipe(learner="sft", credit=credit), "m").least_reward is None


# A teacher

TAUGHT = {
    "learner": "distill",
    "claim": {"group_size": 1, "groups": 4},
    "credit": {"baseline": "none", "normalisation": "none"},
    "teacher": {"url": "http://h/v1", "model": "big", "finished_after_s": 5.0},
}


def test_episodes_of_a_recipe_with_a_teacher_need_no_reward() -> None:
    stale = of_calls(1.0, transition(policy_version=1))
    greedy = of_calls(None, transition(trainable=False, reason="greedy"))
    fresh = [of_calls(reward, transition(policy_version=4)) for reward in (None, 0.25, 1.0)]
    claim = claimed((*fresh, stale, greedy), oldest_version=3, parent_version=4)
    found = plan_update(claim, recipe(**TAUGHT))
    reasons = [one.reason for one in found.outcomes]
    assert reasons == [None, None, None, "stale", "no_trainable_call"]
    assert [row.weight for row in found.rows] == pytest.approx([1 / 3] * 3)
    # The rewards that there are: to be watched, and for nothing else.
    assert found.metrics["reward_mean"] == pytest.approx(2.25 / 3)
    assert [one.advantage for one in found.credited] == [None] * 5
    assert found.step_share == pytest.approx((3 / 4) ** 0.5)


def test_advantage_of_a_token_is_the_teachers_less_the_sampled_log_probability() -> None:
    calls = [transition(tokens=tokens([1, 2], [3, 4], -1.0)), transition()]
    plan = plan_update(claimed((of_calls(None, *calls),)), recipe(**TAUGHT))
    first, second = plan.rows
    found = taught_plan(plan, {first.key: [-3.0, -0.5], second.key: [-1.0, -2.5]})
    assert [row.token_advantages for row in found.rows] == [(-2.0, 0.5), (0.0, -1.5)]
    # KL(policy ‖ teacher): the mean over the four tokens of log policy − log teacher.
    assert found.metrics["teacher_kl"] == pytest.approx((2.0 - 0.5 + 0.0 + 1.5) / 4)


def test_update_with_a_teacher_waits_only_until_episodes_are_silent() -> None:
    credit = TAUGHT["credit"] | {"assignment": "call"}  # type: ignore[operator]
    rule = claim_rule(recipe(**TAUGHT | {"credit": credit}), "m")
    assert (rule.finished_after_s, rule.group_size) == (5.0, 1)
    assert (rule.failed_after_s, rule.call_rewards_after_s) == (None, None)
    assert claim_rule(DEFAULT, "m").finished_after_s is None


# Imitation


def imitated(*groups: tuple[Episode, ...], **sft: Any) -> Plan:
    return plan_update(claimed(*groups), recipe(**IMITATES, sft=sft))


def untrainable(reason: str, **changes: Any) -> TransitionRow:
    return transition(trainable=False, reason=reason, sampling={"temperature": 0.0}, **changes)


def test_each_episode_is_imitated_or_says_why_not() -> None:
    found = imitated(rewarded(1.0, 0.0, 2.0, None), most_per_task=1)
    assert [one.reason for one in found.outcomes] == ["not_best", "low_reward", None, "unscored"]
    assert found.metrics["dropped"] == {"not_best": 1, "low_reward": 1, "unscored": 1}
    assert (found.metrics["episodes"], found.metrics["trained_episodes"]) == (4, 1)
    assert [row.weight for row in found.rows] == [1.0]


def test_group_of_only_successes_is_imitated() -> None:
    """No episode is compared with another: there is no spread to wait for."""
    found = imitated(rewarded(1.0, 1.0), rewarded(1.0))
    assert [one.trained for one in found.outcomes] == [True] * 3
    assert sum(row.weight for row in found.rows) == pytest.approx(1.0)


def test_update_that_imitates_has_no_rows_without_a_success() -> None:
    found = imitated(rewarded(0.0, 0.9))
    assert found.rows == ()
    assert found.metrics["dropped"] == {"low_reward": 2}


def test_imitated_rows_have_the_plain_softmax_despite_their_settings() -> None:
    cold = transition(sampling={"temperature": 0.3, "top_p": 0.5})
    found = imitated((of_calls(1.0, cold, silent(0)),))
    assert [(row.distribution, row.sampled_logprobs) for row in found.rows] == [
        (PLAIN_SOFTMAX, ())
    ] * 2
    assert not any(row.recomputed for row in found.rows)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (untrainable("greedy"), None),
        (untrainable("constrained_sampling"), None),
        (untrainable("reshaped_distribution"), "reshaped_distribution"),
        (untrainable("unreadable_sampling"), "unreadable_sampling"),
        (untrainable("not_text"), "not_text"),
        # A checker's, an outside model's, and a fixed policy's are nobody's of this policy.
        (untrainable("greedy", policy="checker"), "greedy"),
        (untrainable("greedy", policy=None, policy_version=None), "greedy"),
        (untrainable("greedy", policy_version=None), "greedy"),
        (untrainable("greedy", tokens=Tokens()), "greedy"),
    ],
)
def test_call_is_imitated_if_only_its_ratio_is_unknown(
    call: TransitionRow, reason: str | None
) -> None:
    found = imitated((of_calls(1.0, call, transition()),))
    assert [credit.reason for credit in found.credited] == [reason, None]
    assert len(found.rows) == (2 if reason is None else 1)
    compared = claimed((of_calls(1.0, call), episode(0.0)))
    assert len(plan_update(compared, DEFAULT).rows) == 1


def test_a_greedy_call_of_a_version_that_is_too_old_is_stale() -> None:
    made = of_calls(1.0, untrainable("greedy", policy_version=2))
    claim = claimed((made,), parent_version=9, oldest_version=3)
    assert [one.reason for one in plan_update(claim, recipe(**IMITATES)).outcomes] == ["stale"]


# Calls that cannot be computed


def silent(version: int | None, **changes: Any) -> TransitionRow:
    """A call without log-probabilities."""
    none = msgspec.structs.replace(tokens([1, 2], [3, 4]), sampled_logprobs=b"")
    return transition(policy_version=version, tokens=none, **changes)


def held(**changes: Any) -> TransitionRow:
    """A call that a grammar held."""
    sampling = {"temperature": 1.0, "grammar": {"kind": "regex", "text": "a+"}}
    return transition(sampling=sampling, **changes)


def beside_a_failure(*calls: TransitionRow) -> Claim:
    first = of_calls(1.0, *calls)
    group = Group(task="t", episodes=(first, episode(0.0)), earlier=(first,))
    return claimed(parent_version=3, groups=(group,))


def test_only_calls_to_be_trained_are_recomputed_or_replayed() -> None:
    unread: dict[str, Any] = {"trainable": False, "reason": "greedy"}
    asked = beside_a_failure(
        silent(1), silent(None), silent(2, **unread), silent(4, policy="other"),
        transition(policy_version=5),
    )  # fmt: skip
    assert versions_to_ask(asked) == {0, 1}
    asked = beside_a_failure(held(), transition(), held(**unread), held(policy="other"))
    assert calls_with_grammar(asked) == [asked.groups[0].episodes[0].calls[0]]


def test_calls_of_a_lost_version_are_not_trained_and_all_others_are() -> None:
    asked = beside_a_failure(silent(1), silent(2), transition(policy_version=1))
    left_out = LeftOut(lost_versions={1: "version_gone"})
    found = plan_update(asked, DEFAULT, left_out)
    assert [credit.reason for credit in found.credited] == ["version_gone", None, None, None]
    assert sum(credit.weight for credit in found.credited) == 1.0
    assert [row.recomputed for row in found.rows] == [True, False, False]
    assert found.metrics["lost_versions"] == {"1": "version_gone"}
    assert LeftOut.from_metrics(found.metrics) == left_out


def test_calls_outside_their_grammar_are_not_trained_and_all_others_are() -> None:
    asked = beside_a_failure(held(), held(), transition())
    odd = {str(asked.groups[0].episodes[0].calls[0].id): "outside_grammar"}
    found = plan_update(asked, DEFAULT, LeftOut(unreplayed_calls=odd))
    assert [credit.reason for credit in found.credited] == ["outside_grammar", None, None, None]
    assert sum(credit.weight for credit in found.credited) == 1.0
    assert found.metrics["unreplayed_calls"] == odd
    assert [row.distribution.grammar is None for row in found.rows] == [False, True, True]


@pytest.mark.parametrize("call", [silent(1), held()])
def test_update_records_no_left_out_calls_if_none_is_left_out(call: TransitionRow) -> None:
    asked = beside_a_failure(call)
    found = plan_update(asked, DEFAULT)
    assert not found.metrics.keys() & set(LeftOut.__struct_fields__)
    assert LeftOut.from_metrics(found.metrics) == LeftOut()
    other = LeftOut(lost_versions={7: "version_gone"}, unreplayed_calls={"other": "outside"})
    assert plan_update(asked, DEFAULT, other).rows == found.rows


def test_missing_logprobs_are_computed_by_version_newest_first_and_given_to_their_rows() -> None:
    rows = plan_update(beside_a_failure(silent(1), silent(2), silent(1)), DEFAULT).rows
    waiting = rows_to_compute(rows)
    assert [(version, len(own)) for version, own in waiting.items()] == [(2, 1), (1, 2)]
    values = {row.key: [-float(row.position)] * 2 for own in waiting.values() for row in own}
    made = with_logprobs(rows, values)
    assert [row.sampled_logprobs for row in made[:3]] == [(0.0, 0.0), (-1.0, -1.0), (-2.0, -2.0)]
    assert made[3:] == list(rows[3:])
    assert rows_to_compute(made) == {}


# Staleness is measured: what an episode's tokens are worth under the policy

CAP = 2.0
LOG_RATIOS = st.lists(st.floats(min_value=-500.0, max_value=1e6), min_size=1, max_size=50)


@given(LOG_RATIOS, st.sampled_from([CAP, 1e308]))
def test_effective_sample_size_is_the_same_share_in_any_order_and_length(
    log_ratios: list[float], cap: float
) -> None:
    share = effective_share(log_ratios, cap)
    assert 0.0 <= share <= 1.0 + 1e-9
    assert effective_share(log_ratios[::-1], cap) == share
    assert effective_share(log_ratios * 7, cap) == pytest.approx(share)


@given(st.lists(st.floats(min_value=-5.0, max_value=5.0), min_size=1, max_size=50))
def test_effective_sample_size_is_kishs_of_the_capped_ratios_of_the_loss(
    log_ratios: list[float],
) -> None:
    weights = [min(CAP, math.exp(one)) for one in log_ratios]
    wanted = sum(weights) ** 2 / (len(weights) * sum(one**2 for one in weights))
    assert effective_share(log_ratios, CAP) == pytest.approx(wanted)


def test_single_token_of_a_long_episode_does_not_decide_its_effective_sample_size() -> None:
    assert effective_share([0.0] * 999 + [50.0], CAP) > 0.99
    assert effective_share([0.0, -50.0, -50.0], CAP) == pytest.approx(1 / 3)


def test_effective_sample_size_of_tokens_that_the_policy_never_gives_is_0() -> None:
    assert effective_share([-math.inf, -2000.0], CAP) == 0.0


def test_effective_share_that_is_nan_is_left_to_the_learner() -> None:
    share = effective_share([0.0, math.nan], CAP)
    assert math.isnan(share)
    assert episodes_too_far({UUID(int=1): share}, 0.5) == {}
    assert smallest_share_metric({UUID(int=1): share}) == {}


def row(number: int, version: int, *logprobs: float) -> Row:
    made = bare_row(number, [1, 2], range(len(logprobs)))
    return msgspec.structs.replace(made, version=version, sampled_logprobs=logprobs)


def test_effective_share_is_measured_over_a_whole_episode() -> None:
    rows = [row(2, 2, -1.0, -1.0), row(2, 1, -1.0), row(3, 4, -2.0)]
    found = shares_by_episode(rows, [[-1.0, -60.0], [-60.0], [-2.0]], CAP)
    assert found == {UUID(int=2): pytest.approx(1 / 3), UUID(int=3): 1.0}
    assert set(episodes_too_far(found, 0.5)) == {UUID(int=2)}
    assert episodes_too_far(found, 0.0) == {}
    assert smallest_share_metric(found) == {"smallest_effective_sample": pytest.approx(1 / 3)}


def test_off_policy_episode_counts_in_the_baseline_and_is_not_trained() -> None:
    gone = of_calls(1.0, transition(), transition(trainable=False, reason="greedy"))
    held = claimed((gone, episode(1.0), episode(0.0)), parent_version=3)
    found = plan_update(held, DEFAULT, LeftOut(off_policy_episodes={gone.id: 0.25}))
    whole = plan_update(held, DEFAULT)
    assert [one.reason for one in found.outcomes] == ["off_policy", None, None]
    assert [one.reason for one in found.credited] == ["off_policy", "off_policy", None, None]
    kept = [one for one in whole.rows if one.episode_id != gone.id]
    assert [one.advantage for one in found.rows] == [one.advantage for one in kept]
    assert sum(one.weight for one in found.rows) == pytest.approx(1.0)
    assert found.metrics["dropped"] == {"off_policy": 1}
    assert LeftOut.from_metrics(found.metrics).off_policy_episodes == {gone.id: 0.25}
    assert "off_policy_episodes" not in whole.metrics


def test_dropped_group_gives_no_signal() -> None:
    first, second = rewarded(1.0, 0.0)
    far = LeftOut(off_policy_episodes={first.id: 0.1, second.id: 0.2})
    held = claimed((first, second), rewarded(1.0, 0.0))
    found = plan_update(held, recipe(claim={"groups": 4, "group_size": 2}), far)
    assert (found.step_share, len(found.rows)) == (0.5, 2)


# Corrections


def corrected(value: float, *calls: TransitionRow, **changes: Any) -> Episode:
    """An episode whose last call has a correction."""
    made = list(calls or [transition()])
    stated = said(0.0, correction="right")
    made[-1] = msgspec.structs.replace(made[-1], feedback=(stated,), **changes)
    return of_calls(value, *made)


def test_correction_adds_a_row_of_its_call() -> None:
    call = transition(tokens=tokens([7, 8], [9], -0.5), policy_version=2)
    claim = claimed((episode(1.0), corrected(0.0, transition(), call)), parent_version=5)
    replies = {str(call.id): (40, 41, 2)}
    found = plan_update(claim, DEFAULT, replies=replies)
    *ordinary, row = found.rows
    assert [one.is_correction for one in (*ordinary, row)] == [False, False, False, True]
    assert (list(row.prompt_ids), list(row.sampled_ids)) == ([7, 8], [40, 41, 2])
    assert (row.sampled_logprobs, row.distribution, row.advantage) == ((), PLAIN_SOFTMAX, 1.0)
    assert (row.weight, row.version) == (pytest.approx(1 / 3), 2)
    assert math.isclose(math.fsum(one.weight for one in found.rows), 1.0)
    assert len({one.key for one in found.rows}) == 4
    assert (found.metrics["corrections"], found.metrics["corrections_refused"]) == (1, {})
    # What is measured of the policy is measured of what it sampled.
    assert rows_to_compute(found.rows) == {}
    without = plan_update(claimed((episode(1.0), episode(0.0, 2))), DEFAULT).metrics
    assert found.metrics["trained_episodes"] == without["trained_episodes"] == 2


@pytest.mark.parametrize("equal", ["episode", "token", "call", "auto"])
def test_corrections_of_an_episode_share_the_weight_of_an_added_episode(equal: str) -> None:
    stated = (said(0.0, correction="right"),)
    calls = [transition(feedback=stated, tokens=tokens([1], [2] * size)) for size in (3, 9, 27)]
    claim = claimed((episode(1.0), of_calls(0.0, *calls)))
    rule = recipe(credit={"equal_weight": equal})
    found = plan_update(claim, rule, replies={str(call.id): (5,) for call in calls})
    plain = plan_update(claim, rule, LeftOut(refused_corrections={str(c.id): "" for c in calls}))
    shares = [row.weight for row in found.rows if row.is_correction]
    assert shares == [pytest.approx(1 / 9)] * 3
    for one, other in zip(found.credited, plain.credited, strict=True):
        assert (one.advantage, one.weight) == (other.advantage, pytest.approx(other.weight * 2 / 3))
    assert math.isclose(math.fsum(row.weight for row in found.rows), 1.0)


def test_episode_trained_only_by_its_correction_counts_fully_in_the_signal() -> None:
    lone = corrected(0.5, transition(trainable=False, reason="greedy"))
    [call] = lone.calls
    found = plan_update(claimed((lone, episode(0.5))), DEFAULT, replies={str(call.id): (3,)})
    assert (found.outcomes[0].trained, found.outcomes[0].reason) == (True, None)
    alike = plan_update(claimed((episode(0.5), episode(0.5))), DEFAULT)
    assert found.metrics["signal_episodes"] > alike.metrics["signal_episodes"]
    assert found.metrics["signal_episodes"] >= 1.0


@pytest.mark.parametrize(("earlier", "is_alike"), [((), True), ((0.0,), True), ((1.0,), False)])
def test_group_members_with_equal_rewards_count_in_the_signal_by_their_advantage(
    earlier: tuple[float, ...], is_alike: bool
) -> None:
    others = rewarded(0.3, 0.0, 0.3, 0.0)
    group = Group(task="a/1", episodes=rewarded(0.0, 0.0), earlier=rewarded(*earlier))
    mixed = Group(task="a/2", episodes=others)
    found = plan_update(claimed(groups=(group, mixed)), DEFAULT)
    members = {one.id for one in group.episodes}
    own = [one.comparison for one in found.credited if one.episode_id in members]
    assert [one.is_alike for one in own if one is not None] == [is_alike] * 2
    weighed = sum(min(1.0, abs(one.value)) if is_alike else 1.0 for one in own if one is not None)
    assert 0.0 < weighed <= 2.0
    assert found.metrics["signal_episodes"] == pytest.approx(4.0 + weighed)


def test_impossible_correction_is_refused_with_its_reason() -> None:
    two = msgspec.structs.replace(episode(0.0, 2), feedback=(said(0.0, correction="right"),))
    theirs = corrected(0.0, policy="other")
    fixed = corrected(0.0, policy_version=None)
    odd = corrected(0.0, trainable=False, reason="no_token_ids")
    greedy = corrected(0.0, trainable=False, reason="greedy")
    claim = claimed((two, theirs, fixed, odd, greedy, corrected(1.0)))
    wanted = {
        str(two.id): "several_calls",
        str(theirs.calls[0].id): "other_policy",
        str(fixed.calls[0].id): "other_policy",
        str(odd.calls[0].id): "no_token_ids",
    }
    assert refused_corrections(claim, DEFAULT) == wanted
    ppo = refused_corrections(claim, DEFAULT.model_copy(update={"learner": "ppo"}))
    assert set(ppo.values()) == {"several_calls", "ppo"}
    left_out = LeftOut(refused_corrections=wanted)
    found = plan_update(claim, DEFAULT, left_out)
    assert found.metrics["corrections"] == 2
    counted = {"several_calls": 1, "other_policy": 2, "no_token_ids": 1}
    assert found.metrics["corrections_refused"] == counted
    assert LeftOut.from_metrics(found.metrics) == left_out


def test_imitated_row_shares_its_weight_with_its_correction() -> None:
    claim = claimed((corrected(1.0),))
    call = claim.groups[0].episodes[0].calls[0]
    found = plan_update(claim, recipe(**IMITATES), replies={str(call.id): (3, 4)})
    assert [(row.is_correction, row.weight) for row in found.rows] == [(False, 0.5), (True, 0.5)]
