"""Versions give their adapter slots up to the next one; updates wait while none can."""

from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from store import adapter_slots, version_queries, version_states
from store.adapter_slots import LONGEST_KEPT_S, VersionKeptForEpisodes
from store.claims import list_updates
from store.version_states import ensure_base
from tests.support.controller.replicas import reconcile
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import State, add_in_state
from tests.support.records import call, reward
from tests.support.trainer.bench import STEPS, Bench, gauge
from trainer.publishing.model_server import Replicas
from trainer.publishing.pacing import SLOTS_CACHED_S, Pacing
from trainer.recipes.recipe import ClaimOptions, Recipe


async def add(bench: Bench, name: str, *states: tuple[State, float]) -> None:
    """Add versions 1, 2, … of a policy of `m`: each its state, and the seconds since it has it."""
    async with bench.engine.begin() as connection:
        await ensure_base(connection, name, "m")
        await connection.execute(
            text("UPDATE policies SET state = 'retired' WHERE name = :name"), {"name": name}
        )
        for number, (state, ago_s) in enumerate(states, 1):
            await add_in_state(connection, name, number, state, ago_s=ago_s)


async def unloaded(bench: Bench) -> list[int]:
    async with bench.engine.connect() as connection:
        versions = await version_queries.list_versions(connection, "m")
    return [one.version for one in versions if one.unloaded]


async def later(bench: Bench, seconds: float) -> None:
    """Let all changes of state be so long ago."""
    query = text(
        "UPDATE policies SET changed_at = changed_at - make_interval(secs => :s),"
        " unloaded_at = unloaded_at - make_interval(secs => :s)"
    )
    async with bench.engine.begin() as connection:
        await connection.execute(query, {"s": seconds})


async def begin_episodes(bench: Bench, *versions: int) -> None:
    """Let each of these versions have an episode under way."""
    async with bench.engine.begin() as connection:
        await ingest(connection, [call(f"e{v}", policy_version=v) for v in versions])


async def test_versions_with_rewarded_episodes_give_up_their_slots(bench: Bench) -> None:
    bench.slots = 8
    async with bench.working() as loop:
        for number in range(12):
            await bench.fill(f"t{number}")
            assert await loop.update_once()
            await later(bench, 20.0)
            await reconcile(bench.engine, loop._servers)
            assert len(bench.fake.loaded) <= 8
        assert await unloaded(bench) == [1, 2, 3, 4]
    await bench.assert_spent_once(48)


async def test_running_episodes_keep_their_versions_slots_and_training_waits(
    bench: Bench,
) -> None:
    bench.slots = 3
    async with bench.working() as loop:
        for name in "uv":
            await bench.fill(name)
            assert await loop.update_once()
            await later(bench, 100.0)
        await begin_episodes(bench, 1)
        await bench.fill("w")
        assert await loop.update_once()
        await begin_episodes(bench, 2)
        await later(bench, 100.0)
        assert await unloaded(bench) == []
        await bench.fill("x")
        with capture_logs() as logs:
            assert not await loop.update_once()
            assert not await loop.update_once()
        [waits] = [one for one in logs if one["event"] == "trainer_waits_for_a_slot"]
        assert waits["episodes_under_way"] == ["m@1", "m@2"]
        assert 0 < waits["at_most_s"] <= LONGEST_KEPT_S - 200
        assert (gauge("pawl_live_versions"), gauge("pawl_adapter_slots")) == (3.0, 3.0)
        # Nothing is claimed, and nothing spent, while it waits.
        await bench.assert_spent_once(12)
        # The reward of the second comes first: the older version goes on.
        async with bench.engine.begin() as connection:
            await ingest(connection, [reward(1.0, episode="e2")])
        assert await loop.update_once()
        assert await unloaded(bench) == [2]


async def test_oldest_version_with_running_episodes_loses_its_slot_in_the_end(
    bench: Bench,
) -> None:
    bench.slots = 2
    async with bench.working() as loop:
        for name in "uv":
            await bench.fill(name)
            assert await loop.update_once()
        await later(bench, LONGEST_KEPT_S - 10.0)
        await begin_episodes(bench, 1)
        await bench.fill("w")
        assert not await loop.update_once()
        await later(bench, 11.0)
        assert await loop.update_once()
        assert await unloaded(bench) == [1]


async def test_version_promoted_during_eviction_keeps_its_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.slots = 2
    async with bench.working() as loop:
        for name in "uv":
            await bench.fill(name)
            assert await loop.update_once()
            await later(bench, 100.0)
        await bench.fill("w")
        versions_kept_for_episodes = adapter_slots.versions_kept_for_episodes

        async def then_promoted(*given: Any) -> list[VersionKeptForEpisodes]:
            """Read which give way; an operator promotes one before any is unloaded."""
            found = await versions_kept_for_episodes(*given)
            assert [one.version for one in found] == [1]
            async with bench.engine.begin() as connection:
                await version_states.promote(connection, "m", 1, reason="by hand", actor="operator")
            return found

        monkeypatch.setattr(adapter_slots, "versions_kept_for_episodes", then_promoted)
        assert await loop.update_once()
        assert await unloaded(bench) == []


async def test_server_with_fewer_slots_evicts_as_many_versions_as_needed(bench: Bench) -> None:
    for slots, name in ((8, "t"), (8, "u"), (8, "v"), (8, "w"), (2, "x")):
        bench.slots = slots
        await bench.update(name)
        await later(bench, 100.0)
    assert await unloaded(bench) == [1, 2, 3]


async def test_idle_version_keeps_its_slot_until_an_update_is_ready(bench: Bench) -> None:
    bench.slots = 2
    async with bench.working() as loop:
        assert await loop.update_once()
        await bench.fill("u")
        assert await loop.update_once()
        await later(bench, 3700.0)
        # Nothing is ready to be claimed.
        assert not await loop.update_once()
        await reconcile(bench.engine, loop._servers)
        assert await unloaded(bench) == []
        await bench.fill("w")
        assert await loop.update_once()
        assert await unloaded(bench) == [1]


async def test_trainer_that_was_killed_at_full_slots_goes_on_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.slots = 3
    for name in "uvw":
        await bench.update(name)
        await later(bench, 100.0)
    await bench.fill("x")
    await bench.run_killed(monkeypatch, STEPS["before publishing"])
    monkeypatch.undo()
    await begin_episodes(bench, 2)
    async with Replicas([bench.fake.url], bench.slots) as servers:
        loop = bench.loop(servers)
        await loop.finish_killed()
        await loop.check_server()
        assert not loop._breaker.is_open
        await loop.recover()
        await bench.fill("y")
        assert (await bench.version(4)).state == "serving"


async def test_number_of_adapter_slots_is_read_from_the_model_server(bench: Bench) -> None:
    bench.fake.adapter_slots = 3
    bench.slots = None
    async with bench.working() as loop:
        await loop.update_once()
    assert gauge("pawl_adapter_slots") == 3.0
    bench.fake.adapter_slots = None
    bench.slots = None
    async with bench.working() as loop:
        await loop.update_once()
    assert gauge("pawl_adapter_slots") == 8.0


async def test_delayed_update_claims_the_episodes_that_came_meanwhile(bench: Bench) -> None:
    for name in "uv":
        await bench.fill(name)
    bench.slots = 2
    async with bench.working() as loop:
        assert await loop.update_once()
        assert await loop.update_once()
        await begin_episodes(bench, 1)
        await later(bench, 100.0)
        await bench.fill("x")
        assert not await loop.update_once()
        await later(bench, LONGEST_KEPT_S)
        assert await loop.update_once()
    async with bench.engine.connect() as connection:
        sizes = [one.metrics["episodes"] for one in await list_updates(connection, "m")]
    assert sizes == [4, 4, 8]


# The rule by itself


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def allowed(bench: Bench, pacing: Pacing) -> bool:
    async def is_wanted() -> bool:
        return True

    async with bench.engine.begin() as connection:
        return await pacing.allows_version(connection, is_wanted)


async def test_first_of_policies_going_live_together_waits_for_slots_for_all(
    bench: Bench,
) -> None:
    await add(bench, "m", ("retired", 5.0), ("serving", 5.0))
    await add(bench, "n", ("serving", 5.0))
    clock = Clock()
    async with Replicas([bench.fake.url], 4) as servers:

        def pacing(policy: str, *together: str) -> Pacing:
            return Pacing(servers, policy, Recipe(), together, clock)

        first, alone = pacing("m", "m", "n"), pacing("m")
        assert not await allowed(bench, first)
        assert await allowed(bench, alone)
        # Others may take each slot as it becomes free: nobody waits for ever.
        clock.now += Recipe().publish.wait_for_others_s
        assert await allowed(bench, first)
        await add_loaded(bench, "m", 3)
        assert not await allowed(bench, pacing("n", "m", "n"))
        await change(
            bench, "UPDATE policies SET unloaded_at = now() WHERE version = 1 AND name = 'm'"
        )
        await later(bench, 11.0)
        assert await allowed(bench, pacing("n", "m", "n"))


async def add_loaded(bench: Bench, name: str, version: int) -> None:
    async with bench.engine.begin() as connection:
        await add_in_state(connection, name, version, "loaded", ago_s=1.0)


async def change(bench: Bench, query: str) -> None:
    async with bench.engine.begin() as connection:
        await connection.execute(text(query))


async def test_slot_count_is_asked_until_known_and_then_refreshed(
    bench: Bench,
) -> None:
    clock = Clock()
    async with Replicas([bench.fake.url]) as servers:
        pacing = Pacing(servers, "m", Recipe(), (), clock)
        seen = []
        for told, passed_s in ((None, 0.0), (3, 1.0), (5, 1.0), (5, SLOTS_CACHED_S)):
            bench.fake.adapter_slots = told
            clock.now += passed_s
            await allowed(bench, pacing)
            seen.append(gauge("pawl_adapter_slots"))
    assert seen == [8.0, 3.0, 3.0, 5.0]


async def test_max_staleness_too_small_for_the_slots_is_warned_of_once(
    bench: Bench,
) -> None:
    async with Replicas([bench.fake.url], 8) as servers:
        with capture_logs() as logs:
            for staleness in (15, 16):
                recipe = Recipe(claim=ClaimOptions(max_staleness=staleness))
                pacing = Pacing(servers, "m", recipe)
                for _ in range(2):
                    await allowed(bench, pacing)
    [warning] = logs
    assert warning["event"] == "max_staleness_too_small"
    assert "claim.max_staleness to 16" in warning["remedy"]


async def test_self_test_waits_while_all_slots_have_episodes_under_way(bench: Bench) -> None:
    await add(bench, "m", ("retired", 60.0), ("serving", 60.0))
    await change(bench, "UPDATE policies SET share = 0.05 WHERE version = 0")
    await begin_episodes(bench, 1)
    bench.slots = 2
    async with bench.working() as loop:
        await loop.check_server()
        await loop.test_if_due()
        assert bench.learner.self_tests == 0
        async with bench.engine.begin() as connection:
            await ingest(connection, [reward(1.0, episode="e1")])
        await loop.test_if_due()
        assert bench.learner.self_tests == 1
    assert await unloaded(bench) == [1]
