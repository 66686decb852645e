"""Compare the speed of vLLM's CPU LoRA operations with those of plugins/cpu_lora.

Serves the same model and a random adapter of rank 16 twice, without and with the plugin, and counts
sampled tokens a second while 32 streams decode with the adapter. That both compute the same is
tested in `tests/unit/trainer/test_cpu_lora_ops.py`.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.stack import ROOT, vllm_server
from pawl.stack.model import unpacked_model
from pawl.stack.vllm import vllm_environment

ADAPTER, BASE = "bench-adapter", "bench-base"
RANK: Final = 16
PROMPT_TOKENS, TOKENS = 128, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; left out: the packaged SmolLM2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    model = options.model or unpacked_model(ROOT / "var" / "models")
    with tempfile.TemporaryDirectory(prefix="pawl-cpu-lora-") as name:
        folder = Path(name)
        adapter = write_adapter(model, folder / "adapter")
        # VLLM_PLUGINS is a list of allowed names; an empty one allows none.
        stock = measure(folder, model, adapter, "", [ADAPTER], options.streams)
        plugin = measure(folder, model, adapter, "pawl_cpu_lora", [ADAPTER, BASE], options.streams)
    rates = {
        "adapter, vLLM's own operations": stock[ADAPTER],
        "adapter, plugin": plugin[ADAPTER],
        "base model, plugin": plugin[BASE],
    }
    table = Table("served", "sampled tokens/s", "times vLLM's own")
    for title, rate in rates.items():
        table.add_row(title, f"{rate:.1f}", f"{rate / stock[ADAPTER]:.2f}")
    Console(stderr=options.json).print(table)
    if options.json:
        print(json.dumps(rates))


def write_adapter(model: Path, folder: Path) -> Path:
    """Write a random adapter on every linear layer, B not zero, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # The shapes are all that is needed of the base: its weights are not read.
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    config = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False
    )
    get_peft_model(base, config).save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def measure(
    folder: Path, model: Path, adapter: Path, plugins: str, names: list[str], streams: int
) -> dict[str, float]:
    """Return tokens a second of each of `names`, on one server that allows `plugins`."""
    arguments = ["--model", str(model), "--served-model-name", BASE, "--dtype", "float32"]
    arguments += ["--max-model-len", "1024", "--enable-lora", "--max-loras", "2"]
    arguments += ["--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter}"]
    environment = vllm_environment(len(os.sched_getaffinity(0))) | {"VLLM_PLUGINS": plugins}
    with vllm_server(folder, arguments, environment) as url:
        return {name: asyncio.run(tokens_per_s(url, name, streams)) for name in names}


async def tokens_per_s(url: str, model: str, streams: int) -> float:
    unlimited, forever = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=unlimited, timeout=forever) as session:
        await asyncio.gather(*(stream(session, model, number, 2, 2) for number in range(4)))
        started = time.perf_counter()
        numbers = range(streams)
        sampled = await asyncio.gather(
            *(stream(session, model, number, PROMPT_TOKENS, TOKENS) for number in numbers)
        )
        return sum(sampled) / (time.perf_counter() - started)


async def stream(
    session: aiohttp.ClientSession, model: str, number: int, prompt_tokens: int, tokens: int
) -> int:
    """Stream one completion of exactly `tokens` tokens; return how many the server counted."""
    request = {
        "model": model,
        # No two prompts begin alike, so that no stream finds a cached prefix.
        "prompt": [1000 + number, *range(2000, 2000 + prompt_tokens - 1)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    counted = 0
    async with session.post("/v1/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line.removeprefix(b"data: ")).get("usage")
                counted = usage["completion_tokens"] if usage else counted
    if counted != tokens:
        raise RuntimeError(f"a stream ended after {counted} of {tokens} tokens")
    return counted


if __name__ == "__main__":
    main()
