"""An example runs whole: held-out tasks, a wave, an update, held-out tasks again, the report."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import free_port
from pawl.scenarios.run import RunOptions, run_scenario
from pawl.scenarios.scenario import EXAMPLES
from pawl.stack.preflight import NotReady, check_memory
from tests.e2e.conftest import RECIPE
from tests.support.waiting import until_true

# On a machine that others slow down, a wave may take minutes.
pytestmark = pytest.mark.timeout(1800)

PORTS = ("PAWL_LISTEN", "PAWL_ADMIN_LISTEN", "PAWL_TRAINER_LISTEN", "PAWL_CONTROLLER_LISTEN")


def has_room() -> bool:
    try:
        check_memory()
    except NotReady:
        return False
    return True


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the example, with two held-out tasks, once other tests leave room for its stack."""
    until_true(has_room, within_s=900)
    for variable in PORTS:
        monkeypatch.setenv(variable, f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("PAWL_VLLM_PORT", str(free_port()))
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES / "math", folder / "math")
    file = folder / "math" / "example.toml"
    keys = re.sub(r"(?m)^(held_out|at_once|most_waves).*\n", "", file.read_text())
    # Two in five groups have no spread, and so four in a row now and then.
    file.write_text(f"{keys}held_out = 2\nheld_out_samples = 1\nmost_waves = 10\nat_once = 16\n")
    return folder


def each(summary: dict[str, Any], name: str) -> list[Any]:
    """Return one figure of each look at the held-out tasks."""
    return [one[name] for one in summary["held_out"]]


async def test_math_example_trains_versions_and_writes_its_summary(
    examples: Path, tmp_path: Path, model_dir: str
) -> None:
    recipe = tmp_path / "short.toml"
    recipe.write_text(RECIPE)
    var = tmp_path / "var"
    options = RunOptions(
        name="math",
        minutes=25,
        seed=0,
        # A wave of two groups gives none, one or two updates.
        updates=1,
        held_out_every=1,
        var=var,
        models=Path(model_dir).parent,
        recipe=str(recipe),
        examples=examples,
    )
    await run_scenario(options)
    summary = json.loads((var / "summary.json").read_text())
    waves = each(summary, "waves")
    assert waves == list(range(len(waves)))
    assert len(waves) >= 2
    assert each(summary, "updates")[0] == 0
    assert summary["updates"] >= 1
    assert [summary["before"], summary["after"]] == [
        summary["held_out"][0]["score"],
        summary["held_out"][-1]["score"],
    ]
    assert summary["recorded"] == summary["calls"] > 0
    assert summary["trainable_share"] >= 0.95
    assert summary["failed_requests"] == summary["failed_runs"] == 0
    assert summary["policies"]["math"]["versions"] >= 1
    assert summary["policies"]["math"]["trained_episodes"] >= 4
    assert (var / "reward.png").stat().st_size > 10_000
