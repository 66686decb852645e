"""Serve a model that computes what it is asked: vLLM's adapter endpoints, transformers and PEFT.

So the trainer's probe is a real one: log-probabilities of an adapter read from its files,
by another process. A name that comes back with other bytes is refused, for ever: also by one that
was killed and started again, as it keeps the hashes in a folder.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import torch
from aiohttp import web
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

# By this name a proxy knows a server that gives token ids.
ENGINE: Final = "vllm"


class Server:
    """Keep one base model and the adapters that were loaded.

    In `seen`, if given, the hashes of adapters outlive the process.
    """

    def __init__(self, base_name: str, model: Path, seen: Path | None = None) -> None:
        self._base_name = base_name
        self._root = str(model)
        self._base: Any = AutoModelForCausalLM.from_pretrained(self._root, dtype=torch.float32)
        self._words: Any = AutoTokenizer.from_pretrained(self._root)
        self._adapted: Any = None
        self._paths: dict[str, str] = {}
        self._bytes: dict[str, str] = {}
        self._seen = seen
        if seen is not None:
            self._bytes = {file.name: file.read_text() for file in seen.iterdir()}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        base = self._base_name
        listed: list[dict[str, Any]] = [{"id": base, "root": self._root, "parent": None}]
        listed += [{"id": n, "root": path, "parent": base} for n, path in self._paths.items()]
        return web.json_response({"data": [one | {"owned_by": ENGINE} for one in listed]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        found = sha256((Path(path) / "adapter_model.safetensors").read_bytes()).hexdigest()
        if self._remember(name, found) != found:
            return web.Response(status=409, text=f"{name} was loaded with other bytes")
        if self._adapted is None:
            self._adapted = PeftModel.from_pretrained(self._base, path, adapter_name=name)
        elif name not in self._adapted.peft_config:
            self._adapted.load_adapter(path, adapter_name=name)
        self._adapted.eval()
        self._paths[name] = path
        return web.Response(text="Success")

    def _remember(self, name: str, found: str) -> str:
        """Keep the hash that an adapter had the first time."""
        if name not in self._bytes:
            self._bytes[name] = found
            if self._seen is not None:
                # Renamed into place: a kill leaves all of it or nothing.
                half = self._seen.with_name(f"{name}.half")
                half.write_text(found)
                half.rename(self._seen / name)
        return self._bytes[name]

    async def _unload(self, request: web.Request) -> web.Response:
        self._paths.pop((await request.json())["lora_name"], None)
        return web.Response(text="Success")

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response(
            {"tokens": self._words(text, add_special_tokens=False)["input_ids"]}
        )

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != self._base_name and body["model"] not in self._paths:
            return web.Response(status=404, text="no such model")
        ids = body["prompt"]
        if "logprobs" in body:
            sampled = self._sample(body, ids)
            told = {"token_logprobs": [logprob for _, logprob in sampled]}
            ids_of = [token for token, _ in sampled]
            choice: dict[str, Any] = {"token_ids": ids_of, "logprobs": told, "text": "w"}
            choice |= {"index": 0, "prompt_token_ids": ids, "finish_reason": "length"}
            return web.json_response({"id": f"cmpl-{uuid4().hex}", "choices": [choice]})
        entries = [
            {str(token): {"logprob": value}}
            for token, value in zip(ids[1:], self._logprobs(body["model"], ids), strict=True)
        ]
        return web.json_response({"choices": [{"prompt_logprobs": [None, *entries]}]})

    def _logprobs(self, name: str, ids: list[int]) -> list[float]:
        """Return log p of each token after the first, shape (T − 1,)."""
        distribution = torch.log_softmax(self._logits(name, ids)[:-1], -1)
        found: list[float] = distribution.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found

    def _sample(self, body: dict[str, Any], ids: list[int]) -> list[tuple[int, float]]:
        """Sample tokens after `ids`, each with what its log-probability was."""
        temperature = body["temperature"]
        chance = torch.Generator().manual_seed(body["seed"]) if "seed" in body else None
        sampled: list[tuple[int, float]] = []
        for _ in range(body["max_tokens"]):
            seen = [*ids, *(token for token, _ in sampled)]
            logits = self._logits(body["model"], seen)[-1]
            chances = torch.softmax(logits / temperature, -1)
            token = int(torch.multinomial(chances, 1, generator=chance))
            sampled.append((token, float(self._reported(logits, temperature)[token])))
        return sampled

    def _reported(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the log-probabilities told of what is sampled: of the processed logits."""
        return torch.log_softmax(logits / temperature, -1)

    def _logits(self, name: str, ids: list[int]) -> torch.Tensor:
        """Return the logits after each token, (T, V)."""
        tokens = torch.tensor([ids])
        with torch.no_grad():
            if self._adapted is None:
                logits = self._base(tokens).logits
            elif name == self._base_name:
                with self._adapted.disable_adapter():
                    logits = self._adapted(tokens).logits
            else:
                self._adapted.set_adapter(name)
                logits = self._adapted(tokens).logits
        found: torch.Tensor = logits[0].float()
        return found


def serve(base_name: str, model: Path, port: int, seen: Path) -> None:
    """Serve until the process is ended."""
    app = Server(base_name, model, seen).app()
    web.run_app(app, host="127.0.0.1", port=port, print=None)


@asynccontextmanager
async def computing_server(base_name: str, model: str) -> AsyncIterator[str]:
    """Yield the URL, with `/v1`, of one that serves `model` as `base_name`, and its adapters."""
    runner = web.AppRunner(Server(base_name, Path(model)).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
