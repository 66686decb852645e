"""Run openai-python's own tests, direct and through the proxy.

The suite runs twice against the same mock server: straight, and with `pawl proxy` between them,
recording durably. Every test must end alike; those that fail because the allow-list refuses an
endpoint are counted apart, and the endpoints named.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.first_chunk import running_proxy
from benchmarks.openai_suite.compare import (
    compare,
    is_served,
    outcomes,
    requests_seen,
)
from benchmarks.openai_suite.sources import REPOSITORY, ROOT, VERSION, Suite, prepare, templates
from benchmarks.vllm_server import free_port

READY_S = 60.0
# As openai-python's own scripts/mock starts it.
FORMATS = [f"--validator-{of}-format=brackets" for of in ("query-array", "form-array")] + [
    f"--validator-{of}-format=brackets" for of in ("query-object", "form-object")
]


@contextmanager
def mock_server(suite: Suite, log: Path) -> Iterator[int]:
    """Run the mock server, and yield its port once it answers."""
    port = free_port()
    command = [str(suite.mock), "--host", "127.0.0.1", "--port", str(port), *FORMATS]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, str(suite.spec)], stdout=out, stderr=out)
    try:
        _wait(process, f"http://127.0.0.1:{port}/_x-steady/health", log)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the mock server did not come up: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)


def run_suite(suite: Suite, base_url: str, report: Path, selection: list[str]) -> float:
    """Run the suite once against a server; how long it took, in seconds."""
    workers = str(len(os.sched_getaffinity(0)))
    # Thousands of tracebacks: pytest's own style takes longer than the tests.
    options = ["-q", "-n", workers, "-p", "no:cacheprovider", "--tb=native", "--durations=0"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "PAWL_", "PYTEST_"))
    } | {"TEST_API_BASE_URL": base_url, "DEFER_PYDANTIC_BUILD": "false"}
    began = time.monotonic()
    done = subprocess.run(
        [str(suite.python), "-m", "pytest", *options, f"--junitxml={report}", *selection],
        cwd=suite.sources,
        env=environment,
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the suite did not run:\n{done.stdout.decode()[-4000:]}")
    return round(time.monotonic() - began, 1)


async def measure(suite: Suite, folder: Path, selection: list[str]) -> dict[str, object]:
    """Compare both runs."""
    log, here, there = folder / "mock.log", folder / "direct.xml", folder / "proxied.xml"
    port = free_port()
    with mock_server(suite, log) as mock:
        url = f"http://127.0.0.1:{mock}/v1"
        direct_s = await asyncio.to_thread(run_suite, suite, url, here, selection)
        asked = requests_seen(log.read_text(), templates(suite.spec))
        with tempfile.TemporaryDirectory() as scratch:
            async with running_proxy(Path(scratch), mock, port):
                url = f"http://127.0.0.1:{port}/v1"
                proxied_s = await asyncio.to_thread(run_suite, suite, url, there, selection)
    found = compare(outcomes(here), outcomes(there))
    return {
        "version": VERSION,
        "tests": sum(found.same.values()) + len(found.refused) + len(found.different),
        "same": dict(found.same),
        "refused": len(found.refused),
        "different": list(found.different),
        "direct_s": direct_s,
        "proxied_s": proxied_s,
        "served_endpoints": sorted(f"{m} {p}" for m, p in asked if is_served(m, p)),
        "refused_endpoints": sorted(f"{m} {p}" for m, p in asked if not is_served(m, p)),
    }


def main() -> None:
    """Parse, fetch, run twice, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", default=REPOSITORY, help="openai-python's, or a mirror")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("tests", nargs="*", help="files of the suite (all)")
    options = parser.parse_args()
    folder = ROOT / "var" / "openai_suite"
    suite = prepare(folder, options.repository)
    found = asyncio.run(measure(suite, folder, options.tests))
    table = Table("openai-python " + VERSION, "tests")
    for state, count in found["same"].items():  # type: ignore[attr-defined]
        table.add_row(f"{state}, direct and proxied", str(count))
    table.add_row("refused by the allow-list", str(found["refused"]))
    table.add_row("different", str(len(found["different"])))  # type: ignore[arg-type]
    Console().print(table)
    for line in [*found["different"], *found["refused_endpoints"]]:  # type: ignore[misc]
        print(line)
    if options.json:
        print(json.dumps(found))
    sys.exit(1 if found["different"] else 0)


if __name__ == "__main__":
    main()
