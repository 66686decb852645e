"""Tenants with the same names and words: each has what it would have if it were alone."""

import json
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.feedback_body import parse_feedback
from store import claims
from store.claim_query import ClaimRule
from store.database import driver_of
from store.deleting import delete_episode
from store.ids import new_id
from store.questions import known_targets
from store.records import CallRecord, Episode, FeedbackRecord, SpoolRecord
from store.selecting import Selection, find_named_episodes, select_episodes
from store.tenants import DEFAULT, SEPARATOR, bare, keyed_digests, scoped, tenant_of
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.integration.store.test_joins import content, scenario, scores
from tests.support.ledger.any_order import empty, store_in_batches
from tests.support.ledger.episodes import episodes
from tests.support.records import START

TENANTS = (DEFAULT, "a", "b")
FORGED = 9.0
GROUPS = ClaimRule(policy="m", group_size=2, groups=1, max_age_s=1e-6, fewest=1)


def as_of(tenant: str, record: SpoolRecord) -> SpoolRecord:
    """The record as the proxy makes it of a tenant's request."""
    if isinstance(record, CallRecord):
        return msgspec.structs.replace(
            record,
            episode=scoped(tenant, record.episode),
            task=record.task and scoped(tenant, record.task),
            response_id=record.response_id and scoped(tenant, record.response_id),
            provides=keyed_digests(tenant, record.provides),
            needs=keyed_digests(tenant, record.needs),
        )
    assert isinstance(record, FeedbackRecord)
    items = (
        msgspec.structs.replace(item, target=scoped(tenant, item.target)) for item in record.items
    )
    return msgspec.structs.replace(record, items=tuple(items))


def stated(tenant: str, value: float, at: int, key: str | None = None, **target: str) -> Any:
    body = json.dumps({"value": value, **target}).encode()
    return parse_feedback(body, START + timedelta(seconds=at), key, tenant)


def records_of(tenant: str, seed: int) -> list[SpoolRecord]:
    """A scenario of the same names for every tenant, with statements under one idempotency key."""
    records = [as_of(tenant, record) for record in scenario(random.Random(seed))]
    calls = [record for record in records if isinstance(record, CallRecord)]
    about = random.Random(seed).choice(calls)
    said = stated(tenant, 0.3, 7, "key", call=str(about.id))
    return [*records, said, stated(tenant, 0.4, 8, "other", episode="k0")]


def forgeries(tenant: str, others: Sequence[SpoolRecord], dice: random.Random) -> list[SpoolRecord]:
    """What a tenant states who knows all ids of another, and how its names are kept."""
    forged: list[SpoolRecord] = []
    for record in others:
        if isinstance(record, CallRecord):
            names = {"call": str(record.id), "episode": record.episode}
            names |= {"response": record.response_id or "none"}
            kind = dice.choice(list(names))
            if kind != "call" and SEPARATOR not in names[kind]:
                # Such a name is its own, too.
                continue
            forged.append(stated(tenant, FORGED, 99, **{kind: names[kind]}))
    return forged


def of(tenant: str, found: Sequence[Episode]) -> list[Episode]:
    return [one for one in found if tenant_of(one.key) == tenant]


@pytest.mark.parametrize("seed", range(10))
async def test_other_tenants_records_change_no_tenants_episodes_or_scores(
    engine: AsyncEngine, seed: int
) -> None:
    dice = random.Random(seed)
    own = {tenant: records_of(tenant, seed) for tenant in TENANTS}
    alone = {}
    for tenant, records in own.items():
        await store_in_batches(engine, records, dice, disorder=True)
        found = await episodes(engine)
        assert of(tenant, found) == found
        alone[tenant] = content(found), await scores(engine)
        await empty(engine)
    forged = [
        one
        for tenant in TENANTS
        for other in TENANTS
        if other != tenant
        for one in forgeries(tenant, own[other], dice)
    ]
    together = [record for records in own.values() for record in records] + forged
    await store_in_batches(engine, together, dice, disorder=True)
    found, all_scores = await episodes(engine), await scores(engine)
    for tenant in TENANTS:
        scored = [row for row in all_scores if tenant_of(row[0]) == tenant]
        assert (content(of(tenant, found)), scored) == alone[tenant]
    async with engine.connect() as connection:
        landed = text(
            "SELECT count(*) FROM feedback WHERE value = :value AND episode_id IS NOT NULL"
        )
        assert await connection.scalar(landed, {"value": FORGED}) == 0
        crossing = text(
            "SELECT count(*) FROM links l JOIN episodes n ON n.id = l.needed_by"
            " JOIN episodes p ON p.id = l.provided_by"
            f" WHERE split_part(n.key, '{SEPARATOR}', 1) <> split_part(p.key, '{SEPARATOR}', 1)"
            f" AND (strpos(n.key, '{SEPARATOR}') > 0 OR strpos(p.key, '{SEPARATOR}') > 0)"
        )
        assert await connection.scalar(crossing) == 0


async def test_no_group_has_episodes_of_two_tenants_with_the_same_policy(
    engine: AsyncEngine,
) -> None:
    records: list[SpoolRecord] = []
    for tenant in TENANTS:
        calls = [record for record in scenario(random.Random(1)) if isinstance(record, CallRecord)]
        for number in range(3):
            changes = {"id": new_id(), "episode": f"run {number}", "method": "header", "needs": ()}
            told = {"provides": (), "confidence": "certain", "task": "the task", "tool_events": ()}
            plain = msgspec.structs.replace(calls[0], **changes, **told, response_id=None)
            records += [
                as_of(tenant, plain),
                stated(tenant, number / 2, 1, episode=f"run {number}"),
            ]
    await Ingester().store(engine, records)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        update_id = await claims.claim(connection, GROUPS, 0, {})
        assert update_id is not None
        claim = await claims.load_claim(connection, update_id)
    assert claim.groups
    for group in claim.groups:
        [tenant] = {tenant_of(one.key) for one in group.episodes}
        assert group.task == scoped(tenant, "the task")


async def test_feedback_targets_of_another_tenant_are_unknown(
    engine: AsyncEngine,
) -> None:
    [call] = [one for one in records_of("a", 2) if isinstance(one, CallRecord)][:1]
    call = msgspec.structs.replace(call, response_id=scoped("a", "r"))
    await Ingester().store(engine, [call])
    names = {"call": str(call.id), "response": "r", "episode": "k"}
    names["episode"] = call.episode.partition(SEPARATOR)[2]
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        for tenant, known in (("a", 3), ("b", 0), (DEFAULT, 0)):
            wanted = [(kind, scoped(tenant, name)) for kind, name in names.items()]
            assert len(await known_targets(driver, wanted)) == known


async def test_deleting_a_tenants_episodes_spares_equal_names_of_other_tenants(
    engine: AsyncEngine,
) -> None:
    for tenant in TENANTS:
        await Ingester().store(engine, records_of(tenant, 3))
    before = await episodes(engine)
    there, elsewhere = of("a", before)[0].key, scoped("c", bare(of("a", before)[0].key))
    async with engine.begin() as connection:
        chosen = await find_named_episodes(connection, [there, elsewhere])
        assert (len(chosen.wholes), chosen.unknown) == (1, (elsewhere,))
        everything = [await select_episodes(connection, Selection(tenant=one)) for one in TENANTS]
        for whole in await select_episodes(connection, Selection(tenant="a", prefix="k")):
            assert await delete_episode(connection, whole) is not None
    assert [len(ids) for ids in everything] == [len(of(tenant, before)) for tenant in TENANTS]
    # What comes late of the deleted is not stored; the others' names are not deleted ones.
    late = {tenant: records_of(tenant, 3) for tenant in TENANTS}
    for records in late.values():
        await Ingester().store(engine, records)
    left = await episodes(engine)
    assert of("a", left) == []
    for tenant in (DEFAULT, "b"):
        kept = {one.key for one in of(tenant, left)}
        assert kept == {one.key for one in of(tenant, before)}
