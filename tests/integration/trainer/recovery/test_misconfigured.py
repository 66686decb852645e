"""A real `pawl trainer`, started misconfigured: it says why, and spends nothing."""

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from store.ids import new_id
from store.records import FeedbackItem, FeedbackRecord, SpoolRecord
from store.version_states import ensure_base
from tests.support.controller.publishing import publishing_beside
from tests.support.ledger.episodes import ingest
from tests.support.servers.computing_server import Server
from tests.support.trainer.scored_episodes import ALONE, BASE, WORDS, Said, call_record, write_model
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.timeout(600)

MAX_RANK = 16
MEMBERS, GROUPS = 8, 16
# What torch raises of a GPU that another process has filled, wherever the base model computes, for
# as long as a file exists.
FULL_MEMORY = """
import sys, torch
from pathlib import Path
from transformers.models.llama.modeling_llama import LlamaModel
from pawl.cli import main
real = LlamaModel.forward
def forward(*args, **kwargs):
    if Path("memory-is-full").exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return real(*args, **kwargs)
LlamaModel.forward = forward
sys.argv = ["pawl", "trainer"]
main()
"""


class RankedServer(Server):
    """Refuse adapters of a higher rank, in vLLM's words."""

    async def _load(self, request: web.Request) -> web.Response:
        folder = Path((await request.json())["lora_path"])
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank <= MAX_RANK:
            return await super()._load(request)
        message = f"LoRA rank {rank} is greater than max_lora_rank {MAX_RANK}."
        return web.json_response({"error": {"message": message, "code": 400}}, status=400)


class Scenario:
    """A trainer's folder and settings, a model server, and scored episodes to train on."""

    def __init__(self, folder: Path, engine: AsyncEngine, database_url: str) -> None:
        self.folder, self.engine, self.log = folder, engine, folder / "trainer.log"
        self.port = free_port()
        self._environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PAWL_")},
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
            "DATABASE_URL": database_url,
            "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{self.port}/v1",
            "PAWL_ADAPTER_DIR": str(folder / "adapters"),
            "PAWL_RECIPE": str(folder / "recipe.toml"),
            "PAWL_MODEL": str(folder / "model"),
            "PAWL_TRAINER_LISTEN": f"127.0.0.1:{free_port()}",
        }

    def write_recipe(self, rank: int) -> None:
        recipe = (files("trainer.recipes") / "rollout.toml").read_text()
        kept = [line for line in recipe.splitlines() if not line.startswith("rank =")]
        changed = "\n".join(kept).replace("[lora]", f"[lora]\nrank = {rank}")
        (self.folder / "recipe.toml").write_text(changed)

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[asyncio.subprocess.Process]:
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", FULL_MEMORY),
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def store_episodes(self) -> None:
        """Store an update's groups, sampled by the server from the base model."""
        dice = random.Random(0)
        records: list[SpoolRecord] = []
        async with aiohttp.ClientSession() as session:
            for task, member in itertools.product(range(GROUPS), range(MEMBERS)):
                if not member:
                    prompt = [dice.randrange(2, WORDS) for _ in range(9)]
                key, at = f"e{task}-{member}", datetime.now(UTC)
                said = await self._sample(session, prompt)
                item = FeedbackItem(
                    id=new_id(),
                    metric="reward",
                    value=member / MEMBERS,
                    target_kind="episode",
                    target=key,
                )
                records.append(call_record(key, f"t{task}", ALONE, said, at, 0, 2.0))
                records.append(FeedbackRecord(id=new_id(), at=at, items=(item,)))
        async with self.engine.begin() as connection:
            await ensure_base(connection, BASE, BASE)
            await ingest(connection, records)

    async def _sample(self, session: aiohttp.ClientSession, prompt: list[int]) -> Said:
        body = {"model": BASE, "prompt": prompt, "max_tokens": 4, "temperature": 2.0, "logprobs": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        async with session.post(url, json=body) as reply:
            choice = (await reply.json())["choices"][0]
        return Said(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    async def consumed(self) -> int:
        async with self.engine.connect() as connection:
            return int(await connection.scalar(text("SELECT count(*) FROM consumptions")) or 0)

    async def serves_an_update(self) -> bool:
        query = "SELECT EXISTS (SELECT FROM policies WHERE state = 'serving' AND version > 0)"
        async with self.engine.connect() as connection:
            return bool(await connection.scalar(text(query)))


@pytest.fixture
async def scenario(
    tmp_path: Path, engine: AsyncEngine, database_url: str
) -> AsyncIterator[Scenario]:
    torch.set_num_threads(1)
    write_model(tmp_path / "model", spread=0.4)
    scenario = Scenario(tmp_path, engine, database_url)
    runner = web.AppRunner(RankedServer(BASE, tmp_path / "model").app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", scenario.port).start()
    await scenario.store_episodes()
    yield scenario
    await runner.cleanup()


async def test_lora_rank_that_the_model_server_refuses_ends_the_trainer_before_it_claims(
    scenario: Scenario,
) -> None:
    scenario.write_recipe(rank=64)
    async with scenario.trainer() as trainer:
        await until(lambda: trainer.returncode is not None, within_s=120)
    assert trainer.returncode == 2
    assert "--max-lora-rank" in scenario.log.read_text()
    assert await scenario.consumed() == 0
    assert not await scenario.serves_an_update()


async def test_trainer_without_free_memory_waits_for_room(
    scenario: Scenario,
) -> None:
    scenario.write_recipe(rank=MAX_RANK)
    (scenario.folder / "memory-is-full").touch()
    async with scenario.trainer() as trainer:
        await until(lambda: '"training_paused"' in scenario.log.read_text(), within_s=120)
        assert "batch.micro_batch_tokens" in scenario.log.read_text()
        assert (trainer.returncode, await scenario.consumed()) == (None, 0)
        (scenario.folder / "memory-is-full").unlink()
        async with publishing_beside(scenario.engine, [f"http://127.0.0.1:{scenario.port}/v1"]):
            await eventually(scenario.serves_an_update, within_s=120)
