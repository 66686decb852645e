"""One trainer of several policies: turns, what fails in one, and what goes live together."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.records import SpoolRecord
from store.updates import claims, policies
from store.updates.policies import list_versions
from store.write.ingest import ingest
from tests.support.faults.killing import Killed, killing
from tests.support.records import call, reward, tokens
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.waiting import until
from trainer.batches.rows import Row, bare_row
from trainer.errors import AdapterError, FilesUnread
from trainer.loop import Loop
from trainer.metrics import LEFT
from trainer.publishing.adapters import version_folder
from trainer.publishing.publish import Publisher
from trainer.publishing.replicas import Replicas
from trainer.recipes.adapter import PublishOptions
from trainer.recipes.claim import ClaimOptions
from trainer.recipes.recipe import Recipe
from trainer.rounds import Rounds
from trainer.settings import TrainerSettings
from trainer.trainee import Trainee
from trainer.updates.versions import begin_policy

NAMES = ("writer", "checker")
GROUPS = {"writer": 4, "checker": 1}


class FakeLearner:
    """Writes versions that the server answers for; the real one is tested by itself."""

    def __init__(self, policy: str, server: FakeModelServer, folder: Path) -> None:
        self.policy = policy
        self._server = server
        self._versions = folder.resolve() / policy
        self.fails: Exception | None = None
        # What the server serves this one's versions with; the trainer's own is -2.
        self.served = -2.0

    def interrupt(self) -> None:
        return

    def restore(self, adapter: Path | None) -> None:
        if self.fails:
            raise self.fails

    def update(self, rows: Any, step_share: float = 1.0) -> dict[str, Any]:
        return {"loss": 0.5, "rows": len(rows)}

    def save(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(self.policy.encode())

    def misfit(self, adapter: Path) -> str | None:
        return None

    def why_unreplayable(self, distribution: Any, sampled_ids: Any) -> str | None:
        return None

    def version_logprobs(self, adapter: Path | None, rows: Any) -> list[list[float]]:
        return [[-0.5] * len(row.sampled_ids) for row in rows]

    def saved_as(self, adapter: Path) -> None:
        return

    def probe_rows(self) -> list[Row]:
        return [bare_row(0, [1, 2, 3], [4, 5])]

    def logprobs(self, rows: Any) -> list[list[float]]:
        """Version N gives every token -2 - N, here and (if it is healthy) on the server."""
        version = 1 + len(list(self._versions.glob("[0-9]*")))
        self._server.logprobs[f"{self.policy}@{version}"] = self.served - version
        return [[-2.0 - version] * len(row.sampled_ids) for row in rows]


class Bench:
    """A trainer of two policies on real tables."""

    def __init__(self, engine: AsyncEngine, server: FakeModelServer, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.fake = server
        self.learners = {name: FakeLearner(name, server, folder) for name in NAMES}
        self.together: Mapping[str, Sequence[str]] = {}
        self.wait_s = 1e9

    async def fill(self, counts: Mapping[str, int], name: str = "t") -> None:
        """So many episodes for each policy, in groups of two."""
        records: list[SpoolRecord] = []
        for policy, count in counts.items():
            for number in range(count):
                key, made = f"{policy}-{name}{number}", tokens([1, 2, number], [4 + number % 2])
                task = f"{policy}-{name}{number // 2}"
                records.append(call(key, task=task, tokens=made, policy=policy, agent=policy))
                records.append(reward(float(number % 2), episode=key))
        async with self.engine.begin() as connection:
            await ingest(connection, records)

    def trainees(self, servers: Replicas, names: Sequence[str] = NAMES) -> list[Trainee]:
        return [self._trainee(servers, name) for name in names]

    def _trainee(self, servers: Replicas, name: str) -> Trainee:
        recipe = Recipe(
            claim=ClaimOptions(group_size=2, groups=GROUPS[name], max_age_s=1e9),
            publish=PublishOptions(retire_after_s=1e9, wait_for_others_s=self.wait_s),
        )
        settings = TrainerSettings.model_validate({"adapter_dir": self.folder})

        async def begin(engine: AsyncEngine) -> Loop:
            await begin_policy(engine, name, "m", None)
            together = self.together.get(name, ())
            publisher = Publisher(engine, servers, name, recipe.publish, together)
            loop = Loop(settings, recipe, engine, publisher, self.learners[name], name)
            await loop.recover()
            return loop

        return Trainee(name, begin)

    @asynccontextmanager
    async def rounds(self, names: Sequence[str] = NAMES) -> AsyncIterator[Rounds]:
        """A trainer of these policies, with a connection of its own."""
        async with self.engine.connect() as guard, Replicas([self.fake.url]) as servers:
            try:
                yield Rounds(self.trainees(servers, names), guard, self.engine)
            finally:
                # As at the end of a process: the holds go with the connection.
                await guard.invalidate()

    async def turns(self, count: int) -> list[str]:
        """Let one trainer make so many updates; return whose each was."""
        async with self.rounds() as rounds:
            for _ in range(count):
                await asyncio.wait_for(rounds.run(0.01, once=True), 30)
        return await self.updates()

    async def look(self, names: Sequence[str] = NAMES) -> None:
        """Let a trainer of these policies look around, and make an update of what is there."""
        async with self.rounds(names) as rounds:
            await rounds._turn(await rounds._take_up())

    async def updates(self) -> list[str]:
        query = text("SELECT policy FROM updates WHERE state = 'done' ORDER BY claimed_at")
        async with self.engine.connect() as connection:
            return list((await connection.execute(query)).scalars())

    async def states(self) -> dict[str, str]:
        async with self.engine.connect() as connection:
            found = await list_versions(connection)
        return {f"{v.name}@{v.version}": v.state for v in found if v.version}

    async def serving(self) -> dict[str, int]:
        async with self.engine.connect() as connection:
            found = await list_versions(connection)
        return {v.name: v.version for v in found if v.state == "serving"}


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Bench]:
    async with fake_model_server() as server:
        yield Bench(engine, server, tmp_path)


@pytest.fixture
async def together(bench: Bench) -> Bench:
    """A bench whose two policies go live together."""
    bench.together = dict.fromkeys(NAMES, NAMES)
    return bench


async def test_the_most_waiting_signal_has_the_turn_in_updates_of_the_policys_own(
    bench: Bench,
) -> None:
    # 16 episodes are two updates of the writer's; 6 are three of the checker's.
    await bench.fill({"writer": 16, "checker": 6})
    assert await bench.turns(5) == ["checker", "writer", "checker", "writer", "checker"]
    assert await bench.serving() == {"writer": 2, "checker": 3}


async def test_a_policy_that_fails_does_not_stop_the_other(bench: Bench) -> None:
    await bench.fill({"writer": 16, "checker": 4})
    bench.learners["checker"].fails = AdapterError("its files are gone")
    assert await bench.turns(2) == ["writer", "writer"]
    assert LEFT.labels("checker")._value.get() == 1
    # Its episodes are held by its update, which who works on it next gives up.
    bench.learners["checker"].fails = None
    assert await bench.turns(2) == ["writer", "writer", "checker", "checker"]
    assert LEFT.labels("checker")._value.get() == 0


async def test_a_trainer_of_which_all_policies_fail_ends(bench: Bench) -> None:
    await bench.fill({"writer": 16, "checker": 4})
    for learner in bench.learners.values():
        learner.fails = AdapterError("its files are gone")
    async with bench.rounds() as rounds:
        with pytest.raises(AdapterError, match="its files are gone"):
            await asyncio.wait_for(rounds.run(0.01, once=True), 30)


async def test_a_trainer_goes_on_by_itself_once_what_it_could_not_read_can_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.trainee.FIRST_PAUSE_S", 0.05)
    await bench.fill({"checker": 2})
    learner = bench.learners["checker"]
    learner.fails = FilesUnread("weights cannot be read (Input/output error)")
    async with bench.rounds(["checker"]) as rounds:
        # It has no other policy, and does not end.
        work = asyncio.create_task(rounds.run(0.01, once=True))
        await until(lambda: LEFT.labels("checker")._value.get() == 1)
        await until(lambda: work.done() or rounds._trainees["checker"]._failures > 1)
        assert not work.done()
        learner.fails = None
        await asyncio.wait_for(work, 30)
    assert await bench.states() == {"checker@1": "serving"}
    assert LEFT.labels("checker")._value.get() == 0


async def test_a_rejected_version_of_one_does_not_stop_the_other(bench: Bench) -> None:
    await bench.fill({"writer": 8, "checker": 6})
    bench.learners["checker"].served = -7.0
    # After two in a row it holds, and its other episodes wait.
    async with bench.rounds() as rounds:
        for _ in range(6):
            await rounds._turn(await rounds._take_up())
    assert sorted(await bench.updates()) == ["checker"] * 2 + ["writer"]
    assert await bench.serving() == {"writer": 1, "checker": 0}
    assert [s for name, s in (await bench.states()).items() if "checker" in name] == [
        "rejected"
    ] * 2


async def test_a_policy_that_another_trainer_holds_is_passed_over_meanwhile(bench: Bench) -> None:
    await bench.fill({"writer": 8, "checker": 8})
    async with bench.engine.connect() as other:
        assert await claims.hold_policy(other, "checker")
        assert await bench.turns(1) == ["writer"]
        await other.invalidate()
    assert await bench.turns(1) == ["writer", "checker"]


async def test_a_policy_that_was_left_may_be_another_trainers(bench: Bench) -> None:
    await bench.fill({"writer": 8, "checker": 8})
    bench.learners["checker"].fails = AdapterError("its files are gone")
    async with bench.rounds() as rounds, bench.engine.connect() as other:
        await rounds._turn(await rounds._take_up())
        assert await claims.hold_policy(other, "checker")
        assert not await claims.hold_policy(other, "writer")
        await other.invalidate()


async def test_versions_that_go_live_together_do_so_in_one_transaction(together: Bench) -> None:
    await together.fill({"writer": 8, "checker": 8})
    assert len(await together.turns(1)) == 1
    assert list((await together.states()).values()) == ["ready"]
    assert await together.serving() == {"writer": 0, "checker": 0}
    assert sorted(await together.turns(1)) == ["checker", "writer"]
    assert await together.serving() == {"writer": 1, "checker": 1}
    async with together.engine.connect() as connection:
        query = text("SELECT count(DISTINCT changed_at) FROM policies WHERE state = 'serving'")
        assert await connection.scalar(query) == 1


async def test_a_policy_trains_no_further_while_its_version_waits(together: Bench) -> None:
    await together.fill({"writer": 24})
    assert await together.turns(1) == ["writer"]
    await together.look()
    assert await together.updates() == ["writer"]


async def test_one_without_a_version_does_not_hold_the_other_for_ever(together: Bench) -> None:
    await together.fill({"writer": 24})
    await together.turns(1)
    together.wait_s = 1e-6
    await together.look()
    assert await together.serving() == {"writer": 1, "checker": 0}
    # And it trains on.
    assert await together.updates() == ["writer", "writer"]


async def test_a_rejected_one_keeps_all_at_their_old_versions_until_the_next(
    together: Bench,
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    together.learners["checker"].served = -7.0
    await together.turns(2)
    assert await together.states() == {"writer@1": "ready", "checker@1": "rejected"}
    assert await together.serving() == {"writer": 0, "checker": 0}
    together.learners["checker"].served = -2.0
    await together.fill({"checker": 2}, "u")
    await together.turns(1)
    assert await together.serving() == {"writer": 1, "checker": 2}


@pytest.mark.parametrize("first", [("writer",), ("checker",)])
async def test_two_trainers_bring_them_live_together(together: Bench, first: tuple[str]) -> None:
    await together.fill({"writer": 8, "checker": 2})
    await together.look(first)
    assert set((await together.states()).values()) == {"ready"}
    await together.look([name for name in NAMES if name not in first])
    assert await together.serving() == {"writer": 1, "checker": 1}


async def test_a_server_that_was_restarted_loads_what_waits_again(together: Bench) -> None:
    await together.fill({"writer": 8})
    await together.turns(1)
    together.fake.loaded.clear()
    await together.look()
    assert list(together.fake.loaded) == ["writer@1"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["make_ready", "promote", "promote_together"])
async def test_killed_as_they_go_live_none_is_live_alone(
    together: Bench, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    await together.turns(1)
    killing(policies, step, after=after)(monkeypatch)
    with pytest.raises(Killed):
        await together.look()
    assert await together.serving() == {"writer": 0, "checker": 0}
    await together.look()
    assert await together.serving() == {"writer": 1, "checker": 1}


async def test_a_version_that_waits_is_not_one_that_is_written_again(together: Bench) -> None:
    await together.fill({"writer": 8})
    await together.turns(1)
    assert version_folder(together.folder, "writer", 1).exists()
    # Policies that need no longer go live together do so by themselves.
    together.together = {}
    await together.look()
    assert await together.serving() == {"writer": 1, "checker": 0}


async def test_what_it_takes_to_begin_makes_no_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may take a minute to come up; the store is looked at as often as before."""
    looks, now, taken = 0, 0.0, Trainee.take_up
    looked_again = asyncio.Event()

    async def slowly(self: Trainee, guard: Any, engine: Any) -> bool:
        nonlocal looks, now
        looks, now = looks + 1, now + 60.0
        if looks > 1:
            looked_again.set()
        return await taken(self, guard, engine)

    monkeypatch.setattr(Trainee, "take_up", slowly)
    # No time passes but in beginning: else the pause would depend on the machine.
    monkeypatch.setattr("trainer.rounds.perf_counter", lambda: now)
    async with bench.rounds(["writer"]) as rounds:
        running = asyncio.create_task(rounds.run(0.01, once=False))
        try:
            # Ten times a minute's beginning would be ten minutes.
            await asyncio.wait_for(looked_again.wait(), 120.0)
        finally:
            running.cancel()
            await asyncio.wait([running])
    assert looks > 1
