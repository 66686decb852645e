"""Judges of finished episodes: programs and models, through the proxy's own /feedback."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.commands.judging import JudgeFlags
from pawl.export import export
from pawl.judging.answers import Away, Judge, JudgeError, NotYet, Statement, idempotency_key
from pawl.judging.command import judge_episodes
from pawl.judging.feedback import FeedbackClient
from pawl.judging.next_turn import NextTurnJudge
from pawl.judging.program import ProgramJudge
from pawl.judging.relative import RelativeJudge
from pawl.judging.rubric import RubricJudge
from pawl.judging.run import Judging, JudgingPlan
from store.judging import forget_unscored_judgements
from store.records import SpoolRecord
from store.selecting import Selection
from store.tenants import scoped
from tests.conftest import ROOT
from tests.integration.conftest import Proxy
from tests.support.command_line import refusal_here
from tests.support.ledger.episodes import ingest
from tests.support.proxy.keys import bearer, key_of, status, taken
from tests.support.records import call, reward, statement
from tests.support.servers.fake_upstream import FakeUpstream, Handler, answers
from tests.support.waiting import eventually

LONG_AGO = datetime.now(UTC) - timedelta(hours=1)
PLAN = JudgingPlan(quiet=timedelta(0), poll_s=0.05)

PROGRAM = """
import json, sys, time
line = sys.stdin.readline()
with open(sys.argv[1], "a") as asked:
    asked.write(line)
match json.loads(line)["episode"].split("-")[0]:
    case "good": print(json.dumps({"value": 0.8}))
    case "list": print(json.dumps([{"value": 0.3}, {"metric": "style", "value": 1}]))
    case "unsure": print('{"value": null}')
    case "crash": print('{"value": 1}'); print("a\\nno rubric", file=sys.stderr); sys.exit(3)
    case "garbage": print("0.8, I think")
    case "wrong": print('{"value": [1]}')
    case "slow": time.sleep(60)
"""


class Bench:
    """A program as judge, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._asked = folder / "asked"
        self.script = folder / "judge.py"
        self.script.write_text(PROGRAM)
        self.command = [sys.executable, str(self.script), str(self._asked)]
        self.judge = ProgramJudge(self.command, timeout_s=60, name="program")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines it was given."""
        told = self._asked.read_text().splitlines() if self._asked.exists() else []
        return [json.loads(line) for line in told]

    @property
    def asked(self) -> list[str]:
        """Of which episodes."""
        return sorted(line["episode"] for line in self.lines)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as found:
        yield found


class Desk(FeedbackClient):
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posted: dict[str, list[Statement]] = {}
        self.away = False
        self.refused = asyncio.Event()

    async def post(self, statements: list[Statement], key: str) -> None:
        if self.away:
            self.refused.set()
            raise Away("closed")
        self.posted[key] = statements


class Opinion:
    """A judge in this process."""

    name = "opinion"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        self.asked.append(episode)
        await asyncio.sleep(0.01)
        return [{"value": 1, "episode": episode}]


async def store(engine: AsyncEngine, *records: SpoolRecord) -> None:
    async with engine.begin() as connection:
        await ingest(connection, records)


async def judged(
    engine: AsyncEngine, judge: Judge, desk: FeedbackClient | None = None, **plan: Any
) -> Mapping[str, int]:
    """Let a judge judge what waits now; the number of episodes by outcome."""
    rules = msgspec.structs.replace(PLAN, **plan)
    return await Judging(engine, judge, desk or Desk(), rules).run(once=True)


async def outcomes(engine: AsyncEngine) -> dict[str, tuple[str, int, str | None]]:
    query = text(
        "SELECT key, outcome, attempts, reason FROM judgements j"
        " JOIN episodes e ON e.id = j.episode_id"
    )
    async with engine.connect() as connection:
        return {r.key: (r.outcome, r.attempts, r.reason) for r in await connection.execute(query)}


async def set_due(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE judgements SET due_at = now() WHERE due_at > now()"))


# Through the real proxy


async def test_judge_programs_answers_become_feedback(proxy: Proxy, bench: Bench) -> None:
    names = ["good-1", "list-1", "unsure-1", "crash-1", "garbage-1", "wrong-1"]
    for name in names:
        await proxy.chat(headers={"x-pawl-episode": name})
    await proxy.episodes(len(names))
    desk = FeedbackClient(proxy.session, f"{proxy.url}/feedback")
    tally = await judged(proxy.engine, bench.judge, desk)
    assert tally == {"judged": 2, "cannot_tell": 1, "failed": 3}

    async def scored() -> Any:
        told = {e.key: e.feedback for e in await proxy.episodes(len(names))}
        return told if len(told["list-1"]) == 2 and told["good-1"] else None

    told = await eventually(scored)
    assert [(s.metric, s.value) for s in told["good-1"]] == [("reward", 0.8)]
    assert {(s.metric, s.value) for s in told["list-1"]} == {("reward", 0.3), ("style", 1.0)}
    assert not any(told[name] for name in names[2:])
    kept = await outcomes(proxy.engine)
    assert kept["unsure-1"] == ("cannot_tell", 1, None)
    assert kept["crash-1"] == ("failed", 1, "exit code 3: no rubric")
    assert "not JSON" in (kept["garbage-1"][2] or "")
    assert "/feedback refused" in (kept["wrong-1"][2] or "")
    # Nobody is asked again: the next run has nothing to do.
    assert bench.asked == sorted(names)
    await judged(proxy.engine, bench.judge, desk)
    assert bench.asked == sorted(names)


async def test_judgement_posted_again_after_a_crash_scores_the_episode_once(proxy: Proxy) -> None:
    await proxy.chat(headers={"x-pawl-episode": "e"})
    desk = FeedbackClient(proxy.session, f"{proxy.url}/feedback")
    key = idempotency_key("j", "e")
    for value in (0.5, 0.5, 0.9):
        await desk.post([{"value": value, "episode": "e"}], key)

    async def stated() -> Any:
        [episode] = await proxy.episodes(1)
        return [said.value for said in episode.feedback]

    assert await eventually(stated) == [0.5]


async def test_option_once_judges_the_waiting_episodes_and_ends(
    proxy: Proxy, bench: Bench, database_url: str
) -> None:
    for name in ("good-1", "unsure-1"):
        await proxy.chat(headers={"x-pawl-episode": name})
    await proxy.episodes(2)
    code, out, _ = await pawl_judge(
        *("--once", "--quiet", "0", "--json", "--", *bench.command),
        database_url=database_url,
        listen=proxy.settings.listen,
    )
    assert (code, json.loads(out)) == (0, {"judged": 1, "cannot_tell": 1, "failed": 0})
    await proxy.chat(headers={"x-pawl-episode": "crash-1"})
    await proxy.episodes(3)
    code, _, err = await pawl_judge(
        *("--once", "--quiet", "0", "--", *bench.command),
        database_url=database_url,
        listen=proxy.settings.listen,
    )
    assert (code, "1 failed" in err) == (1, True)
    # Unsure about one and failed at another: asked again about both if that is wanted.
    code, out, _ = await pawl_judge(
        *("--once", "--again", "--quiet", "0", "--json", "--", *bench.command),
        database_url=database_url,
        listen=proxy.settings.listen,
    )
    assert json.loads(out) == {"judged": 0, "cannot_tell": 1, "failed": 1}


async def test_tests_and_commits_become_feedback(
    proxy: Proxy, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        soon = {"GIT_COMMITTER_DATE": f"{int(time.time()) + 60} +0000"}
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, env=os.environ | soon, check=True)

    git("init", "-q")
    for name, asked, result in (
        ("edits", {"path": "a.py", "content": "one\n"}, "done"),
        ("tests", {"command": "pytest -q"}, "Exit code 1"),
    ):
        tool: Any = {"id": f"chatcmpl-tool-{name}5d1", "type": "function"}
        tool["function"] = {"name": "t", "arguments": json.dumps(asked)}
        shown = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [tool]},
            {"role": "tool", "tool_call_id": tool["id"], "content": result},
        ]
        await proxy.chat(headers={"x-pawl-episode": name}, messages=shown)
    await proxy.episodes(2)

    async def judged_by(**judge: Any) -> Mapping[str, int]:
        return await judged_here(monkeypatch, database_url, proxy, **judge)

    assert await judged_by(git=tmp_path) == {"judged": 0, "cannot_tell": 2, "failed": 0}
    (tmp_path / "a.py").write_text("one\n")
    git("add", "a.py")
    git("commit", "-qm", "x")
    assert await judged_by(git=tmp_path, again=True) == {
        "judged": 1,
        "cannot_tell": 1,
        "failed": 0,
    }
    await proxy.episodes(2, lambda found: any(episode.feedback for episode in found))
    # What the other judge scored is its opinion, so that this one is asked, too.
    assert await judged_by(tests=True) == {"judged": 1, "cannot_tell": 1, "failed": 0}

    async def stated() -> Any:
        found = {e.key: [one.value for one in e.feedback] for e in await proxy.episodes(2)}
        return found if all(found.values()) else None

    assert await eventually(stated) == {"edits": [1.0], "tests": [0.0]}


async def test_judge_sees_and_scores_the_episodes_of_its_keys_tenant(
    proxy: Proxy,
    engine: AsyncEngine,
    bench: Bench,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for tenant in ("a", "b"):
        agent = await key_of(engine, tenant, "infer", "read")
        await taken(proxy, agent)
        for name in ("good-1", f"good-{tenant}"):
            reply = await proxy.chat(headers={**bearer(agent), "x-pawl-episode": name})
            assert reply.status == 200
    await proxy.episodes(4)
    key = await key_of(engine, "a", "feedback")

    async def known() -> bool:
        # It is for no other endpoint.
        return await status(proxy, "/v1/embeddings", bearer(key)) == 403

    await eventually(known)
    monkeypatch.setenv("PAWL_API_KEY", key)
    tally = await judged_here(monkeypatch, database_url, proxy, command=[*bench.command])
    assert tally == {"judged": 2, "cannot_tell": 0, "failed": 0}
    assert key not in capfd.readouterr().err
    assert bench.asked == ["good-1", "good-a"]

    async def scored() -> list[str]:
        found = await proxy.episodes(4)
        said = [one.key for one in found if one.feedback or one.calls[0].feedback]
        return sorted(said) if len(said) == 2 else []

    assert await eventually(scored) == [scoped("a", "good-1"), scoped("a", "good-a")]


async def judged_here(
    monkeypatch: pytest.MonkeyPatch, database_url: str, proxy: Proxy, **flags: Any
) -> Mapping[str, int]:
    """Let `pawl judge --once` of these flags judge in this process; the episodes by outcome."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_LISTEN", proxy.settings.listen)
    return await judge_episodes(JudgeFlags(once=True, quiet=0, **flags))


async def pawl_judge(*options: str, database_url: str, listen: str) -> tuple[int | None, str, str]:
    process = await start_judge(*options, url=database_url, listen=listen)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def start_judge(*options: str, url: str, listen: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pawl.cli", "judge", *options),
        env=os.environ | {"DATABASE_URL": url, "PAWL_LISTEN": listen},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_sigterm_ends_the_judge_and_the_program_it_runs(
    engine: AsyncEngine, bench: Bench, database_url: str
) -> None:
    await store(engine, call("slow-1", started_at=LONG_AGO))
    listen = f"127.0.0.1:{free_port()}"
    options = ("--timeout", "50", "--", *bench.command)
    process = await start_judge(*options, url=database_url, listen=listen)

    async def asked() -> list[str]:
        return bench.asked

    await eventually(asked)
    process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), 10)
    assert (process.returncode, b"Traceback" in err) == (0, False)
    assert await outcomes(engine) == {}


REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "name a judge"),
    (("--", "no-such-program"), "no-such-program"),
    (("--model", "m"), "--rubric"),
    (("--model", "m", "--rubric", "no-such-file"), "no-such-file"),
    (("--rubric", "README.md", "--", "true"), "--model"),
    (("--model", "m", "--rubric", "README.md", "--", "true"), "not both"),
    (("--tests", "--", "true"), "name one of them"),
    (("--tests", "--git", "."), "name one of them"),
    (("--git", ".", "--rubric", "README.md"), "name one of them"),
    (("--git", "no-such-folder"), "names no checkout"),
    (("--test-command", "("), "no regular expression"),
    (("--model", "m", "--rubric", "README.md", "--base-url", "x"), "'x' is no http"),
    (
        ("--model", "m", "--rubric", "README.md", "--base-url", "http://127.0.0.1:9/v1"),
        "is the proxy",
    ),
)


def test_judge_command_that_cannot_run_says_why(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PAWL_LISTEN", "127.0.0.1:9")
    for options, named in REFUSED:
        assert named in refusal_here(monkeypatch, capfd, "judge", "--once", *options), options


# Which episodes


async def test_only_finished_episodes_without_a_score_are_judged(engine: AsyncEngine) -> None:
    await store(
        engine,
        call("over", started_at=LONG_AGO),
        call("failed", started_at=LONG_AGO, status="truncated", trainable=False, reason="x"),
        call("scored", started_at=LONG_AGO),
        reward(1.0, episode="scored"),
        call("running", started_at=LONG_AGO),
        call("running", started_at=datetime.now(UTC)),
        call("doubtful", started_at=LONG_AGO, confidence="doubtful"),
    )
    judge = Opinion()
    await judged(engine, judge, quiet=timedelta(minutes=10))
    assert sorted(judge.asked) == ["failed", "over"]


async def test_joined_episode_is_judged_when_its_last_part_is_over(engine: AsyncEngine) -> None:
    digest = b"\x01" + b"s" * 15
    await store(
        engine,
        call("first", method="own", started_at=LONG_AGO, provides=(digest,)),
        call("second", method="own", started_at=datetime.now(UTC), needs=(digest,)),
    )
    judge = Opinion()
    await judged(engine, judge, quiet=timedelta(minutes=10))
    assert judge.asked == []
    await judged(engine, judge)
    assert judge.asked == ["first"]


async def test_judge_gets_the_export_of_an_episode_without_its_training_outcome(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, call("good-1", started_at=LONG_AGO, task="t"), call("good-1"))
    await judged(engine, bench.judge)
    out = io.BytesIO()
    await export(engine, Selection(), out)
    exported = json.loads(out.getvalue())
    # What training made of an episode is no business of a judge's.
    assert [fate["policy"] for fate in exported.pop("fates")] == ["m"]
    # An episode is over when the judge's quiet time says so.
    assert bench.lines == [exported | {"state": "unscored"}]


# How often, how many, and for how long


async def test_failed_judgement_is_tried_again_a_bounded_number_of_times(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, call("crash-1"))
    for attempt in range(1, 6):
        await judged(engine, bench.judge, attempts=3)
        [(outcome, attempts, _)] = (await outcomes(engine)).values()
        assert (outcome, attempts) == ("failed", min(attempt, 3))
        await set_due(engine)
    assert len(bench.asked) == 3


async def test_judge_that_cannot_tell_yet_is_asked_again_beyond_the_limit_for_failures(
    engine: AsyncEngine,
) -> None:
    class Patient(Opinion):
        async def judge(self, episode: str, line: bytes) -> list[Statement]:
            raise NotYet("no commit")

    await store(engine, call("e", started_at=LONG_AGO))
    for number in range(1, 5):
        assert await judged(engine, Patient(), attempts=2) == {"cannot_tell": 1}
        assert await judged(engine, Patient(), attempts=2) == {}
        assert await outcomes(engine) == {"e": ("cannot_tell", number, "no commit")}
        await set_due(engine)


async def test_undecided_episode_is_judged_again_after_new_calls(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, call("unsure-1", started_at=LONG_AGO), call("good-1", started_at=LONG_AGO))
    desk = Desk()
    await judged(engine, bench.judge, desk)
    await store(engine, call("unsure-1"), call("good-1"))
    await judged(engine, bench.judge, desk)
    # What was judged stays judged: its score is on its way.
    assert bench.asked == ["good-1", "unsure-1", "unsure-1"]


async def test_judgement_has_a_time_limit(engine: AsyncEngine, bench: Bench) -> None:
    await store(engine, call("slow-1"))
    judge = ProgramJudge(bench.command, timeout_s=0.5, name="hasty")
    assert await judged(engine, judge) == {"failed": 1}
    assert (await outcomes(engine))["slow-1"] == ("failed", 1, "no answer within 0.5 s")


async def test_episodes_are_judged_a_few_at_once(engine: AsyncEngine) -> None:
    await store(engine, *(call(f"e{number}") for number in range(30)))
    judge, desk, three = Opinion(), Desk(), asyncio.Event()
    under_way: list[int] = [0]

    async def together(episode: str, line: bytes) -> list[Statement]:
        under_way.append(under_way[-1] + 1)
        if under_way[-1] == 3:
            three.set()
        await three.wait()
        # Those that could begin wrongly beside these have time to.
        await asyncio.sleep(0.01)
        under_way.append(under_way[-1] - 1)
        return [{"value": 1, "episode": episode}]

    judge.judge = together  # type: ignore[method-assign]
    assert await judged(engine, judge, desk, concurrency=3) == {"judged": 30}
    assert max(under_way) == 3
    assert len(desk.posted) == 30


async def test_judgement_is_posted_as_the_judges_own_if_a_reward_came_meanwhile(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("e"))
    judge, desk = Opinion(), Desk()
    asked = judge.judge

    async def slowly(episode: str, line: bytes) -> list[Statement]:
        await store(engine, reward(0.1, episode="e"))
        return await asked(episode, line)

    judge.judge = slowly  # type: ignore[method-assign]
    await judged(engine, judge, desk)
    # It is posted as an opinion, which counts for nothing beside the fact.
    [[said]] = desk.posted.values()
    assert said["source"] == judge.name


async def test_judge_of_the_same_name_refuses_to_run_twice_at_once(engine: AsyncEngine) -> None:
    first = asyncio.create_task(Judging(engine, Opinion(), Desk(), PLAN).run())
    await eventually(lambda: somebody_judges(engine))
    with pytest.raises(JudgeError, match="at work already"):
        await judged(engine, Opinion())
    await cancelled(first)
    assert await judged(engine, Opinion()) == {}


async def test_judges_of_the_same_name_run_for_two_tenants_at_once(engine: AsyncEngine) -> None:
    for tenant in ("a", "b"):
        await store(engine, call(scoped(tenant, "e")), call(scoped(tenant, f"only {tenant}")))
    judge_of_a, judge_of_b = Opinion(), Opinion()
    plan = msgspec.structs.replace(PLAN, selection=Selection(tenant="a"))
    first = asyncio.create_task(Judging(engine, judge_of_a, Desk(), plan).run())
    await eventually(lambda: somebody_judges(engine))
    of_b = Selection(tenant="b")
    assert await judged(engine, judge_of_b, selection=of_b) == {"judged": 2}
    await cancelled(first)
    assert sorted(judge_of_b.asked) == ["e", "only b"]
    assert "only b" not in judge_of_a.asked


async def test_option_again_affects_only_the_tenants_episodes(
    engine: AsyncEngine, bench: Bench
) -> None:
    await store(engine, *(call(scoped(tenant, "unsure-1")) for tenant in ("a", "b")))
    await judged(engine, bench.judge)
    assert len(bench.asked) == 2
    async with engine.begin() as connection:
        assert await forget_unscored_judgements(connection, bench.judge.name, "a") == 1
    assert list(await outcomes(engine)) == [scoped("b", "unsure-1")]


async def somebody_judges(engine: AsyncEngine) -> bool:
    """Whether somebody holds the lock of a judge's name."""
    held = (
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()"
    )
    async with engine.connect() as connection:
        return bool(await connection.scalar(text(held)))


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_feedback_outage_costs_no_episode_and_no_second_judgement(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("e"))
    judge, desk = Opinion(), Desk()
    desk.away = True
    with pytest.raises(Away, match="closed"):
        await judged(engine, judge, desk)
    assert await outcomes(engine) == {}
    judging = Judging(engine, judge, desk, PLAN)
    desk.refused.clear()
    task = asyncio.create_task(judging.run())
    await desk.refused.wait()
    desk.away = False

    async def posted() -> Any:
        return desk.posted and await outcomes(engine)

    assert (await eventually(posted))["e"] == ("judged", 1, None)
    await cancelled(task)
    assert judge.asked == ["e", "e"]


async def test_feedback_client_gives_up_on_an_unreachable_proxy(
    session: aiohttp.ClientSession,
) -> None:
    desk = FeedbackClient(session, f"http://127.0.0.1:{free_port()}/feedback", patience_s=0.6)
    with pytest.raises(Away, match="does not answer"):
        await desk.post([{"value": 1, "episode": "e"}], "k")


# A model judges


def says(text: str | None) -> Handler:
    return answers({"choices": [{"message": {"role": "assistant", "content": text}}]})


async def never(_: web.Request) -> web.Response:
    await asyncio.sleep(3)
    return web.Response()


def by_rubric(session: aiohttp.ClientSession, url: str, **changes: Any) -> RubricJudge:
    options = {"base_url": url, "model": "big", "rubric": "Is it polite?", "max_chars": 1000}
    return RubricJudge(session, **options | {"timeout_s": 60} | changes)


async def test_score_by_a_judge_model_is_posted_as_the_reward(
    engine: AsyncEngine, session: aiohttp.ClientSession, upstream: FakeUpstream
) -> None:
    await store(engine, call("e", request=b'{"messages":[{"role":"user","content":"hello?"}]}'))
    upstream.behave = says('{"why": "well done", "score": 0.75}')
    desk = Desk()
    judge = by_rubric(session, f"{upstream.url}/", api_key="secret")
    assert await judged(engine, judge, desk) == {"judged": 1}
    [said] = desk.posted.values()
    assert said == [{"value": 0.75, "episode": "e", "source": judge.name}]
    [asked] = upstream.requests
    assert (asked["model"], asked["temperature"]) == ("big", 0.0)
    assert "Is it polite?" in asked["messages"][0]["content"]
    assert "user: hello?" in asked["messages"][1]["content"]
    assert upstream.headers[0]["Authorization"] == "Bearer secret"


async def test_judges_name_depends_on_its_rubric(session: aiohttp.ClientSession) -> None:
    names = [by_rubric(session, "http://m", rubric=rubric).name for rubric in ("a", "b", "a")]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize(
    ("behaves", "outcome", "reason"),
    [
        (says('{"score": null}'), "cannot_tell", None),
        (says("I like it"), "failed", "no JSON object with a score"),
        (says(None), "failed", "no JSON object"),
        (answers({"choices": []}), "failed", "no chat completion"),
        (answers({"error": "x"}), "failed", "no chat completion"),
        (answers({"error": "too long"}, 400), "failed", "too long"),
        (never, "failed", "no answer within"),
    ],
)
async def test_unusable_model_answer_leaves_the_episode_unscored(
    engine: AsyncEngine,
    session: aiohttp.ClientSession,
    upstream: FakeUpstream,
    behaves: Handler,
    outcome: str,
    reason: str | None,
) -> None:
    await store(engine, call("e"))
    upstream.behave = behaves
    desk = Desk()
    judge = by_rubric(session, upstream.url, timeout_s=0.5 if behaves is never else 60)
    assert await judged(engine, judge, desk) == {outcome: 1}
    kept, _, why = (await outcomes(engine))["e"]
    assert kept == outcome
    assert (why is None) == (reason is None)
    assert (reason or "") in (why or "")
    assert desk.posted == {}


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503, None])
async def test_unavailable_judge_model_is_not_recorded_as_a_failure_of_the_episode(
    engine: AsyncEngine, session: aiohttp.ClientSession, upstream: FakeUpstream, status: int | None
) -> None:
    await store(engine, call("e"))
    upstream.behave = answers({}, status or 200)
    url = upstream.url if status else f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(Away, match=str(status) if status else "does not answer"):
        await judged(engine, by_rubric(session, url))
    assert await outcomes(engine) == {}


# By what happened next, and against each other


def talk(*texts: str) -> bytes:
    """A request whose messages are a user's and a model's, in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return json.dumps({"messages": messages}).encode()


async def test_users_next_message_scores_a_call_on_its_policys_scale(
    engine: AsyncEngine, session: aiohttp.ClientSession, upstream: FakeUpstream
) -> None:
    first = call("e", request=talk("1+2?"), policy="m")
    asked = talk("1+2?", "4", "No, that is wrong.")
    second = call("e", request=asked, policy="m", policy_version=3)
    messages = ("1+2?", "4", "No, that is wrong.", "3", "Thanks")
    third = call("e", request=talk(*messages), policy="m", policy_version=3)
    alone = call("f", request=talk("Hello"), policy="m")
    await store(engine, first, second, third, alone)

    async def by_words(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][1]["content"].partition("<next>")[2]
        score = -1 if "wrong" in text else 1
        return await says(f'{{"why": "", "score": {score}}}')(request)

    async def range_of(policy: str) -> tuple[float, float]:
        assert policy == "m"
        return (-3.0, 1.0)

    upstream.behave = by_words
    desk = Desk()
    judge = NextTurnJudge(
        session,
        base_url=upstream.url,
        model="big",
        range_of=range_of,
        timeout_s=60,
        max_chars=900,
    )
    assert await judged(engine, judge, desk) == {"judged": 1, "cannot_tell": 1}
    [said] = desk.posted.values()
    assert [(one.get("call") or one["episode"], one["value"]) for one in said] == [
        (str(first.id), -3.0),
        (str(second.id), 1.0),
        ("e", -1.0),
    ]
    assert {one["source"] for one in said} == {judge.name}


async def test_attempts_at_a_task_share_a_prompt_and_a_tasks_only_attempt_waits(
    engine: AsyncEngine, session: aiohttp.ClientSession, upstream: FakeUpstream
) -> None:
    await store(engine, *(call(f"e{place}", task="t") for place in range(3)), call("x", task="u"))
    upstream.behave = says('{"scores": {"1": 0.0, "2": 0.5, "3": 1.0}}')
    keys = ["e0", "e1", "e2"]

    async def attempts_of(episode: str) -> list[tuple[str, bytes]]:
        line = json.dumps({"calls": []}).encode()
        if episode == "x":
            return [("x", line)]
        return [(key, line) for key in sorted(keys, key=lambda key: key != episode)]

    desk = Desk()
    judge = RelativeJudge(
        session,
        base_url=upstream.url,
        model="big",
        attempts_of=attempts_of,
        timeout_s=60,
        max_chars=900,
    )
    assert await judged(engine, judge, desk) == {"judged": 3, "cannot_tell": 1}
    assert len(upstream.requests) == 1
    values = sorted(one["value"] for said in desk.posted.values() for one in said)
    assert values == [0.0, 0.5, 1.0]
    # It is asked about the one alone again, and not at once.
    async with engine.connect() as connection:
        query = text("SELECT outcome, due_at > now() FROM judgements WHERE attempts = 1")
        found = {tuple(row) for row in await connection.execute(query)}
    assert found == {("judged", None), ("cannot_tell", True)}


async def test_judge_command_compares_recorded_attempts_at_a_task(
    proxy: Proxy,
    upstream: FakeUpstream,
    database_url: str,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("a1", "a2"):
        await proxy.chat(headers={"x-pawl-episode": name, "x-pawl-task": "t"})
    await proxy.episodes(2)
    upstream.behave = says('{"scores": {"1": 0.25, "2": 0.75}}')
    tally = await judged_here(
        monkeypatch, database_url, proxy, relative=True, base_url=upstream.url
    )
    assert tally == {"judged": 2, "cannot_tell": 0, "failed": 0}

    async def scores() -> Any:
        async with engine.connect() as connection:
            rows = await connection.execute(text("SELECT reward FROM episodes ORDER BY reward"))
            return [row.reward for row in rows]

    async def both() -> Any:
        return (await scores()) == [0.25, 0.75]

    assert await eventually(both)


async def test_share_of_rewarded_episodes_is_judged_for_comparison(
    engine: AsyncEngine,
) -> None:
    await store(engine, *(call(f"e{place}") for place in range(60)))
    await store(engine, *(reward(1.0, episode=f"e{place}") for place in range(60)))
    judge = Opinion()
    assert await judged(engine, judge, Desk()) == {}
    await judged(engine, judge, Desk(), compared=0.5)
    assert 10 < len(judge.asked) < 50
    await judged(engine, judge, Desk(), compared=1.0)
    assert len(judge.asked) == 60


async def test_episode_rewarded_only_by_another_judge_is_judged_and_a_rewarded_episode_is_not(
    engine: AsyncEngine,
) -> None:
    await store(engine, *(call(key, policy="m", policy_version=0) for key in ("opinion", "fact")))
    await store(engine, statement("reward", 1.0, source="dice", episode="opinion"))
    await store(engine, reward(1.0, episode="fact"))
    judge = Opinion()
    await judged(engine, judge, Desk())
    assert judge.asked == ["opinion"]


async def test_judge_that_fails_at_an_episode_continues_with_the_others(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("a"), call("b"))
    judge = Opinion()
    asked = judge.judge

    async def breaks(episode: str, line: bytes) -> list[Statement]:
        if episode == "a":
            raise ValueError("embedded null byte")
        return await asked(episode, line)

    judge.judge = breaks  # type: ignore[method-assign]
    assert await judged(engine, judge, Desk()) == {"failed": 1, "judged": 1}
    assert "embedded null byte" in ((await outcomes(engine))["a"][2] or "")
