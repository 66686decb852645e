"""Serve a model that is computed, by a server that can be set up wrongly while it runs.

It answers what vLLM answers to an adapter that does not fit it.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors import safe_open

from benchmarks.chaos.trainer.cast import BASE
from benchmarks.chaos.trainer.server import Server
from benchmarks.vllm_server import free_port

MAX_RANK = 16
# What vLLM answers to an adapter that it cannot load.
REFUSED = 400
# A server that goes away waits for nobody.
SHUTDOWN_S = 0.1


class Settings:
    """Say how the server is set up.

    Attributes:
        max_rank: the highest rank of an adapter.
        without_lora: the layers that it supports no LoRA in.
        raw: whether it tells log-probabilities as they were before the temperature.
        wrong_base: whether it serves another model under the base model's name.
    """

    def __init__(self) -> None:
        """Begin with everything as it should be."""
        self.max_rank = MAX_RANK
        self.without_lora: Collection[str] = ()
        self.raw = False
        self.wrong_base = False


class Particular(Server):
    """Refuse what the server's settings do not allow."""

    def __init__(self, model: Path, settings: Settings) -> None:
        super().__init__(BASE, model)
        self._settings = settings

    async def _load(self, request: web.Request) -> web.Response:
        why = self._misfit(Path((await request.json())["lora_path"]))
        if why is None:
            return await super()._load(request)
        error = {"message": why, "type": "BadRequestError", "code": REFUSED}
        return web.json_response({"error": error}, status=REFUSED)

    def _misfit(self, folder: Path) -> str | None:
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        most = self._settings.max_rank
        if rank > most:
            return f"LoRA rank {rank} is greater than max_lora_rank {most}."
        with safe_open(str(folder / "adapter_model.safetensors"), "pt") as file:
            layers = {name.rsplit(".lora_", 1)[0].rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
        odd = sorted(layers & set(self._settings.without_lora))
        return f"While loading the adapter, found unexpected modules {odd}." if odd else None

    def _reported(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return super()._reported(logits, 1.0 if self._settings.raw else temperature)


class ModelServer:
    """Run one of the right model and one of another at one port, of which the settings pick one."""

    def __init__(self, right: Path, wrong: Path) -> None:
        self.settings = Settings()
        self._port = free_port()
        self._right = Particular(right, self.settings).app()
        self._wrong = Particular(wrong, self.settings).app()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Return its base URL, with `/v1`."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def start(self) -> None:
        """Begin to listen, unless it listens already."""
        if self._runner is None:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._pass_on)
            self._runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def stop(self) -> None:
        """Be away."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _pass_on(self, request: web.Request) -> Any:
        app = self._wrong if self.settings.wrong_base else self._right
        return await (await app.router.resolve(request)).handler(request)
