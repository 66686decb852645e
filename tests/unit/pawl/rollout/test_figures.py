"""The figures: every run counts once, in its wave and for its version."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.figures import WAVES, Figures
from pawl.rollout.journal import Finished, Outcome, outline
from pawl.rollout.proxy_view import read_metrics, versions_of


def run(outcome: Outcome, reward: float | None = None, error: str | None = None) -> Finished:
    said = () if reward is None else ({"metric": "reward", "value": reward, "episode": "e"},)
    return Finished(episode="e", outcome=outcome, error=error, version="m@1", statements=said)


REWARDS = st.integers(0, 64).map(lambda part: part / 64)
RUNS = st.lists(
    st.builds(run, st.sampled_from(get_args(Outcome)), st.none() | REWARDS), max_size=60
)


@given(RUNS, st.integers(1, 60))
def test_waves_and_versions_add_up(runs: list[Finished], planned: int) -> None:
    figures = Figures(planned)
    for number, one in enumerate(runs):
        figures.add("m@1" if number % 2 else "", outline(one))
    counted = [one for one in runs if one.outcome != "abandoned"]
    assert figures.all.runs == len(counted) == sum(wave.runs for wave in figures.waves)
    assert figures.abandoned == len(runs) - len(counted)
    assert sum(tally.runs for tally in figures.policies.values()) == len(counted)
    if len(counted) <= planned:
        assert len(figures.waves) <= WAVES
    rewards = [one.statements[0]["value"] for one in counted if one.statements]
    assert (
        figures.all.reward is None
        or min(rewards) - 1e-9 <= figures.all.reward <= max(rewards) + 1e-9
    )


def test_a_failure_is_no_reward_of_zero() -> None:
    figures = Figures(4)
    for one in (run("done", 1.0), run("done", 0.0), run("failed", error="exit status 3")):
        figures.add("", outline(one))
    figures.add("", outline(run("unjudged", error="judge failed")))
    summary = figures.summary(1.26)
    assert summary["reward"] == 0.5
    assert summary["rewarded"] == 2
    assert summary["success"] == 0.75
    assert summary["errors"] == {"exit status 3": 1, "judge failed": 1}
    assert summary["complete"]
    assert summary["seconds"] == 1.3
    assert summary["waves"][0]["versions"] == ["m@1"]
    assert (summary["failed"], summary["unjudged"], summary["policies"]) == (1, 1, {})


def test_the_interval_is_wilsons_for_right_and_wrong_and_students_else() -> None:
    binary, graded = Figures(2), Figures(2)
    for first, second in ((binary, 1.0), (graded, 0.5)):
        first.add("", outline(run("done", 1.0)))
        first.add("", outline(run("done", second)))
    assert binary.summary(0)["high"] == 1.0
    assert graded.summary(0)["high"] > 1.0


def test_nothing_done_has_no_mean() -> None:
    summary = Figures(3).summary(0.0)
    assert (summary["reward"], summary["success"], summary["low"]) == (None, None, None)
    assert not summary["complete"]


def test_metrics_are_read_from_the_proxys_page() -> None:
    page = (
        'pawl_calls_total{policy="m",status="200"} 3.0\n'
        'pawl_calls_total{policy="n",status="500"} 4.0\n'
        'pawl_calls_without_logprobs_total{x="y"} 9.0\n'
        'pawl_serving_version{policy="m"} 12.0\n'
    )
    assert read_metrics(page) == (7.0, {"m": "m@12"})
    assert read_metrics("") == (None, {})


def test_versions_are_those_that_are_loaded_and_the_base() -> None:
    models = frozenset({"m", "m@3", "m@12", "m@x", "other@1"})
    assert versions_of("m", models) == ("m@0", "m@3", "m@12")
    assert versions_of("other", models) == ("other@0", "other@1")
