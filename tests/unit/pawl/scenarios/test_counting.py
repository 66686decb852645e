"""The facts of a summary, from what was counted."""

from pawl.scenarios.agent import Ran
from pawl.scenarios.counting import policy_facts, trainable_share
from pawl.scenarios.progress import Wave
from store.policy_table import PolicySpec
from store.read.stats import PolicyTotals

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
