"""A scenario, read from its folder: agent, judge, tasks, recipe, and the stack it runs on."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from pawl.programs import TooMuchOutput, run_program
from pawl.rollout.tasks import RolloutError, Task, parse_tasks
from pawl.stack.stack import StackPlan, configured_plan
from proxy.errors import SpoolInUse
from proxy.spool.folders import LOCK, lock_file
from store.policy_table import PolicySpec, open_policies
from store.toml_file import TomlFile

CHECKOUT: Final = Path(__file__).parents[2]
EXAMPLES: Final = CHECKOUT / "examples"
CLIENTS: Final = CHECKOUT / ".venv-clients" / "bin" / "python"
FILE_NAME: Final = "example.toml"
# Limits of a program that makes tasks.
TASKS_S: Final = 600.0
MOST_TASK_BYTES: Final = 2**28
Count = Annotated[int, Field(ge=1)]
Function = Annotated[str, Field(pattern=r"^\w+:\w+$")]
TaskSplit = Literal["train", "held-out"]


class ScenarioFailed(Exception):
    """A scenario cannot be run, or could not go on; the message says why."""


class ScenarioKeys(BaseModel):
    """The keys of an `example.toml`.

    Attributes:
        title: a title of a few words.
        model: the name under which the base model is served.
        python: where the agent's packages are installed: beside Pawl, or in `.venv-clients`.
        agent: the agent's function, as `pawl rollout --python` takes it.
        judge: the judge's function, as `--judge-python` takes it.
        tasks: the program that makes tasks; `--count`, `--seed` and `--split` are appended.
        answer: the tasks' field that the agent does not get.
        models: base models that can do the tasks, each with the GiB that training and serving take
            together, on a CPU and on a GPU; empty: the packaged model can do them.
        recipe: a file of the folder, or the name of a packaged recipe.
        policies: a file of the folder with the policies; None: the model is the only policy.
        tool_parser: vLLM's parser of tool calls; None: the usual one.
        chat_template: a file of the folder, or the name of a packaged template; None: the model's.
        tool_results: how tool results are read, as in `PAWL_TOOL_RESULTS`; None: not at all.
        score: the judge's metric to show, and to compare before and after.
        held_out: number of held-out tasks; fewer if the program makes fewer.
        held_out_samples: runs of each held-out task.
        held_out_every: ask the held-out tasks again after this many waves; None: only at the end.
        at_once: runs at the same time.
        most_waves: waves after which learning ends.
        learned: learning also ends after two waves in a row with at least this mean reward.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    model: str
    python: Literal["pawl", "clients"] = "pawl"
    agent: Function = "agent:answer"
    judge: Function = "judge:verdict"
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("tasks.py",)
    answer: str = "answer"
    models: Mapping[str, tuple[float, float]] = {}
    recipe: str = "recipe.toml"
    policies: str | None = None
    tool_parser: str | None = None
    chat_template: str | None = None
    tool_results: str | None = None
    score: Literal["reward", "success"] = "reward"
    held_out: Count = 96
    held_out_samples: Count = 2
    held_out_every: Count | None = None
    at_once: Count = 32
    most_waves: Count = 40
    learned: float = 0.9


class Scenario(ScenarioKeys):
    """A scenario: the keys of its file, its name and its folder."""

    name: str
    folder: Path

    @property
    def requested_model(self) -> str:
        """Return the model name given to the agent; empty if the agent chooses itself."""
        return "" if self.policies else self.model


SCENARIO_FILE: Final = TomlFile(ScenarioKeys, error=ScenarioFailed)


def parse_scenario(text: str, folder: Path) -> Scenario:
    """Parse the text of a folder's `example.toml`.

    Raises:
        ScenarioFailed: the text is not TOML, or a key is wrong; the message names the key.
    """
    keys = SCENARIO_FILE.parse(text, str(folder / FILE_NAME))
    return Scenario(name=folder.name, folder=folder, **keys.model_dump())


def find_scenario(name: str, examples: Path = EXAMPLES) -> Scenario:
    """Return the scenario in the folder `name` of `examples`.

    Raises:
        ScenarioFailed: there is no such scenario, its file is invalid, or this is not a checkout.
    """
    known = sorted(path.parent.name for path in examples.glob(f"*/{FILE_NAME}"))
    if not known:
        raise ScenarioFailed(f"{examples} is missing: run this from a checkout of the repository")
    if name not in known:
        raise ScenarioFailed(f"there is no example {name!r}: name one of {', '.join(known)}")
    folder = examples / name
    return parse_scenario((folder / FILE_NAME).read_text(), folder)


@contextmanager
def lock_folder(var: Path) -> Iterator[None]:
    """Lock the folder of a run's results and data until the block ends.

    Raises:
        ScenarioFailed: another run uses the folder.
    """
    var.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_file(var / LOCK)
    except SpoolInUse as error:
        raise ScenarioFailed(
            f"another run uses {var}, or is still ending: wait until it has ended, or name another "
            "folder with --var"
        ) from error
    try:
        yield
    finally:
        lock.release()


def check_model(scenario: Scenario, model: str | None) -> None:
    """Check that a model is given if the packaged one cannot do the tasks.

    Raises:
        ScenarioFailed: no model is given; the message names suitable ones that fit this machine.
    """
    if model is not None or not scenario.models:
        return
    import torch

    from trainer.learners.kernels.process import total_memory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gib = total_memory(device) / 2**30
    fit = [name for name, takes in scenario.models.items() if takes[device == "cuda"] <= gib]
    raise ScenarioFailed(
        f"the packaged model cannot do the tasks of {scenario.name}: name another with --model, by"
        f" its folder or its name on the hub. Suitable models that fit into the {gib:.0f} GiB of"
        f" memory here: {', '.join(fit) or 'none of those known'}"
    )


def interpreter(scenario: Scenario) -> str:
    """Return the Python that runs a scenario's agent.

    Raises:
        ScenarioFailed: the environment with the agent's framework is missing.
    """
    if scenario.python == "pawl":
        return sys.executable
    if not CLIENTS.exists():
        raise ScenarioFailed(framework_remedy(scenario))
    return str(CLIENTS)


def framework_remedy(scenario: Scenario) -> str:
    """Return the remedy if the framework of a scenario's agent is not installed."""
    return (
        f"the agent of {scenario.name} needs its framework in .venv-clients: install it with "
        f"`make example NAME={scenario.name}`, which installs it first"
    )


def file_of(scenario: Scenario, name: str) -> Path | None:
    """Return the path of a file in a scenario's folder, or None if it does not exist."""
    path = (scenario.folder / name).resolve()
    return path if path.is_file() else None


def chat_template(scenario: Scenario) -> Path | None:
    """Return the scenario's chat template, or None to use the model's own.

    Raises:
        ScenarioFailed: there is no such template.
    """
    name = scenario.chat_template
    if name is None:
        return None
    template = file_of(scenario, name) or packaged_template(name)
    if not template.is_file():
        raise ScenarioFailed(f"{scenario.folder / FILE_NAME}: chat_template: there is no {name!r}")
    return template


def packaged_template(name: str) -> Path:
    """Return the path of the packaged chat template of that name; it may not exist."""
    return Path(__file__).parent / f"{name}.jinja"


def recipe_file(scenario: Scenario, recipe: str | None) -> str:
    """Return the value of `PAWL_RECIPE`: a name, or the absolute path of a file.

    `recipe` comes from the command line; None: the scenario's own. The path is absolute because the
    trainer may run in another working directory.
    """
    if recipe is not None:
        return str(Path(recipe).resolve()) if Path(recipe).is_file() else recipe
    own = file_of(scenario, scenario.recipe)
    return scenario.recipe if own is None else str(own)


def policies_of(scenario: Scenario) -> tuple[PolicySpec, ...]:
    """Return the policies in the scenario's file of policies; without one, a policy for its model.

    Raises:
        ScenarioFailed: the scenario names a file that does not exist.
        BadPolicies: the file cannot be used.
    """
    table = open_policies(policies_file(scenario))
    return table.specs if table else (PolicySpec(name=scenario.model, base=scenario.model),)


def policies_file(scenario: Scenario) -> Path | None:
    """Return the scenario's file of policies, or None if it has a single policy.

    Raises:
        ScenarioFailed: there is no such file.
    """
    if scenario.policies is None:
        return None
    path = file_of(scenario, scenario.policies)
    if path is None:
        raise ScenarioFailed(f"{scenario.folder}: policies: there is no {scenario.policies}")
    return path


def stack_plan(
    scenario: Scenario,
    *,
    model: str,
    is_packaged: bool,
    recipe: str,
    rank: int,
    seed: int,
    var: Path,
) -> StackPlan:
    """Return the stack to start, with its data and logs in `var`.

    The scenario's chat template and tool parser are used for the packaged model only.
    """
    policies = policies_file(scenario)
    data = var / "data"
    settings = {
        "PAWL_SPOOL_DIR": str((data / "spool").resolve()),
        "PAWL_ADAPTER_DIR": str((data / "adapters").resolve()),
        "PAWL_RECIPE": recipe,
        "PAWL_SEED": str(seed),
        "PAWL_POLICY": "" if policies else scenario.model,
        "PAWL_POLICIES": str(policies or ""),
        "PAWL_MODEL": model,
    }
    if scenario.tool_results is not None:
        settings["PAWL_TOOL_RESULTS"] = scenario.tool_results
    return configured_plan(
        model,
        scenario.model,
        rank,
        tool_parser=scenario.tool_parser if is_packaged else None,
        chat_template=chat_template(scenario) if is_packaged else None,
        data_dir=data,
        log_dir=data / "logs",
        settings=settings,
    )


async def make_tasks(
    scenario: Scenario, count: int, seed: int, split: TaskSplit, folder: Path
) -> tuple[Task, ...]:
    """Have the scenario's program make `count` tasks, write them to `folder`, and return them.

    There may be fewer held-out tasks.

    Raises:
        ScenarioFailed: the program failed, printed no tasks, or too few for training.
    """
    program, *arguments = scenario.tasks
    options = ["--count", str(count), "--seed", str(seed), "--split", split]
    command = [sys.executable, str(scenario.folder / program), *arguments, *options]
    try:
        ended = await run_program(command, b"", limit_s=TASKS_S, most_bytes=MOST_TASK_BYTES)
    except (TimeoutError, TooMuchOutput) as error:
        reason = str(error) or f"it took over {TASKS_S:g} s"
        raise ScenarioFailed(f"{program} was killed: {reason}") from error
    if ended.status:
        raise ScenarioFailed(f"{program} failed: {ended.errors.decode(errors='replace')[-800:]}")
    (folder / f"{split}.jsonl").write_bytes(ended.output)
    try:
        tasks = parse_tasks(ended.output, program, scenario.answer)
    except RolloutError as error:
        raise ScenarioFailed(str(error)) from error
    if len(tasks) < count and split == "train":
        raise ScenarioFailed(f"{program} made only {len(tasks)} of {count} tasks")
    return tasks
