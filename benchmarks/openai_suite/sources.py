"""What the suite needs, fetched once into `var/openai_suite`: sources, packages, mock server.

The suite and its locked packages come with openai-python's source distribution; the mock
server it is run against is `@stdy/cli`, at the version that the sources name. Only the API's
description, which that server answers from, is on GitHub alone.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from store.records import Record

ROOT = Path(__file__).parents[2]
VERSION = "3.3.1"
MOCK = "@stdy/cli@0.22.1"
SPEC_URL = (
    f"https://raw.githubusercontent.com/openai/openai-python/v{VERSION}"
    "/api_reference/openapi.transformed.yml"
)
SPEC_SHA256 = "98d75b34112b8e6b3c587764ee2cbf7236ebb8b605f57a24866500d72dd974a8"


class Suite(Record, frozen=True, kw_only=True):
    """Where everything is."""

    sources: Path
    python: Path
    mock: Path
    spec: Path


def prepare(folder: Path, spec: Path | None) -> Suite:
    """Fetch what is not there yet; `spec` is the API's description where GitHub is out of reach.

    Raises:
        subprocess.CalledProcessError: a package could not be installed.
        OSError: the description could not be had.
        ValueError: it is not the one that belongs to this version of the suite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = _sources(folder)
    return Suite(
        sources=sources,
        python=_environment(folder, sources),
        mock=_mock(folder),
        spec=_spec(folder, spec),
    )


def _sources(folder: Path) -> Path:
    unpacked = folder / f"openai-{VERSION}"
    if not unpacked.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        wanted = ["--no-binary", "openai", f"openai=={VERSION}", "--dest", str(folder)]
        subprocess.run([*pip, *wanted], check=True)
        with tarfile.open(folder / f"openai-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return unpacked


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


def _spec(folder: Path, given: Path | None) -> Path:
    """The description with its paths under /v1, where a server has them."""
    mounted = folder / "openapi.v1.yml"
    if not mounted.exists():
        raw = _download() if given is None else given.read_bytes()
        if hashlib.sha256(raw).hexdigest() != SPEC_SHA256:
            raise ValueError(f"{given or SPEC_URL} is not the API's description of v{VERSION}")
        mounted.write_text("\n".join(under_v1(raw.decode().split("\n"))))
    return mounted


def _download() -> bytes:
    try:
        with urllib.request.urlopen(SPEC_URL, timeout=60) as reply:
            return bytes(reply.read())
    except OSError as error:
        raise OSError(f"{SPEC_URL}: {error}; fetch it elsewhere and name it with --spec") from error


def under_v1(lines: list[str]) -> Iterator[str]:
    """An OpenAPI description's lines, each path of it prefixed with /v1 (pure)."""
    inside = False
    for line in lines:
        if re.match(r"\S", line):
            inside = line.startswith("paths:")
        yield re.sub(r"^  (['\"]?)/", r"  \1/v1/", line) if inside else line


def templates(spec: Path) -> list[str]:
    """The paths of a description, with their parameters in braces."""
    found, inside = [], False
    for line in spec.read_text().split("\n"):
        if re.match(r"\S", line):
            inside = line.startswith("paths:")
        match = re.match(r"  ['\"]?(/[^'\":]*)['\"]?:", line)
        if inside and match is not None:
            found.append(match[1])
    return found
