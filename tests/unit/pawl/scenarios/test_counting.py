"""The facts of a summary, from what was counted."""

from datetime import UTC, datetime

import pytest

from pawl.scenarios.agent import Ran
from pawl.scenarios.ledger import (
    VersionRewards,
    curves_of,
    is_trained,
    policy_facts,
    trainable_share,
)
from pawl.scenarios.progress import Wave, largest_fall
from store.ids import new_id
from store.policy_table import PolicySpec
from store.read.evaluations import Evaluation
from store.read.stats import PolicyTotals
from store.records import UpdateRow
from store.versions import PolicyVersion

SPECS = (
    PolicySpec(name="writer", base="m"),
    PolicySpec(name="rewriter", base="m"),
    PolicySpec(name="checker", base="m", trained=False),
)


def counted(policy: str, calls: int, trainable: int) -> PolicyTotals:
    return PolicyTotals(
        policy=policy,
        calls=calls,
        trainable_calls=trainable,
        failed_calls=0,
        versions=3,
        trained_episodes=calls,
    )


def ran(**metrics: float) -> Ran:
    return Ran(task="t", sample=0, value="text", error=None if metrics else "e", metrics=metrics)


def test_calls_of_a_policy_that_is_not_trained_do_not_count_as_untrainable() -> None:
    totals = [counted("writer", 10, 9), counted("checker", 10, 0)]
    assert trainable_share(SPECS, totals) == 0.9
    assert trainable_share(SPECS, totals[1:]) is None


def test_a_policy_without_a_call_has_its_line() -> None:
    facts = policy_facts(SPECS, [counted("writer", 10, 9)])
    assert facts == {
        "writer": {"trained": True, "versions": 3, "trained_episodes": 10},
        "rewriter": {"trained": True, "versions": 0, "trained_episodes": 0},
        "checker": {"trained": False, "versions": 0, "trained_episodes": 0},
    }


def test_a_run_that_failed_lowers_a_waves_score() -> None:
    wave = Wave(1, 0, 4, "reward")
    assert (wave.success, wave.well_formed) == (0.0, None)
    wave.results += [ran(reward=1.0), ran()]
    assert (wave.success, wave.well_formed) == (0.5, None)
    wave.results += [ran(reward=1.0, well_formed=1.0), ran(reward=0.0, well_formed=0.0)]
    assert (wave.success, wave.well_formed) == (0.5, 0.5)


def test_an_agent_that_says_how_its_tool_ended_is_believed() -> None:
    wave = Wave(1, 0, 2, "success")
    for status in ("ok", "malformed"):
        value = {"tool": {"status": status}}
        wave.results.append(Ran(task="t", sample=0, value=value, error=None, metrics={}))
    assert wave.well_formed == 0.5


def update(policy: str, version: int | None, state: str = "done") -> UpdateRow:
    return UpdateRow(
        id=new_id(),
        policy=policy,
        parent_version=0,
        version=version,
        state=state,
        claimed_at=datetime.now(UTC),
        finished_at=None,
        metrics={},
    )


def serving(policy: str, version: int) -> PolicyVersion:
    return PolicyVersion(
        name=policy,
        version=version,
        state="serving",
        served_name=f"{policy}@{version}",
        adapter_path=None,
        update_id=None,
    )


@pytest.mark.parametrize(
    ("updates", "versions", "number", "trained"),
    [
        ([], [], 1, False),
        ([update("writer", 1)], [], 1, False),
        ([update("writer", 1)], [serving("writer", 1)], 1, True),
        ([update("writer", 1)], [serving("writer", 1)], 2, False),
        ([update("writer", None)], [serving("writer", 0)], 1, True),
        ([update("writer", 1), update("rewriter", 1)], [serving("writer", 1)], 1, False),
        ([update("rewriter", 1)], [serving("rewriter", 1)], 1, False),
        (
            [update("writer", 1), update("rewriter", None, "running")],
            [serving("writer", 1)],
            1,
            False,
        ),
    ],
)
def test_a_wave_is_over_with_the_leading_policys_update(
    updates: list[UpdateRow], versions: list[PolicyVersion], number: int, trained: bool
) -> None:
    assert is_trained(updates, versions, ("writer", "rewriter"), "writer", number) == trained


def point(policy: str, version: int, mean: float | None, scored: int = 4) -> Evaluation:
    return Evaluation(policy=policy, version=version, episodes=5, scored=scored, mean=mean)


def test_each_policy_has_a_curve_of_its_own() -> None:
    worked = [point("writer", 0, 0.25), point("rewriter", 1, 0.5), point("checker", 0, 0.3)]
    asked = [point("writer", 2, 0.75, 8), point("writer", 0, None, 0)]
    assert curves_of(["writer", "rewriter", "third"], worked, asked) == {
        "writer": [
            VersionRewards(version=0, reward=0.25, episodes=4),
            VersionRewards(version=2, held_out=0.75, held_out_episodes=8),
        ],
        "rewriter": [VersionRewards(version=1, reward=0.5, episodes=4)],
        "third": [],
    }


@pytest.mark.parametrize(
    ("scores", "fall"),
    [
        ([], 0),
        ([0.3], 0),
        ([0.3, 0.5, 0.9], 0),
        ([0.3, 0.9, 0.8, 0.95, 0.9], 0.1),
        ([0.5, 0.2, 0.6], 0.3),
    ],
)
def test_a_fall_is_from_the_best_before_it(scores: list[float], fall: float) -> None:
    assert largest_fall(scores) == pytest.approx(fall)
