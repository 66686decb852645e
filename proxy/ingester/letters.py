"""Keep dead letters: records that cannot be stored, with the reason, until somebody looks.

They hold prompts, and are the only copy of their records. So only the proxy's user may read them,
and they are durable before their segment is deleted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from proxy.spool.folders import PRIVATE
from store.files import sync, write_private

log = structlog.get_logger()

FOLDER: Final = "dead"
LETTER: Final = ".letter"
REASON: Final = ".reason"


class Letter(NamedTuple):
    """Hold a record's bytes, and why it is not stored; `name` is unique to the record."""

    name: str
    data: bytes
    reason: str


def bury(root: Path, letters: Sequence[Letter]) -> None:
    """Make letters durable in the spool at `root`; writing the same names again is harmless.

    Raises:
        OSError: they could not all be written.
    """
    folder = root / FOLDER
    if not folder.exists():
        folder.mkdir(mode=PRIVATE)
        sync(root)
    for letter in letters:
        write_private(folder / f"{letter.name}{REASON}", letter.reason.encode(errors="replace"))
        write_private(folder / f"{letter.name}{LETTER}", letter.data)
    sync(folder)


def make_private(root: Path) -> None:
    """Make dead letters of earlier versions of Pawl readable for the proxy's user only."""
    folder = root / FOLDER
    if not folder.exists():
        return
    try:
        folder.chmod(PRIVATE)
        for path in folder.iterdir():
            path.chmod(0o600)
    except OSError as error:
        log.error("letters_not_private", folder=str(folder), reason=str(error))
