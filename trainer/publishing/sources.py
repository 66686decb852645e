"""Bring versions' files to machines that do not see the trainer's PAWL_ADAPTER_DIR.

All processes share one source, PAWL_ADAPTER_SOURCE: `http://TRAINER/adapters`, which the trainer
serves from its folder, or a folder of an object store, to which the trainer uploads. Controller and
`pawl adapters` fetch from it through fsspec, each into a PAWL_ADAPTER_DIR of its own.

A version is fetched into a temporary folder, which is renamed once the SHA-256 of each file matches
the manifest, and the manifest's SHA-256 matches the database. A half-fetched folder stays, so that
the next try continues from there, even after a kill.
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
from trainer.publishing.adapters import MANIFEST, SERVED_FILES, remove_folder, sha256_of
from trainer.settings import SourceSettings

log = structlog.get_logger()

# The trainer serves versions below this path.
ADAPTERS_PATH: Final = "/adapters"
CHUNK_BYTES: Final = 4 * 2**20
MAX_MANIFEST_BYTES: Final = 256 * 2**20
# Seconds that a caller waits for a version; a longer fetch goes on for the next caller.
WAIT_S: Final = 60.0
# Seconds after which a fetch is interrupted, so that others get their turn; the next try continues
# where it ended.
FETCH_S: Final = 600.0
# Seconds for which a fetched version is kept after its last use: a model server reads the files
# again for requests that began before the version was unloaded.
IDLE_S: Final = 300.0
# A file in each fetched folder. It contains the trainer's path of the version; its mtime is the
# time of the last use.
_MARK: Final = ".fetched"


class Hashes(Record, frozen=True, kw_only=True):
    """The part of a manifest that a fetch reads: the SHA-256 of each served file."""

    sha256: dict[str, str]


class AdapterFiles:
    """Access to versions' files in the trainer's own folder, which all processes can read.

    Here no files are copied; subclasses upload or fetch them.
    """

    async def fetch(self, folder: Path, manifest_sha256: str | None) -> Path:
        """Return the local folder with the version that the trainer has in `folder`.

        `manifest_sha256` is the manifest's expected hash, or None if it is unknown.

        Raises:
            NotFetched: the files cannot be fetched for now, or differ from the written ones.
        """
        return folder

    async def offer(self, folder: Path) -> None:
        """Copy a version's files to the source, from which other machines fetch them.

        Raises:
            NotFetched: the source does not answer, or refuses.
        """

    async def withdraw(self, folder: Path) -> None:
        """Remove a version from the source; the caller removes the local folder afterwards.

        Raises:
            NotFetched: the source does not answer, or refuses.
        """

    async def close(self) -> None:
        """Break off transfers that are under way, after their current file or piece."""


def trainer_files(settings: SourceSettings) -> AdapterFiles:
    """Return the trainer's access to versions' files, which uploads them to an object store.

    Nothing is uploaded without PAWL_ADAPTER_SOURCE, or if the trainer serves the files over HTTP.

    Raises:
        TrainerError: there is no such kind of source.
    """
    if settings.adapter_source is None or is_http(settings.adapter_source):
        return AdapterFiles()
    return UploadedFiles(settings.adapter_source)


def reader_files(settings: SourceSettings) -> AdapterFiles:
    """Return the access of controller, commands and `pawl adapters` to the trainer's versions.

    Raises:
        TrainerError: there is no such kind of source.
    """
    return AdapterFiles() if settings.adapter_source is None else FetchedFiles(settings)


def is_http(source: str) -> bool:
    """Return whether the source is an HTTP URL, at which the trainer serves versions itself."""
    return source.startswith(("http://", "https://"))


class Source:
    """The files at PAWL_ADAPTER_SOURCE; its methods block the calling thread."""

    def __init__(self, url: str) -> None:
        """Choose the fsspec file system for `url`.

        Raises:
            TrainerError: there is no such kind of source, or its package is missing.
        """
        # Imported here, because it takes time and most processes have no source.
        import fsspec

        self.shown_url = without_login(url)
        self._is_http = is_http(url)
        # Object stores need no folders; a local disk (file:), for trying this out, does.
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
                f"PAWL_ADAPTER_SOURCE is {self.shown_url}, which cannot be read: {error}"
            ) from error

    def path_of(self, folder: Path, name: str = "") -> str:
        """Return the path at the source of a version's folder, or of the file `name` in it."""
        parts = [*folder.parts[-2:], *([name] if name else [])]
        return "/".join([self._top, *(map(quote, parts) if self._is_http else parts)])

    @contextmanager
    def translate_errors(self, folder: Path) -> Iterator[None]:
        """Translate any error of the source in the `with` block.

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
                    f"{self.shown_url} has no {_name(folder)}: the version was deleted, or"
                    " PAWL_ADAPTER_SOURCE is not the place where the trainer puts versions"
                ) from error
            raise NotFetched(
                f"{self.shown_url} cannot be read from or written to for {_name(folder)}"
                f" ({type(why).__name__}: {str(why)[:200]}), which is tried again: check"
                " PAWL_ADAPTER_SOURCE, and that it can be reached from this machine"
            ) from error

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the size of each served file of a version, in bytes."""
        with self.translate_errors(folder):
            sizes = {name: self.system.size(self.path_of(folder, name)) for name in SERVED_FILES}
        if unknown := [name for name, size in sizes.items() if size is None]:
            raise NotFetched(f"{self.shown_url} does not say how large {unknown[0]} is")
        return sizes

    def pieces(self, folder: Path, name: str, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a version's file `name` from byte `start` on, in pieces."""
        with self.translate_errors(folder):
            # Without a cache each piece is requested only when it is read.
            options = {"block_size": CHUNK_BYTES, "cache_type": "none"}
            with self.system.open(self.path_of(folder, name), "rb", **options) as file:
                file.seek(start)
                while piece := file.read(CHUNK_BYTES):
                    yield bytes(piece)


InUse = Callable[[], Awaitable[Collection[Path]]]


async def _none_in_use() -> Collection[Path]:
    return ()


class UploadedFiles(AdapterFiles):
    """Uploads versions to an object store before they are loaded, and removes withdrawn ones."""

    def __init__(self, url: str) -> None:
        """Open the store at `url`.

        Raises:
            TrainerError: there is no such kind of store.
        """
        self._source = Source(url)
        self._lock = asyncio.Lock()
        self._stopped = threading.Event()

    async def offer(self, folder: Path) -> None:
        """Upload a version, its manifest last, unless the store has it already."""
        async with self._lock:
            await asyncio.to_thread(self._upload, folder)

    def _upload(self, folder: Path) -> None:
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise NotFetched(f"{folder} cannot be uploaded ({error.strerror})") from error
        system, place = self._source.system, self._source.path_of
        with self._source.translate_errors(folder):
            is_uploaded = all(
                system.exists(place(folder, name)) for name in (*SERVED_FILES, MANIFEST)
            )
            if is_uploaded and system.cat_file(place(folder, MANIFEST)) == manifest:
                return
            for name in (*SERVED_FILES, MANIFEST):
                if self._stopped.is_set():
                    raise NotFetched(f"{_name(folder)} is not uploaded: this process is ending")
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
        """Make a running upload end after its current file."""
        self._stopped.set()


class FetchedFiles(AdapterFiles):
    """Fetches versions to a local disk, one after the other; the longest unused make room."""

    def __init__(self, settings: SourceSettings, in_use: InUse = _none_in_use) -> None:
        """Open the source; `in_use` returns the local folders that must not be evicted.

        Raises:
            TrainerError: there is no such kind of source.
        """
        self._source = Source(settings.adapter_source or "")
        self.root = settings.adapter_dir.resolve()
        self._in_use = in_use
        self._most_bytes = int(settings.adapter_disk_gb * 1e9)
        self._lock = asyncio.Lock()
        self._stopped = threading.Event()
        # Fetches under way, and failed fetches whose error no caller has received yet.
        self._fetches: dict[tuple[Path, str | None], asyncio.Task[Path]] = {}
        # The trainer's folder of the version in each local folder.
        self._at_trainer: dict[Path, Path] = {}
        self._lock_file: Any = None

    def lock_folder(self) -> None:
        """Lock the adapter folder: only this process knows which versions in it are in use.

        Raises:
            TrainerError: another process uses it, or it cannot be written to.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock_file = self._lock_root()
        except OSError as error:
            raise TrainerError(f"PAWL_ADAPTER_DIR cannot be written to: {error}") from error

    def _lock_root(self) -> Any:
        """Lock the adapter folder for fetching; return the lock file, whose closing unlocks it."""
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
            raise NotFetched(
                f"{_name(folder)} is still being fetched: the fetch goes on, try again"
            )
        self._fetches.pop(key, None)
        return fetch.result()

    def _forget_fetch(self, key: tuple[Path, str | None], fetch: asyncio.Task[Path]) -> None:
        """Forget a finished fetch, unless it failed: then the next caller gets its error."""
        if fetch.cancelled() or fetch.exception() is None:
            self._fetches.pop(key, None)

    async def close(self) -> None:
        """End fetches after their current piece; the next process continues from there."""
        self._stopped.set()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        if self._lock_file is not None:
            self._lock_file.close()

    def touch(self, policy: str, version: str) -> None:
        """Note a use of a fetched version, which keeps it for `IDLE_S` seconds more."""
        # The version may be evicted already, or the names may not be a version's.
        with suppress(NotFetched, FileNotFoundError):
            folder = self._local_folder(Path(policy.replace("/", "--"), version))
            os.utime(folder / _MARK)

    def trainer_path(self, place: str) -> str:
        """Return the trainer's path of the version in `place`; `place` itself if not fetched."""
        mark = Path(place) / _MARK
        if (path := self._at_trainer.get(mark.parent)) is not None:
            return str(path)
        try:
            is_here = mark.parent.parent.parent == self.root
            return (is_here and mark.read_text()) or place
        except (OSError, ValueError):
            return place

    def _local_folder(self, folder: Path) -> Path:
        """Return the local folder for the version that the trainer has in `folder`."""
        parts = folder.parts[-2:]
        if len(parts) < 2 or any(part[:1] in (".", "/") for part in parts):
            raise NotFetched(f"{folder} is not the folder of a version, POLICY/VERSION")
        return self.root.joinpath(*parts)

    async def _fetch(self, folder: Path, manifest_sha256: str | None) -> Path:
        try:
            # A version that is here already does not wait for the fetch of another version.
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
        """Return the local folder of a version if its files are complete and intact, else None.

        Raises:
            NotFetched: the folder was not fetched, and its files are damaged.
        """
        place = self._local_folder(folder)
        mark = place / _MARK
        is_fetched = mark.exists()
        if is_fetched:
            # Before the check, so that the folder is not evicted meanwhile.
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
        with nullcontext() if self._lock_file else self._lock_root():
            return self._fetch_folder(folder, expected, in_use)

    def _fetch_folder(self, folder: Path, expected: str | None, in_use: Collection[Path]) -> Path:
        if self._stopped.is_set():
            raise NotFetched(f"{_name(folder)} is not fetched: this process is ending")
        started = time.monotonic()
        place = self._local_folder(folder)
        manifest = self._read_manifest(folder, expected)
        digest = sha256(manifest).hexdigest()
        sizes = self._source.sizes(folder)
        # The name has the manifest's hash, so that a later try continues only if the content is the
        # same.
        partial = place.with_name(f".{place.name}-{digest[:16]}")
        self._evict_versions(sum(sizes.values()), {place, partial}, in_use)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            (partial / _MARK).write_text(str(folder))
            for name, expected_hash in _hashes(manifest).items():
                self._fetch_file(
                    folder, partial / name, sizes[name], expected_hash, started + FETCH_S
                )
            (partial / MANIFEST).write_bytes(manifest)
            for path in (partial / MANIFEST, partial / _MARK, partial):
                sync(path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Give the disk space back; the next try begins from the start.
                shutil.rmtree(partial, ignore_errors=True)
            raise
        remove_folder(place)
        partial.rename(place)
        sync(place.parent)
        seconds = round(time.monotonic() - started, 2)
        log.info("adapter_fetched", folder=str(place), seconds=seconds)
        return place

    def _read_manifest(self, folder: Path, expected: str | None) -> bytes:
        """Return the manifest at the source, after checking its hash (None: unknown)."""
        manifest = b""
        for piece in self._source.pieces(folder, MANIFEST):
            manifest += piece
            if len(manifest) > MAX_MANIFEST_BYTES:
                raise NotFetched(f"the manifest of {_name(folder)} at the source is far too large")
        if expected not in (None, sha256(manifest).hexdigest()):
            raise NotFetched(
                f"the manifest of {_name(folder)} at the source is not the one that its update"
                " wrote: it was changed, or PAWL_ADAPTER_SOURCE is another trainer's"
            )
        if set(_hashes(manifest)) != set(SERVED_FILES):
            raise NotFetched(f"the manifest of {_name(folder)} at the source names other files")
        return manifest

    def _evict_versions(self, needed: int, own: set[Path], in_use: Collection[Path]) -> None:
        """Remove the least recently used versions until `needed` more bytes fit.

        `own` are the folders of the version that is being fetched; `in_use` are kept, too.

        Raises:
            NotFetched: the versions in use leave too little room.
        """
        for removed in self.root.glob("*/.*-removed"):
            # A killed process renamed this folder, but did not delete it.
            shutil.rmtree(removed)
        used_at = {
            mark.parent: mark.stat().st_mtime
            for mark in self.root.glob(f"*/*/{_MARK}")
            if mark.parent not in own
        }
        sizes = {other: sum(f.stat().st_size for f in other.iterdir()) for other in used_at}
        total = sum(sizes.values())
        idle = {
            other
            for other, moment in used_at.items()
            if moment < time.time() - IDLE_S and other not in in_use
        }
        kept = total - sum(sizes[other] for other in idle)
        if kept + needed > self._most_bytes:
            raise NotFetched(
                f"the version has {needed / 1e9:.3g} GB, and versions in use or lately used have"
                f" {kept / 1e9:.3g} GB: raise PAWL_ADAPTER_DISK_GB, which is"
                f" {self._most_bytes / 1e9:g}"
            )
        for other in sorted(idle, key=lambda other: used_at[other]):
            if total + needed > self._most_bytes:
                remove_folder(other)
                total -= sizes[other]

    def _fetch_file(
        self, folder: Path, path: Path, size: int, expected: str, ends_at: float
    ) -> None:
        """Fetch the missing rest of a file until `ends_at`, and check the hash of the whole file.

        Raises:
            NotFetched: the time is over, or the hash is wrong (a wrong file is removed).
        """
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
                " not the manifest's. The file is removed, and fetched again at the next try"
            )


def _hashes(manifest: bytes) -> dict[str, str]:
    """Return the SHA-256 of each served file, from a manifest; empty if it cannot be parsed."""
    try:
        return msgspec.json.decode(manifest, type=Hashes).sha256
    except msgspec.DecodeError:
        return {}


def _is_intact(folder: Path, expected: str | None) -> bool:
    """Return whether a version's files are complete and match the manifest's hashes.

    `expected` is the manifest's own hash (None: unknown).
    """
    if not (folder / MANIFEST).exists():
        return False
    manifest = (folder / MANIFEST).read_bytes()
    hashes = _hashes(manifest)
    return (
        expected in (None, sha256(manifest).hexdigest())
        and set(hashes) == set(SERVED_FILES)
        and all((folder / name).exists() for name in SERVED_FILES)
        and all(sha256_of(folder / name) == expected_hash for name, expected_hash in hashes.items())
    )


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def serve_files(app: web.Application, root: Path) -> None:
    """Let `app` serve, by GET, the served files and the manifest of each version below `root`.

    Requests for a range of bytes are answered, too. No other files are served.
    """

    async def send(request: web.Request) -> web.StreamResponse:
        policy, version, name = (request.match_info[part] for part in ("policy", "version", "name"))
        # These parts are URL-decoded, so they may contain `/` or `..`.
        is_plain = all(Path(part).name == part and part[:1] != "." for part in (policy, version))
        path = root / policy / version / name
        if not (is_plain and name in (MANIFEST, *SERVED_FILES) and path.is_file()):
            raise web.HTTPNotFound
        return web.FileResponse(path)

    app.router.add_get(f"{ADAPTERS_PATH}/{{policy}}/{{version}}/{{name}}", send)
