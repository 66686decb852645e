"""Call vLLM's administrative endpoints: models, LoRA adapters, prompt log-probabilities.

The server needs `VLLM_ALLOW_RUNTIME_LORA_UPDATING`. The proxy refuses these endpoints to its
clients. `Replicas` asks several servers at once; a server that is away does not stop the others
(docs/decisions/048-adapters-stay-loaded.md).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import aiohttp
import structlog

from store.limited_bodies import LimitedResponse
from store.records import Record
from store.schema.tables import MANIFEST_SHA256
from store.settings import without_login
from trainer.errors import NotFetched, PublishError, TrainerError, UpstreamAway
from trainer.publishing.probe import ProbeRow
from trainer.publishing.sources import AdapterFiles

log = structlog.get_logger()

T = TypeVar("T")
TIMEOUT_S: Final = 120.0
# Sampling settings under which only the temperature shapes the distribution.
NEUTRAL_SETTINGS: Final[Mapping[str, float]] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# Listing models needs no engine: a server that takes longer counts as away.
LIST_TIMEOUT_S: Final = 10.0
SERVER_ERROR: Final = 500
# A gateway sends these for a server that does not answer; no model server sends them.
GATEWAY_ERRORS: Final = (502, 504)
# `pawl adapters` sends this if it cannot get the files; no model server sends it for a load.
NOT_FETCHED: Final = 424
# A character that occurs in no token's text: the record separator.
SEPARATOR: Final = "\x1e"
# Errors raised by malformed answers.
_MALFORMED: Final = (LookupError, TypeError, ValueError)


class Completion(Record, frozen=True, kw_only=True):
    """A completion: its text, and the ids (S,) and log-probabilities (S,) of its tokens.

    `is_complete` is true if the model ended it, and false if the token limit cut it off.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_complete: bool


class ModelServer:
    """Call one vLLM server.

    Requests raise `UpstreamAway` if the server does not answer or lost the adapter in a restart.
    They raise `PublishError` if it refuses or its answer lacks the requested values.
    """

    def __init__(
        self, base_url: str, files: AdapterFiles | None = None, *, key: str | None = None
    ) -> None:
        """Store the base URL, with its `/v1`; `async with` opens the connection pool.

        `files` brings versions to machines that do not share the trainer's folder. `key`, if any,
        is sent with each request as a bearer token.
        """
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._base_url = base_url.rstrip("/")
        self.files = files or AdapterFiles()
        # Shown in logs, metrics and messages.
        self.url = without_login(self._base_url)

    async def __aenter__(self) -> Self:
        """Open the connection pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=3.0),
            headers=self._headers,
            response_class=LimitedResponse,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection pool."""
        await self._session.close()

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the listed models by name: `root` is the folder, `parent` the base of an adapter.

        A server that does not list its models counts as away (`UpstreamAway`).
        """
        status, body = await self._request("GET", "/models", None, LIST_TIMEOUT_S)
        if status != 200:
            raise UpstreamAway(
                f"the model server does not list its models: {status} {body}; is {self.url} its"
                " base URL, with /v1?"
            )
        try:
            return {model["id"]: model for model in body["data"]}
        except (TypeError, KeyError) as error:
            # Something in front of the server answered, such as an ingress.
            raise UpstreamAway(
                f"{self.url} does not list models as a model server does: is it the base URL of"
                " a model server, with /v1?"
            ) from error

    async def metrics(self) -> str:
        """Return the text of `/metrics`, or "" if the server has none."""
        root = self._base_url.removesuffix("/v1")
        status, body = await self._send("GET", f"{root}/metrics", None, LIST_TIMEOUT_S)
        return body if status == 200 and isinstance(body, str) else ""

    async def token_ids(self, model: str, text: str) -> list[int]:
        """Return the ids that a model's tokenizer gives a text, with no special tokens added."""
        root = self._base_url.removesuffix("/v1")
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        status, answer = await self._send("POST", f"{root}/tokenize", body, LIST_TIMEOUT_S)
        try:
            return list(map(int, answer["tokens"]))
        except _MALFORMED as error:
            raise PublishError(f"no token ids at {root}/tokenize: {status} {answer}") from error

    async def token_texts(self, model: str, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token id of a model, or None if the server does not give them.

        vLLM's `/detokenize` joins the texts of all ids, so a separator that occurs in no text is
        put between the ids. Bytes that are no complete character become U+FFFD.
        """
        root = self._base_url.removesuffix("/v1")
        asked = {"model": model, "prompt": SEPARATOR, "add_special_tokens": False}
        try:
            _, body = await self._send("POST", f"{root}/tokenize", asked, LIST_TIMEOUT_S)
            separator = list(map(int, body["tokens"]))
            joined = [part for token in ids for part in (*separator, token)]
            asked = {"model": model, "tokens": joined}
            _, body = await self._send("POST", f"{root}/detokenize", asked, LIST_TIMEOUT_S)
            texts = str(body["prompt"]).split(SEPARATOR)[1:]
        except _MALFORMED:
            # The server is no vLLM, or lacks the model.
            return None
        return texts if len(texts) == len(ids) else None

    async def load(self, name: str, folder: Path, manifest_sha256: str | None = None) -> None:
        """Load the adapter in `folder` under `name`, unless the server has it already.

        If several processes load it at once, the server accepts one request and refuses the others.
        So success is decided by the server's list of models afterwards. A `pawl adapters` in front
        of the server fetches the files and checks them by the manifest's hash, which vLLM ignores.

        Raises:
            PublishError: the server refuses it, or serves other files under that name.
            NotFetched: the server's machine cannot get the files for now.
        """
        refusal: TrainerError | None = None
        listed = (await self.models()).get(name)
        if listed is None:
            await self.files.offer(folder)
            body = {
                "lora_name": name,
                "lora_path": str(folder),
                # The experts' matrices are stacked. Only a vLLM with
                # --enable-mixed-moe-lora-format reads this key.
                "is_3d_lora_weight": True,
                MANIFEST_SHA256: manifest_sha256,
            }
            status, answer = await self._request("POST", "/load_lora_adapter", body)
            if status == NOT_FETCHED:
                raise NotFetched(f"{self.url} did not load {name}: {_error_message(answer)}")
            if status != 200:
                refusal = await self._refusal_error(
                    status,
                    f"the model server did not load {name}: {status} {answer}; check that it"
                    f" reads {folder}, that it was started with --enable-lora, --max-lora-rank of"
                    " lora.rank at least and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and that it"
                    " supports LoRA in the layers of lora.target_modules",
                )
            listed = (await self.models()).get(name)
        if listed is None and refusal is not None:
            raise refusal
        if listed is None or listed.get("root") != str(folder):
            raise PublishError(
                f"the model server lists {listed} as {name} instead of {folder}: unload that name"
                " or restart the server"
            )

    async def unload(self, name: str) -> None:
        """Unload an adapter; running requests finish, and an unknown name is no error."""
        status, answer = await self._request("POST", "/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404):
            raise PublishError(f"the model server did not unload {name}: {status} {answer}")

    async def prompt_logprobs(self, name: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of the T ids after the ids before it, (T − 1,).

        The first id has none. The temperature is one.
        """
        body = {
            "model": name,
            "prompt": list(ids),
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 0,
        }
        status, answer = await self._request("POST", "/completions", body)
        if status != 200:
            raise await self._probe_error(name, status, answer)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [
                float(entry[str(token)]["logprob"])
                for token, entry in zip(ids[1:], entries[1:], strict=True)
            ]
        except _MALFORMED as error:
            raise PublishError(
                f"the model server does not report the log-probabilities of a prompt of {name}: use"
                " a vLLM that knows prompt_logprobs"
            ) from error

    async def last_logprobs(self, name: str, ids: Sequence[int], count: int) -> list[float]:
        """Return only the last `count` values of `prompt_logprobs`, (count,)."""
        logprobs = await self.prompt_logprobs(name, ids)
        return logprobs[len(logprobs) - count :]

    async def probe_logprobs(self, name: str, rows: Sequence[ProbeRow]) -> list[list[float]]:
        """Return, for each row, the log-probabilities of its last tokens under the model `name`."""
        return [await self.last_logprobs(name, row.ids, len(row.logprobs)) for row in rows]

    async def base_of(self, name: str) -> str:
        """Return the name of the base model that adapter `name` was loaded for."""
        listed = (await self.models()).get(name)
        if listed is None:
            raise self._lost_model_error(name)
        if not listed.get("parent"):
            raise PublishError(f"the model server lists {listed} as {name}, without its base model")
        return str(listed["parent"])

    async def sample(
        self, name: str, ids: Sequence[int], temperature: float, tokens: int
    ) -> list[tuple[int, float]]:
        """Sample `tokens` tokens after `ids`; return each with its reported log-probability."""
        more = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True}
        _, sampled = await self._sample_choice(name, ids, more)
        return sampled

    async def _sample_choice(
        self, name: str, ids: Sequence[int], settings: Mapping[str, float]
    ) -> tuple[dict[str, Any], list[tuple[int, float]]]:
        """Return the completion's `choice` object, and its tokens with their log-probabilities."""
        body = {
            "model": name,
            "prompt": list(ids),
            # Overrides the server's default settings.
            **NEUTRAL_SETTINGS,
            **settings,
            "logprobs": 0,
            "return_token_ids": True,
        }
        status, answer = await self._request("POST", "/completions", body)
        if status != 200:
            raise await self._probe_error(name, status, answer)
        try:
            choice = answer["choices"][0]
            logprobs = map(float, choice["logprobs"]["token_logprobs"])
            sampled = list(zip(choice["token_ids"], logprobs, strict=True))
            if not sampled:
                raise ValueError("no token was sampled")
        except _MALFORMED as error:
            raise PublishError(
                f"the model server does not report ids and log-probabilities of the tokens that"
                f" {name} samples: use a vLLM that knows return_token_ids"
            ) from error
        return choice, sampled

    async def complete(self, name: str, ids: Sequence[int], tokens: int, seed: int) -> Completion:
        """Return the completion of `ids` by `name` at temperature one, at most `tokens` long.

        The same `seed` gives the same completion, as far as the server is deterministic. The text
        includes special tokens, because some mark a tool call.
        """
        settings = {"temperature": 1.0, "max_tokens": tokens, "seed": seed}
        fields = {"ignore_eos": False, "skip_special_tokens": False}
        choice, sampled = await self._sample_choice(name, ids, {**settings, **fields})
        return Completion(
            text=str(choice.get("text", "")),
            ids=tuple(token for token, _ in sampled),
            logprobs=tuple(logprob for _, logprob in sampled),
            is_complete=choice.get("finish_reason") == "stop",
        )

    async def _probe_error(self, name: str, status: int, answer: object) -> TrainerError:
        """Return the error for a refused request to the model `name`.

        A server that no longer has the model was restarted, so its refusal says nothing about the
        version.
        """
        if name not in await self.models():
            return self._lost_model_error(name)
        why = f"the model server refused a probe of {name}: {status} {answer}"
        return await self._refusal_error(status, why)

    def _lost_model_error(self, name: str) -> UpstreamAway:
        """Return the error for a model that the server no longer has."""
        return UpstreamAway(
            f"{self.url} no longer has {name}: the server was restarted, or several"
            " servers share that address (list each in PAWL_REPLICA_URLS)"
        )

    async def _refusal_error(self, status: int, why: str) -> TrainerError:
        """Return the error for a refused request.

        A server whose engine has died answers 5xx to every request until it exits. It counts as
        away, because such an answer says nothing about the version.
        """
        if status < SERVER_ERROR:
            return PublishError(why)
        health = self._base_url.removesuffix("/v1") + "/health"
        status, _ = await self._send("GET", health, None, LIST_TIMEOUT_S)
        return UpstreamAway(why) if status >= SERVER_ERROR else PublishError(why)

    async def _request(
        self, method: str, path: str, body: object, within_s: float = TIMEOUT_S
    ) -> tuple[int, Any]:
        return await self._send(method, self._base_url + path, body, within_s)

    async def _send(self, method: str, url: str, body: object, within_s: float) -> tuple[int, Any]:
        limit = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._session.request(method, url, json=body, timeout=limit) as response:
                if response.status in GATEWAY_ERRORS:
                    response.raise_for_status()
                is_json = response.content_type == "application/json"
                return response.status, await (response.json() if is_json else response.text())
        # ValueError: the answer is not JSON, although its content type says so.
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UpstreamAway(
                f"the model server at {self.url} does not answer ({type(error).__name__})"
            ) from error


class Replicas:
    """Run each operation on all replicas of the model server that answer.

    An operation raises `UpstreamAway` if no replica answers, `PublishError` if a replica refuses.

    Attributes:
        each: the replicas.
        slots: adapter slots of each replica, as configured; None: ask the replicas.
        return_count: how often a replica answered again after it was away; such a replica may have
            been replaced by another server.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        slots: int | None = None,
        files: AdapterFiles | None = None,
    ) -> None:
        """Create a client for each base URL; `async with` opens them, and closes `files`."""
        self.slots = slots
        self.files = files or AdapterFiles()
        self.each = tuple(ModelServer(url, self.files) for url in base_urls)
        self._away: set[ModelServer] = set()
        self.return_count = 0
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open a connection pool for each replica."""
        self._open.push_async_callback(self.files.close)
        for server in self.each:
            await self._open.enter_async_context(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connection pools, and `files`."""
        await self._open.aclose()

    @property
    def is_any_away(self) -> bool:
        """Return whether some replica did not answer its last request."""
        return bool(self._away)

    @property
    def are_all_away(self) -> bool:
        """Return whether no replica answered its last request."""
        return len(self._away) == len(self.each)

    async def ask(
        self,
        operation: Callable[[ModelServer], Awaitable[T]],
        servers: Iterable[ModelServer] | None = None,
    ) -> dict[ModelServer, T]:
        """Run `operation` on all `servers` (None: all replicas) at once; return results by server.

        Servers that are away are left out. All operations have ended when this returns or raises.

        Raises:
            UpstreamAway: all servers are away, or cannot fetch a version's files.
        """
        asked = self.each if servers is None else tuple(servers)
        ended = await asyncio.gather(*(_result_or_error(operation(server)) for server in asked))
        answers: dict[ModelServer, T] = {}
        away: list[UpstreamAway] = []
        for server, result in zip(asked, ended, strict=True):
            if isinstance(result, NotFetched):
                # The server itself answers, so it does not count as away.
                away.append(result)
            elif isinstance(result, UpstreamAway):
                if server not in self._away:
                    log.warning("replica_away", replica=server.url, reason=str(result))
                self._away.add(server)
                away.append(result)
            elif isinstance(result, Exception):
                raise result
            else:
                if server in self._away:
                    self._away.remove(server)
                    self.return_count += 1
                [answers[server]] = result
        if not answers:
            raise away[0]
        return answers

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the models that every answering replica serves, by name.

        The entries are those of the first answering replica.

        Raises:
            UpstreamAway: no replica answers.
        """
        first, *others = (await self.ask(ModelServer.models)).values()
        return {
            name: model for name, model in first.items() if all(name in listed for listed in others)
        }


def _error_message(answer: object) -> str:
    """Return the message of an error in OpenAI's format, or the whole answer."""
    try:
        return str(answer["error"]["message"])  # type: ignore[index]
    except (LookupError, TypeError):
        return str(answer)


async def _result_or_error(work: Awaitable[T]) -> list[T] | Exception:
    """Return a list with the result of `work`, or the exception that it raised."""
    try:
        return [await work]
    except Exception as error:
        return error
