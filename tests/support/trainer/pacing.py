"""Run a trainer's loop with so many adapter slots."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import REGISTRY

from tests.support.trainer.recovery import Bench
from trainer.loop import Loop
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import ClaimOptions, PublishOptions, Recipe
from trainer.settings import TrainerSettings


@asynccontextmanager
async def working(bench: Bench, slots: int | None, **publish: float) -> AsyncIterator[Loop]:
    async with Replicas([bench.fake.url], slots) as servers:
        recipe = Recipe(
            claim=ClaimOptions(group_size=2, groups=2, max_age_s=1e9),
            publish=PublishOptions.model_validate({"retire_after_s": 1e9, **publish}),
        )
        settings = TrainerSettings(adapter_dir=bench.folder)
        publisher = Publisher(bench.engine, servers, "m", recipe.publish)
        yield Loop(settings, recipe, bench.engine, publisher, bench.learner, "m")


def gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"policy": "m"})
