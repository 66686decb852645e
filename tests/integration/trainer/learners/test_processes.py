"""Several processes make the same update as one, whatever is sharded."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands import launch as accelerate_launch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.stack import free_port
from pawl.commands.processes import trainer
from pawl.processes import run_module
from tests.support.mixtures import tiny_model as tiny_mixture
from tests.support.trainer.families import write_family
from tests.support.training import ppo_recipe, recipe, rows, sft_recipe, write_words
from trainer.errors import ShortOfMemory
from trainer.learners import distributed
from trainer.learners.learner import Learner
from trainer.learners.memory import footprint
from trainer.learners.model import base_hash, load_base

LAUNCH = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


# Those of a model whose rows are not computed in one pass, and of a mixture of experts, too.
LEARNERS = {
    "grpo": recipe,
    "ppo": ppo_recipe,
    "sft": sft_recipe,
    "windows": recipe,
    "experts": recipe,
}
POLICIES = "two policies"
LOADING = "loading"
# What a process fails with, and how many there are.
FAILING = [("memory", 2), ("fault", 2), ("memory", 3), ("fault", 3)]


@pytest.fixture(scope="module")
def models(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The model of each learner."""
    windows = write_family(tmp_path_factory.mktemp("windows") / "model", "gemma3_text")
    experts = tmp_path_factory.mktemp("experts")
    tiny_mixture("qwen3_moe").save_pretrained(experts)
    write_words(experts)
    others = {"windows": windows, "experts": str(experts)}
    return dict.fromkeys(LEARNERS, tiny_model) | others


@pytest.fixture(scope="module")
def launched(
    tiny_model: str, models: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folders of all programs, which ran one after another in two or three processes.

    `accelerate launch`, as a user with three GPUs would, on the CPU.
    """
    folder = tmp_path_factory.mktemp("launched")
    large = write_large_model(tmp_path_factory.mktemp("large"))
    programs = [
        *(("two_processes", 2, [model, folder / name, name]) for name, model in models.items()),
        ("two_policies", 2, [tiny_model, folder / POLICIES]),
        ("loading", 2, [large, folder / LOADING]),
        *(
            ("failing", processes, [tiny_model, folder / f"{kind} of {processes}", kind])
            for kind, processes in FAILING
        ),
    ]
    launch(programs)
    return folder


def write_large_model(folder: Path) -> str:
    """Write a model of twelve layers and 50 million parameters."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    config = LlamaConfig(vocab_size=97, num_attention_heads=8, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_words(folder)
    return str(folder)


def launch(programs: Sequence[tuple[str, int, list[Any]]]) -> None:
    for _, _, (_, folder, *_) in programs:
        folder.mkdir()
    given = [
        (module, processes, free_port(), list(map(str, arguments)))
        for module, processes, arguments in programs
    ]
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH]
    command += ["--num_processes", "3", "--multi_gpu", "--main_process_port", str(free_port())]
    command += ["-m", "tests.support.distributed.launched", json.dumps(given)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    # Freed tensors go back at once, so that a process's memory is what it holds.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def failed(*statuses: int) -> ChildFailedError:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=status, error_file="")
        for rank, status in enumerate(statuses)
    }
    return ChildFailedError("pawl.cli", failures)


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (SignalException("SIGTERM", signal.SIGTERM), 0),
        (failed(2), 2),
        # The other lost its connection to the one that refused.
        (failed(1, 2), 2),
        (failed(1), 1),
        (failed(-signal.SIGKILL), 1),
    ],
)
def test_launcher_ends_with_the_status_of_the_refusing_process(
    ended: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        raise ended

    monkeypatch.setattr(accelerate_launch, "main", main)
    monkeypatch.setattr(sys, "argv", [])
    assert distributed.launch(2, "pawl.cli", []) == status


@pytest.mark.timeout(120)
def test_model_that_cannot_be_trained_ends_all_processes_with_its_reason(tmp_path: Path) -> None:
    """`pawl up` starts nothing again that ends with status 2."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    driver.chmod(0o755)
    given = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
        "PAWL_TRAIN_GPUS": "0-1",
        "PAWL_MODEL": "/nowhere",
        "PAWL_POLICY": "m",
    }
    command = [*run_module("pawl.cli"), "trainer"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pawl: the model '/nowhere' cannot be loaded" in done.stderr


def test_training_process_short_of_memory_raises_instead_of_refusing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may give some back: all processes begin anew."""

    async def train(*_: object, **__: object) -> None:
        raise ShortOfMemory("memory ran out")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pawl.commands.processes._use_gpus", lambda *_: None)
    monkeypatch.setattr("trainer.run.train", train)
    with pytest.raises(SystemExit, match="2"):
        trainer()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ShortOfMemory):
        trainer()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as each of the two processes does: their number decides on bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("learner", LEARNERS)
def test_two_processes_make_the_same_update_as_a_single_process(
    models: Mapping[str, str], launched: Path, tmp_path: Path, learner: str
) -> None:
    chosen = LEARNERS[learner](steps=2)
    one = Learner(models[learner], chosen, seed=0, scratch=tmp_path)
    for number in (1, 2):
        one.update(rows(number - 1))
        saved = tmp_path / f"one-{number}"
        one.save(saved)
        ours = load_file(saved / "adapter_model.safetensors")
        theirs = load_file(launched / learner / str(number) / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() < 1e-6, name
    both = [one.version_logprobs(which, rows(1)) for which in (None, tmp_path / "one-1")]
    for alone, together in zip(
        both, json.loads((launched / learner / "computed.json").read_text()), strict=True
    ):
        for here, there in zip(alone, together, strict=True):
            assert here == pytest.approx(there, abs=1e-4)


@pytest.mark.timeout(600)
def test_no_process_ever_has_the_whole_base_in_memory(launched: Path) -> None:
    found = [json.loads((launched / LOADING / f"{rank}.json").read_text()) for rank in (0, 1)]
    alone, _ = load_base(found[0]["model"], recipe())
    whole = sum(parameter.nbytes for parameter in alone.parameters())
    for process in found:
        # Half of it, one layer of twelve, and what else a process needs meanwhile.
        assert whole / 2 < process["most"] < 0.7 * whole
        assert process["hash"] == base_hash(alone)
    # And never while it trains: that is what `pawl plan --gpus 2` says.
    planned = footprint(found[0]["model"], recipe(), "cpu").per_process(2)
    for process in found:
        assert process["kept"] == pytest.approx(planned.weights, rel=0.01)
        own = process["computing"] - process["kept"]
        assert own == pytest.approx(planned.gathered, rel=0.02)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(600)
def test_process_without_memory_for_a_policy_stops_no_other_policy(
    tiny_model: str, launched: Path, tmp_path: Path
) -> None:
    """All processes know of it, so that none computes with what another has not."""
    assert "CUDA out of memory" in (launched / POLICIES / "told").read_text()
    one = Learner(tiny_model, recipe(steps=2), seed=0, scratch=tmp_path)
    one.update(rows(0))
    (tmp_path / "one").mkdir()
    one.save(tmp_path / "one")
    ours = load_file(tmp_path / "one" / "adapter_model.safetensors")
    for name in "ab":
        theirs = load_file(launched / POLICIES / name / "adapter_model.safetensors")
        for key, tensor in ours.items():
            assert (tensor - theirs[key]).abs().max() < 1e-6, key


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(600)
def test_failing_process_keeps_no_other_process_waiting(
    tiny_model: str, launched: Path, tmp_path: Path
) -> None:
    one = Learner(tiny_model, recipe(), seed=0, scratch=tmp_path / "scratch")
    one.update(rows(0))
    one.save(tmp_path)
    ours = load_file(tmp_path / "adapter_model.safetensors")
    for kind, processes in FAILING:
        folder = launched / f"{kind} of {processes}"
        outcomes = json.loads((folder / "outcomes.json").read_text())
        assert len(outcomes) > 15
        assert max(seconds for _, seconds in outcomes) < 60
        ends = [outcome for outcome, _ in outcomes]
        assert ends[-1] == "trained"
        if kind == "memory":
            # It made micro-batches smaller, and so did all the others.
            assert ends.count("trained") > len(ends) / 2
        else:
            assert all("a fault" in end for end in ends[:-1])
        theirs = load_file(folder / "adapter_model.safetensors")
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() < 1e-6, name
