"""Calls that came through several proxies: joined in the store, in any order, never guessed."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.database import driver_of
from store.ids import new_id
from store.link.joins import (
    AMBIGUOUS_MATCH,
    DOUBTFUL_CALL,
    DOUBTFUL_NEED,
    MOST_PROVIDERS,
    TOO_LATE,
)
from store.link.settle import WrittenBatch, resolve_references
from store.questions import known_targets, pinned_episodes
from store.records import CallRecord, Episode, SpoolRecord
from store.values.digests import PREFIX, RESPONSE, TOOL_CALL
from store.version_states import ensure_base
from store.write.bases import BaseCache
from store.write.ingest import Ingester, write_records
from tests.support.ledger.any_order import same_in_any_order
from tests.support.ledger.episodes import episodes, store
from tests.support.records import call, reward, statement, tokens, tool_event

RULE = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=1e9)


def digest(kind: int, name: str) -> bytes:
    return bytes([kind]) + name.encode().ljust(15, b".")


def own(name: str, **changes: Any) -> CallRecord:
    """A call that named no episode; `told` and `repeats` are names of prefixes."""
    told = changes.pop("told", ())
    repeats = changes.pop("repeats", ())
    return call(
        name,
        method="own",
        provides=tuple(digest(PREFIX, one) for one in told),
        needs=tuple(digest(PREFIX, one) for one in repeats),
        **changes,
    )


@pytest.mark.parametrize("turned", [False, True])
async def test_call_joins_the_episode_with_the_repeated_reply(
    engine: AsyncEngine, turned: bool
) -> None:
    first, second = own("a", told=["1"]), own("b", repeats=["1"])
    for record in (second, first) if turned else (first, second):
        await store(engine, record)
    [episode] = await episodes(engine)
    assert episode.key == "a"
    assert episode.aliases == ("b",)
    assert [c.id for c in episode.calls] == [first.id, second.id]
    assert [(c.method, c.confidence) for c in episode.calls] == [
        ("own", "certain"),
        ("prefix", "likely"),
    ]


@pytest.mark.parametrize(("kind", "method"), [(TOOL_CALL, "tool_call"), (RESPONSE, "response")])
async def test_call_joined_by_a_tool_call_or_response_id_is_certain(
    engine: AsyncEngine, kind: int, method: str
) -> None:
    fingerprint = digest(kind, "id")
    await store(engine, own("a", told=[]), call("b", method="own", needs=(fingerprint,)))
    await store(engine, call("a", provides=(fingerprint,)))
    [episode] = await episodes(engine)
    joined = [c for c in episode.calls if c.method == method]
    assert [c.confidence for c in joined] == ["certain"]


async def test_chain_of_joined_calls_is_a_single_episode(engine: AsyncEngine) -> None:
    records = [
        own(str(turn), told=[str(turn)], repeats=[str(turn - 1)] if turn else [])
        for turn in range(6)
    ]
    for record in reversed(records):
        await store(engine, record)
    [episode] = await episodes(engine)
    assert [c.id for c in episode.calls] == [record.id for record in records]
    assert len(episode.aliases) == 5


async def test_name_of_a_joined_episode_stays_valid(engine: AsyncEngine) -> None:
    await store(engine, own("a", told=["1"]), own("b", repeats=["1"]))
    await store(engine, reward(0.5, episode="b"), call("b", method="tool_call"))
    [episode] = await episodes(engine)
    assert len(episode.calls) == 3
    assert [said.value for said in episode.feedback] == [0.5]
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        assert await known_targets(driver, [("episode", "b")]) == {("episode", "b")}
        pins = {key: version for _, key, version in await pinned_episodes(driver, 10)}
    assert pins == {"a": 0, "b": 0}


async def test_reward_for_a_joined_reply_scores_the_whole_episode(engine: AsyncEngine) -> None:
    first, second = own("a", told=["1"]), own("b", repeats=["1"], response_id="r2")
    await store(engine, reward(1.0, response="r2"))
    await store(engine, second)
    await store(engine, first)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        update_id = await claims.claim(connection, RULE, 0, {})
        assert update_id is not None
        claim = await claims.load_claim(connection, update_id)
    [group] = claim.groups
    assert [len(e.calls) for e in group.episodes] == [2]


async def test_doubtful_calls_are_neither_joined_nor_claimed(engine: AsyncEngine) -> None:
    await store(engine, own("a", told=["1"]), own("c", repeats=["1"]))
    assert len(await episodes(engine)) == 1
    await store(engine, own("b", told=["1"]))
    await store(engine, *[reward(1.0, episode=key) for key in "abc"])
    found = {e.key: e for e in await episodes(engine)}
    assert {key: e.quarantined_reason for key, e in found.items()} == {
        "a": AMBIGUOUS_MATCH,
        "b": AMBIGUOUS_MATCH,
        "c": DOUBTFUL_NEED,
    }
    assert [c.confidence for c in found["c"].calls] == ["doubtful"]
    async with engine.begin() as connection:
        assert await claims.claim(connection, RULE, 0, {}) is None


async def test_doubtful_call_stored_as_an_addition_to_another_call_is_read_back_whole(
    engine: AsyncEngine,
) -> None:
    talk = b'{"messages":[' + b"x" * 300
    ingester = Ingester()
    records = [
        own("a", told=["1"], request=talk + b"]}"),
        own("b", told=["1"], request=talk + b"]}"),
        own("c", told=["2"], repeats=["1"], request=talk + b',"y"]}'),
        own("d", repeats=["2"], request=talk + b',"y","z"]}'),
    ]
    for record in records:
        await ingester.store(engine, [record])
    async with engine.connect() as connection:
        parents = text("SELECT count(*) FROM transitions WHERE parent_id IS NOT NULL")
        assert await connection.scalar(parents) == 2
    found = await episodes(engine)
    assert sorted(e.key for e in found) == ["a", "b", "c"]
    read = {c.id: c.request for e in found for c in e.calls}
    assert read == {record.id: record.request for record in records}


@pytest.mark.parametrize("batch", [1, 4, 100])
async def test_reply_common_to_many_episodes_puts_only_its_repeats_in_doubt(
    engine: AsyncEngine, batch: int
) -> None:
    """Only episodes that repeat the reply are quarantined, not those whose own reply it is."""
    dice = random.Random(batch)
    records = [own(f"a{number}", told=["hello"]) for number in range(MOST_PROVIDERS + 3)]
    records += [own(f"b{number}", repeats=["hello"]) for number in range(3)]
    dice.shuffle(records)
    for start in range(0, len(records), batch):
        await store(engine, *records[start : start + batch])
    found = await episodes(engine)
    assert len(found) == len(records)
    assert {e.key: e.quarantined_reason for e in found} == {
        e.key: DOUBTFUL_NEED if e.key.startswith("b") else None for e in found
    }


# Rows that the current transaction read.
_ROWS_READ = "SELECT sum(coalesce(seq_tup_read, 0) + idx_tup_fetch) FROM pg_stat_xact_user_tables"


@pytest.mark.parametrize("first_provides", ["told", "nothing"])
async def test_database_rows_read_to_store_a_call_do_not_grow_with_earlier_equal_calls(
    engine: AsyncEngine, first_provides: str
) -> None:
    def equal_conversations(count: int) -> list[CallRecord]:
        names = [str(new_id()) for _ in range(count)]
        again = "told" if first_provides == "nothing" else "told again"
        first = [own(f"a-{name}", told=[first_provides]) for name in names]
        return first + [own(f"b-{name}", repeats=["told"], told=[again]) for name in names]

    ingester, read = Ingester(), []
    for _ in range(2):
        for _ in range(3):
            await ingester.store(engine, equal_conversations(200))
        async with engine.connect() as connection:
            driver = await driver_of(connection)
            # Plans as of a table that has its statistics, not of an empty one.
            await driver.execute("ANALYZE")
            async with driver.transaction():
                before = await driver.fetchval(_ROWS_READ)
                written = await write_records(
                    driver, equal_conversations(5), BaseCache(), repeated=False
                )
                await resolve_references(driver, written)
                read.append(await driver.fetchval(_ROWS_READ) - before)
    assert 10 * read[1] <= 11 * read[0]


async def written_only(engine: AsyncEngine, *records: CallRecord) -> WrittenBatch:
    """Commit a batch without settling it, as by another ingester or before a crash."""
    async with engine.begin() as connection:
        return await write_records(
            await driver_of(connection), records, BaseCache(), repeated=False
        )


async def settled(engine: AsyncEngine, written: WrittenBatch) -> None:
    async with engine.begin() as connection:
        await resolve_references(await driver_of(connection), written)


async def test_replies_written_before_a_crash_count_when_a_repeated_reply_is_too_common(
    engine: AsyncEngine,
) -> None:
    crashed = [own(f"x{n}", told=["hello"]) for n in range(MOST_PROVIDERS + 2)]
    await store(engine, own("a", told=["hello"]), own("b", repeats=["hello"]))
    await written_only(engine, *crashed)
    await store(engine, own("y", told=["hello"]))
    await store(engine, *crashed)
    assert {e.key: e.quarantined_reason for e in await episodes(engine)}["b"] == DOUBTFUL_NEED


async def test_equal_replies_that_two_ingesters_write_at_once_are_all_counted(
    engine: AsyncEngine,
) -> None:
    few = [own(f"a{n}", told=["hello"]) for n in range(MOST_PROVIDERS)]
    await store(engine, own("b", repeats=["hello"]), *few)
    batches = [
        await written_only(engine, *(own(f"{name}{n}", told=["hello"]) for n in range(2)))
        for name in ("x", "y")
    ]
    for batch in batches:
        await settled(engine, batch)
    assert {e.key: e.quarantined_reason for e in await episodes(engine)} == {
        e.key: DOUBTFUL_NEED if e.key == "b" else None for e in await episodes(engine)
    }


async def test_join_made_before_another_ingester_settles_too_many_equal_replies_is_undone(
    engine: AsyncEngine,
) -> None:
    await store(engine, own("first"))
    needing = await written_only(engine, own("b", repeats=["hello"]))
    await store(engine, own("a", told=["hello"]))
    many = [own(f"x{n}", told=["hello"]) for n in range(MOST_PROVIDERS + 2)]
    providing = await written_only(engine, *many)
    await settled(engine, needing)
    await settled(engine, providing)
    found = await episodes(engine)
    assert len(found) == len(many) + 3
    assert {e.key: e.quarantined_reason for e in found} == {
        e.key: DOUBTFUL_NEED if e.key == "b" else None for e in found
    }


async def test_call_placed_in_doubt_by_the_proxy_quarantines_its_episode(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("a"))
    await store(engine, call("a", confidence="doubtful"), reward(1.0, episode="a"))
    [episode] = await episodes(engine)
    assert episode.quarantined_reason == DOUBTFUL_CALL
    async with engine.begin() as connection:
        assert await claims.claim(connection, RULE, 0, {}) is None


async def test_later_call_does_not_join_a_claimed_episode(engine: AsyncEngine) -> None:
    await store(engine, own("a", told=["1"]), reward(1.0, episode="a"))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        assert await claims.claim(connection, RULE, 0, {}) is not None
    await store(engine, own("b", repeats=["1"]), reward(0.0, episode="b"))
    found = {e.key: e for e in await episodes(engine)}
    assert len(found["a"].calls) == 1
    assert found["a"].quarantined_reason is None
    assert found["b"].quarantined_reason == TOO_LATE


async def test_failed_attempt_and_its_retry_are_a_single_call(engine: AsyncEngine) -> None:
    attempt = call("a", status="client_gone", trainable=False, reason="incomplete")
    repeat = call("a", retry_of=attempt.id)
    await store(engine, repeat, statement("speed", 1.0, call=str(attempt.id)))
    await store(engine, attempt)
    [episode] = await episodes(engine)
    assert [c.id for c in episode.calls] == [repeat.id]
    assert [said.metric for said in episode.calls[0].feedback] == ["speed"]


def scenario(dice: random.Random) -> list[SpoolRecord]:
    """Calls of a few keys that provide and need a few digests, and feedback."""
    keys = [f"k{number}" for number in range(6)]
    digests = [digest(dice.choice([TOOL_CALL, RESPONSE, PREFIX, PREFIX]), str(n)) for n in range(7)]
    records: list[SpoolRecord] = []
    for number in range(12):
        key = dice.choice(keys)
        is_first = not any(isinstance(r, CallRecord) and r.episode == key for r in records)
        is_own = is_first and key not in keys[:2]
        records.append(
            call(
                key,
                method="own" if is_own else "header" if is_first else "tool_call",
                task=dice.choice([None, None, None, f"named {number % 2}"]),
                request=b'{"messages":["' + b"turn, " * 20 * number + b'"], "tools": "..."}',
                tokens=tokens(list(range(1 + number * 3)), [7, number]),
                response_id=f"r{number}",
                provides=tuple(dice.sample(digests, dice.randrange(3))),
                needs=tuple(dice.sample(digests, dice.randrange(1, 3))) if is_own else (),
                confidence=dice.choice(["certain"] * 9 + ["doubtful"]),
                tool_events=(tool_event("ok", f"t{number}"),),
            )
        )
    records += [reward(0.1, at=n, episode=dice.choice(keys)) for n in range(2)]
    records += [reward(0.2, at=n, response=f"r{dice.randrange(12)}") for n in range(2, 5)]
    return records


def content(found: Sequence[Episode]) -> Any:
    """Episodes without the ids that rows were given."""
    nowhere = found[0].calls[0].id
    return [
        msgspec.structs.replace(
            e,
            id=nowhere,
            calls=tuple(msgspec.structs.replace(c, episode_id=nowhere) for c in e.calls),
        )
        for e in found
    ]


async def scores(engine: AsyncEngine) -> Any:
    async with engine.connect() as connection:
        rows = await connection.execute(
            text(
                "SELECT key, scored_at, call_scored_at, quarantined_reason"
                " FROM episodes WHERE root IS NULL"
            )
        )
        return sorted(tuple(row) for row in rows)


async def stored(engine: AsyncEngine) -> tuple[Any, ...]:
    return content(await episodes(engine)), await scores(engine)


@pytest.mark.parametrize("seed", range(12))
async def test_records_in_any_order_batches_and_repetition_give_the_same_episodes(
    engine: AsyncEngine, seed: int
) -> None:
    dice = random.Random(seed)
    await same_in_any_order(engine, scenario(dice), dice, stored)


async def test_several_drainers_at_once_lose_no_join(engine: AsyncEngine) -> None:
    dice = random.Random(3)
    threads = [
        [
            own(f"{name}.{turn}", told=[f"{name}.{turn}"], repeats=[f"{name}.{turn - 1}"])
            for turn in range(1, 6)
        ]
        for name in range(12)
    ]
    records: list[SpoolRecord] = [record for thread in threads for record in thread]
    records += [reward(1.0, episode=f"{name}.5") for name in range(12)]
    dice.shuffle(records)

    async def drain(mine: list[SpoolRecord]) -> None:
        ingester = Ingester()
        for start in range(0, len(mine), 3):
            await ingester.store(engine, mine[start : start + 3])

    await asyncio.gather(*[drain(records[number::4]) for number in range(4)])
    found = await episodes(engine)
    assert sorted(len(e.calls) for e in found) == [5] * 12
    assert all(len(e.feedback) == 1 and e.quarantined_reason is None for e in found)
