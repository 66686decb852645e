"""Corrections on real tables: stored as stated, trained in the next update, shown by `credit`."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.commands.credit import credit_table
from pawl.credit import ExplainedUpdate, explain_past
from store.read.lines import encoded_line
from store.read.past import past_update
from store.records import CallRecord, FeedbackRecord
from store.version_states import ensure_base
from tests.integration.pawl.test_train import RECIPE
from tests.integration.trainer.test_non_finite import RealBench
from tests.support.ledger.deleting import deleted, places_with
from tests.support.ledger.episodes import episodes, ingest
from tests.support.records import START, call, reward, statement, tokens
from tests.support.servers.fake_server import FakeModelServer
from tests.support.training import ppo_recipe, recipe, write_chat_words
from trainer.batches import bare_row
from trainer.exported import read_episodes
from trainer.recipes.recipe import Recipe

pytestmark = pytest.mark.timeout(240)
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "w5"}]}'
PROMPT = [2, 5, 1, 2]
# `w40 w41`, and the end of the turn.
RIGHT = [40, 41, 1]


@pytest.fixture
def chat_model(tiny_model: str, tmp_path: Path) -> str:
    """The tiny model with a chat template."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(Path(tiny_model) / name)
    write_chat_words(folder)
    return str(folder)


@pytest.fixture
async def bench(
    engine: AsyncEngine,
    server: FakeModelServer,
    tmp_path: Path,
    chat_model: str,
    request: pytest.FixtureRequest,
) -> RealBench:
    """A trainer with two groups of two; the lesser of each is `t0-0` and `t1-0`."""
    made: Recipe = getattr(request, "param", recipe())
    bench = RealBench(engine, server, tmp_path, chat_model, made)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        for task in range(2):
            for member in range(2):
                record = asked(f"t{task}-{member}", 20 + member, f"t{task}")
                paid = reward(float(member), episode=record.episode)
                await ingest(connection, [record, paid])
    return bench


def asked(key: str, token: int, task: str) -> CallRecord:
    made = tokens(PROMPT, [token, 1], -4.5)
    return call(key, task=task, tokens=made, request=REQUEST)


async def say(engine: AsyncEngine, *records: FeedbackRecord) -> None:
    async with engine.begin() as connection:
        await ingest(connection, records)


def right(episode: str, text: str = "w40 w41", at: int = 9) -> FeedbackRecord:
    return statement("reward", 0.0, at=at, correction=text, episode=episode)


async def explained(engine: AsyncEngine) -> ExplainedUpdate:
    async with engine.connect() as connection:
        return explain_past(await past_update(connection, 1, "m"))


def likelihood(bench: RealBench, reply: list[int]) -> float:
    return sum(bench.learner.logprobs([bare_row(0, PROMPT, reply)])[0])


async def test_correction_is_trained_beside_the_other_calls_of_its_claim(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await say(engine, right("t0-0"))
    before = likelihood(bench, RIGHT)
    assert await bench.run_once()
    assert likelihood(bench, RIGHT) > before
    metrics = await bench.last_metrics()
    assert (metrics["corrections"], metrics["corrections_refused"]) == (1, {})
    assert (metrics["trained_episodes"], metrics["rows"], metrics["sampled_tokens"]) == (4, 5, 11)
    await bench.assert_spent_once(4)
    shown = await explained(engine)
    fifth = pytest.approx(1 / 5)
    assert shown.notes == []
    assert {line.episode: (line.weight, line.correction) for line in shown.lines} == {
        "t0-0": (fifth, fifth),
        **dict.fromkeys(("t0-1", "t1-0", "t1-1"), (fifth, msgspec.UNSET)),
    }
    assert [column.header for column in credit_table(shown.lines).columns][-1] == "correction"
    # The policy sampled none of it: nothing is kept of what the policy gave it.
    query = text("SELECT octet_length(policy_logprobs), octet_length(sampled_ids) FROM transitions")
    async with engine.connect() as connection:
        kept = (await connection.execute(query)).all()
    assert [of_policy for of_policy, _ in kept] == [sampled for _, sampled in kept]


async def test_newest_correction_is_trained_and_withdrawn_corrections_are_not(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await say(engine, right("t0-0", "w50"), right("t0-0", at=20), right("t1-0"))
    await say(engine, statement("reward", None, at=30, episode="t1-0"))
    await say(engine, statement("reward", 0.0, at=31, episode="t1-0"))
    before = [likelihood(bench, reply) for reply in (RIGHT, [50, 1])]
    assert await bench.run_once()
    after = [likelihood(bench, reply) for reply in (RIGHT, [50, 1])]
    assert after[0] - before[0] > after[1] - before[1]
    assert (await bench.last_metrics())["corrections"] == 1


async def test_refused_corrections_are_counted_and_explained_by_reason(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await say(engine, right("t0-0", "w40 w1 w41"), right("t1-0", "\x0b"))
    other = asked("t1-0", 22, "t1")
    async with engine.begin() as connection:
        await ingest(connection, [other])
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    assert metrics["corrections"] == 0
    assert metrics["corrections_refused"] == {"special_tokens": 1, "several_calls": 1}
    assert metrics["trained_episodes"] == 4
    shown = await explained(engine)
    assert shown.notes == []
    assert {line.episode: line.correction for line in shown.lines} == {
        "t0-0": "special_tokens",
        "t0-1": msgspec.UNSET,
        "t1-0": "several_calls",
        "t1-1": msgspec.UNSET,
    }


async def test_recorded_token_ids_of_another_chat_template_train_no_correction(
    engine: AsyncEngine, bench: RealBench
) -> None:
    """Only ids that the policy sampled carry loss, but for a correction at exactly its prompt."""
    odd = asked("odd-0", 20, "odd")
    odd = msgspec.structs.replace(odd, tokens=tokens([2, 5, 2], [20, 1], -4.5))
    async with engine.begin() as connection:
        await ingest(connection, [odd, reward(0.0, episode="odd-0"), right("odd-0")])
        await ingest(connection, [asked("odd-1", 21, "odd"), reward(1.0, episode="odd-1")])
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    assert metrics["corrections_refused"] == {"other_template": 1}
    assert metrics["rows"] == metrics["episodes"]


@pytest.mark.parametrize("bench", [ppo_recipe()], indirect=True, ids=["ppo"])
async def test_ppo_refuses_corrections_and_counts_them(
    engine: AsyncEngine, bench: RealBench
) -> None:
    await say(engine, right("t0-0"))
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    assert (metrics["corrections"], metrics["corrections_refused"]) == (0, {"ppo": 1})


async def test_correction_of_one_of_an_episodes_calls_is_trained(
    engine: AsyncEngine, bench: RealBench
) -> None:
    second = asked("t0-0", 22, "t0")
    said = statement("reward", 0.0, at=9, correction="w40 w41", call=str(second.id))
    async with engine.begin() as connection:
        await ingest(connection, [second, said])
    assert await bench.run_once()
    assert (await bench.last_metrics())["corrections"] == 1
    assert [bool(line.correction) for line in (await explained(engine)).lines] == [
        *(False, True),
        *(False,) * 3,
    ]


async def test_exported_correction_is_trained_by_pawl_train(
    engine: AsyncEngine, bench: RealBench, chat_model: str, tmp_path: Path
) -> None:
    await say(engine, right("t0-0"))
    stored = await episodes(engine)
    written = [encoded_line(one, START) for one in stored]
    [line] = [line for line in map(json.loads, written) if line["episode"] == "t0-0"]
    assert [one.get("correction") for one in line["feedback"]] == [None, "w40 w41"]
    read = read_episodes(written, "test")
    [again] = [one for one in read if one.key == "t0-0"]
    assert again.calls[0].request == REQUEST.replace(b" ", b"")
    assert [one.correction for one in again.feedback] == [None, "w40 w41"]
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "episodes.jsonl").write_bytes(b"\n".join(written))
    options = ["--recipe", f"{tmp_path}/recipe.toml", "--model", chat_model]
    command = ["train", f"{tmp_path}/episodes.jsonl", *options, "--out", f"{tmp_path}/out"]
    done = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)
    assert (metrics["corrections"], metrics["rows"]) == (1, 5)


async def test_deleted_episode_leaves_no_correction(engine: AsyncEngine, bench: RealBench) -> None:
    await say(engine, right("t0-0"))
    assert await places_with(engine, "w40 w41") == ["feedback.correction"]
    await deleted(engine, "t0-0")
    assert await places_with(engine, "w40 w41") == []
