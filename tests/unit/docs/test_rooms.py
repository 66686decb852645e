"""Folders, modules and functions are small enough for a newcomer (decision 038)."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT

CODE = (
    "benchmarks",
    "examples",
    "migrations",
    "pawl",
    "plugins",
    "proxy",
    "scripts",
    "store",
    "tests",
    "trainer",
)
MOST_MODULES = 16
MOST_LINES = 350
MOST_PARAMETERS = 8
# In each package; migrations and tests take none.
MOST_WITH_MANY = 1
PRODUCT = ("store", "proxy", "trainer", "pawl")


@pytest.mark.parametrize("package", CODE)
def test_no_folder_holds_more_modules_than_a_newcomer_reads(package: str) -> None:
    # A module has a name that can be imported: an `__init__` names its room, and revisions of the
    # schema begin with a number.
    modules = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if path.stem.isidentifier() and path.stem != "__init__"
        if "node_modules" not in path.parts
    )
    assert modules.total() > 0
    assert {room: held for room, held in modules.items() if held > MOST_MODULES} == {}


@pytest.mark.parametrize("package", CODE)
def test_no_module_is_longer_than_a_newcomer_reads(package: str) -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (ROOT / package).rglob("*.py")
        if "node_modules" not in path.parts
    }
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("package", PRODUCT)
def test_functions_take_few_parameters(package: str) -> None:
    many = [place for path in (ROOT / package).rglob("*.py") for place in with_many(path)]
    assert len(many) <= MOST_WITH_MANY, many


def with_many(path: Path) -> list[str]:
    """Return the functions of a file with more parameters than `MOST_PARAMETERS`, but commands.

    The options of a command are its interface, and typer reads them from its parameters.
    """
    return [
        f"{path.relative_to(ROOT)}:{node.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters(node.args) > MOST_PARAMETERS
        and not path.is_relative_to(ROOT / "pawl/commands")
    ]


def parameters(arguments: ast.arguments) -> int:
    """Return how many values a function takes, without the object that a method is called on."""
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    extra = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return len(names) + len(extra) - (names[:1] in (["self"], ["cls"]))
