"""Show the sampled tokens of a call from the recorded ids, as a part of an episode's page.

The console has no tokenizer: it asks a model server for the texts, and shows ids if none answers. A
ratio is a token's probability under the policy about to be trained on it, divided by that under the
policy that sampled it.
"""

import asyncio
import math
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from statistics import fmean
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from console.episode import explained_for
from console.pages import Refusal, console_of, part, reading, viewer_of
from store.read.detail import call_tokens
from store.values.packing import unpack_ids, unpack_logprobs
from trainer.errors import TrainerError
from trainer.publishing.model_server import ModelServer

TOKENS_A_PAGE: Final = 1000
# Time limit for all servers together.
TEXTS_S: Final = 3.0
# Lower bounds of levels 1 to 4, of a token's probability and of its ratio.
LIKELY: Final = (0.05, 0.2, 0.5, 0.9)
RATIOS: Final = (0.5, 0.8, 1.25, 2.0)


def tokens_of(
    ids: Sequence[int],
    logprobs: Sequence[float],
    log_ratios: Sequence[float],
    texts: Sequence[str] | None,
    start: int,
) -> list[dict[str, float | str | None]]:
    """Return `TOKENS_A_PAGE` sampled tokens from `start` on; `texts` begin at `start` (pure).

    `likely` and `moved` are the levels (0 to 4) of a token's probability at sampling (LIKELY) and
    of its ratio (RATIOS). Unknown values are None.
    """
    page = slice(start, start + TOKENS_A_PAGE)
    known = zip_longest(ids[page], logprobs[page], map(_capped_exp, log_ratios[page]), texts or ())
    return [
        {
            "place": place,
            "id": token,
            "text": text,
            "logprob": logprob,
            "ratio": ratio,
            "likely": None if logprob is None else bisect(LIKELY, _capped_exp(logprob)),
            "moved": None if ratio is None else bisect(RATIOS, ratio),
        }
        for place, (token, logprob, ratio, text) in enumerate(known, start)
    ]


def _capped_exp(value: float) -> float:
    return math.exp(min(value, 700.0))


async def _token_texts(request: Request, model: str, ids: Sequence[int]) -> list[str] | None:
    """Return the texts of tokens from the first model server that knows them, or None."""
    with suppress(TimeoutError):
        async with asyncio.timeout(TEXTS_S):
            for url in console_of(request).settings.model_servers:
                with suppress(TrainerError):
                    async with ModelServer(url) as server:
                        if (texts := await server.token_texts(model, ids)) is not None:
                            return texts
    return None


async def tokens(request: Request) -> Response:
    """Show the sampled tokens of a call, with their probabilities, ratios and loss weight."""
    given = request.query_params.get("from", "")
    start = int(given) if given.isdecimal() and len(given) < 9 else 0
    async with reading(request) as connection:
        call = await call_tokens(connection, request.path_params["id"], viewer_of(request).tenant)
    if call is None:
        raise Refusal(404, "There is no such call")
    explained, why = None, "no update has consumed its episode yet"
    if call.update_id is not None:
        explained, why = await explained_for(request, call.update_id)
    own = (one for one in (explained.plan.credited if explained else ()) if one.call.id == call.id)
    ids, logprobs = unpack_ids(call.sampled_ids), unpack_logprobs(call.sampled_logprobs)
    policy = unpack_logprobs(call.policy_logprobs or b"") if logprobs else []
    log_ratios = [now - then for now, then in zip(policy, logprobs, strict=bool(policy))]
    end = start + TOKENS_A_PAGE
    texts = await _token_texts(request, call.model, ids[start:end])
    return part(
        request,
        "episode_tokens.html",
        call=call,
        sampled=len(ids),
        has_logprobs=bool(logprobs),
        tokens=tokens_of(ids, logprobs, log_ratios, texts, start),
        credit=next(own, None),
        why=why,
        # The geometric mean of the ratios decides whether a call carries loss.
        ratio=_capped_exp(fmean(log_ratios)) if log_ratios else None,
        off_policy=explained and explained.recipe.off_policy,
        after=end if end < len(ids) else None,
    )


ROUTES: Final = [Route("/calls/{id:uuid}/tokens", tokens, name="tokens")]
