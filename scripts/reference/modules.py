"""Write the page of modules: every module of the product, by folder, with its first sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .markdown import code, page, paragraph, table

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("store", "proxy", "trainer", "pawl")
INTRODUCTION: Final = """
Each folder is a concept, and each module has one reason to change. `ARCHITECTURE.md` has the map
of the folders.
"""
HEAD: Final = ("module", "what it does")


def modules_page() -> str:
    """Return `modules.md`."""
    folders = [folder for package in PACKAGES for folder in _folders(ROOT / package)]
    return page("Modules", paragraph(INTRODUCTION), *map(_section, folders))


def _folders(package: Path) -> Iterator[Path]:
    """Yield a package's folders that have modules, itself first."""
    yield package
    yield from sorted(path.parent for path in package.rglob("*/__init__.py"))


def _section(folder: Path) -> str:
    rows = [
        (code(path.name), _first_sentence(path))
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__"
    ]
    return f"## `{folder.relative_to(ROOT)}/`\n\n{table(HEAD, rows)}" if rows else ""


def _first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring.

    Raises:
        ValueError: it has none.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path} has no docstring: write what the module does")
    return docstring.partition("\n\n")[0]
