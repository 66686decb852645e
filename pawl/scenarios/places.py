"""Find what a scenario needs on this machine: its folders, its files, the Python of its agent."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pawl.scenarios.errors import ScenarioFailed
from pawl.scenarios.scenario import Scenario, parse_scenario
from proxy.errors import SpoolInUse
from proxy.spool.folders import LOCK, hold

CHECKOUT: Final = Path(__file__).parents[2]
EXAMPLES: Final = CHECKOUT / "examples"
CLIENTS: Final = CHECKOUT / ".venv-clients" / "bin" / "python"
FILE: Final = "example.toml"


def find_scenario(name: str, examples: Path = EXAMPLES) -> Scenario:
    """Return the scenario of that name.

    Raises:
        ScenarioFailed: there is none, or its file cannot be used, or this is no checkout.
    """
    known = sorted(path.parent.name for path in examples.glob(f"*/{FILE}"))
    if not known:
        raise ScenarioFailed(f"{examples} is missing: run this from a checkout of the repository")
    if name not in known:
        raise ScenarioFailed(f"there is no example {name!r}: name one of {', '.join(known)}")
    folder = examples / name
    return parse_scenario((folder / FILE).read_text(), folder)


@contextmanager
def held(var: Path) -> Iterator[None]:
    """Keep the folder of a run's results and data from other runs, until the block ends.

    Raises:
        ScenarioFailed: another run uses it.
    """
    var.mkdir(parents=True, exist_ok=True)
    try:
        lock = hold(var / LOCK)
    except SpoolInUse as error:
        raise ScenarioFailed(
            f"another run uses {var}, or is still ending: wait until it has ended, or name another "
            "folder with --var"
        ) from error
    try:
        yield
    finally:
        lock.release()


def interpreter(scenario: Scenario) -> str:
    """Return the Python that runs a scenario's agent.

    Raises:
        ScenarioFailed: the environment with the agent's framework is not there.
    """
    if scenario.python == "pawl":
        return sys.executable
    if not CLIENTS.exists():
        raise ScenarioFailed(missing_framework(scenario))
    return str(CLIENTS)


def missing_framework(scenario: Scenario) -> str:
    """Return what to do where the framework of a scenario's agent is not installed."""
    return (
        f"the agent of {scenario.name} needs its framework in .venv-clients: install it with "
        f"`make example NAME={scenario.name}`, which begins with that"
    )


def file_of(scenario: Scenario, name: str) -> Path | None:
    """Return the file of a scenario's folder that has this name, or None if there is none."""
    path = (scenario.folder / name).resolve()
    return path if path.is_file() else None


def chat_template(scenario: Scenario) -> Path | None:
    """Return the scenario's chat template: None if it has the model's own.

    Raises:
        ScenarioFailed: there is no such template.
    """
    name = scenario.chat_template
    if name is None:
        return None
    template = file_of(scenario, name) or packaged_template(name)
    if not template.is_file():
        raise ScenarioFailed(f"{scenario.folder / FILE}: chat_template: there is no {name!r}")
    return template


def packaged_template(name: str) -> Path:
    """Return where the packaged chat template of that name lies, if there is one."""
    return Path(__file__).parent / f"{name}.jinja"
