"""Fetch adapters for a model server that does not share the trainer's folder.

Trainer and controller send their requests to this process instead of the server. To load a
version, it fetches the files into its own PAWL_ADAPTER_DIR, which the server sees under the same
path, and has the server load them from there. In the server's list of models it replaces the local
paths by the trainer's. Other requests are forwarded unchanged. Agents' calls do not pass through
this process.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog
from aiohttp import web

from pawl.processes import stop_event
from pawl.settings import AdaptersSettings
from store.admin_port import serve_app
from store.limited_bodies import LimitedResponse
from store.schema.tables import MANIFEST_SHA256
from store.settings import without_login
from trainer.errors import NotFetched
from trainer.publishing.model_server import NOT_FETCHED, TIMEOUT_S
from trainer.publishing.sources import FetchedFiles

log = structlog.get_logger()

# Requests of trainer and controller that are forwarded unchanged.
FORWARDED_UNCHANGED: Final = (
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
)
# Largest request body, in bytes.
MOST_BODY: Final = 64 * 2**20


async def run(settings: AdaptersSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        NotListening: PAWL_ADAPTERS_LISTEN cannot be listened on.
        TrainerError: PAWL_ADAPTER_SOURCE cannot be used.
    """
    stop = stop_event()
    async with AsyncExitStack() as exits:
        limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
        # A model server closes idle connections after 5 s, and a failed POST is not retried.
        pool = aiohttp.TCPConnector(keepalive_timeout=3.0)
        session = await exits.enter_async_context(
            aiohttp.ClientSession(connector=pool, timeout=limit, response_class=LimitedResponse)
        )
        server = AdapterServer(settings, session)
        server.files.lock_folder()
        port = await serve_app(
            server.app(),
            settings.adapters_listen,
            "PAWL_ADAPTERS_LISTEN",
            settings.allowed_hosts,
        )
        exits.push_async_callback(port.cleanup)
        # The port closes only after its requests, which may wait for files: close these first.
        exits.push_async_callback(server.files.close)
        log.info("adapters_up", replica=server.url, folder=str(server.files.root))
        await stop.wait()
    log.info("adapters_down")


class AdapterServer:
    """The HTTP application in front of one model server."""

    def __init__(self, settings: AdaptersSettings, session: aiohttp.ClientSession) -> None:
        base_url = str(settings.upstream_url)
        self.files = FetchedFiles(settings, self._loaded_folders)
        self.url = without_login(base_url)
        self._root_url = base_url.rstrip("/").removesuffix("/v1")
        self._session = session

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY)
        for method, path in FORWARDED_UNCHANGED:
            app.router.add_route(method, path, self._forward_unchanged)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        return app

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _forward_unchanged(self, request: web.Request) -> web.Response:
        return await self._forward(request.method, request.path, await request.read())

    async def _load(self, request: web.Request) -> web.Response:
        """Fetch a version, have the server load it, and forward the server's answer."""
        body = await _json_body(request)
        manifest_sha256 = body.pop(MANIFEST_SHA256, None)
        folder = Path(str(body.get("lora_path")))
        try:
            place = await self.files.fetch(folder, manifest_sha256)
        except NotFetched as error:
            return _refusal(NOT_FETCHED, str(error))
        return await self._forward("POST", request.path, {**body, "lora_path": str(place)})

    async def _unload(self, request: web.Request) -> web.Response:
        """Have the server unload a version; keep its files some minutes, as it may read them."""
        body = await _json_body(request)
        policy, _, version = str(body.get("lora_name")).rpartition("@")
        if version.isdecimal():
            self.files.touch(policy, version)
        return await self._forward("POST", request.path, body)

    async def _models(self, _: web.Request) -> web.Response:
        """List the server's models; replace the local path of each adapter by the trainer's."""
        try:
            listed = await self._server_models()
        except aiohttp.ClientError as error:
            return _refusal(502, f"the model server does not answer ({type(error).__name__})")
        for model in listed["data"]:
            if model.get("root"):
                model["root"] = self.files.trainer_path(str(model["root"]))
        return web.json_response(listed)

    async def _server_models(self) -> dict[str, Any]:
        """Return the server's list of its models.

        Raises:
            ClientError: the server does not answer with a list.
        """
        try:
            async with self._session.get(f"{self._root_url}/v1/models") as response:
                listed = await response.json()
            if not all(isinstance(model, dict) for model in listed["data"]):
                raise ValueError
        except (TimeoutError, ValueError, LookupError, TypeError) as error:
            raise aiohttp.ClientError("no list of models") from error
        return dict(listed)

    async def _loaded_folders(self) -> set[Path]:
        """Return the folders of the server's loaded models, which it may read at any time.

        Raises:
            NotFetched: the server does not answer with a list.
        """
        try:
            listed = await self._server_models()
        except aiohttp.ClientError as error:
            raise NotFetched(f"{self.url} does not list its loaded models: {error}") from error
        return {Path(str(model.get("root"))) for model in listed["data"]}

    async def _forward(self, method: str, path: str, body: bytes | dict[str, Any]) -> web.Response:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json"} if method == "POST" else {}
        try:
            async with self._session.request(
                method, self._root_url + path, headers=headers, **data
            ) as response:
                return web.Response(
                    status=response.status,
                    body=await response.read(),
                    headers={"Content-Type": response.headers.get("Content-Type", "text/plain")},
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            return _refusal(502, f"the model server does not answer ({type(error).__name__})")


async def _json_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        HTTPBadRequest: the body is not a JSON object.
    """
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return body


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
