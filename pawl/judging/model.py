"""Ask a model for a score by a rubric, on any OpenAI-compatible server."""

import asyncio
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import aiohttp
import msgspec

from pawl.judging.answers import Statement
from pawl.judging.errors import Away, JudgeFailed
from pawl.judging.rubric import judge_messages, read_score

# Statuses that are about one request; any other error status would meet the next one, too.
OF_THIS_REQUEST: Final = (400, 413, 422)
SHOWN: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingModel:
    """Name the model that judges, and how it is asked.

    `base_url` is that of the model's server, with its `/v1`, and `name` the model's name there.
    `api_key` is sent as bearer token if it is not None.
    """

    base_url: str
    name: str
    temperature: float = 0.0
    api_key: str | None = None


class RubricJudge:
    """Ask a model for a score from 0 to 1, and state it as the episode's reward."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: JudgingModel,
        *,
        rubric: str,
        timeout_s: float,
        max_chars: int,
        name: str | None = None,
    ) -> None:
        """Store what the model is asked.

        Args:
            session: the HTTP client.
            model: the model, and where it is.
            rubric: what good work is, in words.
            timeout_s: time limit of one judgement, in seconds.
            max_chars: characters of a transcript that the model is shown.
            name: the judge's name; None: model and a digest of the rubric.
        """
        self.name = name or f"{model.name} by rubric {sha256(rubric.encode()).hexdigest()[:12]}"
        self._session = session
        self._url = model.base_url.rstrip("/") + "/chat/completions"
        self._parameters = {"model": model.name, "temperature": model.temperature}
        self._rubric = rubric
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._headers = {"Authorization": f"Bearer {model.api_key}"} if model.api_key else {}

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Return the model's score as one statement about the episode, or none if it cannot tell.

        Raises:
            JudgeFailed: no answer in time, an answer without a score, or a refused request.
            Away: the model's server does not answer, or with an error about any request.
        """
        messages = judge_messages(self._rubric, line, self._max_chars)
        score = read_score(_content(await self._ask(self._parameters | {"messages": messages})))
        return [] if score is None else [{"value": score, "episode": episode}]

    async def _ask(self, request: dict[str, Any]) -> bytes:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(self._url, json=request, headers=self._headers) as reply,
            ):
                body = await reply.read()
        except TimeoutError as error:
            raise JudgeFailed(f"no answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Away(f"{self._url} does not answer: {error}") from error
        if reply.status == 200:
            return body
        answer = f"{reply.status}: {body[:SHOWN].decode(errors='replace')}"
        if reply.status in OF_THIS_REQUEST:
            raise JudgeFailed(f"the model's server refused the request with {answer}")
        raise Away(f"{self._url} answered {answer}")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _content(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Completion).choices[0].message.content or ""
    except (msgspec.MsgspecError, ValueError, RecursionError, IndexError) as error:
        raise JudgeFailed(f"the model server's reply is no chat completion: {error}") from error
