"""A model with a rubric judges: its score is the reward, and its faults are no episode's."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from pawl.judging.answers import Away
from pawl.judging.rubric import RubricJudge
from tests.integration.pawl.judging.test_judge import Desk, judged, outcomes, session, store
from tests.support.records import call

__all__ = ["session"]


class FakeModel:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.text = '{"why": "well done", "score": 0.75}'
        self.body: Any = None
        self.wait_s = 0.0
        self.requests: list[Any] = []
        self.headers: list[Any] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.wait_s)
        said = {"choices": [{"message": {"role": "assistant", "content": self.text}}]}
        return web.json_response(self.body or said, status=self.status)


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    fake = FakeModel()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
    yield fake
    await runner.cleanup()


def by_rubric(
    session: aiohttp.ClientSession,
    model: FakeModel,
    *,
    api_key: str | None = None,
    rubric: str = "Is it polite?",
    timeout_s: float = 5,
) -> RubricJudge:
    return RubricJudge(
        session,
        base_url=model.url,
        model="big",
        rubric=rubric,
        timeout_s=timeout_s,
        max_chars=1000,
        api_key=api_key,
    )


async def test_models_score_is_the_reward(
    engine: AsyncEngine, session: aiohttp.ClientSession, model: FakeModel
) -> None:
    await store(engine, call("e", request=b'{"messages":[{"role":"user","content":"hello?"}]}'))
    desk = Desk()
    judge = by_rubric(session, model, api_key="secret")
    assert await judged(engine, judge, desk) == {"judged": 1}
    assert list(desk.posted.values()) == [[{"value": 0.75, "episode": "e"}]]
    [asked] = model.requests
    assert (asked["model"], asked["temperature"]) == ("big", 0.0)
    assert "Is it polite?" in asked["messages"][0]["content"]
    assert "user: hello?" in asked["messages"][1]["content"]
    assert model.headers[0]["Authorization"] == "Bearer secret"


async def test_another_rubric_is_another_judge(
    session: aiohttp.ClientSession, model: FakeModel
) -> None:
    names = [by_rubric(session, model, rubric=rubric).name for rubric in ("a", "b", "a")]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"text": '{"score": null}'}, "cannot_tell", None),
        ({"text": "I like it"}, "failed", "no JSON object with a score"),
        ({"text": None}, "failed", "no JSON object"),
        ({"body": {"choices": []}}, "failed", "no chat completion"),
        ({"body": {"error": "x"}}, "failed", "no chat completion"),
        ({"status": 400, "body": {"error": "too long"}}, "failed", "too long"),
        ({"wait_s": 3}, "failed", "no answer within"),
    ],
)
async def test_models_faults_leave_the_episode_unscored(
    engine: AsyncEngine,
    session: aiohttp.ClientSession,
    model: FakeModel,
    changes: dict[str, Any],
    outcome: str,
    reason: str | None,
) -> None:
    await store(engine, call("e"))
    for name, value in changes.items():
        setattr(model, name, value)
    desk = Desk()
    judge = by_rubric(session, model, timeout_s=0.5 if model.wait_s else 60)
    assert await judged(engine, judge, desk) == {outcome: 1}
    kept, _, why = (await outcomes(engine))["e"]
    assert kept == outcome
    assert (why is None) == (reason is None)
    assert (reason or "") in (why or "")
    assert desk.posted == {}


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_server_that_cannot_answer_now_is_no_episodes_fault(
    engine: AsyncEngine, session: aiohttp.ClientSession, model: FakeModel, status: int
) -> None:
    await store(engine, call("e"))
    model.status = status
    with pytest.raises(Away, match=str(status)):
        await judged(engine, by_rubric(session, model))
    assert await outcomes(engine) == {}


async def test_server_that_is_gone_is_away(session: aiohttp.ClientSession) -> None:
    fake = FakeModel()
    fake.url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(Away, match="does not answer"):
        await by_rubric(session, fake).judge("e", b'{"calls": []}')
