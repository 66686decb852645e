"""Compare vLLM's CPU LoRA operations with those of plugins/cpu_lora: speed and equality.

    python -m benchmarks.cpu_lora [--model DIR] [--streams 32] [--dtype float32] [--json]

Serves the same model and adapter twice, without and with the plugin, and
counts sampled tokens a second while every stream decodes with the adapter.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.vllm_server import vllm_server
from pawl.stack.model import unpacked_model

if TYPE_CHECKING:
    import torch

ADAPTER = "bench-adapter"
BASE = "bench-base"
RANK = 16

# VLLM_PLUGINS is a list of allowed names; an empty one allows none.
NO_PLUGINS = ""
OUR_PLUGIN = "pawl_cpu_lora"


@dataclass(frozen=True, slots=True)
class Options:
    model: Path
    streams: int
    prompt_tokens: int
    tokens: int
    cores: str
    dtype: str
    port: int
    json: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Hold what --json prints; rates are sampled tokens a second over all streams."""

    stock_tokens_per_s: float
    plugin_tokens_per_s: float
    base_tokens_per_s: float
    ratio: float
    max_abs_diff: float


def main() -> None:
    options = _parse(sys.argv[1:])
    console = Console(stderr=options.json)
    with tempfile.TemporaryDirectory(prefix="pawl-cpu-lora-") as scratch:
        adapter = make_adapter(options.model, Path(scratch) / "adapter")
        console.print("serving with vLLM's own operations")
        stock = measure_server(options, adapter, NO_PLUGINS, [ADAPTER])
        console.print("serving with the plugin")
        plugin = measure_server(options, adapter, OUR_PLUGIN, [ADAPTER, BASE])
    result = Result(
        stock_tokens_per_s=round(stock[ADAPTER], 1),
        plugin_tokens_per_s=round(plugin[ADAPTER], 1),
        base_tokens_per_s=round(plugin[BASE], 1),
        ratio=round(plugin[ADAPTER] / stock[ADAPTER], 2),
        max_abs_diff=largest_difference(),
    )
    console.print(_table(options, result))
    if options.json:
        print(json.dumps(asdict(result)))


def _parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_lora", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, help="a folder; left out: the packaged SmolLM2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="prompt tokens a stream")
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens a stream")
    parser.add_argument("--cores", default="0-1", help="cores the engine is bound to")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = vars(parser.parse_args(arguments))
    given["model"] = given["model"] or unpacked_model(Path("var/models"))
    return Options(**given)


def _table(options: Options, result: Result) -> Table:
    table = Table(title=_title(options))
    table.add_column("served")
    table.add_column("sampled tokens/s", justify="right")
    table.add_column("to stock", justify="right")
    rows = {
        "adapter, stock operations": result.stock_tokens_per_s,
        "adapter, plugin": result.plugin_tokens_per_s,
        "base model, plugin": result.base_tokens_per_s,
    }
    for name, rate in rows.items():
        table.add_row(name, f"{rate:.1f}", f"{rate / result.stock_tokens_per_s:.2f}x")
    table.caption = f"largest difference of one operation, float32: {result.max_abs_diff:.1e}"
    return table


def _title(options: Options) -> str:
    lengths = f"{options.prompt_tokens} + {options.tokens} tokens each"
    return f"{options.streams} streams, {lengths}, {options.dtype}, rank {RANK}"


def make_adapter(model: Path, folder: Path) -> Path:
    """Make a random rank-16 adapter on every linear layer, B not zero, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # The shapes are all that is needed of the base: its weights are not read.
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    config = LoraConfig(
        r=RANK,
        lora_alpha=RANK,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    get_peft_model(base, config).save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def measure_server(
    options: Options, adapter: Path, plugins: str, models: list[str]
) -> dict[str, float]:
    """Return tokens a second for each of `models`, on one server that allows `plugins`."""
    with serving(options, adapter, plugins) as url:
        return {model: asyncio.run(_measure(url, model, options)) for model in models}


@contextmanager
def serving(options: Options, adapter: Path, plugins: str) -> Iterator[str]:
    """Run a server with the adapter loaded, and with `plugins` in place."""
    arguments = ["--model", str(options.model), "--served-model-name", BASE]
    arguments += ["--dtype", options.dtype, "--max-model-len", "1024"]
    arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)]
    arguments += ["--lora-modules", f"{ADAPTER}={adapter}"]
    environment = {"VLLM_PLUGINS": plugins, "VLLM_CPU_OMP_THREADS_BIND": options.cores}
    with vllm_server(arguments, environment, options.port) as url:
        yield url


async def _measure(url: str, model: str, options: Options) -> float:
    """Return tokens a second over all streams, first byte asked to last byte read."""
    unlimited = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=unlimited, timeout=timeout) as session:
        await asyncio.gather(*(_stream(session, model, _prompt(i, 2), 2) for i in range(4)))
        prompts = [_prompt(i, options.prompt_tokens) for i in range(options.streams)]
        started = time.perf_counter()
        streams = [_stream(session, model, prompt, options.tokens) for prompt in prompts]
        sampled = await asyncio.gather(*streams)
        return sum(sampled) / (time.perf_counter() - started)


def _prompt(stream: int, length: int) -> list[int]:
    """Return token ids that differ from the first on, so that no stream finds a cached prefix."""
    return [1000 + stream, *range(2000, 2000 + length - 1)]


async def _stream(
    session: aiohttp.ClientSession, model: str, prompt: list[int], tokens: int
) -> int:
    """Stream one completion of exactly `tokens` tokens; return how many the server counted."""
    request = {
        "model": model,
        "prompt": prompt,
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
                usage = json.loads(line[len(b"data: ") :]).get("usage")
                counted = usage["completion_tokens"] if usage else counted
    if counted != tokens:
        raise RuntimeError(f"a stream ended after {counted} of {tokens} tokens")
    return counted


def largest_difference() -> float:
    """Return the largest absolute difference of stock and plugin operations on the same inputs.

    In float32, on batches where every row has an adapter: without one the
    stock operations are wrong, so there is nothing to agree on.
    """
    import torch

    torch.manual_seed(0)
    one = torch.zeros(32, dtype=torch.int64)
    mixed = torch.randint(0, 4, (32,))
    prefill = torch.randint(0, 4, (512,))
    return max(_difference(indices, 576, 1536) for indices in (one, mixed, prefill))


def _difference(indices: "torch.Tensor", width: int, out: int) -> float:
    """Shrink to the adapter's rank, expand onto a layer's output, and compare both."""
    import torch
    from pawl_cpu_lora import ops
    from vllm.lora.ops.torch_ops import lora_ops as stock

    inputs = torch.randn(len(indices), width)
    down, up = torch.randn(4, 1, RANK, width) / width**0.5, torch.randn(4, 1, out, RANK)
    layer = torch.randn(len(indices), out)

    def run(
        shrink: Callable[..., None], expand: Callable[..., None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        small, large = torch.zeros(len(indices), RANK), layer.clone()
        shrink(inputs, down, small, indices, 1.0)
        expand(small, up, large, indices, 0, out, True)
        return small, large

    pairs = zip(
        run(stock.bgmv_shrink, stock.bgmv_expand_slice),
        run(ops.bgmv_shrink, ops.bgmv_expand_slice),
        strict=True,
    )
    return max(float((a - b).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    main()
