"""What is fetched is what the trainer wrote, or is not there; it goes on where it ended."""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from store.ids import new_id
from trainer.errors import NotFetched, TrainerError
from trainer.publishing import sources
from trainer.publishing.adapters import MANIFEST, SERVED_FILES, NewVersion, sha256_of, write_version
from trainer.publishing.sources import AdapterFiles, FetchedFiles, UploadedFiles, reader_files
from trainer.settings import SourceSettings

WEIGHTS = SERVED_FILES[1]
# Of a version's weights here, and of what is read of them at once.
SIZE, CHUNK = 1000, 300


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """The trainer's folder."""
    return tmp_path / "trainer's"


def write(root: Path, version: int = 1, policy: str = "org/m #1") -> Path:
    def save(folder: Path) -> None:
        (folder / SERVED_FILES[0]).write_text("{}")
        (folder / WEIGHTS).write_bytes(bytes([version]) * SIZE)
        (folder / "trainer").mkdir()
        (folder / "trainer" / "optimizer.pt").write_bytes(b"state")

    new = NewVersion(
        policy=policy,
        version=version,
        update_id=new_id(),
        parent_version=0,
        outcomes=(),
        metrics={},
        probe=(),
    )
    return write_version(root, new, save)


class Served:
    """A trainer's port that counts what is asked for."""

    def __init__(self, root: Path) -> None:
        self.app = web.Application(middlewares=[self._note])
        sources.serve_files(self.app, root)
        self.ranges: list[str] = []
        self.is_away = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self.goes_on.wait()
        if self.is_away:
            raise web.HTTPServiceUnavailable
        if request.path.endswith(WEIGHTS) and "Range" in request.headers:
            self.ranges.append(request.headers["Range"].removeprefix("bytes="))
        found: web.StreamResponse = await handler(request)
        return found


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[tuple[Served, str]]:
    """Give a trainer's port, and the source that it is."""
    served = Served(root)
    async with TestServer(served.app) as server:
        yield served, str(server.make_url(sources.ADAPTERS_PATH))


@asynccontextmanager
async def fetching(url: str, root: Path, **settings: Any) -> AsyncIterator[FetchedFiles]:
    files = reader_files(SourceSettings(adapter_source=url, adapter_dir=root, **settings))
    assert isinstance(files, FetchedFiles)
    try:
        yield files
    finally:
        await files.close()


def same(one: Path, other: Path) -> bool:
    return all(
        (one / n).read_bytes() == (other / n).read_bytes() for n in (MANIFEST, *SERVED_FILES)
    )


def kept(root: Path) -> list[str]:
    """Return the versions, and what is half fetched, that are there."""
    return sorted(folder.name for folder in root.glob("*/*"))


@pytest.mark.parametrize("kind", ["http", "file"])
async def test_fetched_version_equals_the_trainers_files(
    trainer: Path, tmp_path: Path, kind: str
) -> None:
    written = write(trainer)
    async with serving(trainer) as (served, url):
        source = url if kind == "http" else f"file://{trainer}"
        async with fetching(source, tmp_path / "own") as files:
            place = await files.fetch(written, sha256_of(written / MANIFEST))
            assert place == tmp_path / "own" / written.parent.name / "1"
            assert same(place, written)
            assert not (place / "trainer").exists()
            assert files.trainer_path(str(place)) == str(written)
            # Once it is there the source is not asked.
            served.is_away = True
            assert await files.fetch(written, None) == place


async def test_version_files_are_in_the_trainers_folder_without_an_adapter_source(
    trainer: Path,
) -> None:
    files = reader_files(SourceSettings(adapter_dir=trainer))
    assert await files.fetch(trainer / "m" / "1", "0" * 64) == trainer / "m" / "1"


async def test_fetch_of_a_version_goes_on_where_it_was_interrupted(
    trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", CHUNK)
    written = write(trainer)
    # Each try is another process's, and has time for one piece.
    monkeypatch.setattr(sources, "FETCH_S", 0.0)
    async with serving(trainer) as (served, url):
        for had in (300, 600, 900):
            async with fetching(url, tmp_path / "own") as files:
                with pytest.raises(NotFetched, match=rf"is half fetched: {had} of 1,000 bytes"):
                    await files.fetch(written, None)
                assert "1" not in kept(tmp_path / "own")
        async with fetching(url, tmp_path / "own") as files:
            assert same(await files.fetch(written, None), written)
    assert served.ranges == ["0-299", "300-599", "600-899", "900-999"]
    assert kept(tmp_path / "own") == ["1"]


async def test_long_fetch_of_a_version_goes_on_and_the_next_caller_learns_its_result(
    trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(trainer)
    async with serving(trainer) as (served, url), fetching(url, tmp_path / "own") as files:
        monkeypatch.setattr(sources, "WAIT_S", 0.01)
        served.goes_on.clear()
        with pytest.raises(NotFetched, match="is still being fetched"):
            await files.fetch(written, "0" * 64)
        served.goes_on.set()
        monkeypatch.setattr(sources, "WAIT_S", 60.0)
        # It failed meanwhile, or does so now, and is not begun again for that.
        with pytest.raises(NotFetched, match="not the one that its update wrote"):
            await files.fetch(written, "0" * 64)
        assert same(await files.fetch(written, None), written)


async def test_fetched_version_does_not_wait_for_the_fetch_of_another(
    trainer: Path, tmp_path: Path
) -> None:
    here, other = write(trainer, 1), write(trainer, 2)
    async with serving(trainer) as (served, url), fetching(url, tmp_path / "own") as files:
        place = await files.fetch(here, None)
        served.goes_on.clear()
        long = asyncio.create_task(files.fetch(other, None))
        async with asyncio.timeout(5):
            assert await files.fetch(here, sha256_of(here / MANIFEST)) == place
        assert not long.done()
        served.goes_on.set()
        assert same(await long, other)


async def test_folder_of_fetched_versions_is_locked_by_a_single_process(
    trainer: Path, tmp_path: Path
) -> None:
    written, own = write(trainer), tmp_path / "own"
    async with fetching(f"file://{trainer}", own) as one, fetching(f"file://{trainer}", own) as two:
        one.lock_folder()
        with pytest.raises(TrainerError, match="give each a PAWL_ADAPTER_DIR of its own"):
            two.lock_folder()
        with pytest.raises(NotFetched, match="another process fetches into"):
            await two.fetch(written, None)
        place = await one.fetch(written, None)
        # It may be read by anybody.
        assert await two.fetch(written, None) == place


async def test_path_of_fetched_files_is_mapped_to_the_trainers_path(
    trainer: Path, tmp_path: Path
) -> None:
    written, own = write(trainer), tmp_path / "own"
    shutil.copytree(trainer, own)
    async with fetching(f"file://{trainer}", own) as files:
        place = await files.fetch(written, None)
        assert files.trainer_path(str(place)) == str(written)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * SIZE), "not the file that was"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 2 * SIZE), "not the file that was"),
        (lambda folder: (folder / WEIGHTS).unlink(), "has no org--m #1/1"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), "not the one that its update wrote"),
        (lambda folder: (folder / MANIFEST).unlink(), "has no org--m #1/1"),
    ],
)
async def test_fetched_version_that_is_not_as_it_was_written_is_not_kept(
    trainer: Path, tmp_path: Path, damage: Any, why: str
) -> None:
    written = write(trainer)
    digest = sha256_of(written / MANIFEST)
    backup = {path: path.read_bytes() for path in written.iterdir() if path.is_file()}
    damage(written)
    own = tmp_path / "own"
    async with serving(trainer) as (_, url), fetching(url, own) as files:
        with pytest.raises(NotFetched, match=why):
            await files.fetch(written, digest)
        assert not list(own.glob(f"*/*/{WEIGHTS}"))
        for path, data in backup.items():
            path.write_bytes(data)
        assert same(await files.fetch(written, digest), written)


async def test_unreachable_adapter_source_is_named_and_tried_again(
    trainer: Path, tmp_path: Path
) -> None:
    written = write(trainer)
    async with serving(trainer) as (served, url), fetching(url, tmp_path / "own") as files:
        served.is_away = True
        with pytest.raises(NotFetched, match=r"503.*check PAWL_ADAPTER_SOURCE"):
            await files.fetch(written, None)
        served.is_away = False
        await files.fetch(written, None)
    # Nobody listens any more.
    async with fetching(url, tmp_path / "other") as files:
        with pytest.raises(NotFetched, match="which is tried again"):
            await files.fetch(written, None)


async def test_altered_copy_of_a_version_is_fetched_again(trainer: Path, tmp_path: Path) -> None:
    written = write(trainer)
    async with fetching(f"file://{trainer}", tmp_path / "own") as files:
        place = await files.fetch(written, None)
        (place / WEIGHTS).write_bytes(b"altered")
        assert same(await files.fetch(written, None), written)
    # What is not a copy is nobody's to remove.
    async with fetching(f"file://{tmp_path / 'own'}", trainer) as files:
        (written / WEIGHTS).write_bytes(b"altered")
        with pytest.raises(NotFetched, match="was not fetched, and its files are not those"):
            await files.fetch(written, None)
    assert (written / WEIGHTS).read_bytes() == b"altered"


async def test_fetch_to_a_full_disk_leaves_no_files(
    trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written, own = write(trainer), tmp_path / "own"
    async with fetching(f"file://{trainer}", own) as files:
        with monkeypatch.context() as patched:
            patched.setattr(sources, "sync", full)
            with pytest.raises(NotFetched, match="No space left on device"):
                await files.fetch(written, None)
        assert kept(own) == []
        assert same(await files.fetch(written, None), written)


async def test_fetched_versions_requested_longest_ago_are_removed_to_make_room(
    trainer: Path, tmp_path: Path
) -> None:
    own, loaded = tmp_path / "own", set[Path]()
    written = [write(trainer, number, "m") for number in (1, 2, 3, 4)]

    async def in_use() -> set[Path]:
        return loaded

    def age() -> None:
        for number, mark in enumerate(sorted(own.glob("*/*/.fetched"))):
            then = time.time() - 10 * sources.IDLE_S + number
            os.utime(mark, (then, then))

    # So much has room that of these versions two fit.
    settings = SourceSettings(
        adapter_source=f"file://{trainer}", adapter_dir=own, adapter_disk_gb=2.9 * SIZE / 1e9
    )
    files = FetchedFiles(settings, in_use)
    for folder in written[:2]:
        await files.fetch(folder, None)
    # Asked for just now, they may still be read.
    with pytest.raises(NotFetched, match="raise PAWL_ADAPTER_DISK_GB"):
        await files.fetch(written[2], None)
    age()
    files.touch("m", "1")
    await files.fetch(written[2], None)
    assert kept(own) == ["1", "3"]
    age()
    # The server has it.
    loaded.add(own / "m" / "1")
    await files.fetch(written[3], None)
    assert kept(own) == ["1", "4"]
    age()
    # For what can never fit nothing is removed.
    (written[1] / WEIGHTS).write_bytes(b"2" * 5 * SIZE)
    with pytest.raises(NotFetched, match="raise PAWL_ADAPTER_DISK_GB"):
        await files.fetch(written[1], None)
    assert kept(own) == ["1", "4"]
    for policy in ("", "..", ".m", "n"):
        files.touch(policy, "1")
    await files.close()


@pytest.mark.parametrize("folder", ["/", "/x", "/m/..", "/../1", "/m/.1"])
async def test_path_that_is_no_version_folder_is_refused(trainer: Path, folder: str) -> None:
    async with fetching(f"file://{trainer}", trainer) as files:
        with pytest.raises(NotFetched, match="not the folder of a version"):
            await files.fetch(Path(folder), None)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"m/1/{WEIGHTS}", 206),
        (f"m/1/{MANIFEST}", 206),
        ("m/1/trainer/optimizer.pt", 404),
        ("m/1/trainer%2foptimizer.pt", 404),
        ("m/1/", 404),
        ("m/1", 404),
        ("", 404),
        (f"m/2/{WEIGHTS}", 404),
        (f"m/.1-half/{WEIGHTS}", 404),
        (f"..%2f..%2fsecret/1/{WEIGHTS}", 404),
        (f"m/..%2f..%2fsecret/{WEIGHTS}", 404),
        (f"%2e%2e/secret/{WEIGHTS}", 404),
        (f"m%00/1/{WEIGHTS}", 404),
    ],
)
async def test_trainer_serves_nothing_but_versions_files(
    trainer: Path, path: str, status: int
) -> None:
    write(trainer, 1, "m")
    (trainer / "m" / ".1-half").mkdir()
    (trainer.parent / "secret").mkdir()
    for folder in (trainer / "m" / ".1-half", trainer.parent / "secret"):
        (folder / WEIGHTS).write_text("secret")
    async with TestClient(TestServer(Served(trainer).app)) as client:
        asked = URL(f"{client.make_url('/')}adapters/{path}", encoded=True)
        async with client.session.get(asked, headers={"Range": "bytes=0-1"}) as reply:
            assert reply.status == status


async def test_uploaded_version_is_fetched_and_withdrawn(trainer: Path, tmp_path: Path) -> None:
    written, store = write(trainer), tmp_path / "store"
    uploaded = UploadedFiles(f"file://{store}")
    await uploaded.offer(written)
    async with fetching(f"file://{store}", tmp_path / "own") as files:
        assert same(await files.fetch(written, sha256_of(written / MANIFEST)), written)
        assert not (store / written.parent.name / "1" / "trainer").exists()
        # What is there already, as another process finds it, is not uploaded again.
        before = (store / written.parent.name / "1" / WEIGHTS).stat().st_mtime_ns
        await UploadedFiles(f"file://{store}").offer(written)
        assert (store / written.parent.name / "1" / WEIGHTS).stat().st_mtime_ns == before
        # What somebody deleted there is.
        (store / written.parent.name / "1" / WEIGHTS).unlink()
        await uploaded.offer(written)
        assert same(store / written.parent.name / "1", written)
        await uploaded.withdraw(written)
        assert kept(store) == []
        # And nothing is lost by asking again.
        await uploaded.withdraw(written)
        await uploaded.offer(written)
        assert kept(store) == ["1"]


def test_trainer_with_an_http_adapter_source_keeps_versions_in_its_own_folder() -> None:
    settings = SourceSettings(adapter_source="http://trainer:8102/adapters/")
    assert type(sources.trainer_files(settings)) is AdapterFiles
    assert settings.adapter_source == "http://trainer:8102/adapters"


@pytest.mark.parametrize("source", ["nosuch://bucket/folder", "adlx://bucket"])
def test_unknown_kind_of_adapter_source_is_an_error_at_the_start(source: str) -> None:
    with pytest.raises(TrainerError, match="PAWL_ADAPTER_SOURCE"):
        reader_files(SourceSettings(adapter_source=source))


def test_adapter_source_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT/adapters"):
        SourceSettings(adapter_source="trainer:8102")
