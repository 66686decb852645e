"""Who serves, as a file: what a worker does with one it cannot read."""

import asyncio
from pathlib import Path

from proxy.policies.version_file import NAME, VersionFile
from store.versions import PolicyVersion
from tests.support.proxy.versions import version

BASE = version(0, "serving")


async def test_a_damaged_file_is_waited_out(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('[{"name":')
    taken: asyncio.Queue[list[PolicyVersion]] = asyncio.Queue()
    watching = asyncio.create_task(VersionFile(tmp_path).watch(taken.put_nowait))
    await asyncio.sleep(0)
    VersionFile(tmp_path).write([BASE])
    assert await asyncio.wait_for(taken.get(), 10) == [BASE]
    watching.cancel()


async def test_a_disk_that_fails_is_no_end_and_is_waited_out(tmp_path: Path) -> None:
    file = VersionFile(tmp_path)
    file.write([BASE])
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).unlink()
    # Reading it is an error of the disk's (EISDIR), as EIO is.
    (tmp_path / NAME).mkdir()
    assert file.read() is None
    (tmp_path / NAME).rmdir()
    (tmp_path / NAME).write_bytes(whole)
    assert file.read() == [BASE]


async def test_what_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    file = VersionFile(tmp_path)
    assert file.read() is None
    file.write([BASE])
    assert file.read() == [BASE]
    assert file.read() is None
