"""Have a program score what a candidate and what serves answered, where that is all of an episode.

The program is a judge as `pawl judge` runs it: it gets the episode as one line, with the answer in
place of the recorded reply. Nothing is posted, and nothing is kept but the scores.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog

from pawl.judging.answers import Judge, Statement
from pawl.judging.errors import JudgeFailed
from store.read.replayed import ReplayedCall, WholeEpisode
from store.records import REWARD, Split
from store.values.documents import compact

log = structlog.get_logger()

# What the candidate and what serves said, in this order, where a judge can tell which is better.
Said = tuple[str, str]

# What stands for an id in a line that no record is behind.
REPLAYED: Final = "replayed"


def judged_line(episode: WholeEpisode, request: bytes, text: str, split: Split) -> bytes:
    """Return the line of an episode of one chat call, with `text` as its reply (pure).

    Raises:
        ValueError: the request is no JSON document, or is nested too deep.
    """
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    call: dict[str, Any] = {
        "call": REPLAYED,
        "agent": episode.agent,
        "policy": None,
        "request": msgspec.Raw(compact(request)),
        "reply": {"id": REPLAYED, "object": "chat.completion", "choices": [choice]},
        "tool_events": [],
        "feedback": [],
    }
    line = {
        "episode": episode.key,
        "task": episode.task,
        "split": split,
        "state": "unscored",
        "feedback": [],
        "calls": [call],
    }
    return msgspec.json.encode(line)


def reward_of(statements: Sequence[Statement]) -> float | None:
    """Return the mean of the rewards that a judge states; None if it states none (pure)."""
    values = [
        float(one["value"])
        for one in statements
        if one.get("metric", REWARD) == REWARD and isinstance(one["value"], (int, float))
    ]
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


async def rewards(
    judge: Judge, call: ReplayedCall, texts: Said, split: Split
) -> tuple[float, float] | None:
    """Return what a judge gives to the candidate's answer and to that of what serves.

    None if it does not give both: one alone compares nothing.
    """
    assert call.episode is not None
    assert call.request is not None
    scores = []
    for text in texts:
        try:
            line = judged_line(call.episode, call.request, text, split)
            reward = reward_of(await judge.judge(call.episode.key, line))
        except (JudgeFailed, ValueError, OverflowError) as error:
            log.warning("replay_not_judged", episode=call.episode.key, reason=str(error)[:200])
            return None
        if reward is None:
            return None
        scores.append(reward)
    return scores[0], scores[1]
