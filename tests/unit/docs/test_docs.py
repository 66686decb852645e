"""The documents speak of what is there, and each of them can be found."""

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from pawl.settings import known_variables
from tests.conftest import ROOT
from tests.support.docs.documents import anchors, links, slug

SETTINGS = ROOT / "docs/reference/settings.md"
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS_WITH_PAGES = ("examples", "plugins", "tests", "benchmarks", "dashboards")
OTHER_PAGES = sorted(
    page
    for folder in FOLDERS_WITH_PAGES
    for page in (ROOT / folder).rglob("*.md")
    if "node_modules" not in page.parts
)


def test_the_reference_names_every_setting() -> None:
    named = set(re.findall(r"PAWL_[A-Z0-9_]+", SETTINGS.read_text()))
    assert named >= known_variables()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_settings_that_something_reads(page: Path) -> None:
    named = set(re.findall(r"PAWL_[A-Z0-9_]*[A-Z0-9]\b(?!\*|…|_\*)", page.read_text()))
    assert named <= known_variables()


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_resolves(page: Path) -> None:
    assert [target for target in links(page.read_text()) if not resolves(page, target)] == []


def resolves(page: Path, target: str) -> bool:
    """Whether a link of a page leads somewhere: to a file here, and to a heading in it."""
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = unquote(target).partition("#")
    place = (page.parent / path).resolve() if path else page
    if not place.exists() or not place.is_relative_to(ROOT):
        return False
    return not anchor or (place.suffix == ".md" and anchor in anchors(place.read_text()))


def test_every_page_is_reached_from_the_index() -> None:
    reached = {DOCS / "index.md"}
    waiting = list(reached)
    while waiting:
        page = waiting.pop()
        for target in links(page.read_text()):
            place = (page.parent / target.partition("#")[0]).resolve()
            if place.suffix == ".md" and place.is_file() and place not in reached:
                reached.add(place)
                waiting.append(place)
    assert set(PAGES) - reached == set()


def test_pictures_are_shown_somewhere() -> None:
    shown = {
        (page.parent / target).resolve() for page in PAGES for target in links(page.read_text())
    }
    assert set(DOCS.rglob("*.png")) <= shown


PATH = re.compile(
    r"(?<![\w/.@-])(?:benchmarks|dashboards|docs|examples|migrations|pawl|plugins|proxy|requirements"
    r"|scripts|store|tests|trainer)/[\w./-]*?\.(?:json|md|mjs|png|py|sh|toml|txt|yml)\b(?!\.\w)"
)
DECISION = re.compile(r"\bdecisions?[ /](\d{3})\b|\b(\d{3})-[a-z][a-z-]+\.md\b", re.IGNORECASE)


@pytest.mark.parametrize("kind", ["md", "py", "toml"])
def test_every_cited_file_and_decision_exists(kind: str) -> None:
    tracked = ["git", "ls-files", f"*.{kind}"]
    files = subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    decisions = {path.name[:3] for path in (DOCS / "decisions").glob("[0-9]*.md")}
    missing = []
    for name in files.split():
        if "recorded" in name or not (ROOT / name).exists():
            continue
        text = (ROOT / name).read_text()
        missing += [(name, path) for path in PATH.findall(text) if not (ROOT / path).exists()]
        numbers = {one or other for one, other in DECISION.findall(text)}
        missing += [(name, f"decision {number}") for number in sorted(numbers - decisions)]
    assert missing == []


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("3. Independent", "3-independent"),
        ("AIR: what `r_air` is", "air-what-r_air-is"),
        ("[Linked](index.md) and more", "linked-and-more"),
        ("How a change is made", "how-a-change-is-made"),
    ],
)
def test_an_anchor_is_the_one_that_is_linked(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor
