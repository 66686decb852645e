"""Script vLLM's adapter endpoints, for publishing under faults."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.servers.fake_upstream import Handler


class FakeModelServer:
    """Load names and answer prompt log-probabilities, or fail where told to."""

    def __init__(self) -> None:
        self.url = ""
        self.loaded: dict[str, str] = {}
        self.logprobs: dict[str, float] = {}
        self.refuse_load = False
        # What it reports of what it samples, if not what it says of a prompt.
        self.sampled_logprob: float | None = None
        # The last request for a sample.
        self.sampled_with: dict[str, Any] | None = None
        self.refused: set[str] = set()
        self.tries: Counter[str] = Counter()
        self.slow_load: asyncio.Event | None = None
        # What is awaited as an adapter is to be loaded.
        self.at_load: Callable[[], Awaitable[None]] | None = None
        self.engine_is_dead = False
        self.loads: list[str] = []
        # How often it was asked for its models.
        self.lists = 0
        # What its metrics say of them; None: nothing.
        self.adapter_slots: int | None = None
        # Asked for one of these, it has lost all its adapters: it was restarted a moment before.
        self.forgets: set[str] = set()
        # Asked for one of these, it cannot answer; nor to a longer prompt than this.
        self.cannot_answer: set[str] = set()
        self.longest: int | None = None
        # What each of them says, if it is asked to say something.
        self.says: dict[str, str] = {}
        # What is awaited before any answer, and how many were asked for.
        self.slow_answer: asyncio.Event | None = None
        self.asked = 0
        # The text of each token id that it knows; none: it has no tokenizer.
        self.texts: dict[int, str] = {}
        # The key that it asks for, and how many tokens it says that it takes.
        self.key: str | None = None
        self.context: int | None = None
        # How it answers chat completions; None: not at all.
        self.chats: Handler | None = None

    async def models(self, request: web.Request) -> web.Response:
        self.lists += 1
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        base = {"id": "m", "root": "/base", "parent": None, "owned_by": "vllm"}
        listed: list[dict[str, Any]] = [base | {"max_model_len": self.context}]
        listed += [{"id": name, "root": path, "parent": "m"} for name, path in self.loaded.items()]
        return web.json_response({"data": listed})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.engine_is_dead:
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        self.tries[body["lora_name"]] += 1
        if self.refuse_load or body["lora_name"] in self.refused:
            return web.json_response({"error": {"message": "No adapter found"}}, status=404)
        if self.at_load is not None:
            await self.at_load()
        if self.slow_load is not None:
            await self.slow_load.wait()
        if body["lora_name"] in self.loaded:
            said = f"The lora adapter '{body['lora_name']}' has already been loaded."
            return web.json_response({"error": {"message": said}}, status=400)
        self.loads.append(body["lora_name"])
        self.loaded[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def metrics(self, _: web.Request) -> web.Response:
        if self.adapter_slots is None:
            return web.Response(status=404)
        told = f'vllm:lora_requests_info{{max_lora="{self.adapter_slots}"}} 1.0\n'
        return web.Response(text=told)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine_is_dead else 200)

    async def unload(self, request: web.Request) -> web.Response:
        self.loaded.pop((await request.json())["lora_name"], None)
        return web.Response(text="Success")

    async def tokenize(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        ids = [one for one, text in self.texts.items() if text == body["prompt"]]
        return web.json_response({"tokens": ids}) if ids else web.Response(status=404)

    async def detokenize(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        return web.json_response({"prompt": "".join(self.texts[one] for one in body["tokens"])})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404) if self.chats is None else await self.chats(request)

    async def completions(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if body["model"] in self.forgets:
            self.forgets.clear()
            self.loaded.clear()
            said = f"The model `{body['model']}` does not exist."
            return web.json_response({"error": {"message": said}}, status=404)
        self.asked += 1
        if self.slow_answer is not None:
            await self.slow_answer.wait()
        if body["model"] in self.cannot_answer:
            said = "Out of range float values are not JSON compliant"
            return web.json_response({"error": {"message": said}}, status=500)
        if self.longest is not None and len(body["prompt"]) > self.longest:
            said = f"This model's maximum context length is {self.longest} tokens."
            return web.json_response({"error": {"message": said}}, status=400)
        value = self.logprobs.get(body["model"], -1.0)
        if "logprobs" in body:
            self.sampled_with = body
            count = body["max_tokens"]
            reported = value if self.sampled_logprob is None else self.sampled_logprob
            told = {"token_logprobs": [reported] * count}
            text = self.says.get(body["model"], "")
            choice = {"token_ids": [5] * count, "logprobs": told, "text": text}
            return web.json_response({"choices": [{**choice, "finish_reason": "stop"}]})
        entries = [None, *[{str(token): {"logprob": value}} for token in body["prompt"][1:]]]
        return web.json_response({"choices": [{"prompt_logprobs": entries}]})


@asynccontextmanager
async def fake_model_server(port: int = 0) -> AsyncIterator[FakeModelServer]:
    """Run one, on a free port unless one is named."""
    server = FakeModelServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/v1/load_lora_adapter", server.load)
    app.router.add_post("/v1/unload_lora_adapter", server.unload)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/detokenize", server.detokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
