"""Names in the product say what the thing is, and one word names one thing."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PRODUCT = ("store", "proxy", "trainer", "pawl")
SAY_NOTHING = frozenset({"found", "said", "told"})
# So many functions have one still. None is added.
MOST = 40
# Words that once named two or three classes each.
ONE_CLASS = ("Batch", "Call", "Learner", "Member", "StreamedReply", "WholeReply")


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a function binds: its parameters, and what it assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.ExceptHandler(name=str(name)):
                yield name


def vague(path: Path) -> Counter[str]:
    """Return the functions of a file with a name that says nothing, and how many such each has."""
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return Counter(
        {
            f"{path.relative_to(ROOT)}:{function.name}": len(names)
            for function in functions
            if (names := SAY_NOTHING & set(bound_names(function)))
        }
    )


def test_hardly_a_function_has_a_name_that_says_nothing() -> None:
    files = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    places = sum(map(vague, files), Counter[str]())
    assert len(files) > 500
    assert places.total() <= MOST, sorted(places)


def test_each_way_of_binding_a_name_is_seen() -> None:
    text = (
        "def f(told):\n try:\n  said = told\n except OSError as found:\n  pass\n for x in (): pass"
    )
    assert set(bound_names(ast.parse(text))) == {"told", "said", "found", "x"}


def test_a_word_names_one_class() -> None:
    classes = Counter(
        node.name
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {word: classes[word] for word in ONE_CLASS} == dict.fromkeys(ONE_CLASS, 1)
