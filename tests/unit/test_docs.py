"""The documents speak of what is there."""

import re

import pytest

from pawl.settings import known_variables
from tests.conftest import ROOT

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
README = (ROOT / "README.md").read_text()
TREE = ARCHITECTURE.split("```")[3]


@pytest.mark.parametrize("package", ["store", "proxy", "trainer", "pawl"])
def test_the_tree_names_every_module(package: str) -> None:
    words = set(re.findall(r"\w+", TREE))
    modules = {path.stem for path in (ROOT / package).rglob("*.py")} - {"__init__"}
    assert modules <= words
    assert (ROOT / package).name in words


def test_everything_the_documents_point_at_exists() -> None:
    folders = r"(?:docs|tests|proxy|trainer|store|pawl|plugins|examples|dashboards|benchmarks)"
    for path in re.findall(rf"`({folders}/[\w./-]+)(?:::\w+)?`", ARCHITECTURE + README):
        assert (ROOT / path).exists(), path


def test_the_readme_names_every_setting_of_proxy_and_trainer() -> None:
    named = set(re.findall(r"PAWL_\w+", README))
    assert named <= known_variables()
    assert {"PAWL_UPSTREAM_URL", "PAWL_LISTEN", "PAWL_RECIPE", "PAWL_MODEL"} <= named


def test_the_make_targets_are_at_most_twelve_and_all_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    assert len(targets) <= 12
    assert targets == re.findall(r"^([a-z]+):.*##", makefile, re.MULTILINE)
