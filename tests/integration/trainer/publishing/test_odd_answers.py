"""A model server that does not report what the trainer needs is told so, and stops no process."""

import gzip
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from store.limited_bodies import MOST_BYTES
from trainer.errors import PublishError, UpstreamAway
from trainer.publishing.model_server import ModelServer

IDS = [1, 2, 3]


def choice(**fields: Any) -> web.Response:
    return web.json_response({"choices": [fields]})


def of_prompt(*logprobs: Any) -> web.Response:
    entries = [
        {str(token): {"logprob": one}} for token, one in zip(IDS[1:], logprobs, strict=False)
    ]
    return choice(prompt_logprobs=[None, *entries])


# What servers say that do not know vLLM's own fields, with status 200.
ODD: dict[str, Callable[[], web.Response]] = {
    "nothing of it": lambda: choice(text="x"),
    "null": lambda: choice(prompt_logprobs=None, token_ids=None, logprobs=None),
    "no choice": lambda: web.json_response({"choices": []}),
    "another object": lambda: web.json_response({"detail": "ok"}),
    "a text": lambda: web.Response(text="ok"),
}
OF_PROMPT: dict[str, Callable[[], web.Response]] = ODD | {
    "too few": lambda: of_prompt(-1.0),
    "of other tokens": lambda: choice(prompt_logprobs=[None, *[{"9": {"logprob": -1.0}}] * 2]),
    "no number": lambda: of_prompt(-1.0, None),
}
OF_SAMPLE: dict[str, Callable[[], web.Response]] = ODD | {
    "ids alone": lambda: choice(token_ids=[4, 5]),
    "none at all": lambda: choice(token_ids=[], logprobs={"token_logprobs": []}),
    "too few": lambda: choice(token_ids=[4, 5], logprobs={"token_logprobs": [-1.0]}),
    "no number": lambda: choice(token_ids=[4, 5], logprobs={"token_logprobs": [-1.0, None]}),
}


@asynccontextmanager
async def answering(make: Callable[[], web.Response]) -> AsyncIterator[ModelServer]:
    async def completions(_: web.Request) -> web.Response:
        return make()

    app = web.Application()
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        app.router.add_post(path, completions)
    app.router.add_get("/v1/models", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with ModelServer(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as server:
            yield server
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("said", OF_PROMPT)
async def test_model_server_without_prompt_log_probabilities_is_refused_with_the_fields_name(
    said: str,
) -> None:
    async with answering(OF_PROMPT[said]) as server:
        with pytest.raises(PublishError, match="prompt_logprobs"):
            await server.prompt_logprobs("m", IDS)


@pytest.mark.parametrize("said", OF_SAMPLE)
async def test_model_server_without_sampled_token_ids_is_refused_with_the_fields_name(
    said: str,
) -> None:
    async with answering(OF_SAMPLE[said]) as server:
        with pytest.raises(PublishError, match="return_token_ids"):
            await server.sample("m", IDS, 2.0, 2)


@pytest.mark.parametrize("answer", ODD)
async def test_token_texts_are_none_if_the_answer_is_malformed(answer: str) -> None:
    async with answering(ODD[answer]) as server:
        assert await server.token_texts("m", IDS) is None


async def test_log_probabilities_and_sampled_token_ids_of_a_model_server_are_read() -> None:
    async with answering(lambda: of_prompt(-1.0, -2.0)) as server:
        assert await server.prompt_logprobs("m", IDS) == [-1.0, -2.0]
        tails = [await server.last_logprobs("m", IDS, count) for count in range(3)]
        assert tails == [[], [-2.0], [-1.0, -2.0]]
    told = {"token_logprobs": [-1.0, -2.0]}
    async with answering(lambda: choice(token_ids=[4, 5], logprobs=told)) as server:
        assert await server.sample("m", IDS, 2.0, 2) == [(4, -1.0), (5, -2.0)]


async def test_compressed_model_list_beyond_the_limit_is_not_read_on() -> None:
    bomb = gzip.compress(bytes(20 * MOST_BYTES))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with answering(lambda: web.Response(body=bomb, headers=headers)) as server:
        tracemalloc.start()
        try:
            with pytest.raises(UpstreamAway, match="BodyTooLong"):
                await server.models()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 3 * MOST_BYTES
