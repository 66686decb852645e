"""`pawl evaluate` as a process: beside a stand-in for the proxy, and against a real one."""

import os
import re
import signal
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from controller.evaluating import evaluate_candidate
from pawl.commands.evaluate import EvaluateFlags, run_evaluation
from pawl.rollout.evaluation import EvaluationReport
from pawl.rollout.proxy import Models, ProxyClient
from pawl.rollout.tasks import RolloutError
from store.read.gates import VersionInRole
from tests.integration.conftest import Proxy
from tests.support.proxy.versions import version
from tests.support.rollouts import Runner
from tests.support.servers.fake_proxy import FakeProxy
from tests.support.waiting import until
from trainer.recipes.recipe import PublishOptions, Recipe

AGENT = ("--", sys.executable, "agent.py")
OPTIONS = ("--answer", "a", "--tries", "2", "-k", "2", "--json", "result.json")
# Version 2 alone says "echo m@2" if it is asked which it is.
RIGHT_WITH_2 = {"q": "which version", "a": "echo m@2"}
TASKS = [{"id": f"t/{number}", **RIGHT_WITH_2} for number in range(40)]


@pytest.fixture
def runner(fake: FakeProxy, tmp_path: Path) -> Runner:
    return Runner(
        tmp_path, fake.url, TASKS, "evaluate", "m", journal="tasks.m@2-1.evaluation.jsonl"
    )


def result(runner: Runner) -> EvaluationReport:
    return msgspec.json.decode((runner.folder / "result.json").read_bytes(), type=EvaluationReport)


def tasks_by_model(fake: FakeProxy) -> dict[str, Counter[str]]:
    asked: dict[str, Counter[str]] = {}
    for call, body in zip(fake.calls, fake.asked, strict=True):
        asked.setdefault(body["model"], Counter())[call["task"]] += 1
    return asked


async def test_better_version_is_known_before_all_tasks_are_run(
    fake: FakeProxy, runner: Runner
) -> None:
    outcome = await runner.run(*OPTIONS, "--picture", "p.png", *AGENT)
    assert (outcome.status, outcome.errors.count("pawl:")) == (0, 0), outcome.errors
    found = result(runner)
    assert (found.new, found.old, found.outcome) == ("m@2", "m@1", "better")
    assert found.tasks < found.planned == 40
    assert (found.figures.new.mean, found.figures.old.mean) == (1.0, 0.0)
    assert "(scores at most 0.05 lower than m@1)" in outcome.summary["text"]
    assert (runner.folder / "p.png").stat().st_size > 10_000
    assert {call["split"] for call in fake.calls} == {"eval"}
    # The result does not change when it is asked for again, and nobody is asked anything.
    calls = len(fake.calls)
    assert (await runner.run(*OPTIONS, *AGENT)).status == 0
    assert (len(fake.calls), result(runner).figures) == (calls, found.figures)


async def test_worse_and_undecided_evaluations_have_distinct_exit_statuses(
    fake: FakeProxy, runner: Runner
) -> None:
    runner.command = ("evaluate", "m@1", "--against", "@2")
    runner.journal = runner.folder / "tasks.m@1-2.evaluation.jsonl"
    assert (await runner.run(*OPTIONS, *AGENT)).status == 1
    assert result(runner).outcome == "worse"
    journal = ("--journal", "other.jsonl")
    outcome = await runner.run(*OPTIONS, *journal, "--most-runs", "12", *AGENT)
    assert outcome.status == 3
    found = result(runner)
    assert (found.outcome, found.planned, found.runs) == ("undecided", 3, 12)
    assert found.points_to_harm


async def test_killed_evaluation_goes_on_and_both_versions_run_the_same_tasks(
    fake: FakeProxy, runner: Runner
) -> None:
    runner.write([{"id": f"t/{number}", "q": "q", "a": f"{number % 2}"} for number in range(8)])
    options = (*OPTIONS, "--margin", "0.01", *AGENT)
    process = await runner.start(*options)
    await runner.until_settled(6)
    process.kill()
    await process.communicate()
    process = await runner.start(*options)
    await runner.until_settled(14)
    os.kill(process.pid, signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130
    assert result(runner).outcome == "stopped"
    outcome = await runner.run(*options)
    assert outcome.status == 3, outcome.errors
    found = result(runner)
    assert (found.runs, found.tasks, found.figures.new.episodes) == (32, 8, 16)
    keys = [key for key, _ in runner.settled()]
    assert len(set(keys)) == len(keys) == 32
    # Each run has a reward, those that were killed were made again.
    assert len(fake.rewards()) == 32
    counts = tasks_by_model(fake)
    assert counts.keys() == {"m@1", "m@2"}
    assert all(counts[model].keys() == {f"t/{number}" for number in range(8)} for model in counts)


async def test_task_that_crashes_the_agent_is_named(runner: Runner) -> None:
    runner.write([*TASKS[:3], {"id": "crash/1", "do": "exit", **RIGHT_WITH_2}])
    outcome = await runner.run(*OPTIONS, *AGENT)
    assert outcome.status == 3
    text = outcome.summary["text"]
    assert "crash/1 with m@1: exit status 3 (2 runs)" in text
    assert "crash/1 with m@2: exit status 3 (2 runs)" in text
    found = result(runner)
    assert (found.figures.new.failed, found.figures.old.failed) == (2, 2)
    # A task that no version can do says nothing about either.
    assert (found.compared, found.figures.difference) == (3, 1.0)


async def test_version_unloaded_during_evaluation_is_not_called_worse(
    fake: FakeProxy, runner: Runner
) -> None:
    runner.write([{"id": f"t/{number}", "do": "exit late", **RIGHT_WITH_2} for number in range(4)])
    process = await runner.start(*OPTIONS, *AGENT)
    await until(lambda: len(fake.calls) >= 2)
    fake.models.remove("m@2")
    out, errors = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert "the proxy has no 'm@2' any more: it was unloaded meanwhile" in errors.decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": None}, "say what to run with `-- PROGRAM ARGUMENTS`"),
        (
            {"command": None, "python": "agent:answer", "answer": None},
            "say with --answer FIELD or --judge COMMAND",
        ),
        ({"margin": 2.0}, "--range: margin must be smaller"),
        ({"against": "@9"}, "the proxy has no 'm@9'"),
        ({"command": ["no-such-program"]}, "the program 'no-such-program' is not found"),
    ],
)
async def test_evaluate_refuses_an_unusable_option(
    fake: FakeProxy,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(runner.folder)
    usual = {
        "policy": "m",
        "tasks": Path("tasks.jsonl"),
        "url": fake.url,
        "command": ["cat"],
        "answer": "a",
    }
    with pytest.raises(RolloutError, match=re.escape(message)):
        await run_evaluation(EvaluateFlags(**(usual | options)))


async def test_refused_evaluation_ends_with_status_2(runner: Runner) -> None:
    outcome = await runner.run("--answer", "a")
    assert outcome.status == 2
    assert "pawl: say what to run with `-- PROGRAM ARGUMENTS`" in outcome.errors


@pytest.mark.parametrize(
    ("says", "hours", "verdict"),
    [("recipe", 12.0, "better"), ("setting", 12.0, "better"), ("recipe", 1e-9, None)],
)
async def test_controller_has_a_candidate_evaluated_until_its_time_is_over(
    fake: FakeProxy,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    hours: float,
    verdict: str | None,
    says: str,
) -> None:
    monkeypatch.chdir(runner.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(runner.folder))
    options: dict[str, Any] = {
        "tasks": "tasks.jsonl",
        "python": "agent:answer",
        "answer": "a",
        "tries": 2,
    }
    if says == "recipe":
        options["url"] = fake.url
    else:
        monkeypatch.setenv("PAWL_LISTEN", fake.url.removeprefix("http://"))
    rule = Recipe.model_validate({"publish": {"mode": "evaluated"}, "evaluation": options})
    # In a database that is made anew, versions of other updates have the same names.
    for runs in (1, 2):
        new, old = (
            VersionInRole(
                version=msgspec.structs.replace(
                    version(number, state), update_id=uuid4(), gate=rule.judged_by
                ),
                since=datetime.now(UTC),
            )
            for number, state in ((2, "loaded"), (1, "serving"))
        )
        comparison = await evaluate_candidate(new, old, PublishOptions(decide_within_h=hours))
        assert (comparison.verdict and comparison.verdict.kind) == verdict
        journals = list(runner.folder.glob("pawl-evaluations-*/m@2-1-*.jsonl"))
        assert len(journals) == runs
        # Few runs at once: live traffic comes first.
        assert journals[0].read_bytes().count(b"run_abandoned") <= 2


async def test_proxy_client_reads_the_serving_version_from_the_list_of_models(proxy: Proxy) -> None:
    models = await ProxyClient(proxy.session, proxy.url).models()
    assert models == Models(frozenset({"m"}), ("m@0",))
