"""The documents speak of what is there, and each of them can be found."""

import re
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import pytest

from pawl.settings import known_variables
from store.versions import PolicyState
from tests.conftest import ROOT
from tests.support.docs.documents import anchors, links, slug

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
README = (ROOT / "README.md").read_text()
MODULES = ROOT / "docs/reference/modules.md"
SETTINGS = ROOT / "docs/reference/settings.md"
TREE = ARCHITECTURE.split("```")[3]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS_WITH_PAGES = ("examples", "plugins", "tests", "benchmarks", "dashboards")
OTHER_PAGES = sorted(
    page
    for folder in FOLDERS_WITH_PAGES
    for page in (ROOT / folder).rglob("*.md")
    if "node_modules" not in page.parts
)
MOST_WORDS = 700
MOST_WORDS_OF_TWO_PAGES = 1000


@pytest.mark.parametrize("package", ["store", "proxy", "trainer", "pawl"])
def test_the_map_names_every_folder_and_the_reference_every_module(package: str) -> None:
    words = set(re.findall(r"\w+", TREE))
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders | {package} <= words
    named = set(re.findall(r"\w+", MODULES.read_text()))
    assert {path.stem for path in (ROOT / package).rglob("*.py")} - {"__init__"} <= named


def test_the_architecture_is_two_pages() -> None:
    assert len(ARCHITECTURE.split()) <= MOST_WORDS_OF_TWO_PAGES


def test_the_readme_is_one_screen() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_the_reference_names_every_setting() -> None:
    named = set(re.findall(r"PAWL_[A-Z0-9_]+", SETTINGS.read_text()))
    assert named >= known_variables()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_settings_that_something_reads(page: Path) -> None:
    named = set(re.findall(r"PAWL_[A-Z0-9_]*[A-Z0-9]\b(?!\*|…|_\*)", page.read_text()))
    assert named <= known_variables()


def test_the_readme_points_at_settings_recipe_and_commands() -> None:
    targets = set(links(README))
    assert {f"docs/reference/{name}.md" for name in ("settings", "recipe", "cli")} <= targets
    assert "docs/index.md" in targets


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


def test_the_index_of_decisions_has_each_with_its_title_and_status() -> None:
    rows = re.findall(
        r"^\| \[(.+)\]\((.+)\) \| (.+) \|$", (DECISIONS / "README.md").read_text(), re.M
    )
    told = [(name, f"# {title}", f"Status: {status}.") for title, name, status in rows]
    there = []
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        lines = path.read_text().splitlines()
        there.append((path.name, lines[0], lines[2]))
        assert re.match(rf"# {path.name[:3]} · .", lines[0])
        assert re.match(r"Status: (Accepted|Superseded by|Rejected|Proposed)", lines[2])
    assert told == there


def test_each_experiment_has_its_date() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "experiments.md").read_text(), re.M)
    dates = [heading[:10] for heading in headings]
    assert all(re.fullmatch(r"\d{4}-\d{2}-\d{2} · .+", heading) for heading in headings)
    assert dates == sorted(dates)


def test_the_glossary_is_in_order_and_has_each_state_of_a_version() -> None:
    text = (DOCS / "glossary.md").read_text()
    rows = [
        re.sub(r"[^a-z0-9_, ]", "", row.lower()) for row in re.findall(r"^\| (.+?) \|", text, re.M)
    ]
    terms = [row.split(", ") for row in rows[1:]]
    first = [names[0] for names in terms]
    assert first == sorted(set(first))
    assert {*get_args(PolicyState), "servable"} <= {name for names in terms for name in names}


def test_pictures_are_shown_somewhere() -> None:
    shown = {
        (page.parent / target).resolve() for page in PAGES for target in links(page.read_text())
    }
    assert set(DOCS.rglob("*.png")) <= shown


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


def test_the_make_targets_are_at_most_twelve_and_all_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    assert len(targets) <= 12
    assert targets == re.findall(r"^([a-z]+):.*##", makefile, re.MULTILINE)
