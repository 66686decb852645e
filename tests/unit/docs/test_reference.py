"""The generated reference pages and the code that they describe are the same."""

import re

import pytest

from pawl.settings import known_variables
from proxy.metrics import CALLS
from scripts.reference import FOLDER, METRICS, SETTINGS, metrics_of, name_of, pages
from tests.conftest import ROOT

PAGES = pages()
BY_HAND = {"http.md", "openapi.json"}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name], f"{name} is out of date: run `make docs`"


def test_reference_has_no_other_files() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES) | BY_HAND


def test_every_setting_has_a_row() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGES["settings.md"], re.MULTILINE))
    assert named == known_variables() | {"DATABASE_URL"}


def test_every_settings_class_that_a_command_reads_has_a_section() -> None:
    sources = [path.read_text() for path in (ROOT / "pawl").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"read_settings\(([A-Z]\w+)\)", text)}
    assert read <= {kind.__name__ for kind in SETTINGS.values()}


def test_every_packaged_recipe_is_listed() -> None:
    names = {path.stem for path in (ROOT / "trainer/recipes").glob("*.toml")}
    assert set(re.findall(r"^- \[`([\w-]+)`\]", PAGES["recipe.md"], re.MULTILINE)) == names


def test_every_metric_has_a_row() -> None:
    metrics = [metric for module in METRICS.values() for metric in metrics_of(module)]
    assert CALLS in metrics
    assert all(f"| `{name_of(metric)}` |" in PAGES["metrics.md"] for metric in metrics)
