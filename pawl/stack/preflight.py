"""What must hold before anything is started; each failure is one line with its remedy."""

import shutil
import socket
from pathlib import Path
from typing import Final

GIB: Final = 2**30
MEMORY_GIB: Final = 6
DISK_GIB: Final = 3


class NotReady(Exception):
    """The machine or its surroundings cannot run this; the message says what to do."""


def check_ports(ports: dict[str, int]) -> None:
    """Raise `NotReady` unless all of these can be listened on; keys say what they are for."""
    for purpose, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise NotReady(
                    f"port {port} ({purpose}) is taken: stop what listens there, "
                    f"or choose another ({_variable(purpose)})"
                ) from error


def _variable(purpose: str) -> str:
    return {
        "vLLM": "PAWL_VLLM_PORT",
        "proxy": "PAWL_LISTEN",
        "proxy admin": "PAWL_ADMIN_LISTEN",
        "trainer metrics": "PAWL_TRAINER_LISTEN",
    }[purpose]


def check_memory(needed_gib: float = MEMORY_GIB) -> None:
    """Raise `NotReady` unless so much memory is available."""
    available = available_memory() / GIB
    if available < needed_gib:
        raise NotReady(
            f"{available:.1f} GiB of memory are free, {needed_gib:g} are needed: "
            "close other programs, or use a larger machine"
        )


def available_memory() -> int:
    """Bytes of memory that can be had without swapping (Linux)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise NotReady("this system does not say how much memory is free (/proc/meminfo)")


def check_disk(folder: Path, needed_gib: float = DISK_GIB) -> None:
    """Raise `NotReady` unless `folder`'s disk has so much room."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    if free < needed_gib:
        raise NotReady(
            f"{free:.1f} GiB are free on the disk of {folder}, {needed_gib:g} are needed: "
            "free some, or choose another folder"
        )
