"""Run PostgreSQL's programs as a user of their own where Pawl runs as root."""

import os
import pwd
import subprocess
from pathlib import Path
from typing import Final

from store.errors import StoreError

# PostgreSQL refuses to run as root. Where Pawl is root, the server runs as this user.
SYSTEM_USER: Final = "pgserver"


def permit(path: Path, bits: int) -> None:
    """Add these permission bits to a file or folder, unless it has them."""
    mode = path.stat().st_mode
    if mode & bits != bits:
        path.chmod(mode | bits)


def is_root() -> bool:
    """Return whether this process runs as root."""
    return os.geteuid() == 0


def ensure_user() -> None:
    """Add the server's user to the machine, unless it exists or another process adds it now.

    Raises:
        StoreError: the user cannot be added.
    """
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        subprocess.run(
            ["useradd", "-s", "/bin/bash", SYSTEM_USER], check=False, capture_output=True
        )
        try:
            pwd.getpwnam(SYSTEM_USER)
        except KeyError as error:
            raise StoreError(
                f"PostgreSQL does not run as root, and the user {SYSTEM_USER!r} for it cannot be "
                f"added: run `useradd {SYSTEM_USER}`, or start Pawl as a user other than root"
            ) from error
