"""The wheel and the source distribution, installed into empty environments and run."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

from benchmarks.stack import free_port
from scripts.release import UV, build_packages
from store import __version__
from tests.support.waiting import until_true

ROOT: Final = Path(__file__).parents[3]
# A release is tried on each; on other days, what runs on the oldest and the newest runs between.
PYTHONS: Final = ("3.11", "3.12", "3.13") if "DIST" in os.environ else ("3.11", "3.13")
OWN: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"
PATIENCE_S: Final = 60.0
WORKER_MIB: Final = 60
# They would lend the new environment what this one has.
ENVIRONMENT: Final = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

pytestmark = pytest.mark.timeout(600)


def run(*command: object, cwd: Path) -> str:
    """What a command prints; its complaint where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheel and source distribution: a release's (`make release`), or one of now."""
    if "DIST" in os.environ:
        return Path(os.environ["DIST"])
    folder = tmp_path_factory.mktemp("built")
    build_packages(folder)
    return folder


def wheel_in(folder: Path) -> Path:
    return folder / f"pawl_rl-{__version__}-py3-none-any.whl"


@pytest.fixture(params=PYTHONS)
def installed(request: pytest.FixtureRequest, built: Path, tmp_path: Path) -> Path:
    """The programs of an environment with the wheel."""
    found = subprocess.run(
        ["scripts/find_python.sh"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": f"python{request.param}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode and request.param != OWN:
        pytest.skip(f"Python {request.param} is not here")
    python = found.stdout.strip() or sys.executable
    run(python, "-m", "venv", "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    # What is run compiles what it imports; the rest of the packages need not be.
    run(programs / "pip", "install", "--no-compile", wheel_in(built), cwd=tmp_path)
    return programs


def answers(port: int, path: str) -> bool:
    """Whether a page is there."""
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        server.request("GET", path)
        return server.getresponse().status == 200
    except OSError:
        return False
    finally:
        server.close()


def test_wheel_is_installed_into_an_empty_environment_and_serves(
    installed: Path, tmp_path: Path
) -> None:
    run(installed / "pip", "check", cwd=tmp_path)
    assert run(installed / "pawl", "--version", cwd=tmp_path) == f"pawl {__version__}\n"
    assert "proxy" in run(installed / "pawl", "--help", cwd=tmp_path)
    admin = free_port()
    environment = ENVIRONMENT | {
        "PAWL_LISTEN": f"127.0.0.1:{free_port()}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{admin}",
        # Nothing is there: serving does not wait for it.
        "DATABASE_URL": f"postgresql://pawl@127.0.0.1:{free_port()}/pawl",
    }
    proxy = subprocess.Popen(
        [str(installed / "pawl"), "proxy"],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_true(lambda: answers(admin, "/readyz"), PATIENCE_S)
        workers = [
            child.memory_info().rss / 2**20
            for child in psutil.Process(proxy.pid).children()
            if "worker" in child.cmdline()
        ]
        assert workers
        assert max(workers) <= WORKER_MIB
    finally:
        proxy.send_signal(signal.SIGTERM)
        assert proxy.wait(PATIENCE_S) == 0


def test_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    source = built / f"pawl_rl-{__version__}.tar.gz"
    run(UV, "build", "--wheel", "--out-dir", tmp_path, source, cwd=tmp_path)
    assert wheel_in(tmp_path).read_bytes() == wheel_in(built).read_bytes()
