"""Files are kept by state: a bounded disk, and training that stays bit-equal.

Ten thousand versions are simulated on real tables, with tiny files and a learner whose bytes depend
on its parent's weights and optimiser state.
"""

import random
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from store import claims
from store.version_queries import list_versions, rollback_target, versions_with_unneeded_files
from store.version_states import ensure_base, mark_unloaded, recall, roll_back
from store.versions import PolicyVersion
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import promote, set_state
from tests.support.records import ago, call, tokens
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from trainer.publishing import adapters
from trainer.publishing.adapters import NewVersion
from trainer.publishing.cleaning import Cleaning
from trainer.publishing.model_server import Replicas

VERSIONS = 10_000
AT_ONCE = 100
DAY_S = 86_400.0
MANY = """
    WITH given AS (
        SELECT CAST(:first AS integer) + at - 1 AS version, state, uuidv7() AS update_id
        FROM unnest(CAST(:states AS text[])) WITH ORDINALITY AS s (state, at)),
    made AS (
        INSERT INTO updates (id, policy, parent_version, version, state, recipe)
        SELECT update_id, 'm', 0, version, 'done', '{}' FROM given),
    served AS (
        INSERT INTO policy_events (id, name, version, to_state, reason, actor, at)
        SELECT uuidv7(), 'm', version, 'serving', 'for the test', 'operator',
            now() + make_interval(secs => version)
        FROM given WHERE state <> 'rejected')
    INSERT INTO policies (name, version, state, served_name, adapter_path, update_id)
    SELECT 'm', version, state, 'm@' || version, CAST(:root AS text) || '/' || version, update_id
    FROM given
"""
LONG_AGO = (
    "UPDATE policies SET changed_at = now() - interval '1 day' WHERE files_deleted_at IS NULL"
)


class Disk:
    """A policy whose versions are written as a trainer writes them."""

    def __init__(self, engine: AsyncEngine, root: Path, server: FakeModelServer) -> None:
        self.engine = engine
        self.root = root
        self.server = server

    async def begin(self) -> "Disk":
        async with self.engine.begin() as connection:
            await ensure_base(connection, "m")
        return self

    async def write(self, parent: int, number: int) -> None:
        """Train version `parent` into `number`, from its weights and its optimiser state."""
        folder = adapters.version_folder(self.root, "m", parent)
        before = b""
        if parent:
            state = (folder / "trainer" / "state").read_bytes()
            before = (folder / "adapter_model.safetensors").read_bytes() + state

        def save(into: Path) -> None:
            (into / "adapter_config.json").write_text("{}")
            (into / "adapter_model.safetensors").write_bytes(sha256(b"w" + before).digest())
            (into / "trainer").mkdir()
            (into / "trainer" / "state").write_bytes(sha256(b"s" + before).digest())

        async with self.engine.begin() as connection:
            update = await claims.begin_update(connection, "m", parent, {})
        new = NewVersion(
            policy="m",
            version=number,
            update_id=update,
            parent_version=parent,
            outcomes=(),
            metrics={},
            probe=(),
        )
        place = adapters.write_version(self.root, new, save)
        async with self.engine.begin() as connection:
            await claims.record_update(
                connection, update, (), {}, policy="m", version=number, adapter_path=str(place)
            )

    async def end(self, number: int, *, good: bool) -> None:
        async with self.engine.begin() as connection:
            if good:
                await promote(connection, "m", number, reason="for the test", actor="operator")
            else:
                await set_state(
                    connection, "m", number, "rejected", reason="for the test", actor="operator"
                )

    async def unload(self) -> None:
        """A day passes: what lost the traffic is idle, and is unloaded."""
        async with self.engine.begin() as connection:
            await mark_unloaded(connection, "m", self.there(), "idle", "trainer")
            await connection.execute(text(LONG_AGO))

    async def clean(self, *urls: str) -> None:
        async with Replicas(urls or [self.server.url]) as servers:
            await Cleaning(self.engine, servers, "m", self.root).clean()

    def there(self) -> list[int]:
        return [number for number, _ in adapters.version_folders(self.root, "m")]

    def states(self) -> list[int]:
        found = adapters.version_folders(self.root, "m")
        return [number for number, folder in found if (folder / adapters.STATE_FOLDER).exists()]

    def weights(self, number: int) -> bytes:
        folder = adapters.version_folder(self.root, "m", number)
        return (folder / "adapter_model.safetensors").read_bytes()

    async def versions(self) -> dict[int, PolicyVersion]:
        async with self.engine.connect() as connection:
            return {one.version: one for one in await list_versions(connection, "m")}


@pytest.fixture
async def disk(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Disk]:
    async with fake_model_server() as server:
        yield await Disk(engine, tmp_path, server).begin()


async def serve(disk: Disk, *numbers: int) -> None:
    parent = 0
    for number in numbers:
        await disk.write(parent, number)
        await disk.end(number, good=True)
        parent = number


async def test_ten_rejections_in_a_row_do_not_change_the_next_version(disk: Disk) -> None:
    """The next version that serves is the one that would have followed at once."""
    expected = b""
    for number in range(1, 5):
        expected = await trained_alone(disk, number)
    parent = 3
    for number in range(14, 24):
        await disk.write(parent, number)
        await disk.end(number, good=False)
        await disk.unload()
        await disk.clean()
    await disk.write(parent, 24)
    await disk.end(24, good=True)
    assert disk.weights(24) == expected
    await disk.unload()
    await disk.clean()
    assert disk.there() == [1, 3, 24]
    # What can be trained on from, or gets the traffic by a roll-back, has its optimiser state.
    assert disk.states() == [3, 24]


async def trained_alone(disk: Disk, number: int) -> bytes:
    """Version `number`, of the one before it; the fourth is only looked at, and is rejected."""
    await disk.write(number - 1, number)
    await disk.end(number, good=number < 4)
    return disk.weights(number)


async def many(disk: Disk, first: int, states: Sequence[str]) -> None:
    """Versions as so many updates leave them a day later: rows, and folders with a tiny file."""
    values = {"first": first, "states": list(states), "root": str(disk.root.resolve() / "m")}
    async with disk.engine.begin() as connection:
        await connection.execute(
            text("UPDATE policies SET state = 'retired' WHERE name = 'm' AND state = 'serving'")
        )
        await connection.execute(text(MANY), values)
    parent = adapters.version_folder(disk.root, "m", 0).parent
    for number in range(first, first + len(states)):
        (parent / str(number)).mkdir(parents=True)
        (parent / str(number) / "adapter_model.safetensors").write_bytes(b"weights")
    await disk.unload()


@pytest.mark.timeout(600)
async def test_disk_keeps_at_most_twenty_of_ten_thousand_versions(disk: Disk) -> None:
    chance = random.Random(0)
    serving = 0
    for first in range(1, VERSIONS, AT_ONCE):
        # Whole runs of rejections, too: the serving version may be hundreds of numbers back.
        good = chance.choice([0.0, 0.02, 0.7])
        states = ["retired" if chance.random() < good else "rejected" for _ in range(AT_ONCE)]
        states[-1] = "serving"
        last_good = max(
            (first + at for at, state in enumerate(states) if state == "retired"), default=serving
        )
        serving = first + AT_ONCE - 1
        await many(disk, first, states)
        await disk.clean()
        assert {last_good, serving} - {0} <= set(disk.there())
        assert len(disk.there()) <= 20
    versions = await disk.versions()
    assert len(versions) == VERSIONS + 1
    there = {number for number, one in versions.items() if not one.files_deleted}
    assert there == {0, *disk.there()}


async def test_files_of_a_version_promoted_again_stay_as_the_rollback_target(disk: Disk) -> None:
    await serve(disk, 1, 2, 3)
    await disk.end(1, good=True)
    await disk.write(1, 4)
    await disk.end(4, good=True)
    for _ in range(2):
        await disk.unload()
        await disk.clean()
    assert disk.there() == [1, 2, 4]
    assert disk.states() == [1, 4]
    async with disk.engine.connect() as connection:
        assert (await rollback_target(connection, "m")).version == 1


async def test_files_of_retired_versions_are_kept_more_sparsely_with_age(disk: Disk) -> None:
    """A bad release may be found long after it began: there is something to go back to."""
    for number in range(1, 41):
        await disk.write(number - 1, number)
        await disk.end(number, good=True)
        await disk.unload()
        await disk.clean()
    assert len(disk.there()) < 12
    assert disk.states() == [39, 40]
    for first in range(2, 41):
        # No more is lost than has fallen.
        back = max(number for number in disk.there() if number < first)
        assert first - back <= 2 * (40 - first + 2)
    async with disk.engine.begin() as connection:
        await roll_back(connection, (await disk.versions())[40], reason="worse", actor="operator")
        await connection.execute(text("UPDATE policies SET ended_at = now() WHERE version = 1"))
    await disk.unload()
    await disk.clean()
    versions = await disk.versions()
    assert versions[1].files_deleted
    assert versions[40].files_deleted


async def test_files_of_the_last_served_version_stay_after_the_base_model_serves_again(
    disk: Disk,
) -> None:
    await serve(disk, 1, 2, 3, 4)
    await disk.end(0, good=True)
    await disk.unload()
    await disk.clean()
    assert disk.there() == [1, 2, 4]


async def test_files_of_the_control_stay_after_many_later_versions(disk: Disk) -> None:
    await serve(disk, 1, 2, 3, 4)
    async with disk.engine.begin() as connection:
        await connection.execute(text("UPDATE policies SET share = 0.05 WHERE version = 2"))
    await disk.unload()
    await disk.clean()
    assert disk.there() == [1, 2, 3, 4]
    assert disk.states() == [2, 4]


async def test_files_of_a_version_loaded_on_any_server_stay(disk: Disk) -> None:
    await serve(disk, 1, 2, 3, 4)
    await disk.unload()
    disk.server.loaded["m@2"] = "/a/2"
    await disk.clean()
    assert disk.there() == [1, 2, 3, 4]
    disk.server.loaded.clear()
    # A replica that does not say what it has loaded may have it.
    await disk.clean(disk.server.url, f"http://127.0.0.1:{free_port()}/v1")
    assert disk.there() == [1, 2, 3, 4]
    await disk.clean()
    assert disk.there() == [1, 3, 4]


async def test_files_of_a_recently_unloaded_version_stay(disk: Disk) -> None:
    await serve(disk, 1, 2, 3, 4)
    await disk.unload()
    async with disk.engine.begin() as connection:
        await connection.execute(text("UPDATE policies SET changed_at = now()"))
    await disk.clean()
    assert disk.there() == [1, 2, 3, 4]


@pytest.mark.parametrize("part", [False, True])
async def test_files_of_a_version_stay_while_an_episode_waits_for_its_log_probabilities(
    disk: Disk, part: bool
) -> None:
    await serve(disk, 1, 2, 3, 4, 5, 6)
    await disk.unload()
    without = msgspec.structs.replace(tokens([1, 2], [3]), sampled_logprobs=b"")
    records = [
        # The first call of the episode is of a version that is not asked again.
        call("e", policy_version=2, **ago(DAY_S, 0)),
        call("e", policy_version=4, tokens=without, **ago(DAY_S, 1)),
        # What has its log-probabilities, or is not trainable, asks for nothing.
        call("f", policy_version=2, **ago(DAY_S, 2)),
    ]
    async with disk.engine.begin() as connection:
        await ingest(connection, records)
        if part:
            # The episode turns out to be a part of another.
            await connection.execute(
                text(
                    "UPDATE episodes SET root = (SELECT id FROM episodes WHERE key = 'f')"
                    " WHERE key = 'e'"
                )
            )
    await disk.clean()
    assert disk.there() == [1, 3, 4, 5, 6]
    async with disk.engine.begin() as connection:
        await connection.execute(text("UPDATE episode_policies SET claimable = false"))
    await disk.clean()
    assert disk.there() == [1, 3, 5, 6]


async def test_no_version_files_are_deleted_during_a_running_update(disk: Disk) -> None:
    await serve(disk, 1, 2, 3, 4)
    await disk.unload()
    async with disk.engine.begin() as connection:
        update = await claims.begin_update(connection, "m", 4, {})
    await disk.clean()
    assert disk.there() == [1, 2, 3, 4]
    async with disk.engine.begin() as connection:
        await claims.release(connection, update, "stopped")
    await disk.clean()
    assert disk.there() == [1, 3, 4]


async def test_version_files_marked_deleted_before_a_kill_are_removed_later(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve(disk, 1, 2, 3, 4)
    await disk.unload()
    with monkeypatch.context() as patched:
        patched.setattr("trainer.publishing.adapters.remove_folder", lambda _: None)
        await disk.clean()
    versions = await disk.versions()
    assert versions[2].files_deleted
    assert disk.there() == [1, 2, 3, 4]
    await disk.clean()
    assert disk.there() == [1, 3, 4]


async def test_a_version_that_was_recalled_meanwhile_keeps_its_files(disk: Disk) -> None:
    """Recalled: it was unloaded, and is to be loaded again."""
    await serve(disk, 1, 2, 3, 4)
    await disk.unload()
    async with disk.engine.begin() as connection:
        found = await versions_with_unneeded_files(connection, "m", 900.0)
        assert [one.version for one in found] == [2]
        await recall(connection, "m", 2, reason="for the test", actor="operator")
    await disk.clean()
    assert disk.there() == [1, 2, 3, 4]
