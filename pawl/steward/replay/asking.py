"""Ask a model server about one recorded call: what a candidate says there, beside what serves.

The prompt is sent as the ids that were recorded, so nothing is tokenised again. The candidate
continues it, at temperature one; what serves tells the log-probabilities of what came, and
continues it too where tools were offered.
"""

from uuid import UUID

from pawl.steward.replay.tool_text import Tools, is_malformed, offered_tools
from pawl.steward.replay.verdict import Answer
from store.read.replayed import Chosen, ReplayedCall
from store.records import Record
from trainer.errors import PublishError
from trainer.publishing.server import Completion, ModelServer


class Refused(Exception):
    """Say that the candidate was refused an answer, and what serves was not."""


class Pair(Record, frozen=True, kw_only=True):
    """Name what is compared, as the model server does, and how long an answer may be, in tokens."""

    candidate: str
    serving: str
    tokens: int


# What the candidate and what serves said, in this order, where a judge can tell which is better.
Said = tuple[str, str]


async def answer(
    server: ModelServer, pair: Pair, chosen: Chosen, call: ReplayedCall, *, is_judged: bool = False
) -> tuple[Answer, Said | None]:
    """Return what the candidate answers to a call, compared with what serves, and what both said.

    The latter only if it `is_judged`, the answer is all of an episode, and what serves came to its
    end: one that was cut off would be compared by where it was.

    Raises:
        Refused: the server refuses it of the candidate, and not of what serves.
        PublishError: it refuses it of both: the prompt may be too long.
        UpstreamAway: the server does not answer, or has lost one of them.
    """
    tools = offered_tools(call.request)
    is_judged = is_judged and not tools and None not in (call.episode, call.request)

    async def complete(name: str) -> Completion:
        seed = _seed(chosen.call)
        return await server.complete(name, call.prompt_ids, pair.tokens, seed, marks=not is_judged)

    try:
        own = await complete(pair.candidate)
    except PublishError as error:
        await complete(pair.serving)
        raise Refused(str(error)) from error
    scored = await server.last_logprobs(pair.serving, call.prompt_ids + own.ids, len(own.ids))
    malformed: tuple[bool | None, bool | None] = (None, None)
    texts: Said | None = None
    if tools or is_judged:
        other = await complete(pair.serving)
        malformed = (_judged(own, tools), _judged(other, tools))
        texts = (own.text, other.text) if is_judged and other.is_whole else None
    compared = Answer(
        split=chosen.split,
        own=own.logprobs,
        serving=tuple(scored),
        malformed=malformed,
    )
    return compared, texts


def _judged(completion: Completion, tools: Tools) -> bool | None:
    return is_malformed(completion.text, tools, is_whole=completion.is_whole)


def _seed(call: UUID) -> int:
    """Return the seed of a call's answers: both sides have the same, and so has whoever asks again.

    The last bits of a UUIDv7 are random.
    """
    return call.int & 0x7FFFFFFF
