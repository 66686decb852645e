"""Write and read the state that resuming needs beside the adapter, with each version.

    <version>/base.json              which base model it was trained on; kept for good
    <version>/trainer/optimizer.pt   moments; kept by the versions' states (`publishing.cleaning`)
    <version>/trainer/<name>.pt      what a learner adds: a value head

Nothing else is needed: dropout is off, and randomness is used only for a first adapter's
weights, which are seeded. `adapters.write_version` syncs the files.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from safetensors import SafetensorError

from trainer.errors import AdapterError, FilesUnread
from trainer.publishing.adapters import STATE, reading, write_base

log = structlog.get_logger()

OPTIMIZER: Final = "optimizer"


def save_state(objects: Mapping[str, Any], base: str, version_folder: Path) -> None:
    """Write the state of `objects` (with `state_dict`, by name) into a version's folder.

    `base` is the base model's hash.

    Raises:
        OSError: the disk refused a write.
    """
    folder = version_folder / STATE
    folder.mkdir(exist_ok=True)
    for name, one in objects.items():
        # Serialised in memory: torch's own file writer hides the reason of a failed write.
        written = io.BytesIO()
        torch.save(one.state_dict(), written)
        (folder / f"{name}.pt").write_bytes(written.getvalue())
    write_base(version_folder, base)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of `model`, a PEFT model, into `folder`, as a model server reads it.

    Raises:
        OSError: the disk refused a write.
    """
    try:
        model.save_pretrained(str(folder), safe_serialization=True)
    except SafetensorError as error:
        raise OSError(f"the adapter was not written: {error}") from error
    (folder / "README.md").unlink(missing_ok=True)


def load_state(objects: Mapping[str, Any], version_folder: Path) -> None:
    """Restore `objects` from a version's folder.

    One whose file was swept starts anew, with a warning in the log: a roll-back may go
    further back than states are kept.

    Raises:
        AdapterError: a file is damaged; the message names it and the remedy.
        FilesUnread: a file cannot be read for now.
    """
    for name, one in objects.items():
        path = version_folder / STATE / f"{name}.pt"
        if not path.exists():
            log.warning("state_starts_anew", part=name, version=version_folder.name)
            continue
        try:
            with reading(path):
                state = torch.load(path, weights_only=True)
            one.load_state_dict(_with_recipe_settings(one, state))
        except FilesUnread:
            raise
        except Exception as error:
            raise AdapterError(
                f"{path} cannot be read ({type(error).__name__}): remove it to start anew there"
            ) from error


def _with_recipe_settings(restored: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with the recipe's current rates and decay, if `restored` is an optimiser."""
    if isinstance(restored, torch.optim.Optimizer):
        return state | {"param_groups": restored.state_dict()["param_groups"]}
    return state
