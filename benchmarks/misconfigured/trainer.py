"""Run a real trainer over a database, and tell what is seen of it from outside."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import aiohttp
import asyncpg

from benchmarks.chaos.trainer.cast import BASE
from benchmarks.vllm_server import free_port

# An episode that no version which may serve was trained on is spent in vain.
_IN_VAIN: Final = """
    SELECT count(*) FROM consumptions c JOIN updates u ON u.id = c.update_id
    LEFT JOIN policies p ON (p.name, p.version) = (u.policy, u.version)
    WHERE NOT c.trained OR p.state = 'rejected'
"""
_SERVING: Final = "SELECT max(version) FROM policies WHERE state = 'serving'"
HELD: Final = f'pawl_trainer_held{{policy="{BASE}"}} 1.0'
# The events, and the field of each, that tell an operator what is wrong.
TOLD: Final = {"trainer_holds": "reason", "trainer_waits": "reason", "policy_left": "reason"}
STOP_S: Final = 30.0
ASK_S: Final = 5.0


class Trainer:
    """Run `pawl trainer`: started, and started again where it has ended."""

    def __init__(self, folder: Path, url: str, upstream_url: str, model: Path) -> None:
        self.recipe, self.full = folder / "recipe.toml", folder / "memory-is-full"
        self._url, self._folder, self._log = url, folder, folder / "trainer.log"
        self._port = free_port()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PAWL_")}
        self._env: Mapping[str, str] = kept | {
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
            "DATABASE_URL": url,
            "PAWL_UPSTREAM_URL": upstream_url,
            "PAWL_ADAPTER_DIR": str(folder / "adapters"),
            "PAWL_RECIPE": str(self.recipe),
            "PAWL_MODEL": str(model),
            "PAWL_TRAINER_LISTEN": f"127.0.0.1:{self._port}",
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, unless it runs."""
        if self.ended is None and self._process is not None:
            return
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.misconfigured.trainer_process", str(self.full)),
                cwd=self._folder,
                env=self._env,
                stdout=log,
                stderr=log,
            )

    @property
    def ended(self) -> int | None:
        """Return the status that it ended with, None while it runs."""
        return None if self._process is None else self._process.returncode

    async def stop(self) -> None:
        """Send SIGTERM, and wait for its end."""
        if self._process is not None and self.ended is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def is_held(self) -> bool:
        """Return whether its metrics say that it claims nothing."""
        limit = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(f"http://127.0.0.1:{self._port}/metrics") as reply,
            ):
                return HELD in (await reply.text()).splitlines()
        except (aiohttp.ClientError, TimeoutError):
            return False

    def told(self) -> str:
        """Return the last that it said of what is wrong: why it ended, or a reason in its log."""
        return next(reversed(list(self._reasons())), "")

    def _reasons(self) -> Iterator[str]:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        for line in text.splitlines():
            if line.startswith("pawl: "):
                yield line
            elif line.startswith("{"):
                said = json.loads(line)
                field = TOLD.get(said.get("event", ""))
                if field is not None:
                    yield str(said.get(field, ""))

    def says(self, event: str) -> bool:
        """Return whether its log has that event."""
        return self._log.exists() and f'"{event}"' in self._log.read_text(errors="replace")

    async def spent(self) -> int:
        """Count episodes that are consumed, and that no serving version has learned from."""
        return await self._count(_IN_VAIN)

    async def serving(self) -> int:
        """Return the version that serves; 0 if none does yet."""
        return await self._count(_SERVING)

    async def _count(self, question: str) -> int:
        connection = await asyncpg.connect(self._url)
        try:
            return int(await connection.fetchval(question) or 0)
        finally:
            await connection.close()
