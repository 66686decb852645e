"""Read the Berkeley Function Calling Leaderboard from its wheel `bfcl-eval`, and use its checkers.

The checkers import a table of all models that were ever measured, with their makers' libraries.
They only look up whether a model's function names have underscores in place of dots, as OpenAI's
API requires. So the table has one entry here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = "agent"
TABLE = types.ModuleType("bfcl_eval.constants.model_config")
TABLE.MODEL_CONFIG_MAPPING = {  # type: ignore[attr-defined]
    MODEL: types.SimpleNamespace(underscore_to_dot=True)
}
sys.modules.setdefault(TABLE.__name__, TABLE)

from bfcl_eval.constants.enums import Language  # noqa: E402
from bfcl_eval.constants.executable_backend_config import (  # noqa: E402
    MULTI_TURN_FUNC_DOC_FILE_MAPPING,
)
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (  # noqa: E402
    multi_turn_checker,
)

ONE_TURN = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("irrelevance", "live_irrelevance"),
)
SEVERAL_TURNS = tuple(
    f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context")
)
# The leaderboard's own message in a turn that adds functions.
ADDED = "I have updated some more functions you can choose from. What about now?"

Functions = Sequence[dict[str, Any]]


def data_folder() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def entries(category: str) -> list[dict[str, Any]]:
    """Return the leaderboard's entries of a category, each with its functions and `answer`."""
    folder, name = data_folder(), f"BFCL_v4_{category}.json"
    found = read_lines(folder / name)
    # Entries and answers are in the same order; some ids are written differently.
    no_call = [{"ground_truth": []}] * len(found)
    is_irrelevant = "irrelevance" in category
    answers = no_call if is_irrelevant else read_lines(folder / "possible_answer" / name)
    for entry, answer in zip(found, answers, strict=True):
        entry["answer"] = answer["ground_truth"]
        if category in SEVERAL_TURNS:
            add_functions(entry, folder / "multi_turn_func_doc")
    return found


def add_functions(entry: dict[str, Any], folder: Path) -> None:
    """Add the functions of an entry's classes; those of later turns go to `missed_function`."""
    files = [folder / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] for name in entry["involved_classes"]]
    known = {one["name"]: one for file in files for one in read_lines(file)}
    later = entry.get("missed_function", {})
    entry["missed_function"] = {
        turn: [known.pop(name) for name in names] for turn, names in later.items()
    }
    entry["function"] = list(known.values())


def tools(functions: Functions) -> list[dict[str, Any]]:
    """Return functions in OpenAI's format, converted as the leaderboard's own client does."""
    return [
        {
            "type": "function",
            "function": {
                "name": underscored_name(one["name"]),
                "description": one["description"],
                "parameters": {
                    **one["parameters"],
                    "type": "object",
                    "properties": with_json_types(one["parameters"]["properties"]),
                },
            },
        }
        for one in functions
    ]


def underscored_name(name: str) -> str:
    return name.replace(".", "_")


def with_json_types(properties: dict[str, Any]) -> dict[str, Any]:
    return {name: with_json_type(one) for name, one in properties.items()}


def with_json_type(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a property's schema with JSON schema's type in place of Python's."""
    converted = {**schema, "type": GORILLA_TO_OPENAPI.get(schema.get("type", "string"), "string")}
    if schema.get("type") == "float":
        description = f"{schema.get('description', '')} This is a float type value."
        converted |= {"format": "float", "description": description}
    if "properties" in schema:
        converted["properties"] = with_json_types(schema["properties"])
    if "items" in schema:
        converted["items"] = with_json_type(schema["items"])
    return converted


def is_right(task: dict[str, Any], calls: Sequence[dict[str, Any]]) -> bool:
    """Return whether the leaderboard's checker accepts the calls, each {name: arguments}."""
    category = task["category"]
    if "irrelevance" in category:
        return not calls
    try:
        found = ast_checker(
            task["function"], list(calls), task["answer"], Language.PYTHON, category, MODEL
        )
    except (AttributeError, IndexError, KeyError, TypeError):
        # The checker fails on arguments of an unexpected shape.
        return False
    return bool(found["valid"])


def run_calls(task: dict[str, Any], name: str, calls: Sequence[str]) -> list[str]:
    """Run calls on the leaderboard's simulated APIs, and return the results, as JSON or text.

    A failed call gives an `error`. The task has the initial state. The state is kept by `name` for
    the next calls of the same run, so `name` must be unique to the run.
    """
    results, _ = multi_turn_utils.execute_multi_turn_func_call(
        list(calls),
        task["initial_config"],
        task["involved_classes"],
        name,
        task["entry"],
        long_context="long_context" in task["category"],
    )
    return [as_json(str(result)) for result in results]


def as_json(result: str) -> str:
    """Return a call's result; if the call failed, a JSON object with the `error`."""
    why = result.removeprefix("Error during execution: ")
    return result if why == result else json.dumps({"error": why})


def forget(name: str) -> None:
    """Forget the simulated APIs of a run, which the leaderboard would keep forever."""
    kept = vars(multi_turn_utils)
    for key in [key for key in kept if key.startswith(name)]:
        del kept[key]


def is_right_in_turns(
    task: dict[str, Any], turns: Sequence[Sequence[Sequence[str]]], name: str
) -> bool:
    """Return whether the leaderboard's checker accepts the calls of all steps of all turns."""
    if len(turns) != len(task["answer"]):
        return False
    entry = {**task, "id": task["entry"]}
    try:
        found = multi_turn_checker(
            [list(map(list, turn)) for turn in turns], task["answer"], entry, task["category"], name
        )
    finally:
        forget(name)
    return bool(found["valid"])
