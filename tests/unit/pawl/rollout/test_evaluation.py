"""An evaluation's pairs, its outcomes, its versions, and what is shown of it."""

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pawl.commands.evaluate import draw_report, render_report, versions_to_compare
from pawl.rollout.evaluation import EvaluationJob, EvaluationReport, Pairs
from pawl.rollout.journal import Ended, RunKey
from pawl.rollout.proxy import Models
from pawl.rollout.setup import Setup
from pawl.rollout.tasks import RolloutError, Task
from store.values.rewards import RewardRule, RewardTerm
from trainer.recipes.recipe import PublishOptions

NEW, OLD = "m@2", "m@1"


def a_job(**options: Any) -> EvaluationJob:
    setup = Setup(tasks=Path("t"), journal=Path("j"), url="", command="agent", answer="a")
    return EvaluationJob(
        **{"setup": setup, "new": NEW, "old": OLD, "rule": PublishOptions()} | options
    )


def tasks(count: int) -> list[Task]:
    names = [f"{('sums', 'texts')[number % 2]}/{number}" for number in range(count)]
    return [Task(name=name, fields={}) for name in names]


def scored(reward: float) -> Ended:
    statement = {"metric": "reward", "value": reward, "episode": "e"}
    return Ended(episode="e", outcome="done", seconds=1.0, statements=(statement,))


FAILED = Ended(episode="e", outcome="failed", error="exit status 3")
UNJUDGED = Ended(episode="e", outcome="unjudged", error="judge failed")


def evaluated(count: int, new: Ended, old: Ended, **options: Any) -> EvaluationReport:
    """What is found of so many tasks, if each run of a version comes to the same."""
    job = a_job(**options)
    pairs = Pairs(job, job.runs(tasks(count)))
    for key in job.runs(tasks(count)):
        if pairs.verdict is None:
            pairs.add(key, new if key.policy == NEW else old)
    return pairs.report()


@pytest.mark.parametrize(
    ("new", "old", "outcome", "reason"),
    [
        (scored(1.0), scored(0.0), "better", "scores at most"),
        (scored(0.5), scored(0.5), "better", "scores at most"),
        (scored(0.0), scored(1.0), "worse", "scores lower"),
        # A crash counts as the lowest reward, with either version.
        (FAILED, scored(1.0), "worse", ""),
        (scored(1.0), FAILED, "better", ""),
        (UNJUDGED, scored(1.0), "undecided", "no task has a scored run of both versions"),
    ],
)
def test_outcome_of_an_evaluation_follows_from_the_rewards_of_its_runs(
    new: Ended, old: Ended, outcome: str, reason: str
) -> None:
    found = evaluated(120, new, old)
    assert found.outcome == outcome
    assert reason in found.reason
    assert (found.tasks < found.planned) == (outcome != "undecided")


def test_reward_in_an_evaluation_is_the_recipes_sum_of_the_judges_metrics() -> None:
    good = RewardTerm(metric="answer", texts={"good": 1.0, "bad": 0.0})
    rule = RewardRule(terms=(good, RewardTerm(metric="cost", weight=-0.5)))

    def judged(answer: str, cost: float) -> Ended:
        said = {"answer": answer, "cost": cost}
        statements = tuple({"metric": key, "value": value} for key, value in said.items())
        return Ended(episode="e", outcome="done", seconds=1.0, statements=statements)

    found = evaluated(10, judged("good", 0.5), judged("bad", 0.0), rewards=rule)
    assert found.figures.difference == 0.75


def test_evaluation_that_uses_up_its_runs_is_undecided_and_says_if_evidence_shows_harm() -> None:
    found = evaluated(100, scored(0.46), scored(0.5), tries=1, most_runs=20)
    assert (found.outcome, found.planned, found.tasks) == ("undecided", 10, 10)
    assert found.points_to_harm
    assert "the evidence so far speaks against m@2" in found.reason
    seen = evaluated(10, scored(0.5), scored(0.5), tries=1)
    assert "the evidence so far does not speak against m@2" in seen.reason


def test_unscored_run_does_not_count_in_its_pair() -> None:
    job = a_job(tries=2)
    runs = job.runs(tasks(1))
    pairs = Pairs(job, runs)
    for key in runs:
        pairs.add(key, scored(1.0) if key.sample or key.policy == OLD else UNJUDGED)
    found = pairs.report()
    assert (found.compared, found.figures.new.unscored, found.figures.difference) == (1, 1, 0.0)


def test_both_versions_run_each_task_side_by_side_in_an_order_of_the_seed() -> None:
    runs = a_job(tries=3).runs(tasks(50))
    for start in range(0, len(runs), 6):
        [name] = {key.task for key in runs[start : start + 6]}
        assert set(runs[start : start + 6]) == {
            RunKey(name, number, version) for number in range(3) for version in (NEW, OLD)
        }
    assert {key.policy for key in runs[::2]} == {NEW, OLD}
    assert runs == a_job(tries=3).runs(tasks(50))
    assert runs[:60] == a_job(tries=3, most_runs=65).runs(tasks(50))
    assert runs != a_job(tries=3, seed=1).runs(tasks(50))
    with pytest.raises(RolloutError, match="--most-runs 5 does not suffice"):
        a_job(tries=3, most_runs=5).runs(tasks(50))


def test_verdict_does_not_depend_on_the_order_in_which_runs_end() -> None:
    chance = random.Random(1)
    job = a_job(tries=2)
    runs = job.runs(tasks(200))
    ends = {key: scored(float(chance.random() < 0.5 + 0.3 * (key.policy == NEW))) for key in runs}
    found = []
    for _ in range(5):
        pairs = Pairs(job, runs)
        for key in chance.sample(runs, len(runs)):
            pairs.add(key, ends[key])
        found.append(pairs.report())
    assert found[0].outcome == "better"
    assert all(one.figures == found[0].figures and one.tasks == found[0].tasks for one in found)


def test_at_most_5_percent_of_versions_are_called_worse_than_themselves() -> None:
    chance = random.Random(0)
    outcomes = []
    for _ in range(1000):
        job = a_job(tries=2, rule=PublishOptions(margin=0.001))
        pairs = Pairs(job, runs := job.runs(tasks(60)))
        rates = {key.task: chance.random() for key in runs}
        for key in runs:
            if pairs.verdict is None:
                pairs.add(key, scored(float(chance.random() < rates[key.task])))
        outcomes.append(pairs.verdict and pairs.verdict.kind)
    # With hardly any margin "no worse" is as wrong as "worse".
    assert outcomes.count("worse") <= 50
    assert outcomes.count("better") <= 50


LISTED = Models(frozenset({"m", "m@2", "m@5", "m@10", "n@11"}), ("m@5", "n@11"))


@pytest.mark.parametrize(
    ("policy", "against", "expected"),
    [
        ("m", None, ("m@10", "m@5")),
        ("m@2", None, ("m@2", "m@5")),
        ("m@5", None, ("m@5", "m@0")),
        ("m@5", "@2", ("m@5", "m@2")),
        ("m@0", "2", ("m@0", "m@2")),
        ("n", None, ("n@11", "n@0")),
        (None, None, "say which policy to evaluate; the proxy serves m@5, n@11"),
        ("x", None, "no version of 'x' is loaded; the proxy's models are m, m@10"),
        ("m@5", "m@5", "m@5 would be compared with itself"),
        ("m@5", "n@1", "--against n@1: write a version of m"),
        ("m@5", "@x", "--against @x: write a version of m"),
    ],
)
def test_evaluation_compares_named_versions_or_by_default_newest_and_serving(
    policy: str | None, against: str | None, expected: tuple[str, str] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(RolloutError, match=re.escape(expected)):
            versions_to_compare(LISTED, policy, against)
    else:
        assert versions_to_compare(LISTED, policy, against) == expected


def shown(evaluation: EvaluationReport) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(render_report(evaluation))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def test_evaluation_report_names_task_families_and_crashed_tasks() -> None:
    job = a_job(tries=1)
    runs = job.runs(tasks(8))
    pairs = Pairs(job, runs)
    for key in runs:
        is_crash = key == RunKey("texts/3", 0, NEW)
        pairs.add(key, FAILED if is_crash else scored(float(key.policy == NEW)))
    text = shown(pairs.report())
    rows = [line.split() for line in text.splitlines()]
    assert rows.pop(0) == [NEW, "against", OLD]
    assert rows[0] == ["tasks", "@2", "@1", "difference", "interval", "failed", "unscored"]
    assert rows[1][:5] == ["sums", "4", "1.000", "0.000", "+1.000"]
    assert rows[2][:5] == ["texts", "4", "0.750", "0.000", "+0.750"]
    assert rows[3][:6] == ["all", "tasks", "8", "0.875", "0.000", "+0.875"]
    assert rows[3][-2:] == ["1/0", "0/0"]
    assert "  texts/3 with m@2: exit status 3 (1 run)" in text
    assert "8 of 8 tasks, 1 try each; 16 runs" in text
    assert "m@2: undecided (every planned task was run; the evidence" in text


def test_evaluation_report_is_drawn_as_png_and_survives_json(tmp_path: Path) -> None:
    found = evaluated(120, scored(1.0), scored(0.0))
    assert msgspec.json.decode(msgspec.json.encode(found), type=EvaluationReport) == found
    assert [look.tasks for look in found.looks][-1] == found.tasks
    draw_report(tmp_path / "p.png", found)
    draw_report(tmp_path / "none.png", evaluated(1, UNJUDGED, UNJUDGED))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
