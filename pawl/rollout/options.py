"""Turn the options of `pawl rollout` into what they come to: agent, judge, policies, plan."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pawl.rollout.agents.agent import Agent
from pawl.rollout.agents.program import CommandAgent
from pawl.rollout.agents.warm import Function, WarmAgent, WarmWorker
from pawl.rollout.attempts import Job
from pawl.rollout.errors import RolloutError
from pawl.rollout.journal import Plan
from pawl.rollout.judges import AnswerJudge, CommandJudge, PythonJudge, RunJudge
from pawl.rollout.proxy_view import check_policy, versions_of
from pawl.rollout.tasks import Task, check_hidden, digest, parse_tasks
from store.records import Record, Split


class RolloutOptions(Record, frozen=True, kw_only=True):
    """Hold the options of `pawl rollout`, which the CLI's help explains."""

    tasks: Path
    url: str
    metrics_url: str
    command: str | None = None
    python: str | None = None
    interpreter: str | None = None
    samples: int = 1
    at_once: int = 16
    limit_s: float = 600.0
    judge: str | None = None
    judge_python: str | None = None
    judge_limit_s: float = 60.0
    answer: str | None = None
    hide: tuple[str, ...] = ()
    split: Split | None = None
    policy: str | None = None
    every_version: bool = False
    journal: Path | None = None
    again: bool = False
    summary: Path | None = None
    # The header that shows the proxy an API key; empty where it asks for none.
    key: Mapping[str, str] = {}
    # Whose that key must be; None: anybody's.
    tenant: str | None = None


def read_tasks(options: RolloutOptions) -> tuple[Task, ...]:
    """Return the tasks of the file, which have the fields that the options name.

    Raises:
        RolloutError: it cannot be read, a line of it is no task, or a field is missing.
    """
    path = options.tasks
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RolloutError(f"--tasks: {path} cannot be read: {error}") from error
    tasks = parse_tasks(text, str(path), options.answer)
    check_hidden(tasks, options.hide, str(path))
    return tasks


def judge_of(options: RolloutOptions, journal: Path) -> RunJudge:
    """Return what scores the runs; what a Python judge prints goes into a log beside the journal.

    Raises:
        RolloutError: there are several of them, or the program does not exist.
    """
    if sum(one is not None for one in (options.judge, options.judge_python, options.answer)) > 1:
        raise RolloutError("--judge, --judge-python and --answer all score a run: give one of them")
    if options.judge is not None:
        return CommandJudge(_words("--judge", options.judge), options.judge_limit_s)
    if options.judge_python is not None:
        function = Function(
            option="--judge-python",
            name=options.judge_python,
            log_file=journal.with_suffix(".judge.log"),
        )
        return PythonJudge(WarmWorker(function), options.judge_limit_s)
    return RunJudge() if options.answer is None else AnswerJudge(options.answer)


def agent_of(options: RolloutOptions, journal: Path) -> Agent:
    """Return what runs the agent; a Python agent's log lies beside the journal.

    Raises:
        RolloutError: there is no agent, or there are two, or the program does not exist.
    """
    if (options.command is None) == (options.python is None):
        raise RolloutError(
            'say what to run with --command "PROGRAM ARGUMENTS" or --python MODULE:FUNCTION, '
            "one of the two"
        )
    interpreter = _interpreter(options)
    if options.command is not None:
        return CommandAgent(_words("--command", options.command))
    assert options.python is not None
    function = Function(
        name=options.python,
        log_file=journal.with_suffix(".log"),
        model_is_told=options.policy is not None,
        interpreter=interpreter,
    )
    return WarmAgent(function)


def _interpreter(options: RolloutOptions) -> str:
    """Return the Python that runs the agent's function: this process's, unless another is named."""
    if options.interpreter is None:
        return sys.executable
    if options.python is None:
        raise RolloutError(
            "--interpreter is the Python of --python; name a program's own in --command"
        )
    path = shutil.which(options.interpreter)
    if path is None:
        raise RolloutError(
            f"--interpreter: {options.interpreter} is no program that can be run: name the Python "
            "that the agent's packages are installed in, such as .venv/bin/python"
        )
    # Not what a link leads to: through the link a Python knows its environment.
    return os.path.abspath(path)


def check_files(options: RolloutOptions, journal: Path) -> None:
    """Check that a rollout writes into no file that it reads, and writes two things into none.

    Raises:
        RolloutError: two of its files are one, or the journal is a folder.
    """
    if not journal.name:
        raise RolloutError(f"--journal: {journal} cannot be opened: it is a folder; name a file")
    files = [("--tasks", options.tasks), ("--journal", journal)]
    if options.python is not None:
        files.append(("the log of --python", journal.with_suffix(".log")))
    if options.judge_python is not None:
        files.append(("the log of --judge-python", journal.with_suffix(".judge.log")))
    if options.summary is not None:
        files.append(("--summary", options.summary))
    known: dict[str, str] = {}
    for what, path in files:
        other = known.setdefault(os.path.realpath(path), what)
        if other != what:
            raise RolloutError(
                f"{other} and {what} would be one file, {path}: name another for one of them"
            )


def _words(option: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise RolloutError(
            f"{option} cannot be split into words ({error}): quote it as in a shell"
        ) from error


def policies_of(
    options: RolloutOptions, models: frozenset[str], before: Plan | None
) -> tuple[str, ...]:
    """Return the models to ask for; a resumed rollout keeps the versions that it began with.

    Args:
        options: the options.
        models: the models that the proxy has.
        before: the plan of the journal, if it has one.

    Raises:
        RolloutError: the proxy has no such policy or version.
    """
    if options.policy is None:
        if options.every_version:
            raise RolloutError("--every-version needs --policy NAME: name the policy")
        return ("",)
    if not options.every_version:
        check_policy(options.policy, models)
        return (options.policy,)
    if "@" in options.policy:
        raise RolloutError(
            f"--every-version runs all versions: name the policy alone, not {options.policy}"
        )
    versions = versions_of(options.policy, models)
    if before is None:
        return versions
    if gone := [version for version in before.policies if version not in versions]:
        raise RolloutError(
            f"--every-version: {', '.join(gone)} is not loaded any more, and the journal has begun "
            "with it; name another --journal to begin anew"
        )
    return before.policies


def _split(options: RolloutOptions) -> Split | None:
    if options.every_version and options.split == "train":
        raise RolloutError("--every-version compares versions, and needs --split eval")
    return "eval" if options.every_version else options.split


def plan_of(options: RolloutOptions, tasks: tuple[Task, ...], policies: tuple[str, ...]) -> Plan:
    """Return what a journal must begin with for these options to go on with it."""
    agent = options.command or f"python {options.python}"
    judge = options.judge or (f"answer {options.answer}" if options.answer else "")
    if options.judge_python:
        judge = f"python {options.judge_python}"
    return Plan(
        tasks=digest(tasks),
        samples=options.samples,
        agent=agent,
        judge=judge,
        split=_split(options),
        policies=policies,
        hidden=tuple(sorted(set(options.hide))),
    )


def job_of(options: RolloutOptions, tasks: tuple[Task, ...], policies: tuple[str, ...]) -> Job:
    """Return what is run."""
    return Job(
        url=options.url,
        tasks=tasks,
        samples=options.samples,
        policies=policies,
        split=_split(options),
        limit_s=options.limit_s,
        at_once=options.at_once,
        hidden=frozenset(options.hide) | (set() if options.answer is None else {options.answer}),
    )


def base_address(url: str) -> str:
    """Return a proxy's address without `/v1` and a last slash, as `--url` may have them.

    Raises:
        RolloutError: it is no URL.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise RolloutError(
            f"--url: {url!r} is no http:// or https:// URL: give the address that `pawl proxy` or "
            "`pawl up` prints"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
