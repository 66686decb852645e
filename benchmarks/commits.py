"""Run the sources of an earlier commit beside those of this checkout."""

import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


class NoSuchCommit(Exception):
    """Report that git does not know a commit, and what it said."""


@contextmanager
def sources_of(commit: str) -> Iterator[Path]:
    """Make a folder with the files of a commit, however git names it.

    Raises:
        NoSuchCommit: there is none of that name.
    """
    command = ["git", "-C", str(ROOT), "archive", commit]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        raise NoSuchCommit(archive.stderr.decode().strip())
    with TemporaryDirectory(prefix="pawl-sources-") as name:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(name, filter="data")
        yield Path(name)


def environment_of(folder: Path) -> Mapping[str, str]:
    """Return the environment in which this Python imports Pawl from `folder`.

    The working directory is not looked in, which `python -m` would do first.
    """
    return dict(os.environ) | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
