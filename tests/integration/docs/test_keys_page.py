"""The page about API keys, run as it stands: its shell blocks are one script."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from store.keys import list_keys
from tests.conftest import ROOT
from tests.integration.conftest import Proxy
from tests.support.docs.documents import split_blocks

PAGE = ROOT / "docs/howto/keys.md"
LIMIT_S = 150


def script_for(proxy: Proxy) -> str:
    """The page's blocks, with the proxy's addresses and this checkout's `pawl`."""
    found = split_blocks(PAGE, PAGE.read_text())[1]
    blocks = [block.text for block in found if block.language == "sh"]
    text = "\n".join(blocks)
    for shown, real in (("127.0.0.1:8100", proxy.url), ("127.0.0.1:8101", proxy.admin)):
        assert shown in text
        text = text.replace(shown, real)
    # A key counts within two seconds, as the page says; a script is quicker than its reader.
    curl = 'curl() { command curl --retry 20 --retry-delay 1 --retry-all-errors "$@"; }'
    return f'set -eu\npawl() {{ {sys.executable} -m pawl.cli "$@"; }}\n{curl}\n{text}'


async def test_the_page_runs(
    proxy: Proxy, engine: AsyncEngine, database_url: str, tmp_path: Path
) -> None:
    environment = os.environ | {"DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)}
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", script_for(proxy)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "# HELP pawl_records_total" in done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()[-4:]]
    listed = {one["name"]: one for one in lines}
    assert set(listed) == {"agent", "ops", "team-a-agents", "team-a-judge"}
    assert (listed["ops"]["per_minute"], listed["ops"]["at_once"]) == (600, 50)
    assert listed["ops"]["tokens_per_minute"] == 2_000_000
    [call] = (await proxy.episodes(1))[0].calls
    assert call.http_status == 200
    async with engine.connect() as connection:
        keys = {key.name: key for key in await list_keys(connection)}
    assert keys["agent"].revoked_at is not None
    assert keys["ops"].revoked_at is None
