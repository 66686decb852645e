"""Copy a version's adapter out of the folder of versions, as a folder that PEFT and vLLM load."""

from pathlib import Path
from shutil import copyfile
from typing import Final

from store.files import whole_folder
from trainer.errors import AdapterError
from trainer.publishing.adapters import SERVED, read_manifest
from trainer.publishing.progress import PROGRESS

# The last one tells the base model by its hash, so that an import need not go by its name.
EXPORTED: Final = (*SERVED, PROGRESS)


def export_adapter(version: Path, directory: Path) -> None:
    """Copy the adapter of the version in a folder to `directory`: whole, or not at all.

    Raises:
        AdapterError: the version's files are gone or were changed, or `directory` is not empty or
            cannot be written.
    """
    if read_manifest(version) is None:
        raise AdapterError(f"{version} has no version any more: restore it from a backup")
    place = directory.resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise AdapterError(f"{directory} is there already and not empty: name a new folder")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.partial")
        with whole_folder(place, partial):
            for name in EXPORTED:
                if (version / name).exists():
                    copyfile(version / name, partial / name)
    except OSError as error:
        if not version.exists():
            raise AdapterError(f"{version} was deleted meanwhile: it was retired") from error
        raise AdapterError(
            f"{directory} cannot be written: {error.strerror}; name a folder on another disk, or"
            " make room"
        ) from error
