"""Make what a run is told: the base URL that names it, its task, and its environment (pure)."""

from collections.abc import Mapping, Set
from typing import Any, Final
from urllib.parse import quote

import msgspec

from store.records import Record, Split

# Linux refuses a single variable of more than 128 KiB.
MOST_VARIABLE_BYTES: Final = 100_000
NO_KEY: Final = "unused"


class Request(Record, frozen=True, kw_only=True):
    """Hold what the agent is given for one run.

    Attributes:
        episode: the name of its episode.
        task: the task's fields that the agent may see.
        base_url: the proxy's address with the run's names, and without `/v1`.
        model: the model that it is to ask for, as `NAME@N`; None: the agent chooses.
        environment: the variables that are set for it.
        limit_s: its time limit.
        alone: whether it may share a process with no other run that is under way.
    """

    episode: str
    task: dict[str, Any]
    base_url: str
    model: str | None
    environment: dict[str, str]
    limit_s: float
    alone: bool = False


def named_url(url: str, *, task: str, episode: str, split: Split | None) -> str:
    """Return the proxy's address that names a run, without `/v1`."""
    named = f"{url}/task/{quote(task, safe='')}/episode/{quote(episode, safe='')}"
    return named if split is None else f"{named}/split/{split}"


def environment(
    base_url: str,
    *,
    model: str | None,
    given: Mapping[str, str],
    names: Mapping[str, str],
    task: bytes,
) -> dict[str, str]:
    """Return the variables that are set for a run, beside those that it inherits.

    Args:
        base_url: as in `Request`. Anthropic's SDK adds `/v1` itself.
        model: as in `Request`.
        given: the runner's own environment: its API keys are kept.
        names: what `ROLLOUT_*` variables say, by what follows the prefix.
        task: the task as JSON; a longer one than a variable can hold is on standard input only.
    """
    variables = {"OPENAI_BASE_URL": f"{base_url}/v1", "ANTHROPIC_BASE_URL": base_url}
    variables |= keys(given)
    if model is not None:
        variables |= {"OPENAI_MODEL": model, "ANTHROPIC_MODEL": model}
    variables |= {f"ROLLOUT_{name}": value for name, value in names.items()}
    if len(task) <= MOST_VARIABLE_BYTES and b"\0" not in task:
        variables["ROLLOUT_TASK"] = task.decode()
    return variables


def keys(given: Mapping[str, str]) -> dict[str, str]:
    """Return the API keys that SDKs want to see before they call anybody, where there is none."""
    variables = {}
    if not given.get("OPENAI_API_KEY"):
        variables["OPENAI_API_KEY"] = NO_KEY
    if not (given.get("ANTHROPIC_API_KEY") or given.get("ANTHROPIC_AUTH_TOKEN")):
        variables["ANTHROPIC_API_KEY"] = NO_KEY
    return variables


def shown(fields: Mapping[str, Any], hidden: Set[str]) -> dict[str, Any]:
    """Return a task's fields without those that only its judge may see."""
    return {name: value for name, value in fields.items() if name not in hidden}


def as_json(fields: Mapping[str, Any]) -> bytes:
    """Return fields as one line of JSON."""
    return msgspec.json.encode(fields)
