"""A real vLLM that does not see the trainer's folder serves what `pawl adapters` fetched for it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from benchmarks.stack import free_port
from pawl.processes import run_module
from pawl.stack.process import Process
from pawl.stack.stack import Stack
from tests.e2e.any_model.test_version_imported import ask, imported
from tests.e2e.conftest import PATIENCE_S
from tests.support.training import write_adapter
from tests.support.waiting import eventually
from trainer.publishing.model_server import ModelServer

# The last by its name: the stack is of no use afterwards.


async def again(process: Process, environment: Mapping[str, str]) -> None:
    """Start a process of the stack anew, in another environment."""
    await process.stop()
    process._environment = dict(environment)
    process._stopping = False
    await process.start()


@asynccontextmanager
async def apart(stack: Stack, folder: Path) -> AsyncIterator[dict[str, str]]:
    """Let each process have a disk of its own; yield the environment of the trainer.

    It is stopped. It hands out its folder by HTTP. Neither trainer nor controller is of use
    afterwards.
    """
    trainer, controller = stack.processes["trainer"], stack.processes["controller"]
    usual = dict(trainer._environment), dict(controller._environment)
    listen = f"127.0.0.1:{free_port()}"
    source = {"PAWL_ADAPTER_SOURCE": f"http://{stack.plan.trainer_listen}/adapters"}
    asked = source | {"PAWL_UPSTREAM_URL": f"http://{listen}/v1"}
    own = {"PAWL_ADAPTERS_LISTEN": listen, "PAWL_ADAPTER_DIR": str(folder / "server")}
    command = [*run_module("pawl.cli"), "adapters"]
    adapters = Process("adapters", command, usual[0] | source | own, folder)
    await adapters.start()
    try:
        await trainer.stop()
        trainer._environment |= asked
        controllers = usual[1] | asked | {"PAWL_ADAPTER_DIR": str(folder / "controller")}
        await again(controller, controllers)
        yield usual[0] | asked
    finally:
        await adapters.stop()


async def test_version_is_published_and_loaded_again_over_http(
    stack: Stack, shallow_dir: str, tmp_path: Path
) -> None:
    adapter = await asyncio.to_thread(write_adapter, shallow_dir, tmp_path / "sft", seed=7)
    async with (
        apart(stack, tmp_path) as environment,
        ModelServer(f"http://127.0.0.1:{stack.plan.vllm.port}/v1") as server,
    ):
        trainer = stack.processes["trainer"]
        # The trainer, which is the source, is stopped: it publishes what was imported.
        status, said = await imported(trainer, adapter)
        assert status == 0, said
        name = said.partition(" ")[0]
        assert name not in await server.models()
        await again(trainer, environment)
        episodes = count()

        async def serves() -> bool:
            return await ask(stack, f"fetched-{next(episodes)}") == name

        async def root() -> str:
            return str((await server.models()).get(name, {}).get("root", ""))

        await eventually(serves, PATIENCE_S)
        own = str(tmp_path / "server")
        assert (await root()).startswith(own)
        # What a restart loses the controller loads again.
        await server.unload(name)
        assert (await eventually(root, PATIENCE_S)).startswith(own)
