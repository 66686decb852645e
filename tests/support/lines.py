"""Write lines as `pawl export` does, and give such lines their credit."""

import json
from collections.abc import Sequence
from typing import Any

from store.values.rewards import REWARD_ALONE, RewardRule
from trainer.credit.lines import CreditLine, credit_lines, read_lines
from trainer.recipes.recipe import CreditOptions, SftOptions


def reward(value: float | str | None, at: int = 0, metric: str = "reward") -> dict[str, Any]:
    """Make a statement `at` seconds past noon."""
    return {"metric": metric, "value": value, "at": f"2026-01-01T12:00:{at:02}+00:00"}


def call(name: str = "1", **changes: Any) -> dict[str, Any]:
    """Make a trainable call of two sampled tokens."""
    return {
        "call": name,
        "agent": "default",
        "prompt_ids": [1, 2],
        "sampled_ids": [3, 4],
        "trainable": True,
        "tool_events": [],
        "feedback": [],
    } | changes


def calls(count: int) -> list[dict[str, Any]]:
    """Make so many calls, named from 1."""
    return [call(str(number + 1)) for number in range(count)]


def event(status: str, name: str = "calc", **changes: Any) -> dict[str, Any]:
    """Make a tool event."""
    return {"id": None, "name": name, "status": status} | changes


def episode(name: str, *feedback: Any, **changes: Any) -> dict[str, Any]:
    """Make an episode of one call; a number among `feedback` is a reward."""
    said = [reward(one) if isinstance(one, int | float) else one for one in feedback]
    line = {
        "episode": name,
        "task": "t",
        "state": "scored" if said else "unscored",
        "feedback": said,
        "calls": calls(1),
    }
    return line | changes


def credited(
    lines: Sequence[dict[str, Any]],
    kept: SftOptions | None = None,
    earns: RewardRule = REWARD_ALONE,
    reward_range: tuple[float, float] = (0.0, 1.0),
    **rule: Any,
) -> dict[tuple[str, str], CreditLine]:
    """Return what each call is worth, by episode and call."""
    read = read_lines([json.dumps(line).encode() for line in lines], "test")
    found = credit_lines(read, CreditOptions(**rule), kept, earns, reward_range)
    return {(line.episode, line.call): line for line in found}
