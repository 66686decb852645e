"""An adapter from elsewhere, imported, is what a real vLLM serves behind the proxy."""

import asyncio
import os
import sys
from itertools import count
from pathlib import Path

import aiohttp
import pytest
import torch

from pawl.stack.process import Process
from pawl.stack.stack import Stack
from store.connection.engine import make_engine
from store.read.episodes import episode_ids, read_episodes
from store.records import PolicyVersion, TransitionRow
from store.updates.policies import list_versions
from store.values.tokens import unpack_ids, unpack_logprobs
from tests.e2e.conftest import POLICY
from tests.integration.conftest import eventually
from tests.support.training import recipe, write_adapter
from trainer.batches.rows import bare_row
from trainer.learners.learner import Learner
from trainer.learners.scoring import score_rows

# After the others by its name: the version that serves is another from then on.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]


async def imported(trainer: Process, adapter: Path) -> tuple[int, str]:
    """The status and the words of `pawl policies import`, with the settings of a trainer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pawl.cli", "policies", "import", POLICY, str(adapter)),
        env=trainer._environment | {"PYTHONPATH": os.getcwd()},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def ask(stack: Stack, episode: str) -> str:
    """Who answered, as the reply's header says."""
    body = {"model": POLICY, "max_tokens": 24, "seed": 3, "temperature": 1.0}
    asked = {"messages": [{"role": "user", "content": "Where does the river end?"}]}
    url, headers = f"{stack.base_url}/chat/completions", {"x-pawl-episode": episode}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body | asked, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        return response.headers["x-pawl-policy"]


async def stored(stack: Stack, key: str) -> tuple[PolicyVersion, TransitionRow]:
    """The newest version, and the one call of an episode."""
    engine = make_engine(stack.database_url)

    async def look() -> list[TransitionRow]:
        async with engine.connect() as connection:
            found = await read_episodes(connection, await episode_ids(connection))
        return [call for episode in found if episode.key == key for call in episode.calls]

    [call] = await eventually(look)
    async with engine.connect() as connection:
        versions = await list_versions(connection, POLICY)
    await engine.dispose()
    return versions[-1], call


async def test_vllm_serves_what_was_imported(stack: Stack, model_dir: str, tmp_path: Path) -> None:
    adapter = await asyncio.to_thread(write_adapter, model_dir, tmp_path / "sft")
    trainer = stack.processes["trainer"]
    refused = await imported(trainer, adapter)
    assert refused == (2, "")
    await trainer.stop()
    status, said = await imported(trainer, adapter)
    trainer._stopping = False
    await trainer.start()
    assert status == 0, said
    episodes = count()

    # The proxy reads twice a second which version serves; an episode keeps its own.
    async def answered_by_it() -> str | None:
        episode = f"imported-{next(episodes)}"
        return episode if said == f"{await ask(stack, episode)} serves\n" else None

    version, call = await stored(stack, await eventually(answered_by_it))
    assert (version.state, call.policy_version) == ("serving", version.version)
    learner = Learner(model_dir, recipe(), seed=0, scratch=tmp_path)
    learner.restore(Path(version.adapter_path or ""))
    row = bare_row(0, unpack_ids(call.tokens.prompt_ids), unpack_ids(call.tokens.sampled_ids))
    with torch.no_grad():
        own = score_rows(learner._model, [row], merge=False).logprobs
    served = torch.tensor(list(unpack_logprobs(call.tokens.sampled_logprobs)))
    assert float((own - served).abs().mean()) <= 1e-3
