"""Brings the stack up in the right order, keeps it up, and takes all of it down again."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from pawl.stack.database import kept_postgres
from pawl.stack.preflight import check_disk, check_memory, check_ports
from pawl.stack.process import Process, ProcessFailed
from pawl.stack.vllm import VllmOptions, vllm_command, vllm_environment
from proxy.settings import ProxySettings
from store.embedded import EmbeddedPostgres
from store.records import Record
from store.settings import address

READY_S: Final = 600.0
POLL_S: Final = 0.25
# What the proxy's supervisor needs for itself when it is stopped.
STOP_MARGIN_S: Final = 2.0


class StackPlan(Record, frozen=True, kw_only=True):
    """What is started, and where everything is.

    `database_url` or `upstream_url` set: that one runs elsewhere and is not started.
    """

    vllm: VllmOptions
    database_url: str | None
    upstream_url: str | None
    listen: str
    admin_listen: str
    trainer_listen: str
    data_dir: Path
    spool_dir: Path
    adapter_dir: Path
    log_dir: Path
    recipe: str
    policy: str | None
    model: str | None
    seed: int = 0
    # Whether a judge is configured (PAWL_JUDGE_COMMAND).
    judge: bool = False


class Stack:
    """A running stack."""

    def __init__(self, plan: StackPlan, database_url: str, postgres: EmbeddedPostgres | None):
        self.plan = plan
        self.database_url = database_url
        self.postgres = postgres
        self.processes: dict[str, Process] = {}

    @property
    def base_url(self) -> str:
        """What an agent sets as OPENAI_BASE_URL."""
        return f"http://{self.plan.listen}/v1"

    def check(self) -> None:
        """Raise `ProcessFailed` if something could not be kept up."""
        for process in self.processes.values():
            if process.failed is not None:
                raise process.failed


@asynccontextmanager
async def running_stack(
    plan: StackPlan, tell: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Stack]:
    """A stack that is ready when entered, and wholly gone when left, however it is left.

    `tell` is told what is being waited for.

    Raises:
        NotReady: a port is taken, or there is too little memory or disk; nothing was started.
        ProcessFailed: something would not come up.
    """
    preflight(plan)
    async with AsyncExitStack() as exits:
        tell("PostgreSQL")
        postgres = None
        database_url = plan.database_url
        if database_url is None:
            postgres = await exits.enter_async_context(kept_postgres(plan.data_dir))
            database_url = postgres.url
        stack = Stack(plan, database_url, postgres)
        for process in _processes(plan, database_url):
            await process.start()
            exits.push_async_callback(process.stop)
            stack.processes[process.name] = process
        await _wait_until_ready(stack, tell)
        yield stack


def preflight(plan: StackPlan) -> None:
    """Raise `NotReady` unless ports, memory and disk are there."""
    ports = {
        "proxy": address(plan.listen)[1],
        "proxy admin": address(plan.admin_listen)[1],
        "trainer metrics": address(plan.trainer_listen)[1],
    }
    if plan.upstream_url is None:
        ports["vLLM"] = plan.vllm.port
        check_memory()
    check_ports(ports)
    check_disk(plan.data_dir)


def _processes(plan: StackPlan, database_url: str) -> list[Process]:
    """The slowest to come up first."""
    upstream = plan.upstream_url or f"http://127.0.0.1:{plan.vllm.port}/v1"
    environment = _environment(plan, database_url, upstream)
    pawl = [sys.executable, "-m", "pawl.cli"]
    found = []
    if plan.upstream_url is None:
        cores = sorted(os.sched_getaffinity(0))
        found.append(
            Process("vllm", vllm_command(plan.vllm), vllm_environment(cores), plan.log_dir)
        )
    found.append(Process("trainer", [*pawl, "trainer"], environment, plan.log_dir))
    # It lets its calls end first, and stores what they left: only then may it be killed.
    stop_s = ProxySettings().stop_grace_s + STOP_MARGIN_S
    found.append(Process("proxy", [*pawl, "proxy"], environment, plan.log_dir, stop_s=stop_s))
    if plan.judge:
        found.append(Process("judge", [*pawl, "judge"], environment, plan.log_dir))
    return found


def _environment(plan: StackPlan, database_url: str, upstream: str) -> dict[str, str]:
    named = {
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": upstream,
        "PAWL_LISTEN": plan.listen,
        "PAWL_ADMIN_LISTEN": plan.admin_listen,
        "PAWL_TRAINER_LISTEN": plan.trainer_listen,
        "PAWL_DATA_DIR": str(plan.data_dir.resolve()),
        "PAWL_SPOOL_DIR": str(plan.spool_dir.resolve()),
        "PAWL_ADAPTER_DIR": str(plan.adapter_dir.resolve()),
        "PAWL_RECIPE": plan.recipe,
        "PAWL_SEED": str(plan.seed),
        "PAWL_POLICY": plan.policy or "",
        "PAWL_MODEL": plan.model or "",
        "PYTHONWARNINGS": "ignore",
    }
    return dict(os.environ) | named


async def _wait_until_ready(stack: Stack, tell: Callable[[str], None]) -> None:
    """Until every process answers.

    Raises:
        ProcessFailed: one ended, or is not there after ten minutes.
    """
    plan = stack.plan
    waiting: Mapping[str, str] = {
        "proxy": f"http://{plan.admin_listen}/readyz",
        "trainer": f"http://{plan.trainer_listen}/metrics",
        "vllm": f"http://127.0.0.1:{plan.vllm.port}/health",
    }
    left = {name: url for name, url in waiting.items() if name in stack.processes}
    deadline = asyncio.get_running_loop().time() + READY_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while left:
            tell(", ".join(sorted(left)))
            stack.check()
            for name, url in list(left.items()):
                if await _answers(session, url):
                    del left[name]
            if asyncio.get_running_loop().time() > deadline:
                name = next(iter(left))
                raise ProcessFailed(
                    f"{name} did not come up in {READY_S:.0f} s; the end of its log:\n"
                    + stack.processes[name].last_words()
                )
            await asyncio.sleep(POLL_S)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
