"""Start the processes of the local stack, keep them running, and stop them in order."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from pawl.database import keep_postgres_running
from pawl.processes import run_module
from pawl.settings import ConsoleSettings, ControllerSettings, StackSettings, read_settings
from pawl.stack.preflight import (
    check_disk,
    check_dtype,
    check_gpus,
    check_memory,
    check_ports,
    check_vllm,
)
from pawl.stack.process import Process, ProcessFailed
from pawl.stack.vllm import (
    SHARE_ALONE,
    SHARE_BESIDE_TRAINER,
    USUAL_TOOL_PARSER,
    VllmOptions,
    has_gpu,
    log_message,
    vllm_command,
    vllm_environment,
)
from proxy.settings import ProxySettings
from store.embedded import EmbeddedPostgres
from store.records import Record
from store.settings import parse_address
from trainer.settings import USUAL_SLOTS, TrainerSettings

# Without these nothing is served.
SERVING: Final = frozenset(("proxy", "vllm"))
# How long each process may take to end if the stack is stopped before it is ready.
STOP_STARTING_S: Final = 4.0
# A first start downloads the model.
READY_S: Final = 1200.0
CHECK_S: Final = 1.0
POLL_S: Final = 0.25
# How long the proxy's supervisor may take beyond `PAWL_STOP_GRACE_S` when it is stopped.
STOP_MARGIN_S: Final = 2.0


class StackPlan(Record, frozen=True, kw_only=True):
    """The processes to start, with their addresses (HOST:PORT), folders and settings.

    Without a `database_url`, the embedded PostgreSQL is started in `data_dir`; without an
    `upstream_url`, vLLM is started. `train_gpus` are only checked: the trainer reads the setting
    itself. `settings` are environment variables that differ from this process's.
    """

    vllm: VllmOptions
    listen: str
    admin_listen: str
    trainer_listen: str
    controller_listen: str
    console_listen: str
    data_dir: Path
    log_dir: Path
    database_url: str | None = None
    upstream_url: str | None = None
    train_gpus: Sequence[int] = ()
    settings: Mapping[str, str] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """Return the addresses of the processes, by the settings that state them."""
        return {
            "PAWL_LISTEN": self.listen,
            "PAWL_ADMIN_LISTEN": self.admin_listen,
            "PAWL_TRAINER_LISTEN": self.trainer_listen,
            "PAWL_CONTROLLER_LISTEN": self.controller_listen,
            "PAWL_CONSOLE_LISTEN": self.console_listen,
        }


def configured_plan(
    model: str,
    served_name: str,
    rank: int,
    *,
    tool_parser: str | None = None,
    chat_template: Path | None = None,
    **others: Any,
) -> StackPlan:
    """Return a plan with the addresses and vLLM's options from this process's settings.

    `rank` is the highest LoRA rank, and `others` are the other fields of the plan.
    """
    settings, proxy = read_settings(StackSettings), read_settings(ProxySettings)
    trainer = read_settings(TrainerSettings)
    # Unset means the first GPU, for vLLM and for the trainer.
    shares_gpu = set(settings.serve_gpus or (0,)) & set(trainer.train_gpus or (0,))
    return StackPlan(
        vllm=VllmOptions(
            model=model,
            served_name=served_name,
            port=settings.vllm_port,
            dtype=settings.vllm_dtype,
            max_model_len=settings.max_model_len,
            max_lora_rank=rank,
            tool_parser=tool_parser or proxy.tool_parser or USUAL_TOOL_PARSER,
            chat_template=chat_template,
            sampling_defaults=proxy.sampling_defaults,
            adapter_slots=trainer.adapter_slots or USUAL_SLOTS,
            gpus=settings.serve_gpus,
            gpu_share=settings.serve_gpu_share
            or (SHARE_BESIDE_TRAINER if shares_gpu else SHARE_ALONE),
            arguments=settings.vllm_args,
        ),
        listen=proxy.listen,
        admin_listen=proxy.admin_listen,
        trainer_listen=trainer.trainer_listen,
        train_gpus=trainer.train_gpus,
        controller_listen=read_settings(ControllerSettings).controller_listen,
        console_listen=read_settings(ConsoleSettings).console_listen,
        **others,
    )


class Stack:
    """The running processes of a plan; `postgres` is the embedded server, if it is used."""

    def __init__(self, plan: StackPlan, database_url: str, postgres: EmbeddedPostgres | None):
        """Store the plan and the database; processes are added as they start."""
        self.plan = plan
        self.database_url = database_url
        self.postgres = postgres
        self.processes: dict[str, Process] = {}
        self.url = f"http://{plan.listen}"
        # The value for an agent's `OPENAI_BASE_URL`, and the URL that rewards are posted to.
        self.base_url = f"{self.url}/v1"
        self.feedback_url = f"{self.url}/feedback"

    async def stop_training(self) -> None:
        """Stop the trainer, so that no new version comes; the other processes go on."""
        await self.processes["trainer"].stop()

    def check(self) -> None:
        """Raise an error if a process could not be kept running.

        Raises:
            ProcessFailed: a process was given up.
        """
        for process in self.processes.values():
            if process.failed is not None:
                raise process.failed

    async def serve(self, tell: Callable[[str], None]) -> None:
        """Watch all processes for ever; call `tell` for each that fails while serving goes on.

        Raises:
            ProcessFailed: the proxy or vLLM was given up.
        """
        others = {name: one for name, one in self.processes.items() if name not in SERVING}
        while True:
            for name in SERVING & self.processes.keys():
                if (failed := self.processes[name].failed) is not None:
                    raise failed
            for name in [name for name, process in others.items() if process.failed is not None]:
                tell(
                    f"{others.pop(name).failed}\nCalls are still served and recorded, without the "
                    f"{name}. Fix the error in its log, then start Pawl again."
                )
            await asyncio.sleep(CHECK_S)


@asynccontextmanager
async def running_stack(
    plan: StackPlan, tell: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Stack]:
    """Start the stack, yield it once it is ready, and stop it at the end.

    `tell` is called with the names of the processes that are not ready yet.

    Raises:
        NotReady: a port is taken, a GPU is not there, or there is too little memory or disk;
            nothing was started.
        ProcessFailed: a process did not come up.
    """
    preflight(plan)
    async with AsyncExitStack() as exits:
        tell("PostgreSQL")
        postgres = None
        database_url = plan.database_url
        if database_url is None:
            postgres = await exits.enter_async_context(keep_postgres_running(plan.data_dir))
            database_url = postgres.url
        stack = Stack(plan, database_url, postgres)
        try:
            for process in _make_processes(plan, database_url):
                await process.start()
                exits.push_async_callback(process.stop)
                stack.processes[process.name] = process
                if process.name == "vllm" and has_gpu():
                    # vLLM measures the GPU's free memory as it starts: the trainer must not use it.
                    await _wait_until_ready(stack, tell)
            await _wait_until_ready(stack, tell)
        except BaseException:
            # No client was served yet, and a kill may follow after ten seconds, as from Docker.
            stops = (process.stop(STOP_STARTING_S) for process in stack.processes.values())
            await asyncio.gather(*stops)
            raise
        yield stack


def preflight(plan: StackPlan) -> None:
    """Check that a plan's ports are free, its programs and GPUs exist, memory and disk suffice.

    Raises:
        NotReady: something is missing; the message names it and the remedy.
    """
    ports = {setting: parse_address(stated)[1] for setting, stated in plan.addresses.items()}
    if plan.upstream_url is None:
        ports["PAWL_VLLM_PORT"] = plan.vllm.port
        check_vllm()
        check_dtype(plan.vllm.dtype, on_gpu=has_gpu())
        check_memory()
        check_gpus("PAWL_SERVE_GPUS", plan.vllm.gpus)
    check_gpus("PAWL_TRAIN_GPUS", plan.train_gpus)
    check_ports(ports)
    check_disk(plan.data_dir)


def _make_processes(plan: StackPlan, database_url: str) -> list[Process]:
    """Return the processes of a plan, the slowest to come up first."""
    upstream = plan.upstream_url or f"http://127.0.0.1:{plan.vllm.port}/v1"
    environment = _environment(plan, database_url, upstream)
    pawl = run_module("pawl.cli")
    processes = []
    if plan.upstream_url is None:
        cores = len(os.sched_getaffinity(0))
        processes.append(
            Process(
                "vllm",
                vllm_command(plan.vllm),
                vllm_environment(cores, plan.vllm.gpus),
                plan.log_dir,
            )
        )
    processes.append(Process("trainer", [*pawl, "trainer"], environment, plan.log_dir))
    processes.append(Process("controller", [*pawl, "controller"], environment, plan.log_dir))
    processes.append(Process("console", [*pawl, "console"], environment, plan.log_dir))
    # The proxy finishes its calls and stores their records before it may be killed.
    settings = ProxySettings()
    stop_s = settings.drain_delay_s + settings.stop_grace_s + STOP_MARGIN_S
    processes.append(Process("proxy", [*pawl, "proxy"], environment, plan.log_dir, stop_s=stop_s))
    return processes


def _environment(plan: StackPlan, database_url: str, upstream: str) -> dict[str, str]:
    environment = {
        "DATABASE_URL": database_url,
        "PAWL_UPSTREAM_URL": upstream,
        **plan.addresses,
        "PAWL_DATA_DIR": str(plan.data_dir.resolve()),
        "PYTHONWARNINGS": "ignore",
    }
    if plan.upstream_url is None:
        environment["PAWL_TOOL_PARSER"] = plan.vllm.tool_parser
    return {**os.environ, **environment, **plan.settings}


async def _wait_until_ready(stack: Stack, tell: Callable[[str], None]) -> None:
    """Wait until every process answers over HTTP.

    Raises:
        ProcessFailed: a process was given up, or does not answer after `READY_S` seconds.
    """
    plan = stack.plan
    # The trainer is ready once it has tested the model server. A model server that is not ours may
    # come up much later, so then only the trainer's port is waited for.
    trainer_path = "readyz" if "vllm" in stack.processes else "metrics"
    health_urls = {
        "proxy": f"http://{plan.admin_listen}/readyz",
        "trainer": f"http://{plan.trainer_listen}/{trainer_path}",
        "controller": f"http://{plan.controller_listen}/healthz",
        "console": f"http://{plan.console_listen}/healthz",
        "vllm": f"http://127.0.0.1:{plan.vllm.port}/health",
    }
    waiting = {name: url for name, url in health_urls.items() if name in stack.processes}
    deadline = asyncio.get_running_loop().time() + READY_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while waiting:
            tell(", ".join(_awaited_stage(stack, name) for name in sorted(waiting)))
            stack.check()
            for name, url in list(waiting.items()):
                if await _answers(session, url):
                    del waiting[name]
            if asyncio.get_running_loop().time() > deadline:
                name = next(iter(waiting))
                raise ProcessFailed(
                    f"{name} did not come up in {READY_S:.0f} s; the end of its log:\n"
                    + stack.processes[name].last_log_lines()
                )
            await asyncio.sleep(POLL_S)


def _awaited_stage(stack: Stack, name: str) -> str:
    """Return a process's name; for vLLM, whose start takes minutes, also the newest log message."""
    stage = log_message(stack.processes[name].last_log_lines(1)) if name == "vllm" else ""
    return f"{name} ({stage})" if stage else name


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
