"""Recorded traffic of real clients, replayed: no false join, and every join that can be made."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stitching import (
    ALIKE_CALLS,
    CLIENTS,
    KINDS,
    Exchange,
    join_in_ledger,
    make_plans,
    recorded_runs,
    replay,
    score,
)


@pytest.mark.parametrize("proxies", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_calls_of_real_clients_are_joined(proxies: int, seed: int) -> None:
    plans = make_plans(150, seed)
    seen = replay(recorded_runs(plans, seed), proxies, seed)
    result = score(seen, join_in_ledger(seen))
    assert result.false == 0
    # Some continue a beginning that is others', too.
    alike = ALIKE_CALLS * sum(kind == "alike" for _, kind in plans)
    assert result.right >= result.joins - alike


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_run_alone_is_one_episode(client: str, kind: str) -> None:
    seen = replay(recorded_runs([(client, kind)], 0), 1, 0)
    result = score(seen, join_in_ledger(seen))
    assert (result.right, result.false, result.quarantined) == (len(seen) - 1, 0, 0)


FEW = st.sampled_from("ab")
STEPS = st.tuples(FEW, FEW, st.sampled_from(["", "call_1", "call_2"]))


def a_run(steps: list[tuple[str, str, str]]) -> list[Exchange]:
    """A chat of few words, whose server counts its tool calls."""
    messages: list[dict[str, Any]] = []
    exchanges = []
    tool_id = ""
    for asked, told, next_id in steps:
        if tool_id:
            messages.append({"role": "tool", "tool_call_id": tool_id, "content": asked})
        else:
            messages.append({"role": "user", "content": asked})
        call = {"id": next_id, "function": {"name": "f", "arguments": "{}"}}
        calls = [call] if next_id else []
        reply: dict[str, Any] = {"role": "assistant", "content": told, "tool_calls": calls}
        answer = {"id": "x", "choices": [{"message": reply}]}
        body = {"messages": list(messages)}
        exchanges.append(Exchange("chat", {}, body, 200, answer))
        messages.append(reply)
        tool_id = next_id
    return exchanges


@given(
    st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_runs_that_say_the_same_are_never_joined_to_each_other(
    runs: list[list[tuple[str, str, str]]], proxies: int, seed: int
) -> None:
    seen = replay([a_run(steps) for steps in runs], proxies, seed)
    result = score(seen, join_in_ledger(seen))
    assert result.false == 0
    firsts = [steps[0] for steps in runs]
    if len(set(firsts)) == len(firsts):
        assert result.right == result.joins
