"""Run openai-python's own tests, direct and through the proxy.

The suite runs twice against the same mock server: directly, and through `pawl proxy`, which records
durably. Every test must have the same outcome twice; tests that fail because the allow-list refuses
an endpoint are counted apart, and the endpoints named. Ends with status 1 if an outcome differs.

These are fetched once into `var/openai_suite`: openai-python's repository at a tag (the source
distribution lacks tests, and the API description of the mock server), its packages, and the mock
server (`@stdy/cli`, at the version that the sources name).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from benchmarks.stack import (
    CLIENT_BINARIES,
    ROOT,
    answers,
    free_port,
    running,
    running_proxy,
    wait_for,
)

FOLDER: Final = ROOT / "var" / "openai_suite"
VERSION: Final = "3.3.1"
COMMIT: Final = "753ab5c1a81cd85e8bf0aef4c04c51a2e8dae6cd"
REPOSITORY: Final = "https://github.com/openai/openai-python"
SPEC: Final = "api_reference/openapi.transformed.yml"
MOCK: Final = "@stdy/cli@0.22.1"
# Options from openai-python's own scripts/mock.
FORMATS: Final = [
    f"--validator-{of}-format=brackets"
    for of in ("query-array", "form-array", "query-object", "form-object")
]
# The message of the allow-list (`proxy.routing`).
REFUSAL: Final = re.compile(r"([A-Z]+ \S+) is not a path that Pawl serves")


class Outcome(NamedTuple):
    """The outcome of a test; `text` describes its failure."""

    state: str
    text: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", default=REPOSITORY, help="openai-python's, or a mirror")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("tests", nargs="*", help="files of the suite (all)")
    options = parser.parse_args()
    result = measure(options.repository, options.tests)
    table = Table("openai-python " + VERSION, "tests")
    for state, count in result["same"].items():
        table.add_row(f"{state}, direct and proxied", str(count))
    table.add_row("refused by the allow-list", str(sum(result["refused"].values())))
    table.add_row("different", str(len(result["different"])))
    Console().print(table)
    for line in [*result["different"], *(f"refused: {path}" for path in result["refused"])]:
        print(line)
    if options.json:
        print(json.dumps(result))
    sys.exit(1 if result["different"] else 0)


def measure(repository: str, tests: list[str]) -> dict[str, Any]:
    """Run the suite directly and through the proxy, and compare the outcomes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sources = fetch_sources(repository)
    python = install(sources)
    # Real servers have the paths below /v1, but the description has them without it.
    spec = FOLDER / "openapi.v1.yml"
    spec.write_text("\n".join(prefix_paths((sources / SPEC).read_text().split("\n"))))
    port, log = free_port(), FOLDER / "mock.log"
    log.unlink(missing_ok=True)
    mock: list[str | Path] = [
        mock_program(),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *FORMATS,
        spec,
    ]
    with running(mock, log) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/_x-steady/health"), process, log)
        direct, direct_s = run_suite(sources, python, port, "direct", tests)
        with (
            tempfile.TemporaryDirectory() as scratch,
            running_proxy(Path(scratch), port, PAWL_ALLOW_MODEL_DELETE="true") as proxy,
        ):
            proxied, proxied_s = run_suite(sources, python, proxy.port, "proxied", tests)
    return compare(direct, proxied) | {
        "version": VERSION,
        "direct_s": direct_s,
        "proxied_s": proxied_s,
    }


def fetch_sources(repository: str) -> Path:
    """Clone openai-python's tag unless it was cloned before; return the folder.

    Raises:
        ValueError: the tag is not at the commit `COMMIT`.
    """
    sources = FOLDER / f"openai-python-{VERSION}"
    if not sources.exists():
        clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
        subprocess.run([*clone, "--branch", f"v{VERSION}", repository, str(sources)], check=True)
    head = ["git", "-C", str(sources), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    if commit != COMMIT:
        raise ValueError(f"{sources} is at {commit}, not at v{VERSION} ({COMMIT}): remove it")
    return sources


def install(sources: Path) -> Path:
    """Install the suite's packages into an environment of its own; return its Python."""
    venv, lock = FOLDER / "venv", FOLDER / "requirements.txt"
    python, done = venv / "bin" / "python", venv / ".installed"
    if not done.exists():
        uv = str(Path(sys.executable).with_name("uv"))
        export = [uv, "export", "--quiet", "--frozen", "--all-extras", "--no-hashes"]
        export += ["--no-emit-project", "--output-file", str(lock)]
        subprocess.run(export, cwd=sources, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([uv, "venv", "--clear", "--python", sys.executable, str(venv)], check=True)
        pip = [uv, "pip", "install", "--quiet", "--python", str(python), "--no-deps"]
        subprocess.run([*pip, "-r", str(lock)], check=True)
        subprocess.run([*pip, "-e", str(sources)], check=True)
        done.touch()
    return python


def mock_program() -> Path:
    """Install the mock server; return the path of its program.

    npm's launcher is not used: if it is killed, the server stays.
    """
    home = FOLDER / "mock"
    server = home / "node_modules" / "@stdy" / "cli-linux-x64" / "bin" / "steady"
    if not server.exists():
        places = f"{CLIENT_BINARIES}{os.pathsep}{os.environ['PATH']}"
        npm = shutil.which("npm", path=places)
        if npm is None:
            sys.exit("benchmarks.openai_suite needs npm: `make test` brings one, or install Node")
        home.mkdir(exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(home), MOCK]
        subprocess.run(command, check=True, env=os.environ | {"PATH": places})
    return server


def run_suite(
    sources: Path, python: Path, port: int, name: str, tests: list[str]
) -> tuple[dict[str, Outcome], float]:
    """Run the suite against a server; return each test's outcome, and the seconds it took."""
    report = FOLDER / f"{name}.xml"
    # Formatting thousands of tracebacks in pytest's style would take longer than the tests.
    command = [str(python), "-m", "pytest", "-q", "-n", str(len(os.sched_getaffinity(0)))]
    command += ["-p", "no:cacheprovider", "--tb=native", f"--junitxml={report}", *tests]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "PAWL_", "PYTEST_", "PYTHON"))
    } | {"TEST_API_BASE_URL": f"http://127.0.0.1:{port}/v1", "DEFER_PYDANTIC_BUILD": "false"}
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=sources, env=environment, stdout=subprocess.PIPE, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the suite did not run:\n{done.stdout.decode()[-4000:]}")
    return outcomes(report), round(time.monotonic() - began, 1)


def outcomes(report: Path) -> dict[str, Outcome]:
    """Return each test's outcome, from a JUnit report."""
    by_name: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        while name in by_name:  # parameters with the same text
            name += "'"
        by_name[name] = Outcome("passed")
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                by_name[name] = Outcome(child.tag, f"{child.get('message')}\n{child.text}")
    return by_name


def compare(direct: Mapping[str, Outcome], proxied: Mapping[str, Outcome]) -> dict[str, Any]:
    """Count each test once: same outcome, refused by the allow-list, or different."""
    same: Counter[str] = Counter()
    refused, different = Counter[str](), []
    for name in sorted({*direct, *proxied}):
        here, there = direct.get(name, Outcome("missing")), proxied.get(name, Outcome("missing"))
        if here.state == there.state:
            same[here.state] += 1
        elif (refusal := REFUSAL.search(there.text)) is not None:
            refused[refusal[1]] += 1
        else:
            different.append(f"{name}: {here.state} direct, {there.state} through the proxy")
    tests = same.total() + refused.total() + len(different)
    return {"tests": tests, "same": same, "refused": refused, "different": different}


def prefix_paths(lines: list[str]) -> Iterator[str]:
    """Prefix each path in an OpenAPI description's lines with /v1."""
    inside = False
    for line in lines:
        if re.match(r"\S", line):
            inside = line.startswith("paths:")
        yield re.sub(r"^  (['\"]?)/", r"  \1/v1/", line) if inside else line


if __name__ == "__main__":
    main()
