"""Updates wait for an adapter slot, and for their time."""

from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from store import version_queries, version_states
from store.claims import list_updates
from store.version_states import ensure_base
from store.versions import PolicyVersion
from tests.support.ledger.lineage import State, add_in_state
from tests.support.trainer.bench import Bench, gauge
from trainer.publishing.model_server import Replicas
from trainer.publishing.pacing import KNOWN_S, Pacing
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


async def unloaded(bench: Bench, number: int) -> bool:
    version = await bench.version(number)
    assert version.state == "retired"
    return version.unloaded


async def later(bench: Bench, seconds: float) -> None:
    """Let all changes of state be so long ago."""
    query = text(
        "UPDATE policies SET changed_at = changed_at - make_interval(secs => :s),"
        " unloaded_at = unloaded_at - make_interval(secs => :s)"
    )
    async with bench.engine.begin() as connection:
        await connection.execute(query, {"s": seconds})


async def test_no_more_versions_are_live_than_the_server_has_slots(bench: Bench) -> None:
    bench.slots = 2
    async with bench.working() as loop:
        for name in "uv":
            assert await loop.update_once()
            await bench.fill(name)
        assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
        assert not await loop.update_once()
        assert (gauge("pawl_live_versions"), gauge("pawl_adapter_slots")) == (2.0, 2.0)
        # Nothing is claimed, and nothing spent, while it waits.
        await bench.assert_spent_once(8)


async def test_an_idle_version_makes_room_once_the_proxies_know(bench: Bench) -> None:
    bench.slots = 2
    bench.change("publish", retire_after_s=900.0)
    async with bench.working() as loop:
        for name in "uv":
            assert await loop.update_once()
            await bench.fill(name)
        await later(bench, 1000.0)
        await loop.sync_adapters()
        assert await unloaded(bench, 1)
        assert not await loop.update_once()
        await later(bench, 11.0)
        assert await loop.update_once()
    assert (await bench.states())[3] == "serving"


async def test_an_idle_version_that_is_given_the_traffic_at_that_moment_keeps_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.slots = 2
    bench.change("publish", retire_after_s=900.0)
    async with bench.working() as loop:
        for name in "uv":
            assert await loop.update_once()
            await bench.fill(name)
        await later(bench, 1000.0)
        idle_versions = version_queries.idle_versions

        async def then_promoted(*given: Any) -> list[PolicyVersion]:
            """Read which are idle; an operator promotes one before any is unloaded."""
            found = await idle_versions(*given)
            if any(one.version == 1 for one in found):
                async with bench.engine.begin() as connection:
                    await version_states.promote(
                        connection, "m", 1, reason="by hand", actor="operator"
                    )
            return found

        monkeypatch.setattr(version_queries, "idle_versions", then_promoted)
        await loop.sync_adapters()
        assert await bench.states() == {0: "retired", 1: "serving", 2: "retired"}


async def test_a_version_that_is_in_use_for_ever_blocks_nothing_for_ever(bench: Bench) -> None:
    bench.slots = 2
    async with bench.working() as loop:
        for name in "uv":
            assert await loop.update_once()
            await bench.fill(name)
        assert not await loop.update_once()
        assert not await unloaded(bench, 1)
        await later(bench, 3700.0)
        assert not await loop.update_once()
        assert await unloaded(bench, 1)
        await later(bench, 11.0)
        assert await loop.update_once()
    assert (await bench.states())[3] == "serving"


async def test_with_one_slot_the_next_version_waits_for_all_but_the_one_that_serves(
    bench: Bench,
) -> None:
    bench.slots = 1
    async with bench.working() as loop:
        for name in "uv":
            assert await loop.update_once()
            await bench.fill(name)
        assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
        assert not await loop.update_once()


async def test_the_server_says_how_many_slots_it_has(bench: Bench) -> None:
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


async def test_an_update_that_had_to_wait_takes_what_has_waited_with_it(bench: Bench) -> None:
    for name in "uvw":
        await bench.fill(name)
    bench.slots = 2
    bench.change("publish", retire_after_s=900.0)
    async with bench.working() as loop:
        assert await loop.update_once()
        assert await loop.update_once()
        assert not await loop.update_once()
        await later(bench, 1000.0)
        await loop.sync_adapters()
        await later(bench, 11.0)
        assert await loop.update_once()
    async with bench.engine.connect() as connection:
        sizes = [one.metrics["episodes"] for one in await list_updates(connection, "m")]
    assert sizes == [4, 4, 8]


async def test_a_version_in_use_stays_until_its_slot_is_wanted(bench: Bench) -> None:
    bench.slots = 2
    async with bench.working() as loop:
        assert await loop.update_once()
        await bench.fill("u")
        assert await loop.update_once()
        await later(bench, 3700.0)
        # Nothing is ready to be claimed.
        assert not await loop.update_once()
        assert not await unloaded(bench, 1)
        await bench.fill("v")
        assert not await loop.update_once()
        assert await unloaded(bench, 1)


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
        return await pacing.allows(connection, is_wanted)


async def test_the_first_of_those_that_go_live_together_waits_for_room_for_all(
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


async def test_a_wait_for_its_time_is_logged(bench: Bench) -> None:
    await add(bench, "m", ("unloaded", 60.0), ("retired", 5.0), ("serving", 5.0))
    await change(bench, "UPDATE policies SET created_at = now() - interval '1 day'")
    await change(bench, "UPDATE policies SET changed_at = now() - interval '60 s'")
    async with Replicas([bench.fake.url], 4) as servers:
        pacing = Pacing(servers, "m", Recipe())
        assert await allowed(bench, pacing)
        await add_loaded(bench, "m", 4)
        with capture_logs() as logs:
            assert not await allowed(bench, pacing)
            assert not await allowed(bench, pacing)
    [waits] = logs
    assert waits["event"] == "trainer_waits_for_its_time"
    assert 0.0 < waits["due_in_s"] <= 3600.0 / 3


async def test_the_servers_are_asked_again_until_they_say_and_then_now_and_then(
    bench: Bench,
) -> None:
    clock = Clock()
    async with Replicas([bench.fake.url]) as servers:
        pacing = Pacing(servers, "m", Recipe(), (), clock)
        seen = []
        for told, passed_s in ((None, 0.0), (3, 1.0), (5, 1.0), (5, KNOWN_S)):
            bench.fake.adapter_slots = told
            clock.now += passed_s
            await allowed(bench, pacing)
            seen.append(gauge("pawl_adapter_slots"))
    assert seen == [8.0, 3.0, 3.0, 5.0]


async def test_too_small_a_staleness_for_the_slots_is_named_once_with_the_remedy(
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


async def test_a_trial_s_adapter_waits_for_a_slot_as_well(bench: Bench) -> None:
    await add(bench, "other", ("retired", 60.0), ("serving", 60.0))
    bench.slots = 2
    async with bench.working() as loop:
        await loop.check_server()
        await loop.try_again()
        assert bench.learner.trials == 0
        assert not await loop.update_once()
        await change(
            bench,
            "UPDATE policies SET unloaded_at = now() - interval '11 s'"
            " WHERE name = 'other' AND version = 1",
        )
        await loop.try_again()
        assert bench.learner.trials == 1
        assert await loop.update_once()


async def test_for_a_trial_the_version_that_lost_the_traffic_long_ago_makes_room(
    bench: Bench,
) -> None:
    await add(bench, "other", ("retired", 9e3), ("serving", 9e3))
    bench.slots = 2
    async with bench.working() as loop:
        await loop.check_server()
        assert bench.learner.trials == 0
        query = "SELECT unloaded_at FROM policies WHERE name = 'other' AND version = 1"
        async with bench.engine.connect() as connection:
            assert await connection.scalar(text(query)) is not None
        await later(bench, 11.0)
        await loop.try_again()
        assert bench.learner.trials == 1
