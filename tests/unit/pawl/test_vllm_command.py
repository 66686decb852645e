"""The vLLM that Pawl starts samples with the defaults that its proxy records."""

import json
import sys

import pytest

from pawl.stack import vllm
from pawl.stack.vllm import VllmOptions, vllm_command, vllm_environment


def command(**options: float) -> list[str]:
    return vllm_command(
        VllmOptions(
            model="m",
            served_name="m",
            port=1,
            dtype=None,
            max_model_len=128,
            max_lora_rank=8,
            sampling_defaults=options,
        )
    )


def test_it_is_started_by_our_own_program() -> None:
    """vLLM's, but imported sooner."""
    assert command()[:4] == [sys.executable, "-P", "-m", "pawl.stack.vllm"]


def test_the_model_cards_settings_are_never_used() -> None:
    without = command()
    assert without[without.index("--generation-config") + 1] == "vllm"
    assert "--override-generation-config" not in without


def test_the_proxys_defaults_are_the_servers() -> None:
    given = command(temperature=0.6, top_p=0.95, top_k=20)
    said = json.loads(given[given.index("--override-generation-config") + 1])
    assert said == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize("gpu", [False, True])
def test_short_prompts_are_kept_on_a_cpu_and_a_gpu_has_its_own_blocks(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: gpu)
    given = command()
    assert ("--block-size" in given) is not gpu
    if not gpu:
        # vLLM's kernels on a CPU want multiples of 32.
        assert given[given.index("--block-size") + 1] == "32"


@pytest.mark.parametrize("gpu", [False, True])
def test_on_a_cpu_the_engine_computes_by_itself_with_all_cores(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: gpu)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = vllm_environment(4)
    assert given.get("VLLM_ENABLE_V1_MULTIPROCESSING") == (None if gpu else "0")
    assert given["OMP_NUM_THREADS"] == ("1" if gpu else "4")
