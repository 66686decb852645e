"""Run PostgreSQL on machines without one: a real server, a private socket, no port.

Several processes share one server (docs/decisions/034-sharing-the-embedded-postgresql.md). One
process at a time starts or stops it. A process counts as a user until it leaves or ends. The last
user stops the server, and only if some process said that it is no longer needed. So the server
outlives a restart of the proxy, and no process stops a database that another one uses.
"""

import subprocess
import threading
from pathlib import Path
from typing import Final

from store.embedded.cluster import READY, Cluster, Postmaster
from store.embedded.sharing import Hold, Wait, take_turn, try_to_hold
from store.errors import StoreError

# Serving does not wait for the database. So recovery after a crash may take seconds (a large WAL),
# but commits are durable (`synchronous_commit` stays on).
SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "password_encryption": "scram-sha-256",
}
DATABASE: Final = "pawl"
# On a slow disk, a first start or a recovery may take minutes.
PATIENCE_S: Final = 600.0
# Number of attempts to start: remains of a killed server may be in the way for a moment.
TRIES: Final = 5
IN_USE: Final = "pre-existing shared memory block"


class EmbeddedPostgres:
    """Run a PostgreSQL 18, its files in `data_dir / "postgres"`. All methods are thread-safe."""

    def __init__(self, data_dir: Path) -> None:
        """Store the folder; nothing is created or started before `ensure_running`."""
        self.folder = (data_dir / "postgres").resolve()
        self._cluster = Cluster(self.folder)
        self._mutex = threading.Lock()
        self._leaving = threading.Event()
        self._using: Hold | None = None
        self._known: Postmaster | None = None

    def ensure_running(self, *, within_s: float = PATIENCE_S, passing: bool = False) -> str:
        """Start the server unless it runs, create the database `pawl`, and count as a user.

        Wait for a server that is starting, recovering or stopping. With `passing`, a server that
        this call starts is stopped once its last user has left.

        Returns:
            The database's URL, which is the same after every restart.

        Raises:
            StoreError: the extra is not installed, the server would not start, or it is not
                ready within `within_s` seconds.
        """
        with self._mutex:
            server = self._cluster.postmaster()
            if self._using is None or server is None or server.status != READY:
                server = self._join(Wait(within_s, self._leaving.is_set), passing=passing)
            self._known = server
            return self._cluster.url(server, DATABASE)

    def give_up(self) -> None:
        """Make an `ensure_running` that waits in another thread fail soon."""
        self._leaving.set()

    def leave(self) -> None:
        """Stop using the server; shut it down if it has no other user and is marked as unneeded."""
        self._leave(needed=True)

    def stop(self) -> None:
        """Stop using the server and mark it as unneeded; its files stay.

        It is shut down now, or when the last of its other users leaves.
        """
        self._leave(needed=False)

    @property
    def is_running(self) -> bool:
        """Return whether the server's process exists, whoever started it."""
        return self._cluster.postmaster() is not None

    @property
    def log(self) -> Path:
        """Return the path of the server's own log file."""
        return self._cluster.log

    @property
    def programs(self) -> Path:
        """Return the folder of PostgreSQL's own programs."""
        return self._cluster.programs

    @property
    def url(self) -> str:
        """Return the `postgresql://` URL of the database `pawl` on the server's socket.

        Raises:
            StoreError: `ensure_running` has not succeeded yet.
        """
        return self._cluster.url(self._last_known(), DATABASE)

    @property
    def pid(self) -> int | None:
        """Return the process id of the server, or of the last known one if it is down.

        Raises:
            StoreError: `ensure_running` has not succeeded yet, and no server runs.
        """
        return (self._cluster.postmaster() or self._last_known()).pid

    def _last_known(self) -> Postmaster:
        if self._known is None:
            raise StoreError("the embedded PostgreSQL has not been started")
        return self._known

    def _beside(self, suffix: str) -> Path:
        # Not in the folder itself: initdb requires an empty one.
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    def _join(self, wait: Wait, *, passing: bool) -> Postmaster:
        # This raises if the package is not installed, before any file is made.
        self._cluster.programs  # noqa: B018
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            turn = take_turn(self._beside("lock"), wait, "another process that starts PostgreSQL")
            try:
                return self._brought_up(wait, passing=passing)
            finally:
                turn.release()
        except (subprocess.SubprocessError, OSError) as error:
            raise StoreError(
                f"the embedded PostgreSQL did not start: {_message(error)}; its log: {self.log}"
            ) from error

    def _brought_up(self, wait: Wait, *, passing: bool) -> Postmaster:
        began = self._cluster.postmaster() is None
        server = self._ready(wait)
        if not self._cluster.has_database(DATABASE, server):
            self._cluster.create_database(DATABASE, server)
        passing_mark = self._beside("passing")
        if not passing:
            passing_mark.unlink(missing_ok=True)
        elif began:
            passing_mark.touch()
        if self._using is None:
            self._using = try_to_hold(self._beside("users"), shared=True)
        return server

    def _ready(self, wait: Wait) -> Postmaster:
        """Start the server if none runs, and wait until it is ready."""
        settings = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        tries = 0
        while (server := self._cluster.postmaster()) is None or server.status != READY:
            if server is None:
                self._prepare(settings)
                why = self._cluster.start(wait.left_s)
                tries += IN_USE not in why
                if why and tries >= TRIES:
                    raise StoreError(f"the embedded PostgreSQL did not start: {why}")
            wait.go_on("the embedded PostgreSQL to be ready")
        return server

    def _prepare(self, settings: str) -> None:
        if self._cluster.exists:
            self._cluster.configure(settings)
        else:
            self._cluster.initialise(settings)

    def _leave(self, *, needed: bool) -> None:
        # This ends a start that is in progress in another thread, instead of waiting for it.
        self._leaving.set()
        with self._mutex:
            self._leaving.clear()
            if self._using is None:
                return
            wait = Wait(PATIENCE_S, self._leaving.is_set)
            turn = take_turn(self._beside("lock"), wait, "another process that starts PostgreSQL")
            try:
                if not needed:
                    self._beside("passing").touch()
                self._using.release()
                self._using = None
                self._stop_if_unused(wait)
            finally:
                turn.release()

    def _stop_if_unused(self, wait: Wait) -> None:
        if not self._beside("passing").exists() or self._cluster.postmaster() is None:
            return
        alone = try_to_hold(self._beside("users"))
        if alone is None:
            return
        try:
            self._cluster.stop(wait.left_s)
        finally:
            alone.release()


def _message(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return str(stderr).strip() if stderr else f"{type(error).__name__}: {error}"
