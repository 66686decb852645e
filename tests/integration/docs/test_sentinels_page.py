"""The page about sentinels, run as it stands: its commands, one after the other."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from tests.conftest import ROOT
from tests.support.docs.documents import split_blocks
from tests.support.ledger.sentinels import judged, newest

PAGE = ROOT / "docs/howto/sentinels.md"
JUDGE = """
import json, sys
print(json.dumps({"value": int(json.loads(sys.stdin.readline())["episode"].split("-")[1]) / 100}))
"""


def script() -> str:
    """The page's shell blocks, with this checkout's `pawl`."""
    found = split_blocks(PAGE, PAGE.read_text())[1]
    blocks = [block.text for block in found if block.language == "sh"]
    return "set -eu\n" + f'pawl() {{ {sys.executable} -m pawl.cli "$@"; }}\n' + "\n".join(blocks)


async def test_the_page_runs(engine: AsyncEngine, database_url: str, tmp_path: Path) -> None:
    await judged(engine, {f"e-{one}": one / 100 for one in range(25)}, judge="quality")
    (tmp_path / "my_judge.py").write_text(JUDGE)
    environment = os.environ | {
        "DATABASE_URL": database_url,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", script()],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "20 sentinels added, 20 in all" in done.stdout
    [ended] = await newest(engine, "quality")
    # The two that are named may be of the sample, too.
    assert ended.scored in (20, 21, 22)
    assert ended.unscored == 0
