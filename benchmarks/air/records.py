"""Make episodes as the ledger would give them to the trainer."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Final
from uuid import UUID

from benchmarks.air.sampler import Played, Turn
from store.ids import new_id
from store.records import (
    REWARD,
    Episode,
    Feedback,
    Group,
    Tokens,
    ToolCall,
    ToolEvent,
    TransitionRow,
)
from store.values.tokens import pack_ids, pack_logprobs

POLICY: Final = "toy"
NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)


def as_groups(played: Sequence[Played], rewards: Sequence[float]) -> list[Group]:
    """Group neighbours with the same task, each episode with its reward as feedback."""
    episodes = [_episode(*pair) for pair in zip(played, rewards, strict=True)]
    return [
        Group(task=task or "", episodes=tuple(members))
        for task, members in groupby(episodes, key=lambda episode: episode.task)
    ]


def _episode(played: Played, reward: float) -> Episode:
    identifier = new_id()
    return Episode(
        id=identifier,
        key=str(identifier),
        task=played.task.name,
        method="header",
        last_call_at=NOW,
        calls=tuple(_call(turn, identifier) for turn in played.turns),
        feedback=(Feedback(metric=REWARD, value=reward, at=NOW),),
    )


def _call(turn: Turn, episode: UUID) -> TransitionRow:
    outcome = turn.outcome
    asked = ToolCall(
        id=f"call_{outcome.state.turn}", name=outcome.tool, arguments=outcome.arguments
    )
    event = ToolEvent(id=new_id(), tool_id=asked.id, name=asked.name, status=outcome.status)
    return TransitionRow(
        id=new_id(),
        episode_id=episode,
        agent="default",
        policy=POLICY,
        policy_version=0,
        status="complete",
        http_status=200,
        request=None,
        reply=None,
        tokens=Tokens(
            prompt_ids=pack_ids(turn.prompt_ids),
            sampled_ids=pack_ids(turn.sampled_ids),
            sampled_logprobs=pack_logprobs(turn.sampled_logprobs),
        ),
        sampling={"temperature": 1.0},
        trainable=True,
        reason=None,
        tool_calls=(asked,),
        tool_events=(event,),
    )
