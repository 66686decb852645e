"""Bring versions' files to machines that do not see the trainer's PAWL_ADAPTER_DIR.

All processes have one source, PAWL_ADAPTER_SOURCE: `http://TRAINER/adapters`, which the trainer
serves from its folder, or a folder of an object store, to which it uploads. Controller and `pawl
adapters` read it through fsspec, each into a PAWL_ADAPTER_DIR of its own.

A version is fetched into a folder beside its place. The folder is renamed once the SHA-256 of each
file matches the manifest, and the manifest's matches the database. A half-fetched folder stays, so
that the next try continues from there, also after a kill.
"""

import asyncio
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
import structlog
from aiohttp import web

from store.files import sync
from store.records import Record
from store.settings import without_login
from trainer.errors import NotFetched, TrainerError
from trainer.publishing.adapters import MANIFEST, SERVED, remove_folder, sha256_of
from trainer.settings import SourceSettings

log = structlog.get_logger()

# The trainer serves versions below this path.
PATH: Final = "/adapters"
CHUNK: Final = 4 * 2**20
MOST_MANIFEST: Final = 256 * 2**20
# Seconds that a caller waits for a version; a longer fetch goes on for the next caller.
WAIT_S: Final = 60.0
# Seconds that one fetch may keep others waiting; the next try continues where it ended.
FETCH_S: Final = 600.0
# Seconds after the last use in which a fetched version stays: a model server reads the files again
# for requests that began before it was unloaded.
IDLE_S: Final = 300.0
# A file in each fetched folder: its text is the trainer's path, its mtime the time of the last use.
_MARK: Final = ".fetched"


class Hashes(Record, frozen=True, kw_only=True):
    """The part of a manifest that a fetch reads: the SHA-256 of each served file."""

    sha256: dict[str, str]


class AdapterFiles:
    """Use the trainer's folder itself, which this process and the model servers can read.

    No file is copied; subclasses copy them.
    """

    async def fetch(self, folder: Path, manifest_sha256: str | None) -> Path:
        """Return the local folder of the version that the trainer has in `folder`.

        `manifest_sha256` is None if unknown.

        Raises:
            NotFetched: the files cannot be fetched for now, or are not those that were written.
        """
        return folder

    async def offer(self, folder: Path) -> None:
        """Put the files of a version at the source, where model servers look for them.

        Raises:
            NotFetched: the source does not answer, or refuses.
        """

    async def withdraw(self, folder: Path) -> None:
        """Remove a folder from the source before it is removed here.

        Raises:
            NotFetched: the source does not answer, or refuses.
        """

    async def close(self) -> None:
        """End transfers that are under way."""


def trainer_files(settings: SourceSettings) -> AdapterFiles:
    """Return how the trainer hands out its files; over HTTP it uploads nothing.

    Raises:
        TrainerError: there is no such kind of source.
    """
    if settings.adapter_source is None or is_http(settings.adapter_source):
        return AdapterFiles()
    return UploadedFiles(settings.adapter_source)


def reader_files(settings: SourceSettings) -> AdapterFiles:
    """Return how controller, commands and `pawl adapters` get the versions that the trainer wrote.

    Raises:
        TrainerError: there is no such kind of source.
    """
    return AdapterFiles() if settings.adapter_source is None else FetchedFiles(settings)


def is_http(source: str) -> bool:
    """Return whether the trainer itself is the source."""
    return source.startswith(("http://", "https://"))


class Source:
    """Read and write the files at PAWL_ADAPTER_SOURCE; its methods block."""

    def __init__(self, url: str) -> None:
        """Store the URL.

        Raises:
            TrainerError: there is no such kind of source, or its package is missing.
        """
        # Its import takes time, and most processes have no source.
        import fsspec

        self.shown = without_login(url)
        self._is_http = is_http(url)
        # Object stores need no folders; a disk, for trying this out, does.
        options: dict[str, Any] = {"auto_mkdir": True} if url.startswith("file:") else {}
        if self._is_http:
            limit = aiohttp.ClientTimeout(total=120, sock_connect=10, sock_read=30)
            options = {"encoded": True, "client_kwargs": {"timeout": limit}}
        try:
            self.system, self._top = fsspec.url_to_fs(
                url.rstrip("/"), use_listings_cache=False, **options
            )
        except (ImportError, ValueError) as error:
            raise TrainerError(
                f"PAWL_ADAPTER_SOURCE is {self.shown}, which cannot be read: {error}"
            ) from error

    def path_of(self, folder: Path, name: str = "") -> str:
        """Return where a version's folder, or a file of it, is at the source."""
        parts = [*folder.parts[-2:], *([name] if name else [])]
        return "/".join([self._top, *(map(quote, parts) if self._is_http else parts)])

    @contextmanager
    def translate_errors(self, folder: Path) -> Iterator[None]:
        """Translate any error of the source within this block.

        Raises:
            NotFetched: the source lacks the files, does not answer, or refuses.
        """
        try:
            yield
        except NotFetched:
            raise
        # Each kind of store has exceptions of its own.
        except Exception as error:
            why = error
            # Over HTTP fsspec raises FileNotFoundError for every failure.
            if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
                why = error.__cause__
            if isinstance(why, FileNotFoundError) or getattr(why, "status", None) == 404:
                raise NotFetched(
                    f"{self.shown} has no {_name(folder)}: the version was deleted, or"
                    " PAWL_ADAPTER_SOURCE is not the place where the trainer puts versions"
                ) from error
            raise NotFetched(
                f"{self.shown} does not give or take {_name(folder)}"
                f" ({type(why).__name__}: {str(why)[:200]}), which is tried again: check"
                " PAWL_ADAPTER_SOURCE, and that it can be reached from here"
            ) from error

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the size of each served file of a version, in bytes."""
        with self.translate_errors(folder):
            sizes = {name: self.system.size(self.path_of(folder, name)) for name in SERVED}
        if unknown := [name for name, size in sizes.items() if size is None]:
            raise NotFetched(f"{self.shown} does not say how large {unknown[0]} is")
        return sizes

    def pieces(self, folder: Path, name: str, start: int = 0) -> Iterator[bytes]:
        """Yield a file of a version from byte `start` on, in pieces."""
        with self.translate_errors(folder):
            # Without a cache each piece is requested when it is read.
            options = {"block_size": CHUNK, "cache_type": "none"}
            with self.system.open(self.path_of(folder, name), "rb", **options) as file:
                file.seek(start)
                while piece := file.read(CHUNK):
                    yield bytes(piece)


InUse = Callable[[], Awaitable[Collection[Path]]]


async def _none_in_use() -> Collection[Path]:
    return ()


class UploadedFiles(AdapterFiles):
    """Upload versions to an object store before they are loaded, and remove them again."""

    def __init__(self, url: str) -> None:
        """Open the store at `url`.

        Raises:
            TrainerError: there is no such kind of store.
        """
        self._source = Source(url)
        self._lock = asyncio.Lock()
        self._stopped = threading.Event()

    async def offer(self, folder: Path) -> None:
        """Upload a version that is not there yet, its manifest last."""
        async with self._lock:
            await asyncio.to_thread(self._upload, folder)

    def _upload(self, folder: Path) -> None:
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise NotFetched(f"{folder} cannot be uploaded ({error.strerror})") from error
        system, place = self._source.system, self._source.path_of
        with self._source.translate_errors(folder):
            is_there = all(system.exists(place(folder, name)) for name in (*SERVED, MANIFEST))
            if is_there and system.cat_file(place(folder, MANIFEST)) == manifest:
                return
            for name in (*SERVED, MANIFEST):
                if self._stopped.is_set():
                    raise NotFetched("the process is about to end")
                system.put_file(str(folder / name), place(folder, name))
        log.info("adapter_uploaded", folder=_name(folder))

    async def withdraw(self, folder: Path) -> None:
        """Remove a version from the store."""
        await asyncio.to_thread(self._remove, folder)

    def _remove(self, folder: Path) -> None:
        with self._source.translate_errors(folder):
            if self._source.system.exists(self._source.path_of(folder)):
                self._source.system.rm(self._source.path_of(folder), recursive=True)

    async def close(self) -> None:
        """End an upload after the current file."""
        self._stopped.set()


class FetchedFiles(AdapterFiles):
    """Fetch versions to this machine's disk, one at a time, and keep the most recently used."""

    def __init__(self, settings: SourceSettings, in_use: InUse = _none_in_use) -> None:
        """Open the source; `in_use` returns folders that stay, however long ago the last use was.

        Raises:
            TrainerError: there is no such kind of source.
        """
        self._source = Source(settings.adapter_source or "")
        self.root = settings.adapter_dir.resolve()
        self._in_use = in_use
        self._most = int(settings.adapter_disk_gb * 1e9)
        self._lock = asyncio.Lock()
        self._stopped = threading.Event()
        # Fetches under way, and failed ones whose error no caller has got yet.
        self._fetches: dict[tuple[Path, str | None], asyncio.Task[Path]] = {}
        # The trainer's folder of each local folder.
        self._at_trainer: dict[Path, Path] = {}
        self._held: Any = None

    def lock_folder(self) -> None:
        """Lock the folder for this process, which alone knows which versions are in use there.

        Raises:
            TrainerError: another process uses it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._held = self._lock_root()
        except OSError as error:
            raise TrainerError(f"PAWL_ADAPTER_DIR cannot be written to: {error}") from error

    def _lock_root(self) -> Any:
        """Return an open file, which keeps other processes from fetching into the folder."""
        lock = (self.root / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise NotFetched(
                f"another process fetches into {self.root}: give each a PAWL_ADAPTER_DIR of its"
                " own, or try again when it has ended"
            ) from error
        return lock

    async def fetch(self, folder: Path, manifest_sha256: str | None) -> Path:
        """Fetch a version's files, unless intact ones are here already."""
        key = (folder, manifest_sha256)
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = self._fetches[key] = asyncio.create_task(self._fetch(*key))
            fetch.add_done_callback(lambda done: self._forget_fetch(key, done))
        await asyncio.wait([fetch], timeout=WAIT_S)
        if not fetch.done():
            raise NotFetched(f"{_name(folder)} is still being fetched, which goes on")
        self._fetches.pop(key, None)
        return fetch.result()

    def _forget_fetch(self, key: tuple[Path, str | None], fetch: asyncio.Task[Path]) -> None:
        """Forget a fetch, unless it failed: the next caller gets the error."""
        if fetch.cancelled() or fetch.exception() is None:
            self._fetches.pop(key, None)

    async def close(self) -> None:
        """End fetches after the current piece; the next start continues there."""
        self._stopped.set()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        if self._held is not None:
            self._held.close()

    def touch(self, policy: str, version: str) -> None:
        """Keep a version for some minutes longer, if it was fetched."""
        # The version may be gone, and the name may be no version's.
        with suppress(NotFetched, FileNotFoundError):
            folder = self._local_folder(Path(policy.replace("/", "--"), version))
            os.utime(folder / _MARK)

    def trainer_path(self, place: str) -> str:
        """Return the trainer's path of the local folder `place`; they differ if it was fetched."""
        mark = Path(place) / _MARK
        if (known := self._at_trainer.get(mark.parent)) is not None:
            return str(known)
        try:
            is_here = mark.parent.parent.parent == self.root
            return (is_here and mark.read_text()) or place
        except (OSError, ValueError):
            return place

    def _local_folder(self, folder: Path) -> Path:
        """Return the local folder of a version."""
        parts = folder.parts[-2:]
        if len(parts) < 2 or any(part[:1] in (".", "/") for part in parts):
            raise NotFetched(f"{folder} is not the folder of a version, POLICY/VERSION")
        return self.root.joinpath(*parts)

    async def _fetch(self, folder: Path, manifest_sha256: str | None) -> Path:
        try:
            # A version that is here does not wait for another's fetch.
            place = await asyncio.to_thread(self._find_intact, folder, manifest_sha256)
            if place is None:
                async with self._lock:
                    place = await asyncio.to_thread(self._find_intact, folder, manifest_sha256)
                    if place is None:
                        used = await self._in_use()
                        place = await asyncio.to_thread(
                            self._fetch_one, folder, manifest_sha256, used
                        )
        except NotFetched as error:
            log.error("adapter_not_fetched", folder=str(folder), reason=str(error))
            raise
        except OSError as error:
            raise NotFetched(
                f"{_name(folder)} cannot be kept in {self.root} ({error.strerror or error}): check"
                " that disk, or lower PAWL_ADAPTER_DISK_GB"
            ) from error
        self._at_trainer[place] = folder
        return place

    def _find_intact(self, folder: Path, expected: str | None) -> Path | None:
        """Return the local folder of a version if its files are here and right, else None."""
        place = self._local_folder(folder)
        mark = place / _MARK
        is_fetched = mark.exists()
        if is_fetched:
            # Before the check, so that nothing removes the folder meanwhile.
            os.utime(mark)
        if not _is_intact(place, expected):
            if place.exists() and not is_fetched:
                raise NotFetched(
                    f"{place} was not fetched, and its files are not those that were written;"
                    " restore it from a backup, or remove it"
                )
            return None
        if is_fetched and mark.read_text() != str(folder):
            mark.write_text(str(folder))
        return place

    def _fetch_one(self, folder: Path, expected: str | None, in_use: Collection[Path]) -> Path:
        """Fetch a version, and return its local folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        with nullcontext() if self._held else self._lock_root():
            return self._fetch_folder(folder, expected, in_use)

    def _fetch_folder(self, folder: Path, expected: str | None, in_use: Collection[Path]) -> Path:
        if self._stopped.is_set():
            raise NotFetched("the process is about to end")
        started = time.monotonic()
        place = self._local_folder(folder)
        manifest = self._read_manifest(folder, expected)
        digest = sha256(manifest).hexdigest()
        sizes = self._source.sizes(folder)
        # Named by the manifest's hash, so that the next try continues only the same content.
        partial = place.with_name(f".{place.name}-{digest[:16]}")
        self._evict_versions(sum(sizes.values()), {place, partial}, in_use)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            (partial / _MARK).write_text(str(folder))
            for name, right in _hashes(manifest).items():
                self._fetch_file(folder, partial / name, sizes[name], right, started + FETCH_S)
            (partial / MANIFEST).write_bytes(manifest)
            for path in (partial / MANIFEST, partial / _MARK, partial):
                sync(path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Others need the room more; the next try begins anew.
                shutil.rmtree(partial, ignore_errors=True)
            raise
        remove_folder(place)
        partial.rename(place)
        sync(place.parent)
        seconds = round(time.monotonic() - started, 2)
        log.info("adapter_fetched", folder=str(place), seconds=seconds)
        return place

    def _read_manifest(self, folder: Path, expected: str | None) -> bytes:
        """Return the source's manifest after checking that it is the expected one."""
        manifest = b""
        for piece in self._source.pieces(folder, MANIFEST):
            manifest += piece
            if len(manifest) > MOST_MANIFEST:
                raise NotFetched(f"the manifest of {_name(folder)} at the source is far too large")
        if expected not in (None, sha256(manifest).hexdigest()):
            raise NotFetched(
                f"the manifest of {_name(folder)} at the source is not the one that its update"
                " wrote: it was changed, or PAWL_ADAPTER_SOURCE is another trainer's"
            )
        if set(_hashes(manifest)) != set(SERVED):
            raise NotFetched(f"the manifest of {_name(folder)} at the source names other files")
        return manifest

    def _evict_versions(self, needed: int, own: set[Path], in_use: Collection[Path]) -> None:
        """Remove the least recently used versions until `needed` bytes fit.

        `own` are the folders of the version that is fetched.

        Raises:
            NotFetched: the versions in use leave too little room.
        """
        for going in self.root.glob("*/.*-removed"):
            # Left by a kill.
            shutil.rmtree(going)
        asked_at = {
            mark.parent: mark.stat().st_mtime
            for mark in self.root.glob(f"*/*/{_MARK}")
            if mark.parent not in own
        }
        sizes = {other: sum(f.stat().st_size for f in other.iterdir()) for other in asked_at}
        held = sum(sizes.values())
        idle = {
            other
            for other, moment in asked_at.items()
            if moment < time.time() - IDLE_S and other not in in_use
        }
        stays = held - sum(sizes[other] for other in idle)
        if stays + needed > self._most:
            raise NotFetched(
                f"it has {needed / 1e9:.3g} GB, and what is in use or was asked for lately has"
                f" {stays / 1e9:.3g} GB: raise PAWL_ADAPTER_DISK_GB, which is {self._most / 1e9:g}"
            )
        for other in sorted(idle, key=lambda other: asked_at[other]):
            if held + needed > self._most:
                remove_folder(other)
                held -= sizes[other]

    def _fetch_file(
        self, folder: Path, path: Path, size: int, expected: str, ends_at: float
    ) -> None:
        """Fetch the missing rest of a file, and check its hash; a wrong file is removed."""
        with path.open("ab") as file:
            if file.tell() < size:
                for piece in self._source.pieces(folder, path.name, file.tell()):
                    file.write(piece)
                    is_late = self._stopped.is_set() or time.monotonic() > ends_at
                    if is_late and file.tell() < size:
                        raise NotFetched(
                            f"{_name(folder)} is half fetched: {file.tell():,} of {size:,} bytes"
                            f" of {path.name} are here; the next try goes on from there"
                        )
                    if file.tell() > size:
                        break
        sync(path)
        if sha256_of(path) != expected:
            path.unlink()
            raise NotFetched(
                f"{path.name} of {_name(folder)} is not the file that was written: its SHA-256 is"
                " not the manifest's. What was fetched is removed, and fetched anew at the next try"
            )


def _hashes(manifest: bytes) -> dict[str, str]:
    """Return the SHA-256 of each served file that a manifest names; none if it is no manifest."""
    try:
        return msgspec.json.decode(manifest, type=Hashes).sha256
    except msgspec.DecodeError:
        return {}


def _is_intact(folder: Path, expected: str | None) -> bool:
    """Return whether the files of a version are here, and right."""
    if not (folder / MANIFEST).exists():
        return False
    manifest = (folder / MANIFEST).read_bytes()
    hashes = _hashes(manifest)
    return (
        expected in (None, sha256(manifest).hexdigest())
        and set(hashes) == set(SERVED)
        and all((folder / name).exists() for name in SERVED)
        and all(sha256_of(folder / name) == right for name, right in hashes.items())
    )


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def serve_files(app: web.Application, root: Path) -> None:
    """Let `app` answer GET for the served files and the manifest of each version below `root`.

    A request may ask for a range of bytes. No other files are served.
    """

    async def send(request: web.Request) -> web.StreamResponse:
        policy, version, name = (request.match_info[part] for part in ("policy", "version", "name"))
        # URL-decoded, so that they may contain anything.
        is_plain = all(Path(part).name == part and part[:1] != "." for part in (policy, version))
        path = root / policy / version / name
        if not (is_plain and name in (MANIFEST, *SERVED) and path.is_file()):
            raise web.HTTPNotFound
        return web.FileResponse(path)

    app.router.add_get(f"{PATH}/{{policy}}/{{version}}/{{name}}", send)
