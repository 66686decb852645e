"""A real vLLM server on the CPU: base model and adapter in one batch, each gets its own answer."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch

from pawl.stack.stack import Stack
from tests.e2e.asking import direct
from tests.e2e.conftest import POLICY
from tests.support.servers.fetching import fetching_at, trainers_port
from trainer.publishing.adapters import write_hashes
from trainer.publishing.model_server import ModelServer
from trainer.settings import USUAL_SLOTS

BASE = POLICY
# As many names on the same weights fill all slots, the last one included.
ADAPTERS = [f"strong-adapter-{number}" for number in range(USUAL_SLOTS)]
# With the prompt less than a block: a cached prefix would be computed in one batch and read in
# another.
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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def loaded(stack: Stack, adapter_dir: Path) -> AsyncIterator[str]:
    """Load the adapters; yield the server's URL, with `/v1`."""
    url = direct(stack)
    async with aiohttp.ClientSession() as session:
        for name in ADAPTERS:
            request = {"lora_name": name, "lora_path": str(adapter_dir)}
            async with session.post(f"{url}/load_lora_adapter", json=request) as response:
                assert response.status == 200, await response.text()
        yield url
        for name in ADAPTERS:
            request = {"lora_name": name}
            async with session.post(f"{url}/unload_lora_adapter", json=request) as response:
                assert response.status == 200, await response.text()


async def _answer(session: aiohttp.ClientSession, url: str, model: str) -> Answer:
    request = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": SAMPLED_TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    async with session.post(f"{url}/completions", json=request) as response:
        assert response.status == 200, await response.text()
        choice = (await response.json())["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


async def _answers(url: str, models: list[str]) -> list[Answer]:
    """All at once: the server decodes them in the same batches."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(_answer(session, url, model) for model in models))


def assert_same(answer: Answer, wanted: Answer) -> None:
    assert answer.ids == wanted.ids
    assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


async def test_each_request_of_a_mixed_batch_is_answered_by_its_own_model(
    loaded: str,
) -> None:
    (base_alone,) = await _answers(loaded, [BASE])
    (adapter_alone,) = await _answers(loaded, ADAPTERS[:1])
    assert adapter_alone.ids != base_alone.ids

    together = [ADAPTERS[0], BASE, *ADAPTERS, BASE, ADAPTERS[-1], ADAPTERS[0], BASE]
    for model, answer in zip(together, await _answers(loaded, together), strict=True):
        assert_same(answer, base_alone if model == BASE else adapter_alone)


async def _prompt_logprobs(session: aiohttp.ClientSession, url: str) -> list[float]:
    request = {"model": ADAPTERS[0], "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    async with session.post(f"{url}/completions", json=request) as response:
        assert response.status == 200, await response.text()
        entries = (await response.json())["choices"][0]["prompt_logprobs"]
    return [next(iter(entry.values()))["logprob"] for entry in entries[1:]]


async def test_prompt_log_probabilities_beside_other_requests_do_not_end_the_engine(
    loaded: str,
) -> None:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        alone = await _prompt_logprobs(session, loaded)
        busy = asyncio.gather(
            *(_answer(session, loaded, model) for model in [ADAPTERS[0], BASE] * 3)
        )
        beside = await _prompt_logprobs(session, loaded)
        answers = await busy
    assert beside == pytest.approx(alone, abs=1e-4)
    assert len(answers) == 6


async def test_model_server_returns_the_text_of_each_token(stack: Stack) -> None:
    async with ModelServer(direct(stack)) as server:
        answer = await server.complete(BASE, [504, 3575, 282], 40, seed=1)
        texts = await server.token_texts(BASE, answer.ids)
    assert texts is not None
    assert len(texts) == len(answer.ids)
    assert "".join(texts).startswith(answer.text)


async def test_adapter_fetched_by_pawl_adapters_answers_like_the_original(
    loaded: str, adapter_dir: Path, tmp_path: Path
) -> None:
    """vLLM answers alike with the original, and with the copy that `pawl adapters` fetched."""
    written = tmp_path / "trainer" / "m" / "1"
    shutil.copytree(adapter_dir, written)
    digest = write_hashes(written)
    async with AsyncExitStack() as exits:
        port = await exits.enter_async_context(trainers_port(tmp_path / "trainer"))
        made = await exits.enter_async_context(fetching_at(loaded, port.source, tmp_path / "own"))
        server = await exits.enter_async_context(ModelServer(made))
        await server.load("m@1", written, digest)
        shutil.rmtree(tmp_path / "trainer")
        fetched, base = await _answers(loaded, ["m@1", BASE])
        await server.unload("m@1")
    (adapter,) = await _answers(loaded, ADAPTERS[:1])
    assert_same(fetched, adapter)
    assert fetched.ids != base.ids


def test_stock_vllm_still_computes_base_rows_with_the_last_adapter_slot() -> None:
    """Fails when vLLM has mended it (vllm#48421, vllm#49656): the plugin may then go."""
    from vllm.lora.ops.torch_ops import lora_ops

    weights = torch.ones(2, 1, 3, 4)
    output = torch.zeros(1, 3)
    lora_ops.bgmv_shrink(torch.ones(1, 4), weights, output, torch.tensor([-1]))
    assert torch.equal(output, torch.full((1, 3), 4.0))
