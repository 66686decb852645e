"""`pawl sentinels` and `pawl judge --sentinels-once`, as they are run."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.judge.sentinels import sample
from store.tenants import scoped
from store.write.ingest import Ingester
from tests.conftest import ROOT
from tests.integration.store.test_damage import damage
from tests.support.ledger.sentinels import judged, make_sentinels, names, newest, scores_by_round
from tests.support.records import call, reward
from tests.support.waiting import eventually

# Its mood is in a file, and what it was asked about in another.
PROGRAM = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
episode = json.loads(sys.stdin.readline())["episode"]
with (folder / "asked").open("a") as asked:
    asked.write(episode + chr(10))
mood = (folder / "mood").read_text()
if mood == "slow": time.sleep(60)
if mood == "silent": sys.exit(3)
print(json.dumps({"value": int(episode.rpartition("-")[2]) / 100 + float(mood)}))
"""


class Program:
    """A judge program that can change its mind, and the commands about it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._environment = os.environ | {"DATABASE_URL": url}
        (folder / "judge.py").write_text(PROGRAM)
        self.mood = "0"

    @property
    def mood(self) -> str:
        return (self.folder / "mood").read_text()

    @mood.setter
    def mood(self, mood: str) -> None:
        (self.folder / "mood").write_text(mood)

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return sorted(path.read_text().split()) if path.exists() else []

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pawl.cli", *words),
            env=self._environment,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *words: str) -> tuple[int | None, str, str]:
        process = await self.start(*words)
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    @property
    def scoring(self) -> list[str]:
        judge = [sys.executable, str(self.folder / "judge.py"), str(self.folder)]
        options = ["--sentinels-once", "--name", "mood", "--drift-evidence", "100", "--json"]
        return ["judge", *options, "--", *judge]


@pytest.fixture
def program(tmp_path: Path, database_url: str) -> Program:
    return Program(tmp_path, database_url)


async def test_cron_is_told_by_the_exit_status(engine: AsyncEngine, program: Program) -> None:
    keys = names(6)
    await Ingester().store(engine, [call(key) for key in keys])
    code, out, err = await program.run(
        *("sentinels", "add", *keys, "--judge", "mood", "--references", "1")
    )
    assert (code, out) == (
        0,
        "6 sentinels added, 6 in all: the next 1 rounds are their reference\n",
    )
    assert "too few" in err
    for mood, status in (("0", 0), ("0", 0), ("silent", 1), ("0.3", 3)):
        program.mood = mood
        # With one reference each, as many sentinels as these are enough for evidence of 2.
        words = [word if word != "100" else "2" for word in program.scoring]
        code, out, _ = await program.run(*words)
        assert code == status, (mood, out)
    assert json.loads(out)["mean"] == pytest.approx(0.3)
    code, out, err = await program.run("sentinels", "show", "--judge", "mood", "--json")
    told = [json.loads(line) for line in out.splitlines()]
    assert code == 3
    assert "HAS DRIFTED" in err
    assert [(one["round"], one["unscored"]) for one in told] == [(1, 0), (2, 0), (3, 6), (4, 0)]
    code, out, _ = await program.run("sentinels", "list", "--json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert [one["episode"] for one in listed] == keys
    assert listed[2]["score"] == pytest.approx(0.32)


async def test_a_killed_process_neither_loses_nor_doubles_a_score(
    engine: AsyncEngine, program: Program
) -> None:
    await make_sentinels(engine, names(6))
    program.mood = "slow"
    process = await program.start(*program.scoring)

    async def some_asked() -> Any:
        return len(program.asked) >= 4

    await eventually(some_asked)
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    assert await scores_by_round(engine) == {}
    program.mood = "0"

    async def ended() -> Any:
        # The lock of the one that was killed goes with its session.
        return (await program.run(*program.scoring))[0] == 0

    await eventually(ended)
    assert await scores_by_round(engine) == {1: 6}
    assert [one.round for one in await newest(engine)] == [1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("sentinels", "add", "--judge", "j"), "one of both"),
        (("sentinels", "add", "e", "--sample", "2", "--judge", "j"), "one of both"),
        (("sentinels", "add", "nobody", "--judge", "j"), "'nobody'"),
        (("sentinels", "add", "--sample", "2", "--judge", "j"), "of no episode"),
        (("sentinels", "remove", "--judge", "j"), "one of both"),
        (("judge", "--sentinels-once", "--name", "j", "--", "true"), "pawl sentinels add"),
        (("judge", "--sentinels-once", "--once", "--", "true"), "--once"),
        (("sentinels", "show", "--judge", "wrong"), "--tenant"),
        (("sentinels", "renew", "--judge", "wrong"), "pawl sentinels list"),
        (("sentinels", "remove", "--all", "--judge", "wrong"), "'wrong' of tenant 'default'"),
        (("judge", "--sentinels-once", "--drift-evidence", "1", "--", "true"), "above 1"),
        (("judge", "--sentinels-once", "--drift-evidence", "0.5", "--", "true"), "--drift-"),
        (("judge", "--sentinels-once", "--drift-evidence", "inf", "--", "true"), "--drift-"),
    ],
)
async def test_what_cannot_be_done_says_why(
    database_url: str, program: Program, words: tuple[str, ...], named: str
) -> None:
    code, _, err = await program.run(*words)
    assert code == 2
    assert named in err
    assert "Traceback" not in err


async def test_sentinels_are_removed_and_renewed(engine: AsyncEngine, program: Program) -> None:
    await make_sentinels(engine, names(3))
    assert (await program.run("sentinels", "renew", "--judge", "mood"))[1].startswith("3 ")
    assert (await program.run("sentinels", "remove", "e-1", "--judge", "mood"))[1].startswith("1 ")
    assert (await program.run("sentinels", "remove", "--all", "--judge", "mood"))[1].startswith("2")
    assert (await program.run("sentinels", "list", "--json"))[1] == ""


async def test_sentinels_that_all_have_changed_are_no_success(
    engine: AsyncEngine, program: Program
) -> None:
    await make_sentinels(engine, names(2))
    await Ingester().store(engine, [call(key) for key in names(2)])
    words = [word for word in program.scoring if word != "--json"]
    code, _, err = await program.run(*words)
    assert code == 1
    assert "2 changed" in err
    assert "pawl sentinels renew" in err


async def test_a_judge_is_found_by_its_name_and_its_tenant(
    engine: AsyncEngine, program: Program
) -> None:
    await make_sentinels(engine, [scoped("a", "e-1")])
    await make_sentinels(engine, ["e-1"], judge="other")

    async def listed(*words: str) -> list[str]:
        _, out, _ = await program.run("sentinels", "list", "--json", *words)
        return [json.loads(line)["tenant"] for line in out.splitlines()]

    assert await listed("--judge", "mood") == ["a"]
    assert await listed("--judge", "mood", "--tenant", "a") == ["a"]
    assert await listed("--judge", "mood", "--tenant", "default") == []
    assert sorted(await listed()) == ["a", "default"]
    code, _, err = await program.run("sentinels", "show", "--judge", "mood")
    assert (code, "--tenant" in err) == (2, True)
    code, _, err = await program.run("sentinels", "show", "--judge", "mood", "--tenant", "a")
    assert (code, "nothing is known yet" in err) == (0, True)


async def test_one_that_is_damaged_is_named_with_its_remedy(
    engine: AsyncEngine, program: Program
) -> None:
    await make_sentinels(engine, names(2))
    await damage(engine, "e-1")
    code, _, err = await program.run("sentinels", "renew", "--judge", "mood")
    assert code == 2
    _, _, remedy = err.partition("`pawl sentinels remove ")
    removed = await program.run("sentinels", "remove", remedy.partition("`")[0], "--judge", "mood")
    assert removed[1].startswith("1 ")
    assert (await program.run("sentinels", "renew", "--judge", "mood"))[1].startswith("1 ")


async def sampled(engine: AsyncEngine, number: int, **options: Any) -> list[str]:
    async with engine.connect() as connection:
        ids = await sample(connection, "mood", number, **options)
        query = text("SELECT id, key FROM episodes")
        keys = {row.id: row.key for row in await connection.execute(query)}
    return [keys[one] for one in ids]


async def test_a_sample_is_even_over_the_range_and_the_same_by_its_seed(
    engine: AsyncEngine,
) -> None:
    # Nearly all have the best score.
    scores = {f"e-{n}": 1.0 for n in range(30)} | {"low": 0.0, "half": 0.5, "most": 0.7}
    await judged(engine, scores)
    await judged(engine, {"another judge's": 0.2}, judge="other")
    await Ingester().store(engine, [call("mine"), reward(0.1, episode="mine")])
    first = await sampled(engine, 5, seed=1)
    assert first == await sampled(engine, 5, seed=1)
    assert {"low", "half", "most"} <= set(first)
    assert len(set(first)) == 5
    others = {tuple(await sampled(engine, 5, seed=seed)) for seed in range(5)}
    assert len(others) > 1
    assert len(await sampled(engine, 100)) == 33
    assert await sampled(engine, 5, policy="nobody's") == []
    assert await sampled(engine, 5, metric="style") == []


async def test_a_sample_of_equal_and_of_very_different_scores(engine: AsyncEngine) -> None:
    await judged(engine, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert len(await sampled(engine, 2)) == 2
    await judged(engine, {"d": 1.7e308, "f": -1.7e308})
    assert set(await sampled(engine, 3)) >= {"d", "f"}
