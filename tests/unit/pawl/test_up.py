"""`pawl up` that cannot go on says why, in the words of what failed, and without a traceback."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pawl.commands import local
from pawl.settings import StackSettings
from pawl.stack.process import ProcessFailed
from tests.conftest import ROOT


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", "up"],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PAWL_RECIPE": "nowhere",
            "PAWL_UPSTREAM_URL": "http://127.0.0.1:9/v1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "nowhere" in done.stderr


def test_a_process_that_cannot_be_kept_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing(_: StackSettings) -> None:
        await asyncio.sleep(0)
        raise ProcessFailed("vllm ended with code 1; the end of vllm.log:\nno memory")

    monkeypatch.setattr(local, "run_stack", failing)
    with pytest.raises(SystemExit) as ended:
        local.up()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "pawl: vllm ended with code 1; the end of vllm.log:\nno memory\n"
    )


def test_one_trainer_trains_all_policies_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wide.toml").write_text('dtype = "auto"\n[lora]\nrank = 48\n')
    policies = tmp_path / "policies.toml"
    policies.write_text(
        '[[policy]]\nname = "writer"\nbase = "qwen"\n[[policy]]\nname = "checker"\nbase = "qwen"\n'
        f'recipe = "{tmp_path / "wide.toml"}"\n'
    )
    monkeypatch.setenv("PAWL_POLICIES", str(policies))
    monkeypatch.setenv("PAWL_MODEL", "some/model")
    plan = local._plan(StackSettings(model="some/model"))
    assert plan.settings == {"PAWL_POLICY": "", "PAWL_MODEL": "some/model"}
    assert (plan.vllm.served_name, plan.vllm.max_lora_rank) == ("qwen", 48)
