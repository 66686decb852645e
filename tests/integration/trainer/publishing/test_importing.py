"""An adapter from elsewhere: served like a trained one, trained on, refused whole, never half."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import UnknownUpdate
from store.read.past import past_update
from store.read.stats import totals
from store.records import SpoolRecord
from store.schema.trained import updates
from store.updates import claims, policies
from store.updates.policies import list_versions
from store.write.ingest import ingest
from tests.support.faults.killing import Killed, killing
from tests.support.records import call, reward, tokens
from tests.support.servers.computing_server import computing_server
from tests.support.servers.fake_server import fake_model_server
from tests.support.training import write_adapter, write_tiny_model
from trainer.errors import AdapterError, PublishError, TrainerError
from trainer.importing import import_adapter
from trainer.learners.learner import Learner
from trainer.loop import Loop
from trainer.publishing import adapters
from trainer.publishing.exported import export_adapter
from trainer.publishing.progress import read_base, read_progress
from trainer.publishing.publish import Publisher
from trainer.publishing.replicas import Replicas
from trainer.publishing.server import ModelServer
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
retire_after_s = 1e9
"""
WEIGHTS = "adapter_model.safetensors"


class Bench:
    """A policy `m` of the tiny model, and an adapter of it that somebody else trained."""

    def __init__(self, engine: AsyncEngine, folder: Path, model: str, url: str) -> None:
        self.engine = engine
        self.model = model
        self.adapter = write_adapter(model, folder / "sft")
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
        made = await import_adapter(settings or self.settings, self.engine, "m", self.adapter)
        return f"{made.served_name} {made.state}"

    def loop(self, server: Replicas) -> Loop:
        scratch = self.settings.scratch
        learner = Learner(self.model, self.recipe, seed=0, scratch=scratch)
        publisher = Publisher(self.engine, server, "m", self.recipe.publish)
        return Loop(self.settings, self.recipe, self.engine, publisher, learner, "m")

    async def train(self) -> bool:
        """What a trainer does from its start on, once."""
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


@pytest.fixture
async def bench(engine: AsyncEngine, tmp_path: Path, tiny_model: str) -> AsyncIterator[Bench]:
    async with computing_server("m", tiny_model) as url:
        yield Bench(engine, tmp_path, tiny_model, url)


async def test_it_is_served_and_recorded_as_one_that_was_trained(bench: Bench) -> None:
    assert await bench.imports() == "m@1 serving"
    assert await bench.states() == {0: "published", 1: "serving"}
    foreign, own = load_file(bench.adapter / WEIGHTS), bench.weights(1)
    assert foreign.keys() == own.keys()
    assert all(torch.equal(foreign[name], own[name]) for name in own)
    config = json.loads((bench.version(1) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.0)
    assert read_progress(bench.version(1)) == 0
    async with bench.engine.connect() as connection:
        [update] = (await connection.execute(select(updates))).all()
        assert (await totals(connection)).consumed_episodes == 0
        with pytest.raises(UnknownUpdate, match=r"version 1 was imported from .*sft: no episodes"):
            await past_update(connection, 1)
    assert (update.state, update.parent_version, update.version) == ("done", 0, 1)
    assert update.metrics.pop("manifest_sha256") == adapters.sha256_of(
        bench.version(1) / adapters.MANIFEST
    )
    assert update.metrics == {"imported_from": str(bench.adapter)}
    assert update.recipe["lora"]["rank"] == 4


async def test_training_goes_on_from_it_with_a_new_optimiser(bench: Bench) -> None:
    await bench.imports()
    assert not (bench.version(1) / "trainer/optimizer.pt").stat().st_size > 10_000
    await bench.fill(version=1)
    assert await bench.train()
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}
    before, after = bench.weights(1), bench.weights(2)
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    # One step of a new AdamW moves a weight by its rate, at most.
    assert 0.5 * RATE < max(moved) < 1.5 * RATE
    assert read_progress(bench.version(2)) == 1
    assert read_base(bench.version(2)) == read_base(bench.version(1))


async def test_a_version_is_imported_on_top_of_those_there_are(bench: Bench) -> None:
    await bench.imports()
    with pytest.raises(AdapterError, match="m@1 has its weights and serves: all is done"):
        await bench.imports()
    shutil.rmtree(bench.adapter)
    write_adapter(bench.model, bench.adapter, seed=2)
    assert await bench.imports() == "m@2 serving"
    assert await bench.states() == {0: "published", 1: "published", 2: "serving"}


async def test_while_the_server_is_away_it_is_written_and_the_trainer_publishes_it(
    bench: Bench,
) -> None:
    assert await bench.imports(bench.at(upstream_url=NOWHERE, model=bench.model)) == "m@1 written"
    assert not await bench.train()
    assert await bench.states() == {0: "published", 1: "serving"}


async def test_without_a_server_and_a_setting_the_base_is_not_known(bench: Bench) -> None:
    with pytest.raises(
        TrainerError, match=r"does not answer .*base model of policy 'm'.*PAWL_MODEL"
    ):
        await bench.imports(bench.at(upstream_url=NOWHERE))
    assert await bench.states() == {}


async def test_a_policy_whose_base_is_not_served_is_refused(bench: Bench) -> None:
    with pytest.raises(TrainerError, match="policy 'n' is 'n', but the model server serves m: "):
        await import_adapter(bench.settings, bench.engine, "n", bench.adapter)


async def test_while_a_trainer_works_on_the_policy_it_is_refused(bench: Bench) -> None:
    async with bench.engine.connect() as guard:
        assert await claims.hold_policy(guard, "m")
        with pytest.raises(
            TrainerError, match=r"'m' is being worked on, by its trainer.*: stop it"
        ):
            await bench.imports()
        await guard.invalidate()
    assert await bench.imports() == "m@1 serving"
    # It holds nothing back itself.
    async with bench.engine.connect() as guard:
        assert await claims.hold_policy(guard, "m")
        await guard.invalidate()


def with_config(**changes: Any) -> Callable[[Path, str], None]:
    def change(folder: Path, model: str) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[..., None]:
    def changed(folder: Path, model: str) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return changed


def anew(**config: Any) -> Callable[[Path, str], None]:
    def write(folder: Path, model: str) -> None:
        shutil.rmtree(folder)
        write_adapter(model, folder, **config)

    return write


def of_another_width(folder: Path, model: str) -> None:
    other = write_tiny_model(folder.parent / "wide", hidden_size=64)
    shutil.rmtree(folder)
    write_adapter(other, folder)
    with_config(base_model_name_or_path=model)(folder, model)


def first(weights: dict[str, torch.Tensor]) -> str:
    return sorted(weights)[0]


REFUSED = {
    r"its rank \(r\) is 8, and the recipe's lora\.rank is 4": anew(r=8),
    "it has use_dora = True": anew(use_dora=True),
    r"lm_head\.lora_A\.weight is of a layer that the recipe's lora\.target_modules does not": anew(
        target_modules=["q_proj", "lm_head"]
    ),
    "its base model is 'org/other', and the policy's is": with_config(
        base_model_name_or_path="org/other"
    ),
    r"is \[4, 64\] and \[4, 32\] is needed": of_another_width,
    "has values that are not finite": with_weights(lambda w: w[first(w)].fill_(float("nan"))),
    "all its lora_B are zero": with_weights(lambda w: [one.zero_() for one in w.values()]),
    r"lora_A\.weight is missing": with_weights(lambda w: w.pop(first(w))),
    "save it in 16 or 32 bits": with_weights(lambda w: w.update({first(w): w[first(w)].char()})),
    "its target_modules and its weights name different layers": with_config(
        target_modules=["q_proj"]
    ),
    r"adapter_model\.safetensors cannot be read": lambda folder, _: (folder / WEIGHTS).write_bytes(
        b"half"
    ),
}


@pytest.mark.parametrize("said", REFUSED)
async def test_what_cannot_be_a_version_is_refused_and_nothing_changes(
    bench: Bench, said: str
) -> None:
    REFUSED[said](bench.adapter, bench.model)
    with pytest.raises(AdapterError, match=said):
        await bench.imports()
    assert await bench.states() == {}
    assert await bench.running() is None
    assert not (bench.adapters / "m").exists()


async def test_one_that_is_not_served_right_is_rejected(bench: Bench) -> None:
    async with fake_model_server() as wrong:
        wrong.logprobs["m@1"] = -99.0
        settings = bench.at(upstream_url=wrong.url, model=bench.model)
        with pytest.raises(
            PublishError, match="m@1 was rejected, and the version before it serves"
        ):
            await bench.imports(settings)
        assert wrong.loaded == {}
    assert await bench.states() == {0: "serving", 1: "rejected"}


async def test_an_exported_version_is_known_by_the_hash_of_its_base(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.imports()
    export_adapter(bench.version(1), tmp_path / "out")
    bench.adapter = tmp_path / "out"
    # Elsewhere the same model is in another folder.
    with_config(base_model_name_or_path="/models/moved")(bench.adapter, "")
    with pytest.raises(AdapterError, match="m@1 has its weights"):
        await bench.imports()
    progress = bench.adapter / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"base": "another"}))
    with pytest.raises(AdapterError, match=r"on another base model, says its progress\.json"):
        await bench.imports()


STEPS = {
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "before the record": killing(claims, "consume", after=False),
    "within the transaction": killing(claims, "consume", after=True),
    "before publishing": killing(Publisher, "publish", after=False),
    "after loading": killing(ModelServer, "load", after=True),
    "before promoting": killing(policies, "promote", after=False),
}


@pytest.mark.parametrize("step", STEPS)
async def test_killed_at(bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await bench.imports()
    assert not await bench.train()
    assert await bench.running() is None
    whole = {0: "published", 1: "serving"}
    if step == "before the version exists":
        assert await bench.states() == {0: "serving"}
        assert await bench.imports() == "m@1 serving"
    assert await bench.states() == whole


async def test_none_is_made_a_version_of_another_tenants_policy(
    bench: Bench, tmp_path: Path
) -> None:
    async with bench.engine.begin() as connection:
        await policies.ensure_base(connection, "m", None, "a")
    file = tmp_path / "policies.toml"
    file.write_text('[[policy]]\nname = "m"\nbase = "m"\ntrained = true\ntenant = "b"\n')
    with pytest.raises(TrainerError, match="of tenant 'a', and stays so"):
        await bench.imports(bench.at(policies=file))
    assert await bench.states() == {0: "serving"}
    assert await bench.running() is None
    assert not bench.version(1).exists()


async def test_one_that_cannot_be_written_leaves_no_update_running(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise AdapterError("another wrote it")

    monkeypatch.setattr(adapters, "write_version", failing)
    with pytest.raises(AdapterError, match="another wrote it"):
        await bench.imports()
    assert await bench.states() == {0: "serving"}
    assert await bench.running() is None
