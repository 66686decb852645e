"""A judge's program scores what a candidate answers, where that is all of an episode."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.judging.program import ProgramJudge
from tests.integration.pawl.steward.replay.replaying import (
    candidate,
    last_event,
    look,
    recorded,
    replay_of,
)
from tests.integration.pawl.steward.replay.test_replay_servers import TOOLS
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.trials import states

STATES = 16
JUDGE = """
import json, sys
line = json.loads(sys.stdin.readline())
[call] = line["calls"]
said = call["reply"]["choices"][0]["message"]["content"]
print(json.dumps({"value": None if said == "?" else float(said == "right")}))
"""


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    """One that has loaded version 1."""
    async with fake_model_server() as fake:
        fake.loaded["m@1"] = "/m/1"
        yield fake


@pytest.fixture
def judge(tmp_path: Path) -> ProgramJudge:
    program = tmp_path / "judge.py"
    program.write_text(JUDGE)
    return ProgramJudge([sys.executable, str(program)], timeout_s=60)


async def replayed(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, judge: ProgramJudge
) -> None:
    await candidate(engine, replay_states=STATES)
    await look(database_url, engine, server.url, times=STATES // 4 + 2, judge=judge)


async def test_one_that_is_scored_lower_again_and_again_is_rejected_before_any_user_meets_it(
    engine: AsyncEngine, database_url: str, server: FakeModelServer, judge: ProgramJudge
) -> None:
    await recorded(engine, STATES // 2, STATES // 2)
    server.says = {"m": "right", "m@1": "wrong"}
    await replayed(database_url, engine, server, judge)
    assert (await states(engine))[1] == "rejected"
    event = await last_event(engine)
    assert "a judge gave its answers 0 in the mean, and 1" in event.reason
    told = await replay_of(engine)
    assert (told["rewards"], told["judged_answers"], told["kl"]) == ([0.0, 1.0], STATES, 0.0)


async def test_one_that_is_scored_as_high_is_tried(
    engine: AsyncEngine, database_url: str, server: FakeModelServer, judge: ProgramJudge
) -> None:
    await recorded(engine, STATES // 2, STATES // 2)
    server.says = {"m": "right", "m@1": "right"}
    await replayed(database_url, engine, server, judge)
    assert (await states(engine))[1] == "canary"
    assert (await replay_of(engine))["rewards"] == [1.0, 1.0]


async def test_what_is_a_part_of_an_episode_offers_tools_or_is_no_chat_is_not_judged(
    engine: AsyncEngine, database_url: str, server: FakeModelServer, judge: ProgramJudge
) -> None:
    await recorded(engine, 4, 0, request=TOOLS, run="tools-")
    await recorded(engine, 4, 0, dialect="completions", run="text-")
    await recorded(engine, 4, 0, run="long-")
    # A second call of the same episodes.
    await recorded(engine, 4, 0, run="long-", ago_s=3000.0)
    # And what the judge cannot tell.
    server.says = {"m": "right", "m@1": "?"}
    await recorded(engine, 4, 0, run="odd-")
    await replayed(database_url, engine, server, judge)
    assert (await states(engine))[1] == "canary"
    told = await replay_of(engine)
    assert (told["rewards"], told["judged_answers"]) == ([None, None], 0)
    assert told["states"] == STATES


def test_a_judge_that_is_not_there_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_UPSTREAM_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("PAWL_REPLAY_JUDGE_COMMAND", "/nowhere/judge --strict")
    found = CliRunner().invoke(app, ["steward"])
    assert found.exit_code == 2
    assert "PAWL_REPLAY_JUDGE_COMMAND: the judge's program '/nowhere/judge'" in found.stderr
