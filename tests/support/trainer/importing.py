"""Set up a policy of a tiny model, and an adapter of it that was trained elsewhere."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.records import SpoolRecord
from store.version_queries import list_versions
from tests.support.controller.publishing import PublishedLoop, publishing_beside
from tests.support.ledger.episodes import ingest
from tests.support.records import call, reward, tokens
from tests.support.servers.computing_server import computing_server
from tests.support.training import write_adapter
from trainer import importing
from trainer.importing import import_adapter
from trainer.learners.learner import Learner
from trainer.publishing import adapters
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings

NOWHERE = "http://127.0.0.1:9/v1"
RATE = 2e-3
RECIPE = f"""
[claim]
group_size = 2
groups = 2
max_age_s = 1e9
[optimizer]
learning_rate = {RATE}
[off_policy]
sequence_min = 0.0
sequence_max = 1e9
max_drift = 1e9
[lora]
rank = 4
alpha = 8
[publish]
tolerance = 1e-3
"""
WEIGHTS = "adapter_model.safetensors"


class Bench:
    """Hold a policy `m` of the tiny model, and an adapter of it that somebody else trained."""

    def __init__(
        self, engine: AsyncEngine, folder: Path, model: str, adapter: Path, url: str
    ) -> None:
        self.engine = engine
        self.model = model
        self.adapter = shutil.copytree(adapter, folder / "sft")
        (folder / "recipe.toml").write_text(RECIPE)
        self.adapters = folder / "adapters"
        values = {"upstream_url": url, "adapter_dir": self.adapters, "policy": "not this one"}
        recipe = {"recipe": str(folder / "recipe.toml")}
        self.settings = TrainerSettings.model_validate(values | recipe)

    def at(self, **changes: Any) -> TrainerSettings:
        values = self.settings.model_dump(exclude={"database_url"}) | changes
        return TrainerSettings.model_validate(values)

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.settings.recipe)

    async def imports(self, settings: TrainerSettings | None = None) -> str:
        settings = settings or self.settings
        async with publishing_beside(self.engine, settings.server_urls):
            made = await import_adapter(settings, self.engine, "m", self.adapter)
        return f"{made.served_name} {made.state}"

    def loop(self, server: Replicas) -> PublishedLoop:
        scratch = self.settings.scratch
        learner = Learner(self.model, self.recipe, seed=0, scratch=scratch)
        return PublishedLoop(self.settings, self.recipe, self.engine, server, learner, "m")

    async def train(self) -> bool:
        """Do what a trainer does from its start on, once."""
        async with Replicas(self.settings.server_urls) as server:
            loop = self.loop(server)
            await loop.recover()
            return await loop.update_once()

    async def fill(self, version: int) -> None:
        records: list[SpoolRecord] = []
        for number in range(4):
            made = tokens([5, 6, 7 + number // 2], [9 + number, 11], -4.5)
            key, task = f"e{number}", f"t{number // 2}"
            records.append(call(key, task=task, policy_version=version, tokens=made))
            records.append(reward(float(number % 2), episode=key))
        async with self.engine.begin() as connection:
            await ingest(connection, records)

    async def states(self) -> dict[int, str]:
        async with self.engine.connect() as connection:
            return {v.version: v.state for v in await list_versions(connection, "m")}

    async def running(self) -> object:
        async with self.engine.connect() as connection:
            return await claims.running_update(connection, "m")

    def version(self, number: int) -> Path:
        return adapters.version_folder(self.adapters, "m", number)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return load_file(self.version(number) / WEIGHTS)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter") / "sft")


@pytest.fixture(scope="module")
def learner(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    """An import gives it a new adapter; loading the base model is what takes time."""
    folder = tmp_path_factory.mktemp("learner")
    (folder / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(str(folder / "recipe.toml"))
    return Learner(tiny_model, recipe, seed=0, scratch=folder)


@pytest.fixture
async def bench(
    engine: AsyncEngine, tmp_path: Path, tiny_model: str, adapter: Path, learner: Learner
) -> AsyncIterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "Learner", lambda *_: learner)
        async with computing_server("m", tiny_model) as url:
            yield Bench(engine, tmp_path, tiny_model, adapter, url)


def with_config(**changes: Any) -> Callable[[Path, str], None]:
    def change(folder: Path, model: str) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change
