"""A call that cannot be read back: its episode is spent, once, and the trainer goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.cli import main
from store import claims
from store.claims import end_unusable_claim
from store.database import make_engine
from store.errors import ClaimLost
from store.records import CallRecord, SpoolRecord
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.integration.store.test_groups import SHORT
from tests.support.ledger.episodes import keys, reasons, store
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import fake_model_server
from tests.support.trainer.bench import Bench
from trainer.metrics import EPISODES
from trainer.updates.claiming import Claiming

# What may become of a row, and what is told of it.
DAMAGES = {
    "its parent is gone": ("parent_id = uuidv7()", "that call is missing"),
    "its parent is too short": ("request_prefix = 1000000", "cannot be taken from a base of"),
    "it does not say what it takes": ("prompt_prefix = NULL", "are missing"),
    "an id is cut": ("sampled_ids = substr(sampled_ids, 2)", "not a multiple of 4 bytes"),
    # None at all is no damage: the trainer computes those that no server gave.
    "there is a log-probability too many": (
        "sampled_logprobs = sampled_logprobs || substr(sampled_logprobs, 1, 4)",
        "different numbers of sampled ids and log-probabilities",
    ),
}
A_LONG_TEXT = b'{"messages":["' + b"what all turns of the thread repeat, " * 9


def thread(episode: str, task: str, member: int) -> list[CallRecord]:
    """Three calls, of which the later ones are stored as additions."""
    return [
        call(
            episode,
            task=task,
            request=A_LONG_TEXT + b"x" * turn + b'"]}',
            tokens=tokens([1, 2, *range(turn)], [4 + member]),
        )
        for turn in range(3)
    ]


class Threads(Bench):
    """Groups whose calls add to each other."""

    async def fill(  # type: ignore[override]
        self, name: str = "t", groups: int = 2, members: int = 2
    ) -> None:
        async with self.engine.begin() as connection:
            await ensure_base(connection, "m")
        for task in range(groups):
            for member in range(members):
                episode = f"{name}{task}-{member}"
                records: list[SpoolRecord] = [*thread(episode, f"{name}{task}", member)]
                records.append(reward(float(member), episode=episode))
                await Ingester().store(self.engine, records)

    async def damage(self, episode: str, what: str = "parent_id = uuidv7()") -> None:
        await damage(self.engine, episode, what)


async def damage(engine: AsyncEngine, episode: str, what: str = "parent_id = uuidv7()") -> None:
    """Change the last row of an episode behind everybody's back."""
    query = (
        f"UPDATE transitions SET {what} WHERE id ="
        " (SELECT last_call_id FROM episodes WHERE key = :key)"
    )
    async with engine.begin() as connection:
        assert (await connection.execute(text(query), {"key": episode})).rowcount == 1


async def quarantined(engine: AsyncEngine) -> dict[str, str]:
    query = "SELECT key, quarantined_reason FROM episodes WHERE quarantined_reason IS NOT NULL"
    async with engine.connect() as connection:
        return {row.key: row.quarantined_reason for row in await connection.execute(text(query))}


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Threads]:
    async with fake_model_server() as server:
        yield Threads(engine, server, tmp_path)


@pytest.mark.parametrize("kind", DAMAGES)
async def test_update_goes_on_without_the_damaged_episode(bench: Threads, kind: str) -> None:
    await bench.fill(groups=3)
    what, told = DAMAGES[kind]
    await bench.damage("t0-1", what)
    counted = EPISODES.labels("m", "damaged")._value.get()
    assert await bench.run_once()
    # The damaged one is spent; the member of its group that is left waits for others.
    trained = {f"t{task}-{member}": None for task in (1, 2) for member in (0, 1)}
    assert await reasons(bench.engine) == trained | {"t0-1": "damaged"}
    assert EPISODES.labels("m", "damaged")._value.get() == counted + 1
    assert await bench.states() == {0: "retired", 1: "serving"}
    async with bench.engine.connect() as connection:
        found, done = await claims.list_updates(connection, "m")
    assert (found.state, found.version, found.metrics["dropped"]) == (
        "expired",
        None,
        {"damaged": 1},
    )
    [why] = found.metrics["damaged"].values()
    assert "episode 't0-1' cannot be read back: call " in why
    assert told in why
    assert (done.state, done.metrics["episodes"], done.metrics["trained_episodes"]) == (
        "done",
        4,
        4,
    )

    # Nothing of it comes back, and the one that waited is trained with the next of its task.
    assert not await bench.run_once()
    await Ingester().store(bench.engine, [*thread("t0-2", "t0", 2), reward(5.0, episode="t0-2")])
    await bench.fill("u", groups=1)
    assert await bench.run_once()
    spent = await reasons(bench.engine)
    assert len(spent) == 9
    assert {key for key, reason in spent.items() if reason} == {"t0-1"}


async def test_several_damaged_episodes_are_set_aside_at_once(bench: Threads) -> None:
    await bench.fill(groups=4)
    for episode in ("t0-0", "t1-0", "t1-1"):
        await bench.damage(episode)
    assert await bench.run_once()
    spent = await reasons(bench.engine)
    assert [key for key in sorted(spent) if spent[key] == "damaged"] == ["t0-0", "t1-0", "t1-1"]
    assert [key for key in sorted(spent) if spent[key] is None] == ["t2-0", "t2-1", "t3-0", "t3-1"]
    async with bench.engine.connect() as connection:
        states = [update.state for update in await claims.list_updates(connection, "m")]
    assert states == ["expired", "done"]


async def test_no_update_is_made_if_too_few_undamaged_groups_wait(bench: Threads) -> None:
    await bench.fill()
    await bench.damage("t0-0")
    assert not await bench.run_once()
    assert await reasons(bench.engine) == {"t0-0": "damaged"}
    assert not await bench.run_once()


async def test_killed_trainer_finds_damaged_episode_again(
    bench: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.fill(groups=3)
    await bench.damage("t0-0")

    class Killed(BaseException):
        pass

    async def killed(*args: Any) -> int:
        await end_unusable_claim(*args)
        raise Killed

    monkeypatch.setattr("trainer.updates.claiming.end_unusable_claim", killed)
    with pytest.raises(Killed):
        await bench.run_once()
    monkeypatch.undo()
    assert await reasons(bench.engine) == {}
    assert await bench.run_once()
    assert (await reasons(bench.engine)).pop("t0-0") == "damaged"
    await bench.assert_spent_once(5)


async def test_ended_update_sets_no_episode_aside(bench: Threads) -> None:
    await bench.fill()
    claim = await claimed(bench.engine, SHORT)
    assert claim is not None
    await consume_all(bench.engine, claim)
    one = claim.groups[0].episodes[0].id
    with pytest.raises(ClaimLost):
        async with bench.engine.begin() as connection:
            await end_unusable_claim(connection, claim.update_id, {one: "why"})
    assert await quarantined(bench.engine) == {}
    await bench.assert_spent_once(4)


async def consumed_threads(engine: AsyncEngine, names: Sequence[str]) -> UUID:
    """A group of task `t`, rewarded 0, 1, …, and consumed: the update."""
    for member, name in enumerate(names):
        await store(engine, *thread(name, "t", member))
        await store(engine, reward(float(member), episode=name))
    claim = await claimed(engine, SHORT)
    assert claim is not None
    await consume_all(engine, claim)
    return claim.update_id


async def test_no_group_is_filled_up_with_a_damaged_member(engine: AsyncEngine) -> None:
    """It was consumed before; only then was it damaged."""
    await consumed_threads(engine, ["early0", "early1", "early2"])
    await store(engine, call("late", task="t"), reward(1.0, episode="late"))
    await damage(engine, "early1", DAMAGES["an id is cut"][0])
    again = await Claiming(engine, SHORT, {}).claim_update(0)
    assert again is not None
    assert keys(again) == ["late"]
    assert sorted(one.key for one in again.groups[0].earlier) == ["early0", "early2"]
    assert set(await quarantined(engine)) == {"early1"}
    assert set(await reasons(engine)) == {"early0", "early1", "early2"}
    async with engine.connect() as connection:
        states = [update.state for update in await claims.list_updates(connection, "m")]
    assert states == ["done", "abandoned", "running"]


# What is told of them


def test_commands_name_the_damaged_episode_in_a_single_line(
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    async def prepare() -> str:
        engine = make_engine(database_url)
        update_id = await consumed_threads(engine, ["e0", "e1"])
        await damage(engine, "e1", DAMAGES["an id is cut"][0])
        await engine.dispose()
        return str(update_id)

    update = asyncio.run(prepare())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)
    # It is the process's: the tests after this one have theirs.
    monkeypatch.setattr("pawl.cli.configure_logging", lambda: None)
    for command in (["export"], ["credit", "--update", update]):
        monkeypatch.setattr("sys.argv", ["pawl", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        told = capsysbinary.readouterr()
        assert told.err.startswith(b"pawl: episode 'e1' cannot be read back: call ")
        assert told.err.count(b"\n") == 1
        assert [json.loads(line)["episode"] for line in told.out.splitlines()] == (
            ["e0"] if command == ["export"] else []
        )
