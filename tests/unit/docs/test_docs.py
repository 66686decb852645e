"""The documents speak of what is there, and each of them can be found."""

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from pawl.settings import known_variables
from store import __version__
from tests.conftest import ROOT
from tests.support.docs.documents import anchors, links
from trainer.recipes.recipe import Recipe, RecipeTable

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
RECIPE_TABLES = {
    name: options.model_fields
    for name, field in Recipe.model_fields.items()
    if isinstance(options := field.annotation, type) and issubclass(options, RecipeTable)
}
FOLDERS_WITH_PAGES = ("examples", "plugins", "tests", "benchmarks", "dashboards")
OTHER_PAGES = sorted(
    page
    for folder in FOLDERS_WITH_PAGES
    for page in (ROOT / folder).rglob("*.md")
    if "node_modules" not in page.parts
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_doc_page_names_only_existing_settings(page: Path) -> None:
    named = set(re.findall(r"PAWL_[A-Z0-9_]*[A-Z0-9]\b(?!\*|…|_\*)", page.read_text()))
    assert named <= known_variables()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_doc_page_names_only_existing_recipe_keys(page: Path) -> None:
    text = page.read_text()
    named = re.findall(rf"`(?:\[)?({'|'.join(RECIPE_TABLES)})\.([a-z_]+)\b(?!\()", text)
    assert [key for table, key in named if key not in RECIPE_TABLES[table]] == []


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_of_the_docs_resolves(page: Path) -> None:
    assert [target for target in links(page.read_text()) if not resolves(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_doc_page_names_only_the_current_version_of_wheel_and_images(page: Path) -> None:
    named = re.findall(r"(?:pawl_rl-|pawl-(?:proxy|trainer|cpu):)(\d+\.\d+\.\d+)", page.read_text())
    assert set(named) <= {__version__}


def resolves(page: Path, target: str) -> bool:
    """Whether a link of a page leads somewhere: to a file here, and to a heading in it."""
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = unquote(target).partition("#")
    place = (page.parent / path).resolve() if path else page
    if not place.exists() or not place.is_relative_to(ROOT):
        return False
    return not anchor or (place.suffix == ".md" and anchor in anchors(place.read_text()))


PATH = re.compile(
    r"(?<![\w/.@-])(?:benchmarks|console|controller|dashboards|docs|examples|migrations|pawl|plugins"
    r"|proxy|requirements|scripts|store|tests|trainer)/"
    r"[\w./-]*?\.(?:json|md|mjs|png|py|sh|toml|txt|yml)\b(?!\.\w)"
)
DECISION = re.compile(r"\bdecisions?[ /](\d{3})\b|\b(\d{3})-[a-z][a-z-]+\.md\b", re.IGNORECASE)


@pytest.mark.parametrize("kind", ["md", "py", "toml"])
def test_every_file_and_decision_cited_in_the_repository_exists(kind: str) -> None:
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
