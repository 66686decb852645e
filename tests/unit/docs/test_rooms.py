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
# Of a function of the product, from its `def` on, with its docstring.
MOST_FUNCTION_LINES = 50
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


@pytest.mark.parametrize("package", PRODUCT)
def test_no_function_is_longer_than_a_newcomer_reads(package: str) -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno}:{node.name}": length(node)
        for path in (ROOT / package).rglob("*.py")
        for node in functions(path)
    }
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES} == {}


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function has, from its `def` to its end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions of a file, those within classes and other functions too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def with_many(path: Path) -> list[str]:
    """Return the functions of a file with more parameters than `MOST_PARAMETERS`.

    A command with many options takes them as one record (`pawl.commands.flags`).
    """
    return [
        f"{path.relative_to(ROOT)}:{node.name}"
        for node in functions(path)
        if parameters(node.args) > MOST_PARAMETERS
    ]


def parameters(arguments: ast.arguments) -> int:
    """Return how many values a function takes, without the object that a method is called on."""
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    extra = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return len(names) + len(extra) - (names[:1] in (["self"], ["cls"]))
