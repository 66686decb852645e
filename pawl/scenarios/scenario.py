"""Say what a scenario is, and read one from the text of its `example.toml` (pure)."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from pawl.scenarios.errors import ScenarioFailed
from store.toml_file import TomlFile

Count = Annotated[int, Field(ge=1)]
Function = Annotated[str, Field(pattern=r"^\w+:\w+$")]


class Keys(BaseModel):
    """Hold the keys of an `example.toml`.

    Attributes:
        title: what it is called, in a few words.
        about: what the page says about it, in a sentence or two.
        model: the name under which the base model is served.
        python: where the agent's packages are installed: beside Pawl, or in `.venv-clients`.
        agent: the agent's function, as `pawl rollout --python` takes it.
        judge: the judge's function, as `--judge-python` takes it.
        tasks: the program that makes tasks; `--count`, `--seed` and `--split` follow.
        answer: the tasks' field that the agent does not get.
        recipe: a file of the folder, or the name of a packaged recipe.
        policies: a file of the folder that names the policies; None: the model is the one policy.
        tool_parser: vLLM's parser of tool calls; None: the usual one.
        chat_template: a file of the folder, or the name of a packaged template; None: the model's.
        tool_results: how results of tools are read, as in `PAWL_TOOL_RESULTS`; None: they are not.
        score: the judge's metric that is shown, and compared before and after.
        held_out: number of held-out tasks.
        held_out_samples: how often each is given to the agent.
        held_out_every: the held-out tasks are asked again after so many waves; None: only at the
            end.
        at_once: runs at the same time.
        most_waves: waves after which learning ends.
        learned: two waves in a row with at least this score end it as well.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    about: str
    model: str
    python: Literal["pawl", "clients"] = "pawl"
    agent: Function = "agent:answer"
    judge: Function = "judge:verdict"
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("tasks.py",)
    answer: str = "answer"
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


class Scenario(Keys):
    """Describe one scenario: the keys of its file, its name, and the folder that they speak of."""

    name: str
    folder: Path

    @property
    def asks_for(self) -> str:
        """Return the model that the agent is told to ask for; empty: it knows by itself."""
        return "" if self.policies else self.model


FILE: Final = TomlFile(Keys, error=ScenarioFailed)


def parse_scenario(text: str, folder: Path) -> Scenario:
    """Return the scenario that the text of a folder's `example.toml` describes.

    Raises:
        ScenarioFailed: the text is not TOML, or a key is wrong; the message names the key.
    """
    keys = FILE.parse(text, str(folder / "example.toml"))
    return Scenario(name=folder.name, folder=folder, **keys.model_dump())
