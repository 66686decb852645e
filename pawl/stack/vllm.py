"""Run vLLM: the CPU build with our LoRA plugin, or a GPU.

`python -m pawl.stack.vllm` has the arguments of `vllm serve`.
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pawl.processes import large_imports, run_module, showing_gpus, wait_passively
from store.records import Record
from trainer.settings import USUAL_SLOTS

# vLLM's parser of tool calls for most models, Qwen's among them.
USUAL_TOOL_PARSER: Final = "hermes"
# Only whole blocks of a prompt are kept for the next request. vLLM's 128 tokens on a CPU are more
# than many an agent's prompt, which is then computed again for each sample of its group.
CPU_BLOCK_TOKENS: Final = 32
CPU_CONTEXT: Final = 2048
# For keys and values on a CPU.
CPU_CACHE_GIB: Final = 2
# Its --max-lora-rank has to be one of these.
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Of a GPU's memory: beside a trainer, and alone.
SHARED: Final = 0.5
ALONE: Final = 0.9
# Characters of a stage of its start that are shown.
MOST_SAID: Final = 72


class VllmOptions(Record, frozen=True, kw_only=True):
    """Set the options of a vLLM server that differ from one stack to another.

    Attributes:
        model: folder or hub name of the base model.
        served_name: the name under which clients ask for it.
        dtype: number format; None: float32 on a CPU, bfloat16 on a GPU.
        max_model_len: longest context, in tokens; None: the model's own, as far as it fits into a
            GPU's memory, and 2048 on a CPU.
        max_lora_rank: highest rank of an adapter; vLLM is given the next that it knows.
        adapter_slots: adapters that it computes with at once.
        chat_template: chat template file; None: the model's own.
        sampling_defaults: what it samples with if a request does not say, by setting; where one is
            missing, vLLM's own.
        gpus: the GPUs that it serves on, as nvidia-smi numbers them; empty: those that CUDA shows.
        gpu_share: share of each GPU's memory that it takes.
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
    gpu_share: float = SHARED
    arguments: Sequence[str] = ()


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA driver (the program `nvidia-smi`)."""
    return shutil.which("nvidia-smi") is not None


def rank_with_room(rank: int) -> int:
    """Return the lowest --max-lora-rank that adapters of this rank fit; vLLM refuses others."""
    return next((known for known in RANKS if known >= rank), rank)


def lacks_lora(architecture: str) -> bool:
    """Return whether the vLLM that is installed here has no LoRA for a class of models.

    Its sources are read, because to import them takes many seconds. Which layers of a class it
    adapts is known only when a model is built.
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
    found = set(re.findall(listed, "\n".join(sources)))
    is_known, reached = bool(found & bases.keys()), set[str]()
    while found - reached:
        reached |= found
        found = set().union(*(bases.get(name, ()) for name in found))
    return is_known and "SupportsLoRA" not in reached


def vllm_command(options: VllmOptions) -> list[str]:
    """Return the server's command line."""
    dtype = options.dtype or ("bfloat16" if has_gpu() else "float32")
    # "auto": the longest context up to the model's own for which the memory suffices.
    context = options.max_model_len or ("auto" if has_gpu() else CPU_CONTEXT)
    command = [
        *run_module("pawl.stack.vllm"),
        *("--model", options.model),
        *("--served-model-name", options.served_name),
        *("--host", "127.0.0.1", "--port", str(options.port)),
        *("--dtype", dtype),
        *("--max-model-len", str(context)),
        *("--enable-lora", "--max-loras", str(options.adapter_slots)),
        # Whichever mixture it is: adapters have experts as PEFT stacks them.
        "--enable-mixed-moe-lora-format",
        # Those that were retired a moment ago are unloaded at leisure.
        *("--max-cpu-loras", str(2 * options.adapter_slots)),
        *("--max-lora-rank", str(rank_with_room(options.max_lora_rank))),
        # Log-probabilities are of the distribution that was sampled from, and sampling defaults
        # are those that the proxy knows, not the model's own.
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        # With an empty list it would fetch from anywhere; no host has this name (RFC 2606).
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
    environment = dict(os.environ) | showing_gpus(gpus)
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    if not has_gpu():
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB),
            # The engine computes by itself. vLLM would start one process more for that, which
            # imports everything again, and the engine would burn a core while it waits for it.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(cores),
        }
    return environment


def stage(line: str) -> str:
    """Return what a line of the server's log says, without its process, time, source and bar."""
    said = re.sub(r"^(\(\w+ pid=\d+\) )?\w+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ", "", line)
    return said.partition("[")[0].strip(" |")[:MOST_SAID]


def main() -> None:
    """Be vLLM's server."""
    wait_passively()
    # To import it is half of its start.
    with large_imports():
        from vllm.entrypoints.launchers.api_server.entry import main as serve
    serve()


if __name__ == "__main__":
    main()
