"""Dockerfile.proxy without Docker: its build steps and its health check, run as they are written.

What needs an engine (the base image, users, volumes) is left to one.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from benchmarks.stack import free_port
from tests.support.waiting import until
from tests.unit.deploy.test_compose import image_environment, instructions, last_stage

ROOT: Final = Path(__file__).parents[3]
DOCKERFILE: Final = "Dockerfile.proxy"
IMAGE_VENV: Final = "/opt/pawl"
UP_S: Final = 120.0
STOP_S: Final = 60.0
# They would lend the image what this environment has.
OUR_PYTHON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
# As .dockerignore has it.
NOT_SENT: Final = ("__pycache__",)
PACKAGES: Final = ("migrations", "pawl", "proxy", "store", "trainer")
# What the wheel must have beside its modules.
DATA: Final = (
    "migrations/script.py.mako",
    "migrations/versions",
    "pawl/scenarios/smollm2_tools.jinja",
    "trainer/recipes/default.toml",
)


class Stage:
    """The first stage of a Dockerfile, with folders of this machine in the place of its own."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        self.source = folder / "src"
        self.source.mkdir()
        self.environment = {k: v for k, v in os.environ.items() if k not in OUR_PYTHON}
        # The image's `python` is the one that runs this.
        self._extend_path(Path(sys.executable).parent)

    def run(self, dockerfile: str) -> None:
        """Take the steps up to the second FROM."""
        steps = instructions(dockerfile)
        for index, (name, rest) in enumerate(steps):
            if name == "FROM" and index:
                return
            self._step(name, rest)

    def _step(self, name: str, rest: str) -> None:
        match name:
            case "RUN" if rest.startswith("apt-get"):
                # The system is the engine's; what is asked for is on this one.
                return
            case "RUN":
                self.sh(rest.replace(IMAGE_VENV, str(self.venv)))
            case "COPY":
                self._copy(*rest.split())
            case "ENV":
                self._set(dict(word.split("=", 1) for word in shlex.split(rest)))
            case "FROM" | "WORKDIR":
                return
            case _:
                raise AssertionError(f"{name} is not known here")

    def _copy(self, *words: str) -> None:
        *sources, target = words
        for source in sources:
            into = self.source / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns(*NOT_SENT))
                continue
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, into)

    def _set(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            if name == "PATH":
                assert value == f"{IMAGE_VENV}/bin:$PATH"
                self._extend_path(self.venv / "bin")
            else:
                self.environment[name] = value

    def _extend_path(self, folder: Path) -> None:
        self.environment["PATH"] = f"{folder}{os.pathsep}{self.environment['PATH']}"

    def sh(self, command: str) -> str:
        """What a command prints; its complaint where it fails."""
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.source,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    stage = Stage(tmp_path_factory.mktemp("image"))
    stage.run(DOCKERFILE)
    # What is installed has to do; the source is not in the image.
    shutil.rmtree(stage.source)
    stage.source.mkdir()
    return stage


# The packages are fetched and installed once, for whichever test comes first.
pytestmark = pytest.mark.timeout(1800)


def test_command_explains_itself(image: Stage) -> None:
    assert "proxy" in image.sh("pawl --help")
    assert "Serve" in image.sh("pawl proxy --help")


def site_packages(image: Stage) -> Path:
    """The folder that the wheel is installed into."""
    site = Path(image.sh('python -c "import pawl; print(pawl.__path__[0])"').strip()).parent
    assert site.is_relative_to(image.venv)
    return site


def normalized(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(image: Stage) -> dict[str, str]:
    """What the image has, and in which version."""
    listed = json.loads(image.sh("pip list --format=json"))
    return {normalized(package["name"]): package["version"] for package in listed}


def test_image_has_exactly_the_locked_packages(image: Stage) -> None:
    lines = (ROOT / "requirements" / "proxy.txt").read_text().splitlines()
    locked = dict(line.split()[0].split("==") for line in lines if "==" in line)
    ours = {"pawl-rl", "pip", "setuptools", "wheel"}
    found = {name: version for name, version in installed(image).items() if name not in ours}
    assert found == {normalized(name): version for name, version in locked.items()}


def test_image_has_no_torch(image: Stage) -> None:
    image.sh(
        'python -c "import proxy.worker, proxy.ingester.ingester, sys;'
        " assert 'torch' not in sys.modules\""
    )
    names = installed(image).keys()
    assert not {name for name in names if "torch" in name or name.startswith("nvidia")}


def test_wheel_is_for_any_platform_and_has_every_module_and_data_file(image: Stage) -> None:
    site = site_packages(image)
    [wheel] = site.glob("pawl_rl-*.dist-info/WHEEL")
    assert "Tag: py3-none-any" in wheel.read_text().splitlines()
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {*DATA, *(str(path.relative_to(ROOT)) for path in sources)}
    assert {name for name in names if not (site / name).exists()} == set()
    assert any((site / "migrations" / "versions").glob("*.py"))


@pytest.fixture
def listening(image: Stage, tmp_path: Path) -> Iterator[dict[str, str]]:
    """`pawl proxy` from the image, with its variables but for ports and folder; they are given."""
    known = image_environment(DOCKERFILE)
    environment = {name: value for name, value in known.items() if name != "PATH"}
    environment |= {
        "PAWL_LISTEN": f"127.0.0.1:{free_port()}",
        "PAWL_ADMIN_LISTEN": f"127.0.0.1:{free_port()}",
        "PAWL_SPOOL_DIR": str(tmp_path / "spool"),
        # Nothing is there: serving does not wait for it.
        "DATABASE_URL": f"postgresql://pawl@127.0.0.1:{free_port()}/pawl",
        # A health check that went through a proxy would find none.
        "http_proxy": f"http://127.0.0.1:{free_port()}",
    }
    [entry] = [json.loads(rest) for name, rest in last_stage(DOCKERFILE) if name == "ENTRYPOINT"]
    [command] = [json.loads(rest) for name, rest in last_stage(DOCKERFILE) if name == "CMD"]
    running = subprocess.Popen(
        [str(image.venv / "bin" / entry[0]), *entry[1:], *command],
        env=image.environment | environment,
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    yield environment
    running.send_signal(signal.SIGTERM)
    assert running.wait(STOP_S) == 0


def health_check() -> list[str]:
    """The command that the image asks its health with."""
    [check] = [rest for name, rest in last_stage(DOCKERFILE) if name == "HEALTHCHECK"]
    command: list[str] = json.loads(check.partition("CMD ")[2])
    return command


def is_healthy(image: Stage, environment: Mapping[str, str]) -> bool:
    done = subprocess.run(
        health_check(), env=image.environment | dict(environment), capture_output=True, check=False
    )
    return done.returncode == 0


async def test_health_check_tells_up_from_down(image: Stage, listening: dict[str, str]) -> None:
    await until(lambda: is_healthy(image, listening), UP_S)
    nowhere = listening | {"PAWL_ADMIN_LISTEN": f"127.0.0.1:{free_port()}"}
    assert not is_healthy(image, nowhere)
