"""A real vLLM serves an imported adapter behind the proxy."""

import asyncio
import os
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec
import torch

from pawl.stack.process import Process
from pawl.stack.stack import Stack
from store.database import make_engine
from store.records import TransitionRow
from store.version_queries import list_versions
from store.versions import PolicyVersion
from tests.e2e.conftest import POLICY, episodes_of
from tests.e2e.replaying import post, row_of
from tests.support.training import write_adapter
from tests.support.waiting import eventually
from trainer.batches import Row, RowKey
from trainer.learners.learner import Learner
from trainer.updates.plan import rows_to_compute

# After the others by its name: the version that serves is another from then on.


async def imported(trainer: Process, adapter: Path) -> tuple[int, str]:
    """The status and the words of `pawl policies import`, with the settings of a trainer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pawl.cli", "policies", "import", POLICY, str(adapter)),
        env=trainer._environment | {"PYTHONPATH": os.getcwd()},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


CARD = {"temperature": 0.8, "top_p": 0.95, "top_k": 20}


async def ask(stack: Stack, episode: str, model: str = POLICY, **settings: float) -> str:
    """Who answered, as the reply's header says."""
    body = {"model": model, "max_tokens": 24, "seed": 3, "temperature": 1.0} | settings
    asked = {"messages": [{"role": "user", "content": "Where does the river end?"}]}
    headers = await post(stack.base_url, "chat/completions", body | asked, episode)
    return headers["x-pawl-policy"]


async def stored(stack: Stack, keys: Sequence[str]) -> tuple[PolicyVersion, list[TransitionRow]]:
    """The newest version, and the one call of each of these episodes."""
    engine = make_engine(stack.database_url)

    async def look() -> list[TransitionRow] | None:
        async with engine.connect() as connection:
            found = await episodes_of(connection, keys)
        calls = {episode.key: call for episode in found for call in episode.calls}
        return [calls[key] for key in keys] if calls.keys() >= set(keys) else None

    calls = await eventually(look)
    async with engine.connect() as connection:
        versions = await list_versions(connection, POLICY)
    await engine.dispose()
    return versions[-1], calls or []


async def test_vllm_serves_imported_adapter(
    stack: Stack, learner: Learner, shallow_dir: str, tmp_path: Path
) -> None:
    adapter = await asyncio.to_thread(write_adapter, shallow_dir, tmp_path / "sft")
    trainer = stack.processes["trainer"]
    await trainer.stop()
    status, said = await imported(trainer, adapter)
    assert status == 0, said
    name = said.removesuffix(" serves\n")
    episodes = count()

    # The proxy reads twice a second which version serves; an episode keeps its own.
    async def answered_by_it() -> str | None:
        episode = f"imported-{next(episodes)}"
        return episode if name == await ask(stack, episode) else None

    served = [await eventually(answered_by_it) or "", *(f"imported-{own}" for own in "abc")]
    for seed, episode in enumerate(served[1:]):
        assert await ask(stack, episode, seed=seed, **CARD) == name
    based = [f"based-{seed}" for seed in range(3)]
    for seed, episode in enumerate(based):
        await ask(stack, episode, f"{POLICY}@0", seed=seed, **CARD)
    version, calls = await stored(stack, [*served, *based])
    assert version.state == "serving"
    assert {call.policy_version for call in calls[: len(served)]} == {version.version}
    folder = Path(version.adapter_path or "")
    differences = scored_again(learner, folder, list(map(row_of, calls)))
    assert max(differences) <= 1e-3, differences


def scored_again(learner: Learner, folder: Path, told: list[Row]) -> list[float]:
    """The mean difference a token between what the server said and the version says, by row.

    The trainer scores rows whose log-probabilities it is not told, as it does those of
    `/v1/responses`, and stands at neither version when it begins.
    """
    learner.restore(None)
    silent = [msgspec.structs.replace(row, sampled_logprobs=(), recomputed=True) for row in told]
    values: dict[RowKey, list[float]] = {}
    for version, rows in rows_to_compute(silent).items():
        found = learner.version_logprobs(folder if version else None, rows)
        values |= {row.key: own for row, own in zip(rows, found, strict=True)}
    return [
        float((torch.tensor(values[row.key]) - torch.tensor(row.sampled_logprobs)).abs().mean())
        for row in told
    ]
