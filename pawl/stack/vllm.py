"""Run vLLM: on a GPU, or the CPU build with our LoRA plugin.

`python -m pawl.stack.vllm` takes the arguments of `vllm serve`.
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pawl.processes import gpu_environment, large_imports, run_module, wait_passively
from store.records import Record
from trainer.settings import USUAL_SLOTS

# vLLM's parser of tool calls for most models, Qwen's among them.
USUAL_TOOL_PARSER: Final = "hermes"
# Only whole blocks of a prompt are cached for the next request. With vLLM's 128 tokens on a CPU,
# shorter prompts, which many agents have, would be computed again for each episode of a group.
CPU_BLOCK_TOKENS: Final = 32
CPU_CONTEXT: Final = 2048
# Size of the KV cache on a CPU.
CPU_CACHE_GIB: Final = 2
# The values that vLLM accepts for --max-lora-rank.
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# vLLM's share of a GPU's memory: beside a trainer, and alone.
SHARE_BESIDE_TRAINER: Final = 0.5
SHARE_ALONE: Final = 0.9
# Longest stage of vLLM's start that is shown, in characters.
MOST_STAGE_CHARS: Final = 72


class VllmOptions(Record, frozen=True, kw_only=True):
    """Options of a vLLM server that differ from one stack to another.

    Attributes:
        model: folder or hub name of the base model.
        served_name: the name under which clients ask for it.
        dtype: number format; None: float32 on a CPU, bfloat16 on a GPU.
        max_model_len: longest context, in tokens; None: the model's own, as far as it fits into a
            GPU's memory, and 2048 on a CPU.
        max_lora_rank: highest rank of an adapter; vLLM gets the next value that it accepts.
        adapter_slots: adapters that the server computes with at once.
        chat_template: chat template file; None: the model's own.
        sampling_defaults: sampling settings for requests that leave them out; vLLM's own defaults
            hold for other settings.
        gpus: the GPUs that the server uses, as nvidia-smi numbers them; empty: all that CUDA shows.
        gpu_share: share of each GPU's memory that the server takes.
        arguments: further arguments, which override all others.
    """

    model: str
    served_name: str
    port: int
    dtype: str | None
    max_model_len: int | None
    max_lora_rank: int
    tool_parser: str = USUAL_TOOL_PARSER
    chat_template: Path | None = None
    adapter_slots: int = USUAL_SLOTS
    sampling_defaults: Mapping[str, float] = {}
    gpus: Sequence[int] = ()
    gpu_share: float = SHARE_BESIDE_TRAINER
    arguments: Sequence[str] = ()


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA driver (the program `nvidia-smi`)."""
    return shutil.which("nvidia-smi") is not None


def rank_with_room(rank: int) -> int:
    """Return the lowest --max-lora-rank that vLLM accepts and that fits adapters of `rank`."""
    return next((known for known in RANKS if known >= rank), rank)


def lacks_lora(architecture: str) -> bool:
    """Return whether the installed vLLM does not support LoRA for a class of models.

    vLLM's sources are read, because importing them takes many seconds. Which layers adapters can
    change is known only when a model is built.
    """
    spec = importlib.util.find_spec("vllm")
    roots = (spec.submodule_search_locations if spec is not None else None) or ()
    sources = [
        path.read_text()
        for root in roots
        for folder in ("model_executor/models", "models")
        for path in Path(root, folder).rglob("*.py")
    ]
    bases: dict[str, set[str]] = {}
    for name, inherited in re.findall(r"^class (\w+)\(([^)]*)\)", "\n".join(sources), re.MULTILINE):
        bases.setdefault(name, set()).update(re.findall(r"\w+", inherited))
    listed = rf'"{architecture}": \(\s*"[\w.]+",\s*"(\w+)"'
    classes = set(re.findall(listed, "\n".join(sources)))
    is_known, reached = bool(classes & bases.keys()), set[str]()
    while classes - reached:
        reached |= classes
        classes = set().union(*(bases.get(name, ()) for name in classes))
    return is_known and "SupportsLoRA" not in reached


def vllm_command(options: VllmOptions) -> list[str]:
    dtype = options.dtype or ("bfloat16" if has_gpu() else "float32")
    # "auto": the longest context that fits into memory, up to the model's own.
    context = options.max_model_len or ("auto" if has_gpu() else CPU_CONTEXT)
    command = [
        *run_module("pawl.stack.vllm"),
        *("--model", options.model),
        *("--served-model-name", options.served_name),
        *("--host", "127.0.0.1", "--port", str(options.port)),
        *("--dtype", dtype),
        *("--max-model-len", str(context)),
        *("--enable-lora", "--max-loras", str(options.adapter_slots)),
        # For any mixture of experts: adapters stack the experts as PEFT does.
        "--enable-mixed-moe-lora-format",
        # Room for adapters that have just retired, and are unloaded later.
        *("--max-cpu-loras", str(2 * options.adapter_slots)),
        *("--max-lora-rank", str(rank_with_room(options.max_lora_rank))),
        # Log-probabilities are of the distribution that was sampled from. Sampling defaults are the
        # proxy's, not the model's own.
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        # With an empty list vLLM would fetch from any host; no host has this name (RFC 2606).
        *("--allowed-media-domains", "none.invalid"),
        *("--enable-auto-tool-choice", "--tool-call-parser", options.tool_parser),
    ]
    if options.sampling_defaults:
        command += ["--override-generation-config", json.dumps(options.sampling_defaults)]
    if options.chat_template is not None:
        command += ["--chat-template", str(options.chat_template)]
    if has_gpu():
        command += ["--gpu-memory-utilization", str(options.gpu_share)]
    else:
        command += ["--enforce-eager", "--block-size", str(CPU_BLOCK_TOKENS)]
    return [*command, *options.arguments]


def vllm_environment(cores: int, gpus: Sequence[int] = ()) -> dict[str, str]:
    """Return the server's environment; `cores` is the number of threads it has without a GPU."""
    environment = dict(os.environ) | gpu_environment(gpus)
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    if not has_gpu():
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB),
            # The server's process computes. A separate process for that would import everything
            # again, and the server would burn a core while it waits for that process.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(cores),
        }
    return environment


def log_message(line: str) -> str:
    """Return a log line's message, without process, time, source and progress bar."""
    message = re.sub(r"^(\(\w+ pid=\d+\) )?\w+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ", "", line)
    return message.partition("[")[0].strip(" |")[:MOST_STAGE_CHARS]


def main() -> None:
    wait_passively()
    # The import is half of vLLM's start.
    with large_imports():
        from vllm.entrypoints.launchers.api_server.entry import main as serve
    serve()


if __name__ == "__main__":
    main()
