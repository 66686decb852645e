"""Docstrings begin with an imperative sentence; ruff (D401) checks this of functions only."""

import pytest

from tests.conftest import ROOT
from tests.support.docs.docstrings import Opening, openings

PRODUCT = ("store", "proxy", "trainer", "pawl", "scripts", "migrations", "plugins", "examples")
BESIDE = ("benchmarks", "tests/support", "tests/clients")
FILES = [ROOT / "hatch_build.py", ROOT / "class_layouts.py", ROOT / "tests/conftest.py"]
# Of all docstrings, at most. A verb that the list lacks stops nobody; many would mean that the
# list is no longer kept.
HEADLESS, OTHERS = 0.03, 0.05


def first_lines() -> list[Opening]:
    """Return the first lines of all docstrings but the tests' own."""
    folders = [path for name in (*PRODUCT, *BESIDE) for path in (ROOT / name).rglob("*.py")]
    kept = [path for path in sorted(folders) if "node_modules" not in path.parts]
    return [one for path in [*kept, *FILES] for one in openings(path, ROOT)]


def test_docstrings_do_not_begin_as_a_phrase_or_a_clause() -> None:
    lines = first_lines()
    headless = [one for one in lines if one.is_headless]
    assert len(headless) <= HEADLESS * len(lines), headless


def test_docstrings_begin_with_a_verb() -> None:
    lines = first_lines()
    others = [one for one in lines if not one.is_imperative]
    assert len(lines) > 3000
    assert len(others) <= OTHERS * len(lines), others


@pytest.mark.parametrize(
    ("line", "imperative", "headless"),
    [
        ("Return each call's share of the loss.", True, False),
        ("Parse, check and keep a body.", True, False),
        ("What a call came to.", False, True),
        ("`pawl up`: runs the local stack.", False, False),
        ("Record of a call.", False, False),
        ("Rows of one policy.", False, False),
        ("Explore: sample a share of the episodes.", False, False),
        ("Keeps the rows of one policy.", False, False),
    ],
)
def test_a_first_line_is_told_from_others(line: str, imperative: bool, headless: bool) -> None:
    opening = Opening("here", line)
    assert (opening.is_imperative, opening.is_headless) == (imperative, headless)
