"""The PostgreSQL that a machine without one gets: real server, private socket, no port.

Several processes share one server (docs/decisions/034). Starting and stopping it is done by one
process at a time. Who uses it is counted among its users until it leaves, or until its process
is gone; the server is stopped by the last user, and only where somebody said that it is not
needed any longer. So it outlives a proxy that is started again, and no process takes another's
database away.
"""

import subprocess
import threading
from pathlib import Path
from typing import Final

from store.cluster import READY, Cluster, Postmaster
from store.errors import StoreError
from store.sharing import Hold, Wait, take_turn, try_to_hold

# Serving does not wait for the database, so a crash may cost seconds but never a commit.
SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "password_encryption": "scram-sha-256",
}
DATABASE: Final = "pawl"
# A slow disk may take minutes for a first start or for a recovery; that is no reason to give up.
PATIENCE_S: Final = 600.0
# So often a start is tried: what a killed server leaves may be in the way for a moment.
TRIES: Final = 5
IN_USE: Final = "pre-existing shared memory block"


class EmbeddedPostgres:
    """A PostgreSQL 18 whose files lie in `data_dir / "postgres"`; its methods suit any thread."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = (data_dir / "postgres").resolve()
        self._cluster = Cluster(self.folder)
        self._mutex = threading.Lock()
        self._leaving = threading.Event()
        self._using: Hold | None = None
        self._known: Postmaster | None = None

    def ensure_running(self, *, within_s: float = PATIENCE_S, passing: bool = False) -> str:
        """Start the server unless it runs, with the database `pawl`, and count as its user.

        A server that is starting, recovering or stopping is waited for. `passing`: if it was not
        running, it is not needed once its last user has left.

        Returns:
            Its URL; the same after every restart.
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
        """Have an `ensure_running` that waits in another thread end with an error, soon."""
        self._leaving.set()

    def leave(self) -> None:
        """Use the server no longer; stop it if nobody does and nobody needs it any longer."""
        self._leave(needed=True)

    def stop(self) -> None:
        """Use the server no longer and say that nobody needs it; its files stay.

        It is shut down now, or when the last of the other processes that use it leaves.
        """
        self._leave(needed=False)

    @property
    def is_running(self) -> bool:
        """Say whether the server is there, whoever started it."""
        return self._cluster.postmaster() is not None

    @property
    def log(self) -> Path:
        """The server's own log file."""
        return self._cluster.log

    @property
    def programs(self) -> Path:
        """The folder of PostgreSQL's own programs."""
        return self._cluster.programs

    @property
    def url(self) -> str:
        """`postgresql://` URL of the database `pawl` on the server's socket."""
        return self._cluster.url(self._last_known(), DATABASE)

    @property
    def pid(self) -> int | None:
        """The postmaster's process id."""
        return (self._cluster.postmaster() or self._last_known()).pid

    def _last_known(self) -> Postmaster:
        if self._known is None:
            raise StoreError("the embedded PostgreSQL has not been started")
        return self._known

    def _beside(self, suffix: str) -> Path:
        # Not in the folder itself, which initdb wants to be empty.
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    def _join(self, wait: Wait, *, passing: bool) -> Postmaster:
        # What needs a package that is not installed is told before anything is made.
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
                f"the embedded PostgreSQL did not start: {_told(error)}; its log: {self.log}"
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
        """Wait until the server is ready, and start it where there is none."""
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
        # A start that is under way in another thread is not waited for.
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


def _told(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return str(said).strip() if said else f"{type(error).__name__}: {error}"
