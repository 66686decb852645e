"""Build Pawl's wheel, whose proxy is compiled, and install it into a folder of its own.

A checkout runs its sources (docs/decisions/037-compiled-in-wheels-only.md); what measures or
tests the compiled proxy takes it from here, that of an earlier commit too. A folder is made once
for each state of the sources.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Final

from store.embedded.sharing import Wait, take_turn

ROOT: Final = Path(__file__).resolve().parents[1]
WHEELS: Final = ROOT / "var" / "wheels"
PACKAGES: Final = ("migrations", "pawl", "proxy", "store", "trainer")
FILES: Final = ("class_layouts.py", "hatch_build.py", "pyproject.toml")
# Older folders are deleted; a few stay, as a run that uses one may still go on.
KEPT: Final = 3
LOCK: Final = "lock"
BUILT_S: Final = 1500.0
# As hatch_build.py has it: a module that did not change is not compiled again, whichever checkout
# it lies in.
CACHES: Final = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
# A user without a home has a cache in each checkout.
COMPILED: Final = (Path(CACHES) if os.path.isabs(CACHES) else ROOT / "var") / "pawl" / "compiled"
CACHE: Final = {"COMPILED_PROXY_CACHE": str(COMPILED)}
UNUSED_S: Final = 30 * 86400.0
OPTIMIZATION: Final = "COMPILED_PROXY_OPTIMIZATION"


class NotBuilt(Exception):
    """Report that the wheel could not be built or its proxy is not compiled, and why."""


def installed_wheel() -> Path:
    """Return the folder with the wheel of the sources as they are; build it if it is missing.

    Raises:
        NotBuilt: pip failed, or there is no C compiler.
    """
    return _installed(_fingerprint(), nullcontext(ROOT))


def installed_wheel_of(commit: str) -> Path:
    """Return the same of a commit, however git names it.

    Raises:
        NotBuilt: there is no such commit, pip failed, or there is no C compiler.
    """
    name = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    return _installed(f"{name[:12]}-py{sys.hexversion:x}", _sources_of(name))


@contextmanager
def _sources_of(commit: str) -> Iterator[Path]:
    """Make a folder with a commit's files; some commits compile into their sources."""
    with tempfile.TemporaryDirectory(prefix="pawl-sources-") as name:
        with tarfile.open(fileobj=BytesIO(_git("archive", commit))) as files:
            files.extractall(name, filter="data")
        yield Path(name)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise NotBuilt(f"git {' '.join(arguments)} failed: {done.stderr.decode()}")
    return done.stdout


def _installed(name: str, sources: AbstractContextManager[Path]) -> Path:
    folder = WHEELS / name
    WHEELS.mkdir(parents=True, exist_ok=True)
    # Compiling takes minutes: whoever comes second waits, and finds it made.
    turn = take_turn(WHEELS / LOCK, Wait(BUILT_S, lambda: False), "the wheel that another builds")
    try:
        _make(folder, sources)
    finally:
        turn.release()
    return folder


def _make(folder: Path, sources: AbstractContextManager[Path]) -> None:
    if folder.exists():
        # The last that would be deleted.
        folder.touch()
    else:
        with tempfile.TemporaryDirectory(dir=WHEELS, prefix="part-") as name, sources as root:
            _build(Path(name), root)
            # Complete or not there: whoever finds the folder can use it.
            (Path(name) / "site").rename(folder)
        _forget_unused(COMPILED, time.time() - UNUSED_S)
        for old in sorted(_folders(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _forget_unused(cache: Path, before: float) -> None:
    """Delete the extensions that no wheel was built from since a time."""
    for path in cache.glob("*"):
        # Another checkout's run may delete it first, and a cache may be there to be read alone.
        with suppress(FileNotFoundError, PermissionError):
            if path.stat().st_mtime < before:
                path.unlink()


def environment_of(folder: Path) -> Mapping[str, str]:
    """Return the environment in which this Python imports Pawl from `folder`.

    The working directory is not looked in, which `python -m` would do first.
    """
    return dict(os.environ) | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def _folders() -> Iterator[Path]:
    return (
        path for path in WHEELS.iterdir() if path.is_dir() and not path.name.startswith("part-")
    )


def _fingerprint() -> str:
    """Return a hash of the interpreter, the compiler's option, and every file of the wheel."""
    digest = hashlib.sha256(f"{sys.version} {os.environ.get(OPTIMIZATION)}".encode())
    within = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*")))
    for path in [*(ROOT / name for name in FILES), *within]:
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:20]


def _build(work: Path, root: Path) -> None:
    """Build the wheel of `root` and install it into `work`/site, without its dependencies."""
    _pip("wheel", "--no-deps", "--wheel-dir", str(work), str(root))
    [wheel] = work.glob("*.whl")
    site = work / "site"
    _pip("install", "--no-deps", "--target", str(site), str(wheel))
    if next((site / "proxy").rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"), None) is None:
        raise NotBuilt(
            "the wheel's proxy is not compiled: install a C compiler and Python's headers"
        )


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env=os.environ | CACHE, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotBuilt(f"pip {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
