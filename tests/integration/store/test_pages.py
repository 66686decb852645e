"""Pages of episodes, policy versions and updates: each item once, in order, as JSON."""

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import BadPage
from store.ids import lowest_id_at, new_id
from store.read.pages import EpisodeSummary, Page, episode_page, update_page, version_page
from store.updates import claims
from store.updates.claims import Outcome
from store.updates.ready import ClaimRule
from store.version_queries import list_versions
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.records import call, reward

RULE = ClaimRule(policy="m", group_size=1, groups=1, smallest_group=1, max_age_s=1e9)
MOST = 100


async def every(
    engine: AsyncEngine,
    read: Callable[..., Awaitable[Page[Any]]],
    *,
    limit: int,
    between: Callable[[], Awaitable[None]] | None = None,
    **chosen: Any,
) -> list[Any]:
    """All items, page by page; something else happens after each page."""
    items: list[Any] = []
    after: str | None = None
    for _ in range(MOST):
        async with engine.connect() as connection:
            page = await read(connection, after=after, limit=limit, **chosen)
        assert len(page.items) <= limit
        items += page.items
        after = page.next
        if after is None:
            return items
        assert page.items
        if between is not None:
            await between()
    raise AssertionError(f"more than {MOST} pages")


def made_at(moment: datetime, number: int) -> UUID:
    return UUID(int=lowest_id_at(moment).int + number)


async def test_nothing_is_one_empty_page(engine: AsyncEngine) -> None:
    for read in (episode_page, version_page, update_page):
        async with engine.connect() as connection:
            page: Page[Any] = await read(connection)
        assert (page.items, page.next) == ((), None)


async def test_every_episode_comes_once_in_order_while_others_are_stored(
    engine: AsyncEngine,
) -> None:
    begun = datetime.now(UTC) - timedelta(hours=1)
    store = Ingester().store
    first = [call(f"e{n}", id=made_at(begun, 10 * n)) for n in range(1, 24)]
    await store(engine, first)
    stored = iter(range(0))

    async def others() -> None:
        """One before all, one in the midst of all, and one after all, with a later call of e1."""
        n = next(stored, None)
        if n is None:
            return
        await store(
            engine,
            [
                call(f"before-{n}", id=made_at(begun, n - 1000)),
                call(f"amid-{n}", id=made_at(begun, 10 * n + 5)),
                call(f"behind-{n}", id=new_id()),
                call("e1"),
            ],
        )

    for limit in (1, 4, 23, MOST):
        stored = iter(range(limit, limit + 5))
        found = await every(engine, episode_page, limit=limit, between=others)
        keys = [one.key for one in found]
        assert [key for key in keys if key.startswith("e")] == [one.episode for one in first]
        assert len(keys) == len(set(keys))
        assert [one.id for one in found] == sorted(one.id for one in found)


async def test_a_page_that_is_just_full_is_the_last(engine: AsyncEngine) -> None:
    await Ingester().store(engine, [call(f"e{n}") for n in range(4)])
    async with engine.connect() as connection:
        assert (await episode_page(connection, limit=4)).next is None
        assert (await episode_page(connection, limit=3)).next is not None


async def test_episodes_are_filtered_as_for_the_export(engine: AsyncEngine) -> None:
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    await Ingester().store(
        engine,
        [
            call("writers", agent="writer", started_at=datetime.now(UTC)),
            call("old", started_at=hour_ago, policy="n"),
            call("other", policy="n", started_at=datetime.now(UTC)),
        ],
    )

    async def keys(**chosen: Any) -> list[str]:
        return [one.key for one in await every(engine, episode_page, limit=1, **chosen)]

    assert await keys() == ["writers", "old", "other"]
    assert await keys(agent="writer") == ["writers"]
    assert await keys(policy="n") == ["old", "other"]
    assert await keys(policy="n", since=hour_ago + timedelta(minutes=1)) == ["other"]


async def test_the_parts_of_an_episode_are_one_item(engine: AsyncEngine) -> None:
    started = datetime.now(UTC) - timedelta(hours=1)
    records = [
        call("whole", provides=(b"3" * 16,), started_at=started),
        call("part", method="own", needs=(b"3" * 16,), task="named", started_at=datetime.now(UTC)),
    ]
    await Ingester().store(engine, records)
    [found] = await every(engine, episode_page, limit=5)
    assert (found.key, found.task) == ("whole", "named")
    assert found.last_call_at == records[1].started_at


async def spend(engine: AsyncEngine, version: int) -> UUID:
    async with engine.begin() as connection:
        update_id = await claims.claim(connection, RULE, version - 1, {})
        assert update_id is not None
        claim = await claims.load_claim(connection, update_id)
        [episode] = [one for group in claim.groups for one in group.episodes]
        await claims.consume(
            connection,
            update_id,
            [Outcome(episode_id=episode.id, trained=False, reason="no_spread")],
            {"episodes": 1},
            policy="m",
            version=version,
            adapter_path=f"/adapters/{version}",
        )
    return update_id


async def test_versions_and_updates_come_once_in_order(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        for name in ("m", "n@1", "n"):
            await ensure_base(connection, name)
    said = [[call(f"e{n}"), reward(1.0, episode=f"e{n}")] for n in range(5)]
    await Ingester().store(engine, [record for records in said for record in records])
    spent = [await spend(engine, version) for version in range(1, 4)]
    versions = await every(engine, version_page, limit=2)
    async with engine.connect() as connection:
        assert versions == await list_versions(connection)
        assert await every(engine, update_page, limit=2) == await claims.list_updates(connection)
    assert [one.id for one in await every(engine, update_page, limit=1)] == spent
    assert [one.version for one in await every(engine, version_page, limit=1, policy="m")] == [
        *range(4)
    ]
    assert await every(engine, update_page, limit=1, policy="n") == []


async def test_pages_are_json(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    await Ingester().store(engine, [call("e"), reward(1.0, episode="e"), call("open")])
    update_id = await spend(engine, 1)
    async with engine.connect() as connection:
        pages = [
            await episode_page(connection, limit=1),
            await version_page(connection, limit=1),
            await update_page(connection),
        ]
    found, version, done = [json.loads(msgspec.json.encode(page)) for page in pages]
    [episode] = found["items"]
    assert set(episode) == set(EpisodeSummary.__struct_fields__)
    assert found["next"] == episode["id"]
    assert (episode["key"], episode["policy"], episode["policy_version"]) == ("e", "m", 0)
    [claimed] = episode["claims"]
    assert (claimed["policy"], claimed["version"]) == ("m", 0)
    spent_by = (claimed["update_id"], claimed["trained"], claimed["reason"])
    assert spent_by == (str(update_id), False, "no_spread")
    assert datetime.fromisoformat(episode["scored_at"]) < datetime.now(UTC)
    assert version["next"] == "m@0"
    assert [one["served_name"] for one in version["items"]] == ["m"]
    assert [(one["id"], one["state"]) for one in done["items"]] == [(str(update_id), "done")]


@pytest.mark.parametrize("page", [episode_page, version_page, update_page])
@pytest.mark.parametrize("asked", [{"limit": 0}, {"limit": -1}, {"after": "x"}, {"after": "m@-1"}])
async def test_a_page_that_does_not_exist_is_named(
    engine: AsyncEngine, page: Any, asked: dict[str, Any]
) -> None:
    [name] = asked
    async with engine.connect() as connection:
        with pytest.raises(BadPage, match=f"{name} is"):
            await page(connection, **asked)
