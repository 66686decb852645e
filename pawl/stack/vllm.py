"""Run vLLM: the CPU build with our LoRA plugin, or a GPU.

`python -m pawl.stack.vllm` has the arguments of `vllm serve`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pawl.processes import large_imports, run_module
from store.records import Record
from trainer.settings import USUAL_SLOTS

# vLLM's parser of tool calls for most models, Qwen's among them.
USUAL_TOOL_PARSER: Final = "hermes"
# Only whole blocks of a prompt are kept for the next request. vLLM's 128 tokens on a CPU are more
# than many an agent's prompt, which is then computed again for each sample of its group.
CPU_BLOCK_TOKENS: Final = 32


class VllmOptions(Record, frozen=True, kw_only=True):
    """Set the options of a vLLM server that differ from one stack to another.

    Attributes:
        model: folder or hub name of the base model.
        served_name: the name under which clients ask for it.
        dtype: number format; None: float32 on a CPU, bfloat16 on a GPU.
        adapter_slots: adapters that it computes with at once.
        chat_template: chat template file; None: the model's own.
        sampling_defaults: what it samples with if a request does not say, by setting; where one is
            missing, vLLM's own.
    """

    model: str
    served_name: str
    port: int
    dtype: str | None
    max_model_len: int
    max_lora_rank: int
    tool_parser: str = USUAL_TOOL_PARSER
    chat_template: Path | None = None
    adapter_slots: int = USUAL_SLOTS
    sampling_defaults: Mapping[str, float] = {}


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA driver (the program `nvidia-smi`)."""
    return shutil.which("nvidia-smi") is not None


def vllm_command(options: VllmOptions) -> list[str]:
    """Return the server's command line."""
    dtype = options.dtype or ("bfloat16" if has_gpu() else "float32")
    command = [
        *run_module("pawl.stack.vllm"),
        *("--model", options.model),
        *("--served-model-name", options.served_name),
        *("--host", "127.0.0.1", "--port", str(options.port)),
        *("--dtype", dtype),
        *("--max-model-len", str(options.max_model_len)),
        *("--enable-lora", "--max-loras", str(options.adapter_slots)),
        # Those that were retired a moment ago are unloaded at leisure.
        *("--max-cpu-loras", str(2 * options.adapter_slots)),
        *("--max-lora-rank", str(options.max_lora_rank)),
        # Log-probabilities are of the distribution that was sampled from, and sampling defaults
        # are those that the proxy knows, not the model's own.
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-auto-tool-choice", "--tool-call-parser", options.tool_parser),
        *("--max-num-seqs", "64"),
    ]
    if options.sampling_defaults:
        command += ["--override-generation-config", json.dumps(options.sampling_defaults)]
    if options.chat_template is not None:
        command += ["--chat-template", str(options.chat_template)]
    if not has_gpu():
        command += ["--enforce-eager", "--block-size", str(CPU_BLOCK_TOKENS)]
    return command


def vllm_environment(cores: int) -> dict[str, str]:
    """Return the server's environment; `cores` is the number of threads it has without a GPU."""
    environment = dict(os.environ)
    environment |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not has_gpu():
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # The engine computes by itself. vLLM would start one process more for that, which
            # imports everything again, and the engine would burn a core while it waits for it.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(cores),
        }
    return environment


def main() -> None:
    """Be vLLM's server."""
    # To import it is half of its start.
    with large_imports():
        from vllm.entrypoints.launchers.api_server.entry import main as serve
    serve()


if __name__ == "__main__":
    main()
