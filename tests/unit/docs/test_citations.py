"""Every document, section, decision and module that a text cites exists in this repository."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docs.citations import ROOT, is_module_or_name, missing_citations

CODE = ("benchmarks", "examples", "migrations", "plugins", "scripts", "tests")
PRODUCT = ("pawl", "proxy", "store", "trainer")
SKIPPED = {"node_modules", "recorded", "recordings", "__pycache__"}
SUFFIXES = {".md", ".py", ".sh", ".toml", ".yml"}
# What programs write or wrote once, a module that decision 028 still names, and keys of requests
# that look like modules.
NO_CITATIONS = {
    "proxy/compiled.json",
    "proxy.outdated",
    "tests/clients/node/node_modules",
    "pawl.agent",
    "pawl.episode",
    "pawl.task",
    "pawl.split",
}
# These cite what does not exist, to find it.
ABOUT_CITATIONS = {Path(__file__), ROOT / "tests/support/docs/citations.py"}


def texts_of(place: Path) -> Iterator[Path]:
    """All files of a folder that people read."""
    for path in sorted(place.rglob("*")):
        if path.suffix in SUFFIXES and not SKIPPED & set(path.relative_to(ROOT).parts):
            yield path


def missing(paths: list[Path]) -> list[str]:
    """`file:line: citation` for each one that leads nowhere."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in paths
        if path not in ABOUT_CITATIONS
        for line, words in missing_citations(path.read_text())
        if words not in NO_CITATIONS
    ]


def test_what_documents_cite_exists() -> None:
    at_the_root = [
        path for path in ROOT.iterdir() if path.is_file() and path.suffix in SUFFIXES
    ] + [
        ROOT / name
        for name in ("Makefile", "Dockerfile.proxy", "Dockerfile.trainer", ".env.example")
    ]
    assert missing([*at_the_root, *texts_of(ROOT / "docs")]) == []


@pytest.mark.parametrize("folder", CODE)
def test_what_the_code_beside_cites_exists(folder: str) -> None:
    assert missing(list(texts_of(ROOT / folder))) == []


@pytest.mark.parametrize("package", PRODUCT)
def test_what_the_product_cites_exists(package: str) -> None:
    assert missing(list(texts_of(ROOT / package))) == []


@pytest.mark.parametrize(
    "text",
    [
        "docs/credit.md has it",
        "(docs/decisions/014-http.md)",
        "see `docs/decisions/099`",
        "decision 099",
        "decisions 001 and 099",
        "invariant 12",
        "tests/unit/docs/test_docs.py::test_nothing_like_it",
        "`trainer.nowhere`",
        "`store.write.ingest.NoSuchClass`",
        "999-nothing.md",
        "as NOTES.md says",
        "(DESIGN §4)",
    ],
)
def test_a_citation_that_leads_nowhere_is_found(text: str) -> None:
    assert len({line for line, _ in missing_citations(text)}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "docs/explanation/credit.md has it, docs/decisions/034 too",
        "decisions 001 and 002, and invariant 11",
        "tests/unit/docs/test_docs.py::test_the_readme_is_one_screen",
        "`store.write.ingest.Ingester`, `trainer.credit`",
        "https://example.org/docs/nothing.md",
    ],
)
def test_what_exists_is_not_reported(text: str) -> None:
    assert list(missing_citations(text)) == []


def test_a_module_is_told_from_a_name_in_one() -> None:
    assert is_module_or_name("store.write.ingest")
    assert is_module_or_name("store.write.ingest.Ingester")
    assert not is_module_or_name("store.ingested")
