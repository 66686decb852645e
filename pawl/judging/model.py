"""Ask a judging model on any OpenAI-compatible server, and read its score."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import aiohttp
import msgspec

from pawl.judging.answers import Away, JudgeError, JudgeFailed

# Errors about one request; any other error status would affect the next request, too.
REQUEST_FAULT_STATUSES: Final = (400, 413, 422)
SHOWN_BYTES: Final = 300
SHORT_S: Final = 10.0
THOUGHT_END: Final = "</think>"
Message = dict[str, str]
_DECODER: Final = json.JSONDecoder()


class ModelJudge:
    """Base class of judges that ask a model."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        base_url: str,
        model: str,
        timeout_s: float,
        max_chars: int,
        temperature: float = 0.0,
        api_key: str | None = None,
        name: str,
    ) -> None:
        """Ask `model` at `base_url`, which ends with the server's `/v1`.

        The model sees `max_chars` characters of a transcript, and must answer within `timeout_s`
        seconds. `api_key` is sent as bearer token.
        """
        self.name = name
        self._session = session
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._parameters = {"model": model, "temperature": temperature}
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._headers = _headers(api_key)

    async def _ask_model(self, messages: list[Message]) -> str:
        """Return the model's answer.

        Raises:
            JudgeFailed: no answer in time, or a refused request.
            Away: the server does not answer, or with an error that is not about this request.
        """
        return _reply_text(await self._ask(self._parameters | {"messages": messages}))

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
        answer = f"{reply.status}: {body[:SHOWN_BYTES].decode(errors='replace')}"
        if reply.status in REQUEST_FAULT_STATUSES:
            raise JudgeFailed(f"the model's server refused the request with {answer}")
        raise Away(f"{self._url} answered {answer}")


class _Model(msgspec.Struct):
    id: str
    # An adapter's base model.
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def base_model(session: aiohttp.ClientSession, base_url: str, api_key: str | None) -> str:
    """Return the name of a server's first model that is not an adapter.

    Raises:
        Away: the server does not answer with its models.
        JudgeError: the server has no base model.
    """
    url = base_url.rstrip("/") + "/models"
    try:
        async with asyncio.timeout(SHORT_S), session.get(url, headers=_headers(api_key)) as reply:
            found = msgspec.json.decode(await reply.read(), type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise Away(f"{url} does not answer with its models: {error}") from error
    name = next((one.id for one in found if one.parent is None), None)
    if name is None:
        raise JudgeError(f"{url} lists no base model: name the judge's model with --model")
    return name


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _reply_text(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Completion).choices[0].message.content or ""
    except (msgspec.MsgspecError, ValueError, RecursionError, IndexError) as error:
        raise JudgeFailed(f"the model server's reply is no chat completion: {error}") from error


def fence_text(text: str, most: int, mark: str) -> str:
    """Return `cut_middle(text, most)` between tags named `mark`, which the text cannot close."""
    shown = cut_middle(text, most).replace(f"</{mark}", f"<\\/{mark}")
    return f"<{mark}>\n{shown}\n</{mark}>"


def cut_middle(text: str, most: int) -> str:
    """Return at most `most` characters of a text; in a longer one, a note replaces the middle."""
    if len(text) <= most:
        return text
    head, tail = most - most // 2, most // 2
    left_out = len(text) - most
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[len(text) - tail :]}"


def read_score(answer: str, lowest: float = 0.0) -> float | None:
    """Return the score in a model's answer, from `lowest` to 1; None if the model cannot tell.

    The last JSON object with a score counts: models may write thoughts before it, and put it into
    a code fence.

    Raises:
        JudgeFailed: there is no such object, or its score is not a number from `lowest` to 1.
    """
    score = last_object(answer, "score")["score"]
    return None if score is None else as_score(score, lowest)


def as_score(score: Any, lowest: float = 0.0) -> float:
    """Return a score that a model wrote, from `lowest` to 1.

    Raises:
        JudgeFailed: the score is no number in that range.
    """
    if isinstance(score, bool) or not isinstance(score, int | float) or not lowest <= score <= 1:
        raise JudgeFailed(
            f"the model's score is {str(score)[:40]!r}, no number from {lowest:g} to 1"
        )
    return float(score)


def last_object(answer: str, field: str) -> dict[str, Any]:
    """Return the last JSON object with this field in a model's answer, without its thoughts.

    Raises:
        JudgeFailed: there is no such object.
    """
    text = answer.rpartition(THOUGHT_END)[2]
    found = next((one for one in _objects_from_the_end(text) if field in one), None)
    if found is None:
        raise JudgeFailed(f"no JSON object with a {field} in the model's answer: {answer[-200:]!r}")
    return found


def _objects_from_the_end(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, the one that begins last first."""
    place = text.rfind("{")
    while place >= 0:
        try:
            value, _ = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        place = text.rfind("{", 0, place)
