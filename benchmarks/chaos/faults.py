"""Make a disk full for a while, or give I/O errors: the kernel's own, on demand."""

import asyncio
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

Fault = Literal["full disk", "I/O errors"]
FAULTS: Final[tuple[Fault, ...]] = ("full disk", "I/O errors")
DISK_MIB: Final = 64
PIECE: Final = 2**16
# What is freed meanwhile (segments that were stored) is taken again so soon.
TOP_UP_S: Final = 0.005
SOURCE: Final = Path(__file__).with_name("io_errors.c")


class CannotInjectFaults(Exception):
    """Report that this machine does not let us; the message says what is missing."""


class Disk:
    """Keep a folder on a filesystem of its own, and make it go wrong."""

    def __init__(self, folder: Path, beside: Path) -> None:
        """Set up in `beside`, a folder on another disk, what makes the errors."""
        self.folder = folder
        self._balloon = folder / "balloon"
        self._switch = beside / "io-errors"
        self._library = _compiled(beside)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what a process needs so that its I/O on this disk can fail."""
        return {
            "LD_PRELOAD": str(self._library),
            "CHAOS_FOLDER": str(self.folder.resolve()),
            "CHAOS_SWITCH": str(self._switch),
        }

    async def suffer(self, fault: Fault, seconds: float) -> None:
        """Let it go wrong for so long; after that it is as it was."""
        if fault == "full disk":
            await self._be_full(seconds)
        else:
            await self._give_errors(seconds)

    async def _be_full(self, seconds: float) -> None:
        over = time.monotonic() + seconds
        balloon = os.open(self._balloon, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            while time.monotonic() < over:
                _write_until_full(balloon)
                await asyncio.sleep(TOP_UP_S)
        finally:
            os.close(balloon)
            self._balloon.unlink()

    async def _give_errors(self, seconds: float) -> None:
        self._switch.touch()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._switch.unlink()


def _write_until_full(handle: int) -> None:
    size = PIECE
    while size:
        try:
            os.write(handle, bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # To the last byte: a small record must not find room where a large piece does not.
            size //= 2


def _compiled(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotInjectFaults(
            "I/O errors are made by a small library, and there is no C compiler to make it with: "
            "install gcc, or leave the faults out with --plain"
        )
    library = folder / "io_errors.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


@contextmanager
def small_disk(folder: Path, beside: Path, mib: int = DISK_MIB) -> Iterator[Disk]:
    """Mount a filesystem of so many MiB there; it is gone when the block is left.

    Raises:
        CannotInjectFaults: it cannot be mounted here, or there is no C compiler.
    """
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "pawl-chaos", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        raise CannotInjectFaults(
            f"a disk that fills is a tmpfs of {mib} MiB, and it cannot be mounted here "
            f"({mounted.stderr.strip()}): run as root, or leave the faults out with --plain"
        )
    try:
        yield Disk(folder, beside)
    finally:
        # What is killed may hold it for a moment longer: it goes with its last user.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
