"""Define `pawl judge`, which has a program or a model score finished episodes."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pawl.commands.common import OfAgent, OfPolicy, Since, fail, with_zone

if TYPE_CHECKING:
    from pawl.judging.command import JudgeOptions

Command = Annotated[
    list[str] | None,
    typer.Argument(
        help="After `--`: program to run once for each episode; default: PAWL_JUDGE_COMMAND."
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Model to ask instead of a program; needs --rubric.")
]
Rubric = Annotated[
    Path | None, typer.Option(help="Text file that tells the model what good work is.")
]
BaseUrl = Annotated[
    str | None,
    typer.Option(help="Base URL of the model's server, with /v1; default: PAWL_UPSTREAM_URL."),
]
Temperature = Annotated[
    float, typer.Option(min=0, help="Temperature at which the model is sampled.")
]
MaxChars = Annotated[
    int,
    typer.Option(
        min=200, help="Characters of a transcript that the model is shown; the middle is cut."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        help="Name under which verdicts are stored; default: the command, or model and rubric."
    ),
]
Quiet = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Seconds without a call after which an episode is finished; "
        "default: PAWL_JUDGE_QUIET_S, or 600.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, help="Episodes judged at the same time; default: PAWL_JUDGE_CONCURRENCY, or 4."
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="Time limit of one judgement, in seconds; default: PAWL_JUDGE_TIMEOUT_S, or 60.",
    ),
]
Attempts = Annotated[
    int, typer.Option(min=1, help="Failures after which an episode is not tried again.")
]
Once = Annotated[
    bool,
    typer.Option("--once", help="End when no episode waits to be judged, as cron jobs need it."),
]
Again = Annotated[
    bool,
    typer.Option("--again", help="Judge again all episodes that could not be judged before."),
]
FeedbackUrl = Annotated[
    str | None,
    typer.Option(help="URL that verdicts are posted to; default: /feedback at PAWL_LISTEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="With --once: print the counts as JSON.")]


def judge(
    command: Command = None,
    model: Model = None,
    rubric: Rubric = None,
    base_url: BaseUrl = None,
    temperature: Temperature = 0.0,
    max_chars: MaxChars = 60_000,
    name: Name = None,
    quiet: Quiet = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    attempts: Attempts = 5,
    once: Once = False,
    again: Again = False,
    since: Since = None,
    agent: OfAgent = None,
    policy: OfPolicy = None,
    feedback_url: FeedbackUrl = None,
    as_json: AsJson = False,
) -> None:
    """Judge finished episodes that nobody has scored, and post the verdicts as feedback.

    The judge is a program (after `--`) or a model (--model with --rubric). Needs the database,
    and a proxy that takes the feedback. Runs until SIGTERM, or until nothing is left with --once.

    Status 1: at least one judgement failed. Status 2: the judge cannot run like this, or with
    --once: the model's server or the proxy does not answer. Status 130: Ctrl-C.
    """
    from pawl.export import Selection
    from pawl.judging.command import JudgeOptions

    options = JudgeOptions(
        command=tuple(command or ()),
        model=model,
        rubric=rubric,
        base_url=base_url,
        temperature=temperature,
        max_chars=max_chars,
        name=name,
        quiet_s=quiet,
        concurrency=concurrency,
        timeout_s=timeout,
        attempts=attempts,
        once=once,
        again=again,
        selection=Selection(since=with_zone(since), agent=agent, policy=policy),
        feedback_url=feedback_url,
    )
    _judge(options, as_json=as_json)


def _judge(options: "JudgeOptions", *, as_json: bool) -> None:
    """Judge, print what became of the episodes, and set the exit status."""
    from pawl.judging.command import judge_episodes
    from pawl.judging.errors import JudgeError

    try:
        tally = asyncio.run(judge_episodes(options))
    except JudgeError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(tally))
    else:
        counts = ", ".join(
            f"{count} {outcome.replace('_', ' ')}" for outcome, count in tally.items()
        )
        print(f"episodes: {counts}", file=sys.stderr)
    if tally["failed"]:
        raise SystemExit(1)
