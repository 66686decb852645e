"""A real vLLM server on the CPU: base model and adapter in one batch, each gets its own answer."""

import asyncio
import shutil
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import torch

from benchmarks.stack import answers, free_port, running, wait_for
from pawl.stack.vllm import vllm_environment
from tests.support.servers.fetching import fetching_at, trainers_port
from trainer.publishing.adapters import write_hashes
from trainer.publishing.model_server import Completion, ModelServer

BASE, ADAPTER = "base", "strong-adapter"
PROMPT = "The capital of France is"
SAMPLED_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """What was sampled for one request: ids, and the log-probability of each."""

    ids: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def adapter_dir(shallow_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random rank-16 adapter with B not zero, strong enough to change every answer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    # The shapes are all that is needed of the base: its weights are not read.
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shallow_dir))
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(base, config).save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def server_url(shallow_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for two adapters, our plugin in place."""
    arguments = ["--model", shallow_dir, "--served-model-name", BASE]
    arguments += ["--dtype", "float32", "--max-model-len", "1024"]
    arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"]
    # A cached prefix would be computed in one batch and read in another.
    arguments += ["--no-enable-prefix-caching"]
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "vllm.log"
    command = [sys.executable, "-m", "pawl.stack.vllm", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    # As the stack starts it: one process, which does not burn a core while it waits for another.
    environment = vllm_environment(2) | {"VLLM_PLUGINS": "pawl_cpu_lora"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{port}"
    with running(command, log, environment) as process:
        wait_for(lambda: answers(f"{url}/health"), process, log, within_s=300.0)
        yield url


async def _load_adapters(url: str, folder: Path, names: list[str]) -> None:
    async with aiohttp.ClientSession(url) as session:
        for name in names:
            request = {"lora_name": name, "lora_path": str(folder)}
            async with session.post("/v1/load_lora_adapter", json=request) as response:
                assert response.status == 200, await response.text()


async def _answer(session: aiohttp.ClientSession, model: str) -> Answer:
    request = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": SAMPLED_TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    async with session.post("/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        choice = (await response.json())["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


async def _answers(url: str, models: list[str]) -> list[Answer]:
    """All at once: the server decodes them in the same batches."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        return await asyncio.gather(*(_answer(session, model) for model in models))


def assert_same(answer: Answer, wanted: Answer) -> None:
    assert answer.ids == wanted.ids
    assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_each_request_of_a_mixed_batch_is_answered_by_its_own_model(
    server_url: str, adapter_dir: Path
) -> None:
    # Two names on the same weights fill both slots, the last one included.
    other = f"{ADAPTER}-again"
    asyncio.run(_load_adapters(server_url, adapter_dir, [ADAPTER, other]))
    (base_alone,) = asyncio.run(_answers(server_url, [BASE]))
    (adapter_alone,) = asyncio.run(_answers(server_url, [ADAPTER]))
    assert adapter_alone.ids != base_alone.ids

    together = [ADAPTER, BASE, other, BASE, ADAPTER, other, BASE, ADAPTER]
    for model, answer in zip(together, asyncio.run(_answers(server_url, together)), strict=True):
        assert_same(answer, base_alone if model == BASE else adapter_alone)


async def _prompt_logprobs(session: aiohttp.ClientSession, model: str) -> list[float]:
    request = {"model": model, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    async with session.post("/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        entries = (await response.json())["choices"][0]["prompt_logprobs"]
    return [next(iter(entry.values()))["logprob"] for entry in entries[1:]]


async def _probed_while_busy(url: str) -> tuple[list[float], list[float], list[Answer]]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        alone = await _prompt_logprobs(session, ADAPTER)
        busy = asyncio.gather(*(_answer(session, model) for model in [ADAPTER, BASE] * 3))
        beside = await _prompt_logprobs(session, ADAPTER)
        return alone, beside, await busy


def test_prompt_log_probabilities_beside_other_requests_do_not_end_the_engine(
    server_url: str, adapter_dir: Path
) -> None:
    alone, beside, answers = asyncio.run(_probed_while_busy(server_url))
    assert beside == pytest.approx(alone, abs=1e-4)
    assert len(answers) == 6


async def _with_texts(url: str) -> tuple[Completion, list[str] | None]:
    async with ModelServer(f"{url}/v1") as server:
        answer = await server.complete(BASE, [504, 3575, 282], 40, seed=1)
        return answer, await server.token_texts(BASE, answer.ids)


def test_model_server_returns_the_text_of_each_token(server_url: str) -> None:
    answer, texts = asyncio.run(_with_texts(server_url))
    assert texts is not None
    assert len(texts) == len(answer.ids)
    assert "".join(texts).startswith(answer.text)


async def _fetched_and_loaded(url: str, adapter: Path, tmp_path: Path) -> list[Answer]:
    """Load a version that the server does not see but through `pawl adapters`, and ask for it."""
    written = tmp_path / "trainer" / "m" / "1"
    shutil.copytree(adapter, written)
    digest = write_hashes(written)
    async with AsyncExitStack() as exits:
        port = await exits.enter_async_context(trainers_port(tmp_path / "trainer"))
        made = await exits.enter_async_context(
            fetching_at(f"{url}/v1", port.source, tmp_path / "own")
        )
        server = await exits.enter_async_context(ModelServer(made))
        await server.load("m@1", written, digest)
        shutil.rmtree(tmp_path / "trainer")
        fetched = await _answers(url, ["m@1", BASE])
        await server.unload("m@1")
        await _load_adapters(url, adapter, ["its-own"])
        return [*fetched, *await _answers(url, ["its-own"])]


def test_adapter_fetched_by_pawl_adapters_answers_like_the_original(
    server_url: str, adapter_dir: Path, tmp_path: Path
) -> None:
    fetched, base, adapter = asyncio.run(_fetched_and_loaded(server_url, adapter_dir, tmp_path))
    assert_same(fetched, adapter)
    assert fetched.ids != base.ids


def test_stock_vllm_still_computes_base_rows_with_the_last_adapter_slot() -> None:
    """Fails when vLLM has mended it (vllm#48421, vllm#49656): the plugin may then go."""
    from vllm.lora.ops.torch_ops import lora_ops

    weights = torch.ones(2, 1, 3, 4)
    output = torch.zeros(1, 3)
    lora_ops.bgmv_shrink(torch.ones(1, 4), weights, output, torch.tensor([-1]))
    assert torch.equal(output, torch.full((1, 3), 4.0))
