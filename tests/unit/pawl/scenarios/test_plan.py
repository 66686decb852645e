"""The stack of a scenario samples as the environment says."""

import json
from pathlib import Path

import pytest

from pawl.scenarios.scenario import find_scenario, stack_plan
from pawl.settings import read_settings
from pawl.stack.stack import StackPlan
from pawl.stack.vllm import vllm_command
from proxy.settings import ProxySettings


def planned(var: Path) -> StackPlan:
    return stack_plan(
        find_scenario("calculator"),
        model="/a/model",
        is_packaged=True,
        recipe="demo",
        rank=8,
        seed=0,
        var=var,
    )


def test_the_demos_server_samples_with_the_defaults_that_its_proxy_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAWL_DEFAULT_SAMPLING", "top_p=0.95,top_k=20")
    command = vllm_command(planned(tmp_path).vllm)
    served = json.loads(command[command.index("--override-generation-config") + 1])
    assert served == {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
    # The proxy is started with this environment.
    assert read_settings(ProxySettings).sampling_defaults == served
