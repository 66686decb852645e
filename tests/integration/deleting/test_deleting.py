"""Deleting an episode: nothing of it is left in any table, and nothing else changes."""

import random
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.identity.identify import why_unusable
from store import claims
from store.claim_query import ClaimRule
from store.deleting import mark_deleted
from store.errors import ClaimLost
from store.ids import new_id
from store.judging import Judgement, store_judgement
from store.records import FeedbackRecord, GapRecord, SpoolRecord, ToolCall
from store.selecting import Selection, find_named_episodes, select_episodes
from store.values.digests import PREFIX, TOOL_CALL
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.any_order import store_in_batches
from tests.support.ledger.deleting import deleted, exported, places_with
from tests.support.ledger.totals import totals
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward, statement, tokens, tool_event

CANARY = "canary-7f3a9c"
RULE = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=1e9)


def digest(kind: int, name: str) -> bytes:
    return bytes([kind]) + name.encode()[-15:].ljust(15, b".")


def now(record: FeedbackRecord) -> FeedbackRecord:
    """Make feedback as it is stated: its time is that of its ids."""
    return msgspec.structs.replace(record, at=datetime.now(UTC))


def body(*turns: str) -> bytes:
    messages = [{"role": "user", "content": turn * 20} for turn in turns]
    return msgspec.json.encode({"model": "m", "messages": messages})


def about_everything(key: str, word: str) -> list[SpoolRecord]:
    """Records of an episode that fill each table, with `word` wherever a client has a say."""
    first = call(
        key,
        task=f"task {word}",
        request=body(word),
        reply=msgspec.json.encode({"id": word}),
        response_id=f"response {word}",
        tool_calls=(ToolCall(id=f"tool {word}", name=word, arguments=word),),
        usage=b'{"prompt_tokens": 1}',
        provides=(digest(TOOL_CALL, f"{key} tool"),),
    )
    second = call(
        key,
        request=body(word, "more"),
        tool_events=(
            msgspec.structs.replace(tool_event("error", f"tool {word}"), detail=f"failed {word}"),
        ),
        needs=(digest(PREFIX, f"{key} nobody told"),),
    )
    raw = call(key, request=None, request_raw=word.encode(), reply=None, reply_raw=word.encode())
    said = now(statement("reward", 0.5, episode=key, key=f"key {word}"))
    right = f"the reply with {word}"
    about_call = now(statement(f"metric {word}", 0.5, call=str(first.id), correction=right))
    unmatched = now(statement("late", 0.5, response=f"response {word} later"))
    return [first, second, raw, said, about_call, unmatched]


async def store(engine: AsyncEngine, *records: SpoolRecord) -> frozenset[Any]:
    return await Ingester().store(engine, records)


async def test_deletion_leaves_no_trace_and_changes_no_other_episode(engine: AsyncEngine) -> None:
    kept = about_everything("kept", "kept-word")
    gone = about_everything(f"gone {CANARY}", CANARY)
    # What names nothing that is stored cannot be known to be about it.
    await store(engine, *kept, *gone[:-1])
    async with engine.begin() as connection:
        [whole] = (await find_named_episodes(connection, [f"gone {CANARY}"])).wholes
        judged = Judgement(
            episode_id=whole,
            judge="j",
            outcome="failed",
            attempts=1,
            last_call_at=datetime.now(UTC),
            reason=CANARY,
        )
        await store_judgement(connection, judged)
    before = await exported(engine)
    tables = {name.partition(".")[0] for name in await places_with(engine, CANARY)}
    assert tables >= {"episodes", "transitions", "tool_events", "feedback", "judgements"}
    assert "transitions.reply_raw" in await places_with(engine, CANARY)
    receipt = await deleted(engine, f"gone {CANARY}")
    assert await places_with(engine, CANARY) == []
    assert await exported(engine) == {"kept": before["kept"]}
    assert receipt.removed == {
        "transitions": 3,
        "tool_events": 1,
        "feedback": 2,
        "feedback_requests": 2,
        "judgements": 1,
        "provided_fingerprints": 1,
        "needed_fingerprints": 1,
    }
    assert (receipt.state, receipt.keys) == ("deleted", (f"gone {CANARY}",))
    # A judge that was still thinking.
    async with engine.begin() as connection:
        await store_judgement(connection, judged)
    assert await places_with(engine, CANARY) == []
    async with engine.connect() as connection:
        counted = await totals(connection)
    assert (counted.calls, counted.episodes) == (3, 1)


async def test_key_left_in_a_deleted_episodes_row_is_no_valid_episode_name(
    engine: AsyncEngine,
) -> None:
    await Ingester().store(engine, [call("gone")])
    await deleted(engine, "gone")
    async with engine.connect() as connection:
        [key] = (await connection.execute(text("SELECT key FROM episodes"))).scalars()
    assert why_unusable(key) == "holds unprintable characters"


async def test_late_records_of_a_deleted_episode_are_not_stored(engine: AsyncEngine) -> None:
    records = about_everything(f"gone {CANARY}", CANARY)
    await store(engine, *records[:-1])
    await deleted(engine, f"gone {CANARY}")
    other = reward(1.0, episode="other")
    mixed = msgspec.structs.replace(
        now(reward(0.0, episode=f"gone {CANARY}")),
        items=(*reward(0.0, episode=f"gone {CANARY}").items, *other.items),
    )
    lost = GapRecord(id=new_id(), episodes=(f"gone {CANARY}", "other"))
    late = call(f"gone {CANARY}", request=body(CANARY), response_id=f"late {CANARY}")
    early = now(reward(1.0, response=f"late {CANARY}"))
    assert await store(engine, early) == frozenset()
    left_out = await store(engine, *records[:-1], late, mixed, lost)
    assert left_out == {record.id for record in (*records[:-1], late)}
    assert await store(engine, now(reward(1.0, call=str(late.id)))) != frozenset()
    assert await places_with(engine, CANARY) == []
    async with engine.connect() as connection:
        rows = (await connection.execute(text("SELECT target FROM feedback"))).scalars()
        assert list(rows) == ["other"]
        assert await connection.scalar(text("SELECT count(*) FROM transitions")) == 0


async def test_call_that_extends_a_call_of_a_deleted_episode_is_still_exported_whole(
    engine: AsyncEngine,
) -> None:
    told = digest(PREFIX, "told")
    # Two were told the same: whom the third continues is in doubt, and it is joined with neither.
    records = [
        call("a", request=body("x" * 50), tokens=tokens([1, 2, 3], [4, 5]), provides=(told,)),
        call("b", request=body("x" * 50), provides=(told,)),
    ]
    ingester = Ingester()
    await ingester.store(engine, records)
    third = call(
        "c",
        method="own",
        request=body("x" * 50, "y"),
        tokens=tokens([1, 2, 3, 4, 5, 6], [7]),
        needs=(told,),
    )
    fourth = call("c", method="own", request=body("x" * 50, "y", "z"))
    await ingester.store(engine, [third, fourth])
    parents = text("SELECT parent_id FROM transitions WHERE id = :id")
    async with engine.connect() as connection:
        parent = await connection.scalar(parents, {"id": third.id})
        assert await connection.scalar(parents, {"id": fourth.id}) == third.id
    base = next(record for record in records if record.id == parent)
    before = await exported(engine)
    receipt = await deleted(engine, base.episode)
    assert receipt.rewritten_calls == 1
    assert receipt.linked == ("c",)
    after = await exported(engine)
    assert after == {key: line for key, line in before.items() if key != base.episode}
    # A batch that is stored now adds to no call that is gone.
    await ingester.store(
        engine, [call("d", method="own", request=body("x" * 50, "w"), needs=(told,))]
    )
    assert sum(len(line["calls"]) for line in (await exported(engine)).values()) == 4


async def test_a_joined_episode_is_deleted_whole(engine: AsyncEngine) -> None:
    told = digest(PREFIX, "told")
    await store(
        engine,
        call("first", method="own", provides=(told,)),
        call("second", method="own", needs=(told,)),
    )
    receipt = await deleted(engine, "second")
    assert receipt.episode == "first"
    assert receipt.keys == ("first", "second")
    assert await exported(engine) == {}
    assert await store(engine, call("first"), call("second")) != frozenset()
    async with engine.connect() as connection:
        again = await find_named_episodes(connection, ["first", "second", "never"])
    assert set(again.deleted_before) == {"first", "second"}
    assert (again.wholes, again.unknown) == ((), ("never",))


async def test_receipt_names_the_versions_trained_on_the_deleted_episode(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("e1"), call("e2"), reward(1.0, episode="e1"))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    claim = await claimed(engine, RULE)
    assert claim is not None
    await consume_all(engine, claim, version=1)
    for version, metrics in ((2, {}), (3, {"imported_from": 1.0})):
        await store(engine, call(f"of {version}"), reward(1.0, episode=f"of {version}"))
        claim = await claimed(engine, RULE, version - 1)
        assert claim is not None
        await consume_all(engine, claim, metrics, version=version)
    receipt = await deleted(engine, "e1")
    assert receipt.trained == ("m@1",)
    assert receipt.carried_by == ("m@1", "m@2")
    assert (await deleted(engine, "e2")).trained == ()
    # That it was spent is still known.
    async with engine.connect() as connection:
        counted = await totals(connection)
    assert (counted.trained_episodes, counted.trained_unscored_episodes) == (3, 0)


async def test_deletion_abandons_the_update_that_claimed_the_episode(engine: AsyncEngine) -> None:
    rule = msgspec.structs.replace(RULE, groups=2)
    await store(engine, *(call(key) for key in "ab"), *(reward(1.0, episode=key) for key in "ab"))
    claim = await claimed(engine, rule)
    assert claim is not None
    assert sum(len(group.episodes) for group in claim.groups) == 2
    receipt = await deleted(engine, "a")
    assert receipt.abandoned_updates == (claim.update_id,)
    with pytest.raises(ClaimLost):
        await consume_all(engine, claim, version=1)
    again = await claimed(engine, RULE)
    assert again is not None
    assert [e.key for group in again.groups for e in group.episodes] == ["b"]
    async with engine.connect() as connection:
        assert await claims.running_update(connection, "m") == again.update_id


async def test_unrecorded_episode_name_can_be_marked_deleted(engine: AsyncEngine) -> None:
    await store(engine, now(reward(1.0, episode="later")))
    async with engine.begin() as connection:
        marked = await mark_deleted(connection, "later")
    assert (marked.state, marked.removed["feedback"]) == ("marked", 1)
    assert await store(engine, call("later")) != frozenset()
    async with engine.begin() as connection:
        await connection.execute(text("DELETE FROM deleted_names"))
    await store(engine, call("stored"))
    async with engine.begin() as connection:
        assert (await mark_deleted(connection, "stored")).state == "deleted"


async def test_episodes_are_selected_by_task_name_prefix_and_time(engine: AsyncEngine) -> None:
    early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)
    await store(
        engine,
        call("u_1/a", task="t", started_at=early),
        call("u_1/b", started_at=late),
        call("uX1/c", task="t", started_at=late),
    )

    async def keys(**chosen: Any) -> set[str]:
        async with engine.connect() as connection:
            ids = await select_episodes(connection, Selection(**chosen))
            rows = text("SELECT key FROM episodes WHERE id = ANY(:ids)")
            return set((await connection.execute(rows, {"ids": ids})).scalars())

    assert await keys(task="t") == {"u_1/a", "uX1/c"}
    assert await keys(prefix="u_1/") == {"u_1/a", "u_1/b"}
    assert await keys(since=late) == {"u_1/b", "uX1/c"}
    assert await keys(before=late) == {"u_1/a"}
    assert await keys(task="t", since=late) == {"uX1/c"}


@pytest.mark.parametrize("seed", range(4))
async def test_deleting_any_episode_changes_no_other_episode(
    engine: AsyncEngine, seed: int
) -> None:
    dice = random.Random(seed)
    told = [digest(PREFIX, f"t{n}") for n in range(6)]
    records: list[SpoolRecord] = []
    for number in range(30):
        key = f"e{dice.randrange(10)}"
        mark = f"{key}-{CANARY}"
        request = body(mark, *["turn"] * dice.randrange(4))
        needs = tuple(dice.sample(told, dice.randrange(3)))
        provides = tuple(dice.sample(told, dice.randrange(2)))
        records.append(
            call(
                key,
                method="own",
                request=request,
                needs=needs,
                provides=provides,
                tokens=tokens(list(range(dice.randrange(1, 9))), [number]),
            )
        )
        if dice.random() < 0.3:
            records.append(now(reward(dice.random(), episode=key)))
    await store_in_batches(engine, records, dice, disorder=True)
    before = await exported(engine)
    victim = dice.choice(sorted(before))
    receipt = await deleted(engine, victim)
    for key in receipt.keys:
        assert await places_with(engine, f"{key}-{CANARY}") == []
    await store_in_batches(engine, records, dice, disorder=True)
    after = await exported(engine)
    assert after == {key: line for key, line in before.items() if key != victim}
