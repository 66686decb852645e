"""Find what a text cites of this repository, and what of it does not exist (pure but for lookups).

A citation is the path of a file, a decision by its number, an invariant by its number, a Markdown
file by its name, a module by its dotted name, or a document that is known not to be here.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tests.conftest import ROOT
from tests.support.docs.documents import anchors

FOLDERS: Final = (
    "benchmarks|dashboards|docs|examples|migrations|pawl|plugins|proxy|requirements|scripts"
    "|store|tests|trainer"
)
SUFFIXES: Final = "ini|in|jinja|json|md|mjs|png|py|sh|toml|txt|yml"
PATH: Final = re.compile(
    rf"(?<![\w/.@-])(?:{FOLDERS})/[\w./-]*?\.(?:{SUFFIXES})\b(?!\.\w)(?:::\w+)?"
)
IN_TICKS: Final = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
DECISION_PATH: Final = re.compile(r"docs/decisions/(\d{3}(?:-[\w-]+)?)(?:\.md)?")
DECISION: Final = re.compile(r"\bdecisions? ((?:\d{3}(?:, | and |–)?)+)", re.IGNORECASE)
DECISION_FILE: Final = re.compile(r"\b\d{3}-[a-z][a-z-]+\.md\b")
INVARIANT: Final = re.compile(r"\binvariants? (\d+)", re.IGNORECASE)
MARKDOWN: Final = re.compile(r"(?<![\w/.#-])[\w-]+\.md\b")
MODULE: Final = re.compile(r"`((?:benchmarks|pawl|proxy|store|tests|trainer)(?:\.\w+)+)`")
# Documents that were cited once and never were in the repository.
ELSEWHERE: Final = re.compile(r"\b(?:DESIGN|FACTS|STYLE)\b")

Citation = tuple[int, str]


def missing_citations(text: str) -> Iterator[Citation]:
    """Yield the line and the words of each citation that leads to nothing here."""
    for number, line in enumerate(text.splitlines(), start=1):
        for words in sorted(set(_missing(line))):
            yield number, words


def _missing(line: str) -> Iterator[str]:
    for pattern, without_target in CHECKS:
        for found in pattern.finditer(line):
            yield from without_target(found)


def _path(found: re.Match[str]) -> Iterator[str]:
    path, _, name = found[0].partition("::")
    if not (ROOT / path).exists() or (name and f"def {name}(" not in _text(ROOT / path)):
        yield found[0]


def _in_ticks(found: re.Match[str]) -> Iterator[str]:
    if not (ROOT / found[1]).exists() and not DECISION_PATH.match(found[1]):
        yield found[1]


def _decision_path(found: re.Match[str]) -> Iterator[str]:
    if len(_decisions(f"{found[1]}*.md")) != 1:
        yield found[0]


def _decision(found: re.Match[str]) -> Iterator[str]:
    for number in re.findall(r"\d{3}", found[1]):
        if not _decisions(f"{number}-*.md"):
            yield f"decision {number}"


def _decision_file(found: re.Match[str]) -> Iterator[str]:
    if not _decisions(found[0]):
        yield found[0]


def _invariant(found: re.Match[str]) -> Iterator[str]:
    if not any(anchor.startswith(f"{found[1]}-") for anchor in _invariants()):
        yield found[0]


def _markdown(found: re.Match[str]) -> Iterator[str]:
    if not _is_a_page(found[0]):
        yield found[0]


def _module(found: re.Match[str]) -> Iterator[str]:
    is_file = found[1].rsplit(".")[-1] in SUFFIXES.split("|")
    if not is_file and not is_module_or_name(found[1]):
        yield found[1]


def _elsewhere(found: re.Match[str]) -> Iterator[str]:
    yield found[0]


CHECKS: Final = (
    (PATH, _path),
    (IN_TICKS, _in_ticks),
    (DECISION_PATH, _decision_path),
    (DECISION, _decision),
    (DECISION_FILE, _decision_file),
    (INVARIANT, _invariant),
    (MARKDOWN, _markdown),
    (MODULE, _module),
    (ELSEWHERE, _elsewhere),
)


def is_module_or_name(dotted: str) -> bool:
    """Return whether a dotted name is a module or a package here, or a name in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        rest = parts[length:]
        for module in (place.with_suffix(".py"), place / "__init__.py"):
            if module.is_file():
                return not rest or re.search(rf"\b{rest[0]}\b", _text(module)) is not None
        if place.is_dir():
            return not rest
    return False


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def _decisions(pattern: str) -> tuple[Path, ...]:
    return tuple((ROOT / "docs/decisions").glob(pattern))


@cache
def _invariants() -> frozenset[str]:
    return frozenset(anchors(_text(ROOT / "docs/explanation/invariants.md")))


@cache
def _is_a_page(name: str) -> bool:
    return (ROOT / name).is_file() or any(
        path.name == name for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.md")
    )
