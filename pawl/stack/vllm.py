"""How vLLM is started: the CPU build with our LoRA plugin, or the plain one on a GPU."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from store.records import Record


class VllmOptions(Record, frozen=True, kw_only=True):
    """What differs between one start and another."""

    model: str
    served_name: str
    port: int
    dtype: str | None
    max_model_len: int
    max_lora_rank: int
    tool_parser: str = "hermes"
    chat_template: Path | None = None


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    return shutil.which("nvidia-smi") is not None


def vllm_command(options: VllmOptions) -> list[str]:
    """The server's command line."""
    dtype = options.dtype or ("bfloat16" if has_gpu() else "float32")
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", options.model),
        *("--served-model-name", options.served_name),
        *("--host", "127.0.0.1", "--port", str(options.port)),
        *("--dtype", dtype),
        *("--max-model-len", str(options.max_model_len)),
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "16"),
        *("--max-lora-rank", str(options.max_lora_rank)),
        # What was really sampled from, at the defaults that the proxy assumes.
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-auto-tool-choice", "--tool-call-parser", options.tool_parser),
        *("--max-num-seqs", "64"),
    ]
    if options.chat_template is not None:
        command += ["--chat-template", str(options.chat_template)]
    if not has_gpu():
        command.append("--enforce-eager")
    return command


def vllm_environment(cores: Sequence[int]) -> dict[str, str]:
    """The server's environment; `cores` are those a CPU server may compute on."""
    environment = dict(os.environ)
    environment |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not has_gpu():
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        }
    return environment
