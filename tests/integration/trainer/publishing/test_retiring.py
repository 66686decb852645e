"""Versions that lost the traffic leave the model servers, unless they are to serve again."""

from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.support.ledger.lineage import set_state
from tests.support.servers.fake_server import fake_model_server
from tests.support.steward.replicas import publish, retire
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.publisher import Publisher
from trainer.recipes.recipe import PublishOptions


@pytest.mark.parametrize("is_called_back", [False, True])
async def test_what_is_called_back_while_servers_answer_stays_loaded(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_called_back: bool
) -> None:
    await publish(engine, tmp_path, 1, 2)
    await retire(engine, 1)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE policies SET changed_at = now() - interval '1 day'"))
    models = ModelServer.models

    async def answer(server: ModelServer) -> list[str]:
        if is_called_back:
            async with engine.begin() as connection:
                await set_state(
                    connection, "m", 1, "published", reason="it serves again", actor="steward"
                )
        return await models(server)

    monkeypatch.setattr(ModelServer, "models", answer)
    async with fake_model_server() as server, Replicas([server.url]) as servers:
        server.loaded.update({"m@1": "/1", "m@2": "/2"})
        await Publisher(engine, servers, "m", PublishOptions()).reconcile()
        assert set(server.loaded) == ({"m@1", "m@2"} if is_called_back else {"m@2"})
