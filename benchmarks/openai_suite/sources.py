"""Fetch what the suite needs once into `var/openai_suite`: sources, packages, mock server.

The sources come from openai-python's repository, whose tag also holds the description of the
API that the mock server (`@stdy/cli`, at the version that the sources name) answers from: the
source distribution has neither that nor all tests.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from store.records import Record

ROOT = Path(__file__).parents[2]
VERSION = "3.3.1"
MOCK = "@stdy/cli@0.22.1"
COMMIT = "753ab5c1a81cd85e8bf0aef4c04c51a2e8dae6cd"
REPOSITORY = "https://github.com/openai/openai-python"
SPEC = "api_reference/openapi.transformed.yml"


class Suite(Record, frozen=True, kw_only=True):
    """Name where everything is."""

    sources: Path
    python: Path
    mock: Path
    spec: Path


def prepare(folder: Path, repository: str) -> Suite:
    """Fetch what is not there yet; `repository` is openai-python's, or a mirror of it.

    Raises:
        subprocess.CalledProcessError: something could not be fetched or installed.
        ValueError: the repository's tag is another commit than ours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = _sources(folder, repository)
    return Suite(
        sources=sources,
        python=_environment(folder, sources),
        mock=_mock(folder),
        spec=_spec(folder, sources),
    )


def _sources(folder: Path, repository: str) -> Path:
    sources = folder / f"openai-python-{VERSION}"
    if not sources.exists():
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{VERSION}"]
        quiet = ["-c", "advice.detachedHead=false"]
        subprocess.run([*clone, *quiet, repository, str(sources)], check=True)
    head = ["git", "-C", str(sources), "rev-parse", "HEAD"]
    found = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    if found != COMMIT:
        raise ValueError(f"{sources} is at {found}, not at v{VERSION} ({COMMIT}): remove it")
    return sources


def _environment(folder: Path, sources: Path) -> Path:
    venv = folder / "venv"
    python = venv / "bin" / "python"
    done = venv / ".installed"
    if not done.exists():
        uv = str(Path(sys.executable).with_name("uv"))
        lock = folder / "requirements.txt"
        export = ["export", "--quiet", "--frozen", "--all-extras", "--no-hashes"]
        target = ["--no-emit-project", "--output-file", str(lock)]
        subprocess.run([uv, *export, *target], cwd=sources, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([uv, "venv", "--clear", "--python", sys.executable, str(venv)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        subprocess.run([*install, "--no-deps", "-r", str(lock)], check=True)
        subprocess.run([*install, "--no-deps", "-e", str(sources)], check=True)
        done.touch()
    return python


def _mock(folder: Path) -> Path:
    home = folder / "mock"
    # The launcher in front of it would leave the server behind when it is ended.
    server = home / "node_modules" / "@stdy" / "cli-linux-x64" / "bin" / "steady"
    if not server.exists():
        places = f"{ROOT / '.venv-clients' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        npm = shutil.which("npm", path=places)
        if npm is None:
            sys.exit("benchmarks.openai_suite needs npm: `make test` brings one, or install Node")
        home.mkdir(exist_ok=True)
        environment = os.environ | {"PATH": places}
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(home), MOCK]
        subprocess.run(install, check=True, env=environment)
    return server


def _spec(folder: Path, sources: Path) -> Path:
    """Write the description with its paths under /v1, where a server has them."""
    mounted = folder / "openapi.v1.yml"
    mounted.write_text("\n".join(under_v1((sources / SPEC).read_text().split("\n"))))
    return mounted


def under_v1(lines: list[str]) -> Iterator[str]:
    """Prefix each path in an OpenAPI description's lines with /v1 (pure)."""
    inside = False
    for line in lines:
        if re.match(r"\S", line):
            inside = line.startswith("paths:")
        yield re.sub(r"^  (['\"]?)/", r"  \1/v1/", line) if inside else line


def templates(spec: Path) -> list[str]:
    """Return the paths of a description, with their parameters in braces."""
    found, inside = [], False
    for line in spec.read_text().split("\n"):
        if re.match(r"\S", line):
            inside = line.startswith("paths:")
        match = re.match(r"  ['\"]?(/[^'\":]*)['\"]?:", line)
        if inside and match is not None:
            found.append(match[1])
    return found
