"""An adapter from elsewhere is served like a trained one and trained on, whole or not at all."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import select

from store import claims
from store.errors import UnknownUpdate
from store.read.past import past_update
from store.schema.tables import updates
from tests.support.faults.killing import Killed, killing
from tests.support.ledger.totals import totals
from tests.support.trainer.importing import NOWHERE, RATE, WEIGHTS, Bench, adapter, bench, learner
from tests.support.training import write_adapter
from trainer.errors import AdapterError, PublishError
from trainer.importing import AdapterImport
from trainer.publishing import adapters
from trainer.publishing.adapters import read_base_hash
from trainer.publishing.model_server import ModelServer, Replicas

__all__ = ["adapter", "bench", "learner"]


async def test_imported_adapter_is_served_and_recorded_like_a_trained_version(bench: Bench) -> None:
    assert await bench.imports() == "m@1 serving"
    assert await bench.states() == {0: "retired", 1: "serving"}
    foreign, own = load_file(bench.adapter / WEIGHTS), bench.weights(1)
    assert foreign.keys() == own.keys()
    assert all(torch.equal(foreign[name], own[name]) for name in own)
    config = json.loads((bench.version(1) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.0)
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


async def test_training_continues_from_an_import_with_a_new_optimiser(bench: Bench) -> None:
    await bench.imports()
    assert not (bench.version(1) / "trainer/optimizer.pt").stat().st_size > 10_000
    await bench.fill(version=1)
    assert await bench.train()
    assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
    before, after = bench.weights(1), bench.weights(2)
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    # One step of a new AdamW moves a weight by its rate, at most.
    assert 0.5 * RATE < max(moved) < 1.5 * RATE
    assert read_base_hash(bench.version(2)) == read_base_hash(bench.version(1))


async def test_import_becomes_the_next_version_of_the_policy(bench: Bench) -> None:
    await bench.imports()
    with pytest.raises(AdapterError, match="m@1 already serves these weights: nothing to import"):
        await bench.imports()
    shutil.rmtree(bench.adapter)
    write_adapter(bench.model, bench.adapter, seed=2)
    assert await bench.imports() == "m@2 serving"
    assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}


async def test_import_without_a_server_is_published_once_one_answers(bench: Bench) -> None:
    assert await bench.imports(bench.at(upstream_url=NOWHERE, model=bench.model)) == "m@1 written"
    assert not await bench.train()
    assert await bench.states() == {0: "retired", 1: "serving"}


async def test_misserved_import_is_rejected(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelServer.last_logprobs

    async def wrong(self: ModelServer, name: str, *of_row: Any) -> list[float]:
        off = 9.0 if name == "m@1" else 0.0
        return [logprob - off for logprob in await real(self, name, *of_row)]

    monkeypatch.setattr(ModelServer, "last_logprobs", wrong)
    with pytest.raises(PublishError, match="m@1 was rejected, and the earlier version keeps"):
        await bench.imports()
    async with Replicas(bench.settings.server_urls) as servers:
        assert set(await servers.models()) == {"m"}
    assert await bench.states() == {0: "serving", 1: "rejected"}


STEPS = {
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "before the record": killing(claims, "record_update", after=False),
    "within the transaction": killing(claims, "record_update", after=True),
    "before publishing": killing(AdapterImport, "until_published", after=False),
}


@pytest.mark.parametrize("step", STEPS)
async def test_killed_import_happens_whole_or_not_at_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await bench.imports()
    assert not await bench.train()
    assert await bench.running() is None
    whole = {0: "retired", 1: "serving"}
    if step == "before the version exists":
        assert await bench.states() == {0: "serving"}
        assert await bench.imports() == "m@1 serving"
    assert await bench.states() == whole


async def test_failed_write_of_an_import_leaves_no_running_update(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise AdapterError("another wrote it")

    monkeypatch.setattr(adapters, "write_version", failing)
    with pytest.raises(AdapterError, match="another wrote it"):
        await bench.imports()
    assert await bench.states() == {0: "serving"}
    assert await bench.running() is None
