"""Build the judge of `pawl judge` from its options and settings, and run it until stopped."""

import asyncio
import os
import signal
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
from pydantic import HttpUrl
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import with_zone
from pawl.database import open_engine
from pawl.judging import relative
from pawl.judging.answers import Judge, JudgeError
from pawl.judging.exit_status import RUNS_TESTS, ExitStatusJudge
from pawl.judging.feedback import FeedbackClient, feedback_url
from pawl.judging.git import GitJudge
from pawl.judging.model import base_model
from pawl.judging.next_turn import NextTurnJudge
from pawl.judging.program import ProgramJudge
from pawl.judging.rubric import RubricJudge
from pawl.judging.run import Judging, JudgingPlan
from pawl.settings import ClientSettings, StackSettings, read_settings
from proxy.settings import ProxySettings
from store.judging import attempts_at_task, forget_unscored_judgements, scales_of
from store.keys import tenant_of_key
from store.limited_bodies import LimitedResponse
from store.read.episodes import read_episodes
from store.read.lines import encoded_line
from store.records import REWARD
from store.selecting import Selection
from store.settings import parse_address
from store.tenants import bare, scoped

if TYPE_CHECKING:
    from pawl.commands.judging import JudgeFlags

ALL_INTERFACES: Final = ("0.0.0.0", "::")
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1", *ALL_INTERFACES)
# The longest source of an opinion that `/feedback` accepts.
MAX_NAME: Final = 1024
OUTCOMES: Final = ("judged", "cannot_tell", "failed")


async def judge_episodes(flags: "JudgeFlags") -> dict[str, int]:
    """Run the judge until SIGTERM, or until nothing is left to judge with --once.

    Returns:
        The number of episodes by outcome: `judged`, `cannot_tell` and `failed`.

    Raises:
        JudgeError: the judge cannot run with these flags.
        Away: with `once`, a server does not answer.
    """
    proxy, client = read_settings(ProxySettings), read_settings(ClientSettings)
    # No session limit: each judge and each post has a time limit of its own.
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, response_class=LimitedResponse) as session,
        open_engine(read_settings(StackSettings), create=False) as engine,
    ):
        async with engine.connect() as connection:
            tenant = await tenant_of_key(connection, client.key)
        judge = await _make_judge(flags, proxy, session, _Reader(engine, tenant, flags.quiet))
        url = flags.feedback_url or feedback_url(proxy.listen)
        feedback = FeedbackClient(session, _checked_url("--feedback-url", url), key=client.headers)
        if len(judge.name) > MAX_NAME:
            raise JudgeError(f"a judge's name has at most {MAX_NAME} characters: give it a --name")
        if flags.again:
            async with engine.begin() as connection:
                await forget_unscored_judgements(connection, judge.name, tenant)
        judging = Judging(engine, judge, feedback, _make_plan(flags, tenant))
        await _run_until_stopped(judging, once=flags.once)
        return {outcome: judging.tally[outcome] for outcome in OUTCOMES}


def _make_plan(flags: "JudgeFlags", tenant: str) -> JudgingPlan:
    """Return the judge's plan; only episodes of `tenant` are judged."""
    return JudgingPlan(
        compared=flags.compare,
        selection=Selection(
            since=with_zone(flags.since), agent=flags.agent, policy=flags.policy, tenant=tenant
        ),
        quiet=timedelta(seconds=flags.quiet),
        concurrency=flags.concurrency,
        attempts=flags.attempts,
    )


class _Reader:
    """Reads data that judges need beside the episode itself."""

    def __init__(self, engine: AsyncEngine, tenant: str, quiet_s: float) -> None:
        self._engine = engine
        self._tenant = tenant
        self._quiet = timedelta(seconds=quiet_s)

    async def range_of(self, policy: str) -> tuple[float, float]:
        """Return the lowest and highest reward of a policy; 0 and 1 if none are declared."""
        async with self._engine.connect() as connection:
            scales = await scales_of(connection, policy)
        own = next((scale for scale in scales if scale.metric == REWARD), None)
        return (own.low, own.high) if own else (0.0, 1.0)

    async def attempts_of(self, episode: str) -> list[tuple[str, bytes]]:
        """Return key and export line of the newest attempts at an episode's task (`AttemptsOf`)."""
        now = datetime.now(UTC)
        key, quiet_since = scoped(self._tenant, episode), now - self._quiet
        async with self._engine.connect() as connection:
            ids = await attempts_at_task(
                connection, key, quiet_since=quiet_since, most=relative.MAX_ATTEMPTS
            )
            found = await read_episodes(connection, ids)
        return [(bare(one.key), encoded_line(one, now, self._quiet)) for one in found]


async def _make_judge(
    flags: "JudgeFlags", proxy: ProxySettings, session: aiohttp.ClientSession, recorded: _Reader
) -> Judge:
    is_by_tests = flags.tests or flags.test_command is not None
    if is_by_tests or flags.git:
        others = (flags.command, flags.model, flags.rubric, flags.next_turn, flags.relative)
        if any(others) or (is_by_tests and flags.git):
            raise JudgeError("a judge is a program, a model, --tests or --git: name one of them")
        if flags.git:
            return GitJudge(flags.git, name=flags.name)
        return ExitStatusJudge(flags.test_command or RUNS_TESTS, name=flags.name)
    if flags.next_turn and (flags.relative or flags.rubric):
        raise JudgeError("--next-turn has a rubric of its own: leave out --relative and --rubric")
    if flags.model is None and not (flags.next_turn or flags.relative):
        if flags.rubric is not None:
            raise JudgeError("--rubric is for a model that judges: name the model with --model")
        if not flags.command:
            raise JudgeError(
                "there is no judge to run; name a judge with `pawl judge -- COMMAND…`, with --model"
                " and --rubric, or with --relative, --next-turn, --tests or --git"
            )
        return ProgramJudge(tuple(flags.command), timeout_s=flags.timeout, name=flags.name)
    if flags.command:
        raise JudgeError("a judge is a program or a model: name one of them, not both")
    base_url = _checked_url("--base-url", flags.base_url or str(proxy.upstream_url))
    if is_proxy_url(base_url, proxy.listen):
        raise JudgeError(
            f"{base_url} is the proxy: the judge's calls would be recorded, and trained on like "
            "an agent's. Name the model's own server with --base-url"
        )
    api_key = os.environ.get("OPENAI_API_KEY")
    options: dict[str, Any] = {
        "base_url": base_url,
        "model": flags.model or await base_model(session, base_url, api_key),
        "temperature": flags.temperature,
        "api_key": api_key,
        "timeout_s": flags.timeout,
        "max_chars": flags.max_chars,
        "name": flags.name,
    }
    if flags.next_turn:
        return NextTurnJudge(session, range_of=recorded.range_of, **options)
    if flags.relative:
        rubric = _read_rubric(flags.rubric) if flags.rubric else relative.RUBRIC
        return relative.RelativeJudge(
            session, attempts_of=recorded.attempts_of, rubric=rubric, **options
        )
    return RubricJudge(session, rubric=_read_rubric(flags.rubric), **options)


def _checked_url(option: str, value: str) -> str:
    try:
        HttpUrl(value)
    except ValueError as error:
        raise JudgeError(f"{option}: {value!r} is no http:// or https:// URL") from error
    return value


def _read_rubric(path: Path | None) -> str:
    if path is None:
        raise JudgeError(
            "--model needs --rubric, --next-turn or --relative: --rubric names a text file that "
            "tells the model what good work is"
        )
    try:
        rubric = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"the rubric {path} cannot be read: {error}") from error
    if not rubric.strip():
        raise JudgeError(f"the rubric {path} is empty: write into it what good work is")
    return rubric


def is_proxy_url(base_url: str, listen: str) -> bool:
    """Return whether a URL has the host and port of a proxy that listens on `listen`.

    A URL that reaches the proxy by another host name is not recognised.
    """
    url, (host, port) = urlsplit(base_url), parse_address(listen)
    same_host = url.hostname == host or (url.hostname in LOCAL_HOSTS and host in LOCAL_HOSTS)
    return same_host and (url.port or {"http": 80, "https": 443}.get(url.scheme)) == port


async def _run_until_stopped(judging: Judging, *, once: bool) -> None:
    """Run to the end or until SIGTERM; interrupted episodes are judged at the next start."""
    running = asyncio.ensure_future(judging.run(once=once))
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        running.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    with suppress(asyncio.CancelledError):
        await running
        return
    if not stopped:
        raise asyncio.CancelledError
