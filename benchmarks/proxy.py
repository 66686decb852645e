"""`python -m benchmarks.proxy`: calls a second at 64 at once, direct to nginx and through Pawl.

nginx plays the model server (a canned reply of 2.9 KB with ids, 4 KB prompts) on one core,
beside wrk, which makes the load; `pawl proxy` has the other core to itself, recording durably
and draining into an embedded PostgreSQL meanwhile. The ratio is to nginx, the floor, asked
through an nginx that passes on. Needs nginx and wrk (Debian: nginx-light, wrk).
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.first_chunk import running_proxy
from benchmarks.vllm_server import free_port

PROXY_CORE, OTHER_CORE = "0", "1"
PROMPT = "x" * 4000


def canned_reply() -> str:
    """A chat completion as vLLM gives it: 200 prompt ids, 20 sampled."""
    logprob = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * 60},
        "logprobs": {"content": [logprob] * 20},
        "finish_reason": "stop",
        "token_ids": list(range(20)),
    }
    reply = {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": 200, "completion_tokens": 20},
        "prompt_token_ids": list(range(1000, 1200)),
    }
    return json.dumps(reply, separators=(",", ":"))


HEAD = """
worker_processes 1; daemon off; pid {folder}/{name}.pid; error_log {folder}/{name}.log;
events {{ worker_connections 4096; }}
http {{ access_log off; keepalive_requests 10000000; client_body_buffer_size 64k;
"""


def model_server(port: int) -> str:
    """nginx's configuration as the model server."""
    models = json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]})
    return f"""server {{ listen 127.0.0.1:{port}; default_type application/json;
 location = /v1/models {{ return 200 '{models}'; }}
 location / {{ return 200 '{canned_reply()}'; }} }} }}"""


def passing_on(port: int, upstream: int) -> str:
    """nginx's configuration as the floor: a reverse proxy that does nothing else."""
    return f"""upstream model {{ server 127.0.0.1:{upstream}; keepalive 128; }}
server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://model;
 proxy_http_version 1.1; proxy_set_header Connection ""; }} }} }}"""


@contextmanager
def nginx(folder: Path, name: str, servers: str, core: str) -> Iterator[None]:
    """nginx on one core."""
    config = folder / f"{name}.conf"
    config.write_text(HEAD.format(folder=folder, name=name) + servers)
    process = subprocess.Popen(["taskset", "-c", core, "nginx", "-c", str(config)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def calls_per_second(port: int, folder: Path, seconds: int, at_once: int) -> dict[str, float]:
    """What wrk sees."""
    script = folder / "post.lua"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": PROMPT}]})
    header = 'wrk.headers["Content-Type"]="application/json"'
    script.write_text(f"wrk.method=\"POST\" wrk.body='{body}' {header}")
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    load = ["wrk", "-t1", f"-c{at_once}", f"-d{seconds}s", "--latency", "-s", str(script), url]
    out = subprocess.run(
        ["taskset", "-c", OTHER_CORE, *load], check=True, capture_output=True, text=True
    ).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        raise RuntimeError(f"calls failed:\n{out}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    median = re.search(r"50%\s+([\d.]+)(us|ms|s)", out)
    assert rate is not None
    assert median is not None
    unit = {"us": 0.001, "ms": 1.0, "s": 1000.0}[median[2]]
    return {"calls_per_s": float(rate[1]), "median_ms": float(median[1]) * unit}


async def measure(seconds: int, at_once: int) -> dict[str, dict[str, float]]:
    """The model server itself, the floor and Pawl, in one run."""
    upstream, floor, pawl = free_port(), free_port(), free_port()
    found: dict[str, dict[str, float]] = {}

    async def load(name: str, port: int) -> None:
        found[name] = await asyncio.to_thread(calls_per_second, port, folder, seconds, at_once)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with nginx(folder, "model", model_server(upstream), OTHER_CORE):
            await asyncio.sleep(0.5)
            await load("direct", upstream)
            with nginx(folder, "floor", passing_on(floor, upstream), PROXY_CORE):
                await asyncio.sleep(0.5)
                await load("nginx", floor)
            # The proxy, its drainer and PostgreSQL inherit the one core.
            os.sched_setaffinity(0, {int(PROXY_CORE)})
            async with running_proxy(folder, upstream, pawl):
                await load("pawl", pawl)
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    for tool in ("nginx", "wrk", "taskset"):
        if shutil.which(tool) is None:
            sys.exit(f"benchmarks.proxy needs {tool}: install it (Debian: nginx-light, wrk)")
    found = asyncio.run(measure(options.seconds, options.at_once))
    table = Table("through", "calls/s", "median ms", "of nginx")
    floor = found["nginx"]["calls_per_s"]
    for name, figures in found.items():
        rate = figures["calls_per_s"]
        table.add_row(name, f"{rate:.0f}", f"{figures['median_ms']:.2f}", f"{rate / floor:.1%}")
    Console().print(table)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
