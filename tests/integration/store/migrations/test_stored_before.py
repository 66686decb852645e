"""Calls, feedback and joins that were stored before a migration are there after it, and back."""

import json

from sqlalchemy import text

from store.connection.engine import make_engine
from store.ids import new_id, time_of
from store.read.episodes import episode_ids, read_episodes
from store.schema.migrate import check, downgrade, upgrade
from store.schema.partitions import ensure_partition
from store.values.tokens import pack_logprobs
from store.write.ingest import Ingester
from tests.integration.store.migrations.test_migrations import joins, store_all, tables
from tests.support.records import call, reward, tokens


async def test_rewards_on_single_calls_are_found_again(database_url: str) -> None:
    engine = make_engine(database_url)
    whole = call("whole", provides=(b"3" * 16,))
    part = call("part", method="own", needs=(b"3" * 16,))
    named = call("part", method="prefix")
    other = call("other")
    said = [reward(1.0, call=str(one.id), at=at) for at, one in enumerate([whole, whole, named])]
    await Ingester().store(engine, [whole, part, named, other, *said])
    query = text("SELECT key, scored_at, call_scored_at FROM episodes WHERE root IS NULL")
    async with engine.connect() as connection:
        before = sorted(map(tuple, await connection.execute(query)), key=str)
    assert [key for key, _, at in before if at] == ["whole"]
    await engine.dispose()
    await downgrade(database_url, "0004")
    await upgrade(database_url)
    async with engine.connect() as connection:
        assert sorted(map(tuple, await connection.execute(query)), key=str) == before
    await engine.dispose()


OLD_EPISODE = """
    INSERT INTO episodes (id, key, method, task, task_named, policy, policy_version,
                          first_call_id, last_call_at)
    VALUES (:id, 'old', 'own', 'prompt:1', false, 'm', 0, :id, now())
"""
OLD_CALL = """
    INSERT INTO transitions (id, episode_id, agent, dialect, policy, policy_version, status,
        stream, request, reply, prompt_ids, sampled_ids, sampled_logprobs, sampling, trainable,
        tool_calls, started_at, total_ms, retry)
    VALUES (:id, :id, 'default', 'chat', 'm', 0, 'complete', false, CAST(:request AS json),
        CAST(:reply AS json), :ids, :ids, :logprobs, '{"temperature": 1.0}', true, '[]', now(),
        1, 0)
"""
ODD = '{"z":1, "a":12345678901234567890,"nul":"\\u0000","twice":1,"twice":2}'


async def test_what_was_stored_survives_up_and_down(empty_database_url: str) -> None:
    await upgrade(empty_database_url, "0001")
    engine = make_engine(empty_database_url)
    old = new_id()
    async with engine.begin() as connection:
        await ensure_partition(connection, time_of(old).date())
        await connection.execute(text(OLD_EPISODE), {"id": old})
        values = {"id": old, "request": ODD, "reply": '{"id": "r"}'}
        values |= {"ids": b"\x01\x00\x00\x00", "logprobs": pack_logprobs([-0.5])}
        await connection.execute(text(OLD_CALL), values)
    await engine.dispose()

    await upgrade(empty_database_url)
    thread = [
        call(
            "new",
            method="own",
            request=json.dumps({"messages": ["turn"] * 40 * turn}).encode(),
            tokens=tokens(list(range(turn)), [turn]),
            provides=(b"3" * 16,),
        )
        for turn in range(1, 4)
    ]
    joined = call("other", method="own", task="named", needs=(b"3" * 16,), request=ODD.encode())
    await Ingester().store(engine, [*thread, joined, reward(1.0, call=str(joined.id))])
    async with engine.connect() as connection:
        before = await read_episodes(connection, await episode_ids(connection))
        added = await connection.execute(text("SELECT count(parent_id) FROM transitions"))
        assert added.scalar() == 2
    assert [len(episode.calls) for episode in before] == [1, 4]
    assert before[0].calls[0].request == ODD.encode()
    await engine.dispose()

    await downgrade(empty_database_url, "0001")
    async with engine.connect() as connection:
        rows = await connection.execute(
            text("SELECT id, request::text, prompt_ids FROM transitions ORDER BY id")
        )
        assert [(row.id, row.request.encode(), row.prompt_ids) for row in rows] == [
            (c.id, c.request, c.tokens.prompt_ids) for episode in before for c in episode.calls
        ]
        kept = await connection.execute(
            text("SELECT key, task, scored_at IS NOT NULL FROM episodes ORDER BY first_call_id")
        )
        assert [tuple(row) for row in kept] == [("old", "prompt:1", False), ("new", "named", True)]
    await engine.dispose()

    await upgrade(empty_database_url)
    async with engine.connect() as connection:
        after = await read_episodes(connection, await episode_ids(connection))
    await engine.dispose()
    assert [[c.request for c in e.calls] for e in after] == [
        [c.request for c in e.calls] for e in before
    ]
    assert [[said.value for said in e.feedback] for e in after] == [[], [1.0]]
    await check(empty_database_url)


async def test_two_bodies_under_one_key_survive_down_and_up(empty_database_url: str) -> None:
    await upgrade(empty_database_url, "0005")
    engine = make_engine(empty_database_url)
    insert = text(
        "INSERT INTO feedback_requests (id, idempotency_key, body_hash, at)"
        " VALUES (:id, :key, :hash, now())"
    )
    async with engine.begin() as connection:
        for key in ("old", None, None):
            await connection.execute(insert, {"id": new_id(), "key": key, "hash": key and "a"})
    await engine.dispose()
    await upgrade(empty_database_url)
    async with engine.begin() as connection:
        for key, body in (("k", "a"), ("k", "b"), ("old", "b")):
            await connection.execute(insert, {"id": new_id(), "key": key, "hash": body})
    await engine.dispose()
    await downgrade(empty_database_url, "0005")
    query = text("SELECT idempotency_key, body_hash FROM feedback_requests ORDER BY id")
    async with engine.connect() as connection:
        kept = [tuple(row) for row in await connection.execute(query)]
    await engine.dispose()
    empty = [(None, None), (None, None)]
    assert kept == [("old", "a"), *empty, ("k", "a"), (None, "b"), (None, "b")]
    await upgrade(empty_database_url)
    await check(empty_database_url)


async def test_both_sides_of_a_join_survive_their_new_names(database_url: str) -> None:
    url = database_url
    before = (
        "SELECT digest, episode_id FROM offers",
        "SELECT digest, call_id, episode_id, level FROM asks",
        "SELECT call_id, level, offered_by, asked_by, worn FROM links",
    )
    after = (
        "SELECT digest, episode_id FROM provided_fingerprints",
        "SELECT digest, call_id, episode_id, level FROM needed_fingerprints",
        "SELECT call_id, level, provided_by, needed_by, too_common FROM links",
    )
    alone, shared = b"3" * 16, b"4" * 16
    await store_all(
        url,
        [
            call("one", method="own", provides=(alone,)),
            *(call(f"of-many-{n}", method="own", provides=(shared,)) for n in range(10)),
            call("joins-one", method="own", needs=(alone,)),
            call("joins-none", method="own", needs=(shared,)),
        ],
    )
    stored = [await joins(url, query) for query in after]
    assert [len(rows) for rows in stored] == [11, 2, 10]
    assert {row[-1] for row in stored[2]} == {False, True}

    await downgrade(url, "0006")
    assert [await joins(url, query) for query in before] == stored
    assert {"asks", "offers", "api_keys"} <= await tables(url)
    await upgrade(url)
    assert [await joins(url, query) for query in after] == stored
    await check(url)
    # What is stored now finds what was stored under the old names.
    engine = make_engine(url)
    await Ingester().store(engine, [call("joins-one-late", method="own", needs=(alone,))])
    async with engine.connect() as connection:
        found = await read_episodes(connection, await episode_ids(connection))
    await engine.dispose()
    assert ("joins-one", "joins-one-late") in [episode.aliases for episode in found]


async def test_indexes_have_the_names_that_their_tables_give_them(database_url: str) -> None:
    query = (
        "SELECT tablename, indexname FROM pg_indexes WHERE tablename IN"
        " ('needed_fingerprints', 'provided_fingerprints', 'links')"
    )
    assert {(table, name) for table, name in await joins(database_url, query)} == {
        ("needed_fingerprints", "ix_needed_fingerprints_digest"),
        ("needed_fingerprints", "ix_needed_fingerprints_call_id"),
        ("needed_fingerprints", "ix_needed_fingerprints_episode_id"),
        ("provided_fingerprints", "ix_provided_fingerprints_digest"),
        ("provided_fingerprints", "ix_provided_fingerprints_episode_id"),
        ("links", "pk_links"),
        ("links", "ix_links_needed_by"),
        ("links", "ix_links_provided_by"),
    }
