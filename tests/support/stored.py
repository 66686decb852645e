"""Make episodes as the store gives them."""

from datetime import timedelta
from typing import Any

import msgspec

from store.ids import new_id
from store.records import Episode, Feedback, TransitionRow
from tests.support.records import START, tokens


def transition(**changes: Any) -> TransitionRow:
    """Make a complete, trainable call."""
    row = TransitionRow(
        id=new_id(),
        episode_id=new_id(),
        agent="default",
        policy="m",
        policy_version=0,
        status="complete",
        http_status=200,
        request=None,
        reply=None,
        tokens=tokens([1, 2], [3, 4]),
        sampling={"temperature": 1.0},
        trainable=True,
        reason=None,
        tool_calls=(),
    )
    return msgspec.structs.replace(row, **changes)


def said(
    value: float | None, at: int = 0, metric: str = "reward", correction: str | None = None
) -> Feedback:
    """Make a statement `at` seconds past noon."""
    moment = START + timedelta(seconds=at)
    return Feedback(metric=metric, value=value, at=moment, correction=correction)


def episode(reward: float | None, calls: int = 1, **changes: Any) -> Episode:
    """Make an episode with a reward, or without one."""
    made = Episode(
        id=new_id(),
        key=str(new_id()),
        task="t",
        method="header",
        last_call_at=START,
        calls=tuple(transition() for _ in range(calls)),
        feedback=() if reward is None else (said(reward),),
    )
    return msgspec.structs.replace(made, **changes)
