"""`pawl judge`: have a program or a model score finished episodes."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pawl.commands.common import OfAgent, OfPolicy, Since, fail, with_flags
from store.records import Record


class JudgeFlags(Record, frozen=True, kw_only=True):
    """The arguments of `pawl judge`."""

    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: program to run once for each episode."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to ask instead of a program, with --rubric, --next-turn or --relative;"
            " default of the last two: the base model."
        ),
    ] = None
    next_turn: Annotated[
        bool,
        typer.Option(
            "--next-turn",
            help="Judge each call by the message of the user or the tool that came after it.",
        ),
    ] = False
    relative: Annotated[
        bool,
        typer.Option(
            "--relative", help="Judge the attempts at a task in one prompt, against each other."
        ),
    ] = False
    rubric: Annotated[
        Path | None, typer.Option(help="Text file that tells the model what good work is.")
    ] = None
    base_url: Annotated[
        str | None,
        typer.Option(help="Base URL of the model's server, with /v1; default: PAWL_UPSTREAM_URL."),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature at which the model is sampled.")
    ] = 0.0
    max_chars: Annotated[
        int,
        typer.Option(
            min=200, help="Characters of a transcript that the model is shown; the middle is cut."
        ),
    ] = 60_000
    tests: Annotated[
        bool, typer.Option("--tests", help="Score by the agent's last test command: 1 or 0.")
    ] = False
    test_command: Annotated[
        str | None, typer.Option(help="Regular expression of test commands; implies --tests.")
    ] = None
    git: Annotated[
        Path | None,
        typer.Option(
            help="Git checkout; score: the share of the agent's lines that were committed."
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            help="Name under which verdicts are stored; default: the judge, as it is named here."
        ),
    ] = None
    compare: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the episodes with a reward that are judged, too, to measure the judge.",
        ),
    ] = 0.25
    quiet: Annotated[
        float,
        typer.Option(min=0, help="Seconds without a call after which an episode is finished."),
    ] = 600.0
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes judged at the same time.")] = 4
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Time limit of one judgement, in seconds.")
    ] = 60.0
    attempts: Annotated[
        int, typer.Option(min=1, help="Failures after which an episode is not tried again.")
    ] = 5
    once: Annotated[
        bool,
        typer.Option("--once", help="End when no episode waits to be judged, for cron jobs."),
    ] = False
    again: Annotated[
        bool,
        typer.Option("--again", help="Judge again all episodes that could not be judged before."),
    ] = False
    since: Since = None
    agent: OfAgent = None
    policy: OfPolicy = None
    feedback_url: Annotated[
        str | None,
        typer.Option(help="URL that verdicts are posted to; default: /feedback at PAWL_LISTEN."),
    ] = None
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --once: print the result as JSON."),
    ] = False


@with_flags(JudgeFlags)
def judge(flags: JudgeFlags) -> None:
    """Judge finished episodes that nobody has scored, and post the verdicts as feedback.

    The judge is a program (after `--`), a model (--model with --rubric, --next-turn or
    --relative), the agent's own tests (--tests) or the next commit (--git). Its verdicts are
    opinions: they count where no fact was stated, and weigh by how far they agree with facts about
    other episodes (`pawl doctor`). Needs the database, and a proxy that takes the feedback. Runs
    until SIGTERM, or until nothing is left with --once.

    Status 1: at least one judgement failed. Status 2: the judge cannot run like this, or with
    --once: the model's server or the proxy does not answer. Status 130: Ctrl-C.
    """
    from pawl.judging.answers import JudgeError
    from pawl.judging.command import judge_episodes

    try:
        tally = asyncio.run(judge_episodes(flags))
    except JudgeError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if flags.as_json:
        print(json.dumps(tally))
    else:
        counts = ", ".join(
            f"{count} {outcome.replace('_', ' ')}" for outcome, count in tally.items()
        )
        print(f"episodes: {counts}", file=sys.stderr)
    if tally["failed"]:
        raise SystemExit(1)
