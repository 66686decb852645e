"""`pawl train`: the updates of an export, without a database."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from pawl.cli import app
from pawl.export import export
from store.records import SpoolRecord
from store.selecting import Selection
from tests.support.ledger.episodes import ingest
from tests.support.records import call, reward, tokens
from trainer.publishing.adapters import read_manifest

RECIPE = """
[claim]
group_size = 2
groups = 2
[lora]
rank = 4
[batch]
micro_batch_tokens = 64
[off_policy]
max_drift = 100.0
sequence_min = 0.0
sequence_max = 1e9
"""


@pytest.fixture
async def exported(engine: AsyncEngine, tmp_path: Path) -> Path:
    """Write four groups of two episodes, one of them without signal, and one of evaluation."""
    records: list[SpoolRecord] = []
    for task in range(5):
        for member in range(2):
            key, made = f"{task}-{member}", tokens([2, 3, 4 + task], [9 + member, 5], -4.5)
            split: Any = "eval" if task == 4 else "train"
            records.append(call(key, task=f"t{task}", tokens=made, split=split))
            records.append(reward(1.0 if task == 1 else float(member), episode=key))
    async with engine.begin() as connection:
        await ingest(connection, records)
    with (tmp_path / "episodes.jsonl").open("wb") as out:
        await export(engine, Selection(), out)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "episodes.jsonl"


def run(file: Path, model: str, *more: str) -> Result:
    folder = file.parent
    options = ["--recipe", str(folder / "recipe.toml"), "--model", model]
    return CliRunner().invoke(app, ["train", str(file), *options, "--out", f"{folder}/out", *more])


def test_export_is_trained_update_by_update(exported: Path, tiny_model: str) -> None:
    done = run(exported, tiny_model)
    assert done.exit_code == 0, done.output
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["version"], second["version"]) == (1, 2)
    # The group whose rewards are equal is taken along with the two that differ, and is compared
    # with all three: 1/3 above the mean of their six, by a spread of √(2/9).
    assert (first["groups"], second["groups"]) == (3, 1)
    assert first["signal_episodes"] == pytest.approx(4 + 2 * (1 / 3) / (2 / 9) ** 0.5)
    assert second["step_share"] == pytest.approx(0.5**0.5)
    assert "episodes in no update: 2 evaluation" in done.stderr
    manifest = read_manifest(Path(second["folder"]))
    assert manifest is not None
    assert (manifest.policy, manifest.parent_version) == ("m", 1)
    on = run(exported, tiny_model, "--start", second["folder"], "--out", f"{exported.parent}/on")
    assert [json.loads(line)["version"] for line in on.stdout.splitlines()] == [3, 4]
    again = run(exported, tiny_model)
    assert again.exit_code == 2
    assert "already has versions of 'm': name another folder with --out" in again.stderr


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("prompt_ids", [], "prompt_ids is missing or empty; write the file again"),
        ("sampling", None, "sampling is missing; write the file again"),
        ("sampled_logprobs", [-1.0], "sampled_logprobs is not as long as sampled_ids"),
        ("policy", "m@new", "policy is 'm@new', and must be NAME or NAME@N"),
    ],
)
def test_export_lacking_training_fields_is_refused(
    exported: Path, tiny_model: str, field: str, value: Any, why: str
) -> None:
    line = json.loads(exported.read_text().splitlines()[0])
    line["calls"][0][field] = value
    exported.write_text(json.dumps(line))
    refused = run(exported, tiny_model)
    assert refused.exit_code == 2
    assert "episode '0-0'" in refused.stderr
    assert why in refused.stderr
