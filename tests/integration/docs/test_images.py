"""The proxy's image, built and run by this machine's container engine (or by one made for it)."""

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from store import __version__
from tests.support.waiting import until_true

ROOT: Final = Path(__file__).parents[3]
MEGABYTE: Final = 10**6
UP_S: Final = 120.0
PACKAGES: Final = ("console", "controller", "migrations", "pawl", "proxy", "store", "trainer")
# What the image must have beside modules.
DATA: Final = (
    "migrations/script.py.mako",
    "pawl/scenarios/smollm2_tools.jinja",
    "trainer/recipes/default.toml",
)
TOOLS: Final = ("pip", "pip3", "gcc", "cc", "c++", "ld", "make", "strip")
# Building takes minutes, for whichever test comes first.
pytestmark = pytest.mark.timeout(1800)


def docker(*arguments: str) -> str:
    """What a command of the engine prints; its complaint where it fails."""
    done = subprocess.run(
        [ROOT / "scripts" / "engine.sh", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def normalized(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Image:
    """An image that was built."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        [self.facts] = json.loads(docker("image", "inspect", name))

    def sh(self, command: str) -> str:
        """What a command prints in a container of its own."""
        return docker("run", "--rm", "--entrypoint", "sh", self.name, "-c", command)


@pytest.fixture(scope="module")
def image() -> Image:
    if (
        os.getuid()
        and subprocess.run(
            [ROOT / "scripts" / "engine.sh", "version"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no container engine answers, and only root can have one made")
    built = subprocess.run(
        [ROOT / "scripts" / "images.sh", "proxy"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    name, size = built.stdout.split()[-2:]
    return Image(name, int(size))


def test_image_has_at_most_250_megabytes(image: Image) -> None:
    assert image.size / MEGABYTE <= 250


def test_image_labels_and_tags_have_pawls_version_and_git_revision(image: Image) -> None:
    labels = image.facts["Config"]["Labels"]
    said = {key.removeprefix("org.opencontainers.image."): labels[key] for key in labels}
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    assert said["version"] == __version__
    assert revision.startswith(said["revision"].removesuffix("-dirty"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", said["created"])
    tags = [tag.partition(":")[2] for tag in image.facts["RepoTags"]]
    assert f"{__version__}-g{said['revision']}" in tags
    assert "latest" not in tags


def test_image_and_its_sbom_have_exactly_the_locked_packages(image: Image) -> None:
    lines = (ROOT / "requirements" / "proxy.txt").read_text().splitlines()
    locked = dict(line.split()[0].split("==") for line in lines if "==" in line)
    wanted = {normalized(name): version for name, version in locked.items()}
    wanted["pawl-rl"] = __version__
    listing = (
        "import importlib.metadata, json;"
        "print(json.dumps([(d.name, d.version) for d in importlib.metadata.distributions()]))"
    )
    installed = json.loads(image.sh(f"python -c '{listing}'"))
    assert {normalized(name): version for name, version in installed} == wanted
    sbom: dict[str, Any] = json.loads(image.sh("cat /opt/pawl/sbom.cdx.json"))
    listed = {normalized(one["name"]): one["version"] for one in sbom["components"]}
    assert listed == wanted


def test_image_has_every_module_and_data_file_of_ours(image: Image) -> None:
    found = set(image.sh("cd /opt/pawl/lib/python3.*/site-packages && find . -type f").split())
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {*DATA, *(str(path.relative_to(ROOT)) for path in sources)}
    assert {name for name in names if f"./{name}" not in found} == set()


def test_image_has_no_build_tools_and_no_pip(image: Image) -> None:
    assert image.sh(f"which {' '.join(TOOLS)} || true") == ""
    assert image.sh("python -m pip --version 2>&1 || true").endswith("No module named pip")


@pytest.fixture
def container(image: Image) -> Iterator[str]:
    """`pawl proxy` without a database, as Kubernetes and OpenShift would run it."""
    name = f"pawl-test-{uuid.uuid4().hex[:8]}"
    confined = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--user=123456:0")
    # A health check that went through a proxy would find none.
    variables = ("DATABASE_URL=postgresql://pawl@127.0.0.1:9/pawl", "http_proxy=http://127.0.0.1:9")
    environment = [word for one in variables for word in ("--env", one)]
    volume = ("--volume", f"{name}:/var/lib/pawl/spool")
    docker(
        "run", "--detach", "--init", "--name", name, *confined, *volume, *environment, image.name
    )
    yield name
    docker("rm", "--force", name)
    docker("volume", "rm", name)


def state(container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", container))
    return found


def test_image_runs_as_any_unprivileged_user_on_a_read_only_disk(
    image: Image, container: str
) -> None:
    assert image.facts["Config"]["User"] == "2000:0"
    until_true(lambda: state(container)["Health"]["Status"] == "healthy", UP_S)
    check = image.facts["Config"]["Healthcheck"]["Test"][1:]
    elsewhere = ("exec", "--env", "PAWL_ADMIN_LISTEN=127.0.0.1:9", container, *check)
    with pytest.raises(AssertionError, match="ConnectionRefusedError"):
        docker(*elsewhere)
    docker("stop", "--time", "60", container)
    assert state(container)["ExitCode"] == 0
