"""Make whole calls with wrk: write its script, run it, read its output."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

from benchmarks.proxy import wire
from benchmarks.proxy.machine import LOAD_CORE, on_core

MARK: Final = "%016d"
MILLISECONDS: Final = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}


@dataclass(frozen=True, slots=True)
class Seen:
    """Hold what wrk counted; a failed call has no 2xx, or a broken or late connection."""

    calls: int
    failed: int
    calls_per_s: float
    median_ms: float
    p99_ms: float


def run(
    url: str, folder: Path, seconds: int, at_once: int, chars: int, key: str = wire.KEY
) -> Seen:
    """Call for so long, so many at once, each call with a prompt of its own."""
    script = folder / "calls.lua"
    script.write_text(lua(url, uuid4().hex, chars, key))
    load = ["wrk", "-t1", f"-c{at_once}", f"-d{seconds}s", "--timeout", "30s", "--latency"]
    with on_core(LOAD_CORE):
        done = subprocess.run(
            [*load, "-s", str(script), url], check=True, capture_output=True, text=True
        )
    return parse(done.stdout)


def lua(url: str, run_mark: str, chars: int, key: str = wire.KEY) -> str:
    """Write a script whose requests differ in a number of fixed width."""
    at = urlsplit(url)
    zeros = MARK % 0
    body = wire.prompt(f"{run_mark} {zeros} ", chars).encode()
    whole = wire.post(at.netloc, at.path, body, key)
    before, after = whole.decode().split(zeros)
    return f"""local number = 0
local before, after = [==[{before.replace(chr(13), "")}]==], [==[{after}]==]
before = before:gsub("\\n", "\\r\\n")
request = function()
  number = number + 1
  return before .. string.format("{MARK}", number) .. after
end
"""


def parse(output: str) -> Seen:
    """Parse wrk's output with --latency; raise `ValueError` for any other."""
    calls = int(_found(r"(\d+) requests in", output)[0])
    refused = _count(r"Non-2xx or 3xx responses: (\d+)", output)
    broken = _count(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output)
    return Seen(
        calls=calls - refused,
        failed=refused + broken,
        calls_per_s=float(_found(r"Requests/sec:\s+([\d.]+)", output)[0])
        * ((calls - refused) / calls if calls else 1),
        median_ms=_milliseconds("50%", output),
        p99_ms=_milliseconds("99%", output),
    )


def _found(pattern: str, output: str) -> tuple[str, ...]:
    match = re.search(pattern, output)
    if match is None:
        raise ValueError(f"wrk's output has no {pattern!r}:\n{output}")
    return match.groups()


def _count(pattern: str, output: str) -> int:
    match = re.search(pattern, output)
    return sum(map(int, match.groups())) if match else 0


def _milliseconds(share: str, output: str) -> float:
    number, unit = _found(rf"{share}\s+([\d.]+)(us|ms|s|m)\b", output)
    return float(number) * MILLISECONDS[unit]
