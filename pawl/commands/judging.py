"""Define `pawl judge`, which has a program or a model score finished episodes."""

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer

from pawl.commands.common import OfAgent, OfPolicy, Since, fail, with_zone
from pawl.commands.flags import takes
from store.records import Record

if TYPE_CHECKING:
    from pawl.judging.command import JudgeOptions

Result = TypeVar("Result")

DRIFTED: Final = 3
MOST_THRESHOLD: Final = 1e100


class JudgeFlags(Record, frozen=True, kw_only=True):
    """Hold what may be written after `pawl judge`."""

    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After `--`: program to run once for each episode; default: PAWL_JUDGE_COMMAND."
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Model to ask instead of a program; needs --rubric.")
    ] = None
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
    name: Annotated[
        str | None,
        typer.Option(
            help="Name under which verdicts are stored; default: the command, or model and rubric."
        ),
    ] = None
    quiet: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds without a call after which an episode is finished; "
            "default: PAWL_JUDGE_QUIET_S, or 600.",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Episodes judged at the same time; default: PAWL_JUDGE_CONCURRENCY, or 4."
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Time limit of one judgement, in seconds; default: PAWL_JUDGE_TIMEOUT_S, or 60.",
        ),
    ] = None
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
    sentinels_every: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which the judge scores its sentinels again while it runs; 0: "
            "never; default: PAWL_JUDGE_SENTINELS_S, or 3600.",
        ),
    ] = None
    sentinels_once: Annotated[
        bool,
        typer.Option(
            "--sentinels-once",
            help="Instead of episodes: score the judge's sentinels now, and end, as cron jobs "
            "need it. Posts nothing.",
        ),
    ] = False
    drift_evidence: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=MOST_THRESHOLD,
            help="Evidence at which the judge counts as drifted, above 1; default: "
            "PAWL_JUDGE_DRIFT_EVIDENCE, or 10000.",
        ),
    ] = None
    since: Since = None
    agent: OfAgent = None
    policy: OfPolicy = None
    feedback_url: Annotated[
        str | None,
        typer.Option(help="URL that verdicts are posted to; default: /feedback at PAWL_LISTEN."),
    ] = None
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --once or --sentinels-once: print the result as JSON."),
    ] = False


@takes(JudgeFlags)
def judge(flags: JudgeFlags) -> None:
    """Judge finished episodes that nobody has scored, and post the verdicts as feedback.

    The judge is a program (after `--`) or a model (--model with --rubric). Needs the database,
    and a proxy that takes the feedback. Runs until SIGTERM, or until nothing is left with --once.
    While it runs it scores its sentinels again (`pawl sentinels add`).

    Status 1: at least one judgement failed; with --sentinels-once: a sentinel has no score. Status
    2: the judge cannot run like this, or with --once: the model's server or the proxy does not
    answer. Status 3: with --sentinels-once: the judge has drifted. Status 130: Ctrl-C.
    """
    if flags.sentinels_once:
        if flags.once or flags.again:
            fail("--sentinels-once judges no episode: leave --once and --again to another run")
        _score_sentinels(_options(flags), as_json=flags.as_json)
    else:
        _judge(_options(flags), as_json=flags.as_json)


def _options(flags: JudgeFlags) -> "JudgeOptions":
    from pawl.export import Selection
    from pawl.judging.command import JudgeOptions

    if flags.drift_evidence == 1:
        fail("--drift-evidence: the evidence must be above 1: at 1, any judge would have drifted")
    return JudgeOptions(
        command=tuple(flags.command or ()),
        model=flags.model,
        rubric=flags.rubric,
        base_url=flags.base_url,
        temperature=flags.temperature,
        max_chars=flags.max_chars,
        name=flags.name,
        quiet_s=flags.quiet,
        concurrency=flags.concurrency,
        timeout_s=flags.timeout,
        attempts=flags.attempts,
        once=flags.once,
        again=flags.again,
        selection=Selection(since=with_zone(flags.since), agent=flags.agent, policy=flags.policy),
        feedback_url=flags.feedback_url,
        sentinels_every_s=flags.sentinels_every,
        drift_evidence=flags.drift_evidence,
    )


def _judge(options: "JudgeOptions", *, as_json: bool) -> None:
    """Judge, print what became of the episodes, and set the exit status."""
    from pawl.judging.command import judge_episodes

    tally = _run(judge_episodes(options))
    if as_json:
        print(json.dumps(tally))
    else:
        counts = ", ".join(
            f"{count} {outcome.replace('_', ' ')}" for outcome, count in tally.items()
        )
        print(f"episodes: {counts}", file=sys.stderr)
    if tally["failed"]:
        raise SystemExit(1)


def _score_sentinels(options: "JudgeOptions", *, as_json: bool) -> None:
    """Score the sentinels once, print the result, and set the exit status."""
    from pawl.judging.command import score_sentinels
    from pawl.judging.sentinels.tables import in_words

    ended = _run(score_sentinels(options))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(ended) + b"\n")
    else:
        print(in_words(ended), file=sys.stderr)
    if ended.drifted:
        raise SystemExit(DRIFTED)
    if ended.unscored or ended.changed or not ended.scored:
        raise SystemExit(1)


def _run(work: "Coroutine[Any, Any, Result]") -> Result:
    """Run the judge, and end with the status of what stops it."""
    from pawl.judging.errors import JudgeError

    try:
        return asyncio.run(work)
    except JudgeError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
