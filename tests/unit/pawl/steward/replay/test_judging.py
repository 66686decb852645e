"""What a judge is shown of a replayed call, and what is read of its answer."""

import json
from typing import Any

import pytest

from pawl.judging.errors import JudgeFailed
from pawl.judging.rubric import transcript
from pawl.steward.replay.judging import judged_line, reward_of, rewards
from store.read.replayed import ReplayedCall, WholeEpisode

EPISODE = WholeEpisode(key="run-7", task="sum", agent="adder")
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "1 + 1?"}]}'
CALL = ReplayedCall(prompt_ids=(1, 2), request=REQUEST, episode=EPISODE)


class Scripted:
    """Give what the text of the reply says."""

    name = "scripted"

    async def judge(self, episode: str, line: bytes) -> list[dict[str, Any]]:
        said = json.loads(line)["calls"][0]["reply"]["choices"][0]["message"]["content"]
        if said == "fail":
            raise JudgeFailed("exit code 1")
        return [] if said == "?" else [{"value": float(said), "episode": episode}]


def test_a_judge_sees_the_episode_with_the_answer_in_place_of_the_reply() -> None:
    line = judged_line(EPISODE, REQUEST, "2", "eval")
    shown = json.loads(line)
    assert (shown["episode"], shown["task"], shown["split"]) == ("run-7", "sum", "eval")
    [call] = shown["calls"]
    assert call["request"] == json.loads(REQUEST)
    assert b"\n" not in line
    # A model with a rubric reads it, too.
    assert "reply: 2" in transcript(shown)
    assert "1 + 1?" in transcript(shown)


def test_the_reward_is_what_is_stated_of_the_metric_reward() -> None:
    assert reward_of([{"value": 1}, {"value": 0.5, "metric": "reward"}]) == 0.75
    assert reward_of([{"value": True}]) == 1.0
    assert reward_of([{"value": 3, "metric": "cents"}, {"value": "good"}]) is None
    assert reward_of([{"value": float("nan")}]) is None
    assert reward_of([]) is None


@pytest.mark.parametrize(
    ("said", "found"),
    [(("0", "1"), (0.0, 1.0)), (("?", "1"), None), (("1", "fail"), None)],
)
async def test_both_answers_are_scored_or_none_is(
    said: tuple[str, str], found: tuple[float, float] | None
) -> None:
    assert await rewards(Scripted(), CALL, said, "train") == found


async def test_a_request_that_cannot_be_shown_compares_nothing() -> None:
    broken = ReplayedCall(prompt_ids=(1,), request=b"{", episode=EPISODE)
    assert await rewards(Scripted(), broken, ("0", "1"), "train") is None
