"""Run model servers that share no folder, each behind a `pawl adapters` of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from pawl.adapters import AdapterServer
from pawl.settings import AdaptersSettings
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.servers.fake_upstream import Handler
from trainer.publishing.adapters import MANIFEST, SERVED_FILES
from trainer.publishing.sources import ADAPTERS_PATH, serve_files


@dataclass
class Apart:
    """Hold a model server, its own disk, and the address by which it is asked for loads."""

    server: FakeModelServer
    disk: Path
    url: str

    def has(self, name: str, written: Path) -> bool:
        """Return whether it loaded a version from its own disk, as the trainer wrote it."""
        place = Path(self.server.loaded.get(name, "/none"))
        return place.is_relative_to(self.disk) and all(
            (place / file).read_bytes() == (written / file).read_bytes()
            for file in (MANIFEST, *SERVED_FILES)
        )


@asynccontextmanager
async def fetching_at(url: str, source: str, disk: Path) -> AsyncIterator[str]:
    """Run `pawl adapters` for the model server at `url`; yield the address that loads go to."""
    settings = AdaptersSettings.model_validate(
        {"upstream_url": url, "adapter_source": source, "adapter_dir": disk}
    )
    async with aiohttp.ClientSession() as session:
        fetching = AdapterServer(settings, session)
        try:
            async with TestServer(fetching.app()) as port:
                yield str(port.make_url("/v1"))
        finally:
            await fetching.files.close()


@asynccontextmanager
async def fetching_for(server: FakeModelServer, source: str, disk: Path) -> AsyncIterator[Apart]:
    """Run `pawl adapters` for a scripted model server."""
    async with fetching_at(server.url, source, disk) as url:
        yield Apart(server, disk, url)


@asynccontextmanager
async def apart(source: str, disk: Path) -> AsyncIterator[Apart]:
    """Run a scripted model server, and `pawl adapters` for it."""
    async with fake_model_server() as server, fetching_for(server, source, disk) as made:
        yield made


@dataclass
class TrainersPort:
    """Serve a trainer's folder.

    Attributes:
        source: what PAWL_ADAPTER_SOURCE is.
        is_away: whether it answers nothing.
    """

    source: str = ""
    is_away: bool = False


@asynccontextmanager
async def trainers_port(root: Path) -> AsyncIterator[TrainersPort]:
    """Serve the versions below `root`."""
    made = TrainersPort()

    @web.middleware
    async def away(request: web.Request, handler: Handler) -> web.StreamResponse:
        if made.is_away:
            raise web.HTTPServiceUnavailable
        return await handler(request)

    app = web.Application(middlewares=[away])
    serve_files(app, root)
    async with TestServer(app) as port:
        made.source = str(port.make_url(ADAPTERS_PATH))
        yield made
