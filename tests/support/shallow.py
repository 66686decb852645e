"""Cut a model down to its first layers: as quick as a tiny one, with the words of the real one."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

WEIGHTS = "model.safetensors"
LAYER = "model.layers."


def write_shallow(model: Path, folder: Path, layers: int) -> Path:
    """Write the first `layers` of a Llama's layers, and all else that it has; return the folder."""
    for file in model.iterdir():
        if file.name != WEIGHTS:
            shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with safe_open(model / WEIGHTS, framework="pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _is_kept(name, layers)}  # noqa: SIM118
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _is_kept(name: str, layers: int) -> bool:
    number = name.removeprefix(LAYER).partition(".")[0] if name.startswith(LAYER) else "0"
    return int(number) < layers
