"""Trials of bad and good adapters: what is made for them, and what their figures come to."""

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.trials.figures import (
    GOOD,
    INVERTED,
    RANDOM,
    Trial,
    bars,
    lower,
    table,
    trial_of,
    turned_bars,
    turned_table,
)
from benchmarks.trials.ledger import Begun
from benchmarks.trials.making import UPSIDE_DOWN, write_inverted, write_random
from benchmarks.trials.turning import Turned, turned_of
from pawl.scenarios.places import find_scenario
from pawl.steward.gate.records import GateOptions
from store.records import Arm
from store.versions import PolicyEvent, PolicyState

START = datetime(2026, 1, 1, tzinfo=UTC)
OPTIONS = GateOptions(canary_share=0.3, base_share=0.1)
IMPORTED_S, CANARY_S, END_S = 100.0, 110.0, 400.0


def told(*states: tuple[PolicyState, float]) -> list[PolicyEvent]:
    return [
        PolicyEvent(
            id=uuid4(),
            name="m",
            version=1,
            from_state=None,
            to_state=state,
            reason=f"it is {state}",
            actor="steward",
            evidence=None,
            at=START + timedelta(seconds=at),
        )
        for state, at in states
    ]


def episodes(
    arm: Arm, version: int, from_s: float, to_s: float, rewards: Sequence[float]
) -> list[Begun]:
    step = (to_s - from_s) / len(rewards)
    return [
        Begun(
            arm=arm, version=version, at=START + timedelta(seconds=from_s + step * at), reward=one
        )
        for at, one in enumerate(rewards)
    ]


def tried(name: str, end: PolicyState, given: Sequence[Begun], *, has_share: bool = True) -> Trial:
    """A trial's figures, with those of what served before it and beside it."""
    states: list[tuple[PolicyState, float]] = [("written", IMPORTED_S), ("candidate", 105.0)]
    states += [("canary", CANARY_S)] if has_share else []
    others = episodes("serving", 0, 0.0, IMPORTED_S, [0.0, 1.0] * 50)
    others += episodes("serving", 0, CANARY_S, END_S, [0.0, 1.0] * 100)
    first = START + timedelta(seconds=IMPORTED_S)
    return trial_of(name, 1, told(*states, (end, END_S)), [*others, *given], first, OPTIONS)


def broken(*trials: Trial) -> set[str]:
    return {bar.name for bar in bars(trials, OPTIONS) if not bar.holds}


def test_what_ends_as_it_should_and_takes_no_more_than_its_share_holds() -> None:
    worse = episodes("canary", 1, CANARY_S, END_S, [0.0, 0.2] * 40)
    better = episodes("canary", 1, CANARY_S, END_S, [1.0, 0.9] * 40)
    trials = [
        tried(RANDOM, "rejected", [], has_share=False),
        tried(INVERTED, "rolled_back", worse),
        tried(GOOD, "serving", better),
    ]
    assert not broken(*trials)
    random, inverted, good = trials
    assert (random.episodes, random.canary, random.own, random.fixed) == (0, 0, None, None)
    assert (inverted.episodes, inverted.canary, inverted.afterwards) == (280, 80, 0)
    assert inverted.own is not None
    assert inverted.own.mean == pytest.approx(0.1)
    assert lower(inverted) == pytest.approx(0.0)
    # (variance / 0.3 + variance / 0.7) · ((z of level + z of power) / difference)².
    assert inverted.fixed == pytest.approx(
        (0.01 / 0.3 + 0.25 / 0.7) * (2.8016 / 0.4) ** 2, rel=1e-3
    )
    assert good.fixed == pytest.approx((0.0025 / 0.3 + 0.25 / 0.7) * (2.4865 / 0.47) ** 2, rel=1e-3)
    assert good.seconds == END_S - IMPORTED_S
    assert "it is serving" in table(trials).notes[2]


def test_what_has_more_than_its_share_or_has_any_afterwards_does_not_hold() -> None:
    too_many = episodes("canary", 1, CANARY_S, END_S, [0.0, 0.2] * 100)
    late = episodes("canary", 1, END_S + 10.0, END_S + 20.0, [0.0])
    found = broken(tried(INVERTED, "rolled_back", [*too_many, *late]))
    assert found == {"inverted: share of the new episodes", "inverted: episodes after that"}
    assert broken(tried(INVERTED, "serving", [])) == {"inverted rewards: ends as rolled_back"}
    shown = episodes("canary", 1, CANARY_S, END_S, [0.0])
    assert broken(tried(RANDOM, "rejected", shown)) == {"random: episodes that it got"}
    assert broken(tried(GOOD, "rolled_back", shown)) == {"good: ends as serving"}


def test_others_whose_rewards_fall_do_not_hold() -> None:
    fell = episodes("base", 0, CANARY_S, END_S, [0.0] * 300)
    assert "inverted: others' rewards, standard errors lower" in broken(
        tried(INVERTED, "rolled_back", fell)
    )


def turned(sufficed_s: float | None) -> Turned:
    """A version that turned bad as its trial ended, and was rolled back 200 s later."""
    [end] = told(("rolled_back", END_S + 200.0))
    given = episodes("serving", 1, CANARY_S, END_S, [1.0, 0.9] * 20)
    given += episodes("serving", 1, END_S, END_S + 200.0, [0.1, 0.0] * 50)
    given += episodes("base", 0, CANARY_S, END_S + 200.0, [0.25] * 10)
    given += episodes("serving", 0, END_S + 200.0, END_S + 300.0, [0.5] * 10)
    since = START + timedelta(seconds=END_S)
    sufficed = None if sufficed_s is None else START + timedelta(seconds=sufficed_s)
    return turned_of(1, end, "m", since, sufficed, given)


def test_what_turned_bad_is_timed_from_when_its_evidence_sufficed() -> None:
    bad = turned(END_S + 198.5)
    assert (bad.seconds, bad.waited, bad.episodes, bad.serves) == (200.0, 1.5, 100, "m")
    assert [bad.own, bad.base, bad.before] == pytest.approx([0.05, 0.25, 0.95])
    assert all(bar.holds for bar in turned_bars(bad))
    assert turned_table(bad).lines[0][1:3] == ["200", "1.5"]


def test_what_keeps_the_traffic_too_long_or_was_never_shown_bad_does_not_hold() -> None:
    for one in (turned(END_S + 139.0), turned(None), None):
        assert not any(bar.holds for bar in turned_bars(one))
    assert turned_table(None).notes == ["The good adapter was not promoted."]


def test_a_random_adapter_has_the_shapes_of_the_other_and_is_so_much_larger(tmp_path: Path) -> None:
    like, made = tmp_path / "like", tmp_path / "made"
    like.mkdir()
    chance = torch.Generator().manual_seed(1)
    weights = {f"a.lora_{one}.weight": torch.randn(64, 64, generator=chance) * 0.5 for one in "AB"}
    save_file(weights, str(like / "adapter_model.safetensors"))
    (like / "adapter_config.json").write_text('{"r": 64}')
    write_random(like, made, 10.0, seed=2)
    drawn = load_file(made / "adapter_model.safetensors")
    assert {name: one.shape for name, one in drawn.items()} == {
        name: one.shape for name, one in weights.items()
    }
    assert drawn["a.lora_A.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert drawn["a.lora_B.weight"].std() == pytest.approx(5.0, rel=0.1)
    assert not torch.equal(drawn["a.lora_A.weight"], weights["a.lora_A.weight"])
    assert (made / "adapter_config.json").read_text() == '{"r": 64}'


def test_the_inverted_example_is_the_demo_with_another_judge(tmp_path: Path) -> None:
    write_inverted(tmp_path)
    inverted, demo = find_scenario(UPSIDE_DOWN, tmp_path), find_scenario("calculator")
    assert inverted.judge == "inverted:verdict"
    same = {"judge", "name", "folder"}
    assert inverted.model_dump(exclude=same) == demo.model_dump(exclude=same)
    assert (tmp_path / UPSIDE_DOWN / "judge.py").exists()
    answered = {"id": "q", "answer": "4", "response_id": "r", "tool": None}
    run = {"task": {"answer": "4"}, "output": json.dumps(answered)}
    program = f"import json, inverted; print(json.dumps(inverted.verdict({run!r})))"
    folder = tmp_path / UPSIDE_DOWN
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=folder, text=True)
    said = {item["metric"]: item["value"] for item in json.loads(printed)}
    assert said == {"reward": 0.0, "success": 1}
