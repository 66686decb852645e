"""What resuming needs beside the adapter: written with a version, read when it goes on."""

from pathlib import Path
from typing import Any, Final

import torch

FOLDER: Final = "trainer"
OPTIMIZER: Final = "optimizer.pt"


def save_state(trainer: Any, version_folder: Path) -> None:
    """Write the state of `trainer` (TRL's) into `trainer/` of a version's folder."""
    folder = version_folder / FOLDER
    folder.mkdir(exist_ok=True)
    torch.save(trainer.optimizer.state_dict(), folder / OPTIMIZER)


def load_state(trainer: Any, version_folder: Path) -> None:
    """Put `trainer` where the version left it; one whose state was swept starts anew."""
    path = version_folder / FOLDER / OPTIMIZER
    if path.exists():
        trainer.optimizer.load_state_dict(torch.load(path, weights_only=True))
