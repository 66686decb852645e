"""`pawl credit FILE`: what it reads and writes, and how it says what is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pawl.cli import app
from pawl.commands.credit import credit_table
from tests.conftest import ROOT
from tests.support.lines import call, calls, episode, event, reward
from trainer.credit.lines import CreditLine

KEYS = ["episode", "call", "agent", "r_final", "r_air", "r_total", "advantage", "weight", "reason"]


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["credit", *arguments], input=given)


def text(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def good() -> list[dict[str, Any]]:
    won = calls(2)
    won[1] |= {"agent": "checker", "trainable": False, "reason": "greedy", "policy": "m@3"}
    won[0]["tool_events"] = [event("ok", arguments="{}", ms=3)]
    lost = [call("1", tool_events=[event("malformed")])]
    return [episode("won", 1.0, calls=won, aliases=[]), episode("lost", 0.0, calls=lost)]


def test_pawl_credit_prints_a_json_line_for_each_transition(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    file.write_text("\n" + text(*good()) + "\n")
    found = run(str(file))
    assert (found.exit_code, found.stderr) == (0, "")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 3
    # Half (one of two succeeds) of 0.5 of the final rewards and 0.2 of AIR, by the spread √½.
    won = pytest.approx(0.35 * 2**0.5, abs=1e-12)
    assert lines[0] == {
        "episode": "won", "call": "1", "agent": "default", "r_final": 1.0, "r_air": 0.2,
        "r_total": 1.1, "advantage": won, "weight": 0.5, "reason": None,
    }  # fmt: skip
    assert [(line["agent"], line["reason"]) for line in lines] == [
        ("default", None),
        ("checker", "greedy"),
        ("default", None),
    ]
    assert run("-", given=file.read_text()).stdout == found.stdout
    assert run(str(file), "--json").stdout == found.stdout


def test_credit_is_computed_with_the_named_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[credit]\nnormalisation = "none"\nair_lambda = 0.0')
    found = run("-", "--recipe", str(recipe), given=text(*good()))
    assert [json.loads(line)["advantage"] for line in found.stdout.splitlines()] == [0.5, 0.5, -0.5]


def test_pawl_credit_prints_nothing_for_empty_input() -> None:
    assert (run("-", given="").exit_code, run("-", given="\n").stdout) == (0, "")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"state": "done"}, "line 3, state: Invalid enum value 'done'"),
        ({"feedback": [reward(0.5) | {"value": [1]}]}, "line 3, feedback[0].value: Expected"),
        ({"feedback": [reward(0.5) | {"at": "noon"}]}, "line 3, feedback[0].at: Invalid RFC3339"),
        ({"feedback": [reward(0.5) | {"at": -1}]}, "line 3, feedback[0].at"),
        ({"calls": [call(tool_events=[event("okay")])]}, "calls[0].tool_events[0].status"),
        ({"calls": [{"call": "1"}]}, "line 3, calls[0]: Object missing required field `trainable`"),
        ({"calls": [call(trainable=1)]}, "line 3, calls[0].trainable: Expected `bool`"),
        *(
            ({name: None}, f"line 3: Object missing required field `{name}`")
            for name in ("episode", "state", "feedback", "calls")
        ),
        ({"task": 7}, "line 3, task: Expected `str | null`"),
        ({"episode": "won"}, "line 3: episode 'won' is on line 1 already"),
    ],
)
def test_wrong_field_of_an_episode_is_named_and_no_credit_is_printed(
    changes: Any, named: str
) -> None:
    bad = {name: value for name, value in (episode("bad") | changes).items() if value is not None}
    found = run("-", given=text(*good(), bad))
    assert (found.exit_code, found.stdout) == (2, "")
    assert f"pawl: standard input, {named}" in found.stderr or named in found.stderr


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"episode": NaN}', '{"x": ' + "[" * 100_000])
def test_input_line_that_is_no_episode_is_refused_by_its_number(line: str) -> None:
    found = run("-", given=text(*good()) + line + "\n")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "standard input, line 3" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a file of episodes"),
        (["a.jsonl", "--update", "3"], "one of them"),
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file"),
        (["-", "--recipe", "nope"], "there is no recipe 'nope'"),
        (["--update", "3", "--recipe", "default"], "leave out --recipe"),
        (["--update", "three"], "a version's number or an update's id"),
    ],
)
def test_impossible_options_of_pawl_credit_are_refused(arguments: list[str], said: str) -> None:
    found = run(*arguments, given="")
    assert (found.exit_code, found.stdout) == (2, "")
    assert said in found.stderr


ALONE = """
import sys
from pawl.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules, file=sys.stderr)
"""


def test_pawl_credit_in_a_pipe_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "credit", "-"],
        input=text(*good()).encode(),
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == b"0 False\n"


def test_credit_table_shows_markup_in_names_as_plain_text() -> None:
    line = CreditLine(
        episode="[red]e", call="c", agent="a", r_final=None, r_air=0.1, r_total=None,
        advantage=None, weight=0.0, reason="unscored",
    )  # fmt: skip
    found = credit_table([line])
    assert [str(cell) for column in found.columns for cell in column.cells] == [
        "[red]e", "c", "a", "", "0.1000", "", "", "0.0000", "unscored",
    ]  # fmt: skip


def test_pawl_credit_reproduces_the_example_of_the_docs() -> None:
    page = (ROOT / "docs/explanation/credit.md").read_text()
    given, told = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert run("-", given=given).stdout == told
