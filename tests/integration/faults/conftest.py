"""Share a spool with its drain, and disks that are full or fail."""

import errno
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.drain import Drainer
from proxy.spool.segments import Frame, encode_frame
from store.ids import new_id
from store.read.episodes import read_episodes
from store.selecting import select_episodes
from tests.support.faults.counters import assert_adds_up, count_from_here, ledger


@pytest.fixture(autouse=True)
def _counted_from_here() -> None:
    """Keep what tests before left in their spools out of a test's sums."""
    count_from_here()


@dataclass
class Spooled:
    """A spool with records, and the drain that has to get them out."""

    folder: Path
    engine: AsyncEngine
    drainer: Drainer

    def write(self, *records: Frame) -> Path:
        """A segment that will not grow."""
        home = self.folder / "0"
        home.mkdir(exist_ok=True)
        path = home / f"{new_id()}.seg"
        path.write_bytes(b"".join(encode_frame(record) for record in records))
        return path

    async def drain(self) -> None:
        """Until nothing moves any more, and once more."""
        for _ in range(2):
            while await self.drainer.drain_once():
                pass
        await self.drainer.count()

    async def follow(self) -> None:
        """Have another ingester take over, as after a restart."""
        spooled = int(ledger()["pawl_records_spooled"])
        self.drainer = Drainer(self.folder, lambda: self.engine, batch=10, counted_before=spooled)
        await self.drainer.count()
        assert_adds_up()

    def letters(self) -> list[Path]:
        return sorted((self.folder / "dead").glob("*.letter"))

    def reasons(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "dead").glob("*.reason"))

    def segments(self) -> list[Path]:
        return list(self.folder.glob("*/*.seg"))

    async def stored(self) -> int:
        async with self.engine.connect() as connection:
            return len(await select_episodes(connection))

    async def outcome(self) -> tuple[int, int, list[Path]]:
        """How many episodes are stored, how many dead letters there are, and what waits."""
        return await self.stored(), len(self.letters()), self.segments()

    async def names(self) -> set[str]:
        """The episodes that are stored."""
        return set(await reasons_by_episode(self.engine))

    async def incomplete(self) -> set[str]:
        """The episodes that are marked because a record of theirs was lost."""
        found = await reasons_by_episode(self.engine)
        return {name for name, reason in found.items() if "lost" in reason}


async def reasons_by_episode(engine: AsyncEngine) -> dict[str, str]:
    """Why each episode is set aside; empty where it is not."""
    async with engine.connect() as connection:
        found = await read_episodes(connection, await select_episodes(connection))
    return {episode.key: episode.quarantined_reason or "" for episode in found}


@pytest.fixture
def spooled(engine: AsyncEngine, tmp_path: Path) -> Iterator[Spooled]:
    yield Spooled(tmp_path, engine, Drainer(tmp_path, lambda: engine, batch=10))
    assert_adds_up()


class Failing:
    """Has calls of the spool's writer fail, and counts in `refused` how often they did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.refused: Counter[str] = Counter()

    def __call__(self, *names: str, error: BaseException | None = None) -> Callable[[], None]:
        """Have these calls fail, with EIO by default; the returned function mends them."""
        broken = threading.Event()
        broken.set()

        def refuse(name: str) -> None:
            if broken.is_set():
                self.refused[name] += 1
                raise error or OSError(errno.EIO, "Input/output error")

        for name in names:
            self._precede(name, refuse)
        return broken.clear

    def hang(self, name: str) -> threading.Event:
        """Have a call hang, until the event is set."""
        go_on = threading.Event()
        self._precede(name, lambda _: bool(go_on.wait(20)))
        return go_on

    def _precede(self, name: str, check: Callable[[str], object]) -> None:
        where = Path if name in ("rename", "unlink") else os
        real = getattr(where, name)

        def call(*args: Any, **more: Any) -> Any:
            if threading.current_thread().name == "pawl-spool":
                check(name)
            return real(*args, **more)

        self._monkeypatch.setattr(where, name, call)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own, from mount(8)'s options."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that takes a reserve, and can be filled with a file."""
    yield from mounted(tmp_path, "size=4m")


def fill(disk: Path) -> Path:
    """Write a file until the disk is full."""
    balloon = disk / "balloon"
    with balloon.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return balloon
