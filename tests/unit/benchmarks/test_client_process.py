"""A client's process: what it is told, what it says, and that none is left behind."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks import client_process
from benchmarks.client_process import ClientFailed, run_client

URL = "http://127.0.0.1:1/agent/a/v1"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients are there: this Python stands for theirs."""
    monkeypatch.setattr(client_process, "BINARIES", Path(sys.executable).parent)


async def python(program: str, within_s: float | None = None) -> str:
    return await run_client(URL, sys.executable, "-c", program, within_s=within_s)


async def test_the_last_line_is_what_a_client_says() -> None:
    assert await python("print('a warning'); print('the answer')") == "the answer"


async def test_a_client_is_told_where_the_server_is_and_nothing_of_pawl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAWL_POLICY", "secret")
    told = await python("import os; print(dict(os.environ))")
    assert f"'OPENAI_BASE_URL': '{URL}'" in told
    assert "'ANTHROPIC_BASE_URL': 'http://127.0.0.1:1/agent/a'" in told
    assert "PAWL" not in told


async def test_an_error_ends_with_what_the_client_printed() -> None:
    with pytest.raises(ClientFailed, match="ValueError: not today"):
        await python("raise ValueError('not today')")


async def test_a_client_that_does_not_end_in_time_has_failed() -> None:
    with pytest.raises(ClientFailed, match=r"did not end in 0\.01 s"):
        await python("import signal; signal.pause()", within_s=0.01)


async def test_no_client_is_left_behind(tmp_path: Path) -> None:
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    tell = f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); signal.pause()"
    running = asyncio.create_task(python(tell))
    client = int(await asyncio.to_thread(pipe.read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(client, 0)


async def test_without_clients_it_is_said_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_process, "BINARIES", tmp_path / "nowhere")
    with pytest.raises(ClientFailed, match=r"scripts/install_clients\.py"):
        await python("print()")
