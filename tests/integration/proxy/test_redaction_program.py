"""A user's program sees each call before it is stored; what it takes out is stored nowhere."""

import json
import shlex
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.errors import BadRedaction
from proxy.keeper.keeper import keeping
from proxy.redaction.program import open_program
from proxy.settings import ProxySettings
from store.records import Tokens, TransitionRow
from tests.integration.conftest import Proxy, proxy_with, working
from tests.support.proxy.redaction import leaks, rows, said, settings
from tests.support.waiting import eventually, until

__all__ = ["settings"]

PROGRAM = """
import json, pathlib, sys, time

for line in sys.stdin:
    call = json.loads(line)
    said = json.dumps(call)
    if "hang" in said:
        time.sleep(60)
    if "nonsense" in said:
        print("[1", flush=True)
    elif "canary" in said:
        print(json.dumps({"request": {"model": "m", "messages": "gone"}}), flush=True)
    else:
        print("{}", flush=True)
"""


def with_program(
    settings: ProxySettings, folder: Path, program: str, *, wrapped: bool = False
) -> ProxySettings:
    path = folder / "program.py"
    path.write_text(program)
    command = f"{sys.executable} {path}"
    if wrapped:
        # A shell that starts the program as a child, and does not become it.
        command = shlex.join(["sh", "-c", f"{command}; :"])
    changes = {"redaction": None, "redaction_program": command, "redaction_program_s": 4.0}
    return settings.model_copy(update=changes)


async def calls_of(proxy: Proxy, number: int) -> dict[str, TransitionRow]:
    return {one.key: one.calls[0] for one in await proxy.episodes(number)}


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_program_decides_and_a_call_that_it_fails_over_has_no_content(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path, wrapped: bool
) -> None:
    settings = with_program(settings, tmp_path, PROGRAM, wrapped=wrapped)
    async with proxy_with(settings, engine) as proxy:
        for name in ("canary-1234", "hang", "nonsense", "fine"):
            await proxy.chat(path=f"/episode/of-{name[:4]}", **said(name))
        calls = await calls_of(proxy, 4)
        async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
            told = await reply.read()
    assert json.loads(calls["of-cana"].request or b"") == {"model": "m", "messages": "gone"}
    for name in ("of-hang", "of-nons"):
        assert (calls[name].request, calls[name].reply) == (None, None)
    reasons = {name: call.reason for name, call in calls.items()}
    assert reasons == {
        "of-cana": "redacted",
        "of-hang": "redacted",
        "of-nons": "redacted",
        "of-fine": None,
    }
    assert calls["of-fine"].tokens != Tokens()
    assert b'pawl_redacted_total{rule="program"}' in told
    assert b'pawl_withheld_total{reason="program"}' in told
    assert leaks(await rows(engine)) == []


async def test_while_a_program_does_not_work_calls_wait_and_none_is_stored(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings = with_program(settings, tmp_path, "raise SystemExit(1)")
    async with proxy_with(settings, engine) as proxy:
        reply = await proxy.chat(**said("canary-1234"))
        assert reply.status == 200

        async def stuck() -> bool:
            async with proxy.session.get(f"{proxy.admin}/readyz") as answer:
                told = await answer.json()
            drain = told["drain"]
            return drain["state"] == "stuck" and "PAWL_REDACTION_PROGRAM" in drain["reason"]

        await eventually(stuck)
        assert leaks(await rows(engine)) == []
        (tmp_path / "program.py").write_text(PROGRAM)
        call = await proxy.only_call()
    assert call.reason == "redacted"
    assert leaks(await rows(engine)) == []


SLOW = """
import json, pathlib, sys, time

seen = pathlib.Path(sys.argv[0]).with_name("seen")
for line in sys.stdin:
    with seen.open("a") as file:
        file.write("x")
    time.sleep(600 if "stops here" in line else 0.4)
    print("{}", flush=True)
"""


def slow_program(settings: ProxySettings, folder: Path) -> tuple[ProxySettings, Path]:
    """A program that may take its time, and the file with a byte for each call it was asked."""
    made = with_program(settings, folder, SLOW).model_copy(update={"redaction_program_s": 600.0})
    return made, folder / "seen"


def asked(seen: Path) -> int:
    return len(seen.read_bytes()) if seen.exists() else 0


async def recorded(settings: ProxySettings, engine: AsyncEngine, calls: Iterable[str]) -> None:
    """Record these calls, each in an episode of its own, while there is no keeper."""
    async with working(settings), aiohttp.ClientSession() as session:
        proxy = Proxy(settings, engine, session)
        for number, content in enumerate(calls):
            await proxy.chat(path=f"/episode/e{number}", **said(content))


async def stored(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        found = await connection.execute(text("SELECT count(*) FROM transitions"))
        return int(found.scalar_one())


async def test_a_keeper_ends_in_time_whatever_a_program_does_and_the_next_one_goes_on(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings, seen = slow_program(settings, tmp_path)
    await recorded(settings, engine, ["q"] * 3 + ["stops here"] + ["q"] * 3)
    async with keeping(settings):
        await until(lambda: asked(seen) == 4)
        began = time.monotonic()
    # What it spends on the rest of the spool at most, and on ending the program.
    assert time.monotonic() - began < settings.keeper_ends_s
    assert await stored(engine) < 7
    (tmp_path / "program.py").write_text(PROGRAM)
    async with proxy_with(settings, engine) as proxy:
        episodes = await proxy.episodes(7)
    assert sorted(len(one.calls) for one in episodes) == [1] * 7


async def test_what_a_slow_program_has_seen_is_stored_before_it_has_seen_the_whole_batch(
    settings: ProxySettings, engine: AsyncEngine, tmp_path: Path
) -> None:
    settings, seen = slow_program(settings, tmp_path)
    await recorded(settings, engine, ["q"] * 5 + ["stops here"])
    async with keeping(settings):
        await until(lambda: asked(seen) == 6)
        # It is asked about the last one and does not answer.
        assert await stored(engine) > 0


@pytest.mark.parametrize(
    ("command", "says"),
    [("no-such-program-of-ours x", "there is no program 'no-such"), ("'a", "split into words")],
)
async def test_a_program_that_is_not_there_is_an_error_at_the_start(
    settings: ProxySettings, command: str, says: str
) -> None:
    settings = settings.model_copy(update={"redaction_program": command})
    with pytest.raises(BadRedaction, match=says):
        open_program(settings)
    async with AsyncExitStack() as exits:
        with pytest.raises(BadRedaction, match=says):
            await exits.enter_async_context(keeping(settings))
