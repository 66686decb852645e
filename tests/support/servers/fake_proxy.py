"""Stand in for the proxy: it answers chat calls, takes feedback, and keeps both by episode."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

from aiohttp import web


class FakeProxy:
    """Keep what it was sent. `down` makes it refuse all that comes, as while it restarts.

    With `no_model` its model server is away: it answers 502 to calls and to `/v1/models`.
    `turned_away` has the paths of what it did not answer for either reason.
    """

    def __init__(self) -> None:
        self.url = ""
        self.models = ["m", "m@1", "m@2"]
        self.serving = "m@1"
        self.calls: list[dict[str, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.statements: list[dict[str, Any]] = []
        self.keys: Counter[str] = Counter()
        self.feedback_status: list[int] = []
        self.turned_away: list[str] = []
        self.down = False
        self.no_model = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any path."""
        if self.down:
            self.turned_away.append(request.path)
            assert request.transport is not None
            request.transport.close()
            return web.Response(status=500)
        if request.path == "/feedback":
            return await self.take(request)
        if self.no_model:
            self.turned_away.append(request.path)
            return web.json_response({"error": {"message": "no model server"}}, status=502)
        if request.path.endswith("/v1/models"):
            listed = {"data": [{"id": name} for name in self.models]}
            return web.json_response(listed, headers={"x-pawl-policy": self.serving})
        asked = await request.json()
        self.calls.append(names_in(request.raw_path))
        self.asked.append(asked)
        said = self.asked[-1]["messages"][-1]["content"]
        # Tasks can ask what one version alone answers rightly.
        said = said.replace("which version", asked["model"])
        message = {"role": "assistant", "content": f"echo {said}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": f"c-{len(self.calls)}", "object": "chat.completion", "created": 0}
        return web.json_response(reply | {"model": "m", "choices": [choice]})

    async def take(self, request: web.Request) -> web.StreamResponse:
        """Take feedback once under each key, unless another status is wanted first."""
        if self.feedback_status:
            return web.Response(status=self.feedback_status.pop(0), text="not now")
        key = request.headers["Idempotency-Key"]
        self.keys[key] += 1
        statements = json.loads(await request.read())
        if self.keys[key] == 1:
            self.statements += statements
        known = {call.get("episode") for call in self.calls}
        seen = all(statement["episode"] in known for statement in statements)
        return web.json_response({}, status=200 if seen else 202)

    def rewards(self) -> dict[str, list[float]]:
        """Return the rewards of each episode."""
        found: dict[str, list[float]] = {}
        for statement in self.statements:
            if statement["metric"] == "reward":
                found.setdefault(statement["episode"], []).append(statement["value"])
        return found


def names_in(path: str) -> dict[str, str]:
    """Return the names that stand in a path before `/v1`."""
    parts = path.split("/v1/", maxsplit=1)[0].strip("/").split("/")
    return {kind: unquote(name) for kind, name in zip(parts[::2], parts[1::2], strict=False)}


@asynccontextmanager
async def fake_proxy() -> AsyncIterator[FakeProxy]:
    """Serve a stand-in on a free port."""
    fake = FakeProxy()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()
