"""Train lines of versions wave by wave, each on a bench of its own, and rebuild them."""

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import version_states
from store.connection.engine import make_engine
from store.embedded import EmbeddedPostgres
from store.rebuilding.choosing import Query
from store.records import SpoolRecord
from store.schema.recorded import episodes
from store.schema.trained import consumptions
from store.updates import claims
from store.version_queries import list_versions
from store.write.ingest import ingest
from tests.conftest import Psql, database_of
from tests.support.records import call, reward, tokens
from tests.support.servers.computing_server import computing_server
from trainer.learners.learner import Learner
from trainer.loop import Loop
from trainer.publishing import adapters
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.rebuilding.rebuild import Result, Wish, rebuild_policy
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings

GROUP = """
[claim]
group_size = 4
groups = 2
max_age_s = 1.0
[off_policy]
sequence_min = 0.0
sequence_max = 1e9
max_drift = 1e9
[optimizer]
learning_rate = 2e-3
[lora]
rank = 4
alpha = 8
[publish]
tolerance = 1e-3
retire_after_s = 1e9
"""
MOVING = GROUP.replace("group_size = 4\ngroups = 2", "group_size = 1\ngroups = 8") + (
    '[credit]\nbaseline = "moving"\nnormalisation = "batch"\n'
)
PPO = (
    GROUP
    + '[credit]\nbaseline = "none"\nnormalisation = "batch"\n[ppo]\nepochs = 2\n'
    + "value_learning_rate = 1e-2\n"
)
PPO = f'learner = "ppo"\n{PPO}'
GATED = f'{GROUP}[gate]\nmode = "gated"\n'
RECIPES = {"group": GROUP, "moving": MOVING, "ppo": PPO}
FILES = ("adapter_model.safetensors", "adapter_config.json", "base.json")
WAVES = 3
Waves = list[list[SpoolRecord]]


def waves(version: int | None = None) -> Waves:
    """Make three waves of eight scored episodes of two tasks; the first task is asked in each.

    Each was sampled by the version that the wave before came to, or by `version`. In the last one
    the first task is short of a member.
    """
    made: Waves = []
    for wave in range(WAVES):
        records: list[SpoolRecord] = []
        for number in range(wave == WAVES - 1, 8):
            task = "t/all" if number < 4 else f"t/{wave}"
            ids = tokens([5, 6, 7 + wave], [9 + number, 11 + wave, 20 + 3 * number], -4.5)
            sampled_by = wave if version is None else version
            key = f"w{wave}/e{number}"
            records.append(call(key, task=task, policy_version=sampled_by, tokens=ids))
            records.append(reward(float(number % 3), episode=key, at=wave))
        made.append(records)
    return made


def of_episode(record: Any) -> str:
    """Return the key of the episode that a call belongs to, or a reward is about."""
    return str(record.episode if hasattr(record, "episode") else record.items[0].target)


def without(records: Iterable[SpoolRecord], keys: Sequence[str]) -> list[SpoolRecord]:
    return [record for record in records if of_episode(record) not in keys]


class Bench:
    """Run a trainer of policy `m`, with a database, a folder and a model server of its own."""

    def __init__(
        self, engine: AsyncEngine, folder: Path, model: str, url: str, recipe: str = GROUP
    ) -> None:
        self.engine, self.model, self.folder = engine, model, folder
        folder.mkdir(exist_ok=True)
        (folder / "recipe.toml").write_text(recipe)
        values = {"upstream_url": url, "adapter_dir": folder / "adapters", "policy": "m"}
        self.settings = TrainerSettings.model_validate(
            values | {"recipe": str(folder / "recipe.toml")}
        )

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.settings.recipe)

    async def store(self, records: Sequence[SpoolRecord]) -> None:
        async with self.engine.begin() as connection:
            await ingest(connection, list(records))

    async def train(self, records: Sequence[SpoolRecord]) -> bool:
        """Store records, and do what a trainer does from its start on, once."""
        await self.store(records)
        async with Replicas(self.settings.server_urls) as server:
            learner = Learner(self.model, self.recipe, seed=0, scratch=self.settings.scratch)
            gate = self.recipe.gate
            publisher = Publisher(self.engine, server, "m", self.recipe.publish, gate=gate)
            loop = Loop(self.settings, self.recipe, self.engine, publisher, learner, "m")
            await loop.recover()
            return await loop.update_once()

    async def trains(self, made: Waves) -> None:
        async with self.engine.begin() as connection:
            await version_states.ensure_base(connection, "m")
        for records in made:
            assert await self.train(records)

    async def rebuild(self, *keys: str, leave_missing: bool = False, **more: Any) -> Result:
        queries = [Query(episode=key) for key in keys] + ([Query(**more)] if more else [])
        wish = Wish(queries=tuple(queries), leave_missing=leave_missing)
        self.told: list[tuple[int, int]] = []

        def tell(done: int, of: int) -> None:
            self.told.append((done, of))

        return await rebuild_policy(self.settings, self.engine, "m", wish, tell)

    async def states(self) -> dict[int, str]:
        async with self.engine.connect() as connection:
            return {v.version: v.state for v in await list_versions(connection, "m")}

    async def running(self) -> object:
        async with self.engine.connect() as connection:
            return await claims.running_update(connection, "m")

    async def spent(self) -> dict[str, tuple[bool, str | None]]:
        """Return whether each episode was trained, and the reason beside it."""
        query = select(episodes.c.key, consumptions.c.trained, consumptions.c.reason).join(
            consumptions, consumptions.c.episode_id == episodes.c.id
        )
        async with self.engine.connect() as connection:
            return {row[0]: (row[1], row[2]) for row in await connection.execute(query)}

    async def all(self, query: str) -> list[Any]:
        async with self.engine.connect() as connection:
            return list((await connection.execute(text(query))).all())

    def version(self, number: int) -> Path:
        return adapters.version_folder(self.settings.adapter_dir, "m", number)

    def written(self, number: int) -> dict[str, bytes]:
        """Return the bytes of a version's adapter, and of its progress."""
        return {name: (self.version(number) / name).read_bytes() for name in (*FILES, "base.json")}

    def state(self, number: int) -> dict[str, bytes]:
        """Return the bytes of what a version resumes with."""
        kept = self.version(number) / "trainer"
        return {path.name: path.read_bytes() for path in sorted(kept.glob("*.pt"))}


class Stand:
    """Make benches, each with a database of its own."""

    def __init__(
        self, postgres: EmbeddedPostgres, psql: Psql, template: str, folder: Path, model: str
    ) -> None:
        self.open = AsyncExitStack()
        self._make = lambda: database_of(postgres, psql, template)
        self.folder, self.model = folder, model

    async def bench(self, name: str, recipe: str = GROUP) -> Bench:
        engine = make_engine(self.open.enter_context(self._make()))
        self.open.push_async_callback(engine.dispose)
        url = await self.open.enter_async_context(computing_server("m", self.model))
        return Bench(engine, self.folder / name, self.model, url, recipe)
