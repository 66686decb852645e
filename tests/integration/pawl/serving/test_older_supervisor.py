"""After an upgrade, SIGHUP has a supervisor of an earlier release start the workers of this one."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import aiohttp

from proxy.counting.memory import make_block
from tests.support.servers.fake_upstream import FakeUpstream

# What supervisors gave their workers before these shared a page of versions.
GIVEN = ("ready", "listener", "counters")
BODY = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


async def test_a_worker_that_is_given_no_page_of_versions_serves(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    told, ready = os.pipe()
    counters = make_block("counters")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = (ready, listener.fileno(), counters)
        arguments = (f"--{name}={fd}" for name, fd in zip(GIVEN, given, strict=True))
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pawl.serving.child", "worker", *arguments),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=given,
            env=os.environ
            | {"PAWL_UPSTREAM_URL": upstream.url, "PAWL_SPOOL_DIR": str(tmp_path / "spool")},
        )
        os.close(ready)
        assert await asyncio.to_thread(os.read, told, 2) == b"up"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=BODY) as reply:
            assert reply.status == 200
        worker.terminate()
        assert await worker.wait() == 0
    os.close(told)
    os.close(counters)
