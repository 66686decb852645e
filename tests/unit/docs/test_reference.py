"""The reference pages and the code that they describe are the same, in both directions."""

import ast
import re
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, Table

from pawl.settings import known_variables
from proxy.metrics import CALLS
from scripts.reference.cli import STATUSES, commands, parameters
from scripts.reference.columns import COLUMNS, TABLES
from scripts.reference.database import meaning_of_column
from scripts.reference.http import routes
from scripts.reference.metrics import LABELS, MODULES, labels_of, metrics_of, name_of
from scripts.reference.pages import COMMAND, FOLDER, pages
from scripts.reference.recipe import packaged_recipes
from scripts.reference.settings import SECTIONS, own_fields, variable
from store.schema.tables import metadata
from tests.conftest import ROOT

PAGES = pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_what_the_code_says(name: str) -> None:
    path = FOLDER / name
    assert path.exists(), f"docs/reference/{name} is missing: run `{COMMAND}`"
    assert path.read_text() == PAGES[name], f"docs/reference/{name} is out of date: run `{COMMAND}`"


def test_no_other_file_lies_among_the_generated_pages() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", sorted(name for name in PAGES if name.endswith(".md")))
def test_a_page_links_only_to_pages_and_sections_that_exist(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
        page, _, section = target.partition("#")
        text = PAGES[page or name]
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert not section or section in {title.lower().replace(" ", "-") for title in titles}


def test_the_generator_has_one_module_a_page() -> None:
    # The module of the page about HTTP is the room `http`, with `openapi` in it.
    folder = Path(routes.__file__).parents[1]
    modules = {path.stem for path in (*folder.iterdir(), *folder.rglob("*.py"))}
    assert {name.partition(".")[0] for name in PAGES} <= modules


# Settings and recipes


def test_every_variable_has_a_row() -> None:
    described = {variable(name) for one in SECTIONS for name in own_fields(one.kind)}
    assert described == known_variables() | {"DATABASE_URL"}
    assert all(f"| `{name}` |" in PAGES["settings.md"] for name in described)


def test_every_settings_class_that_a_command_reads_has_a_section() -> None:
    sources = [path.read_text() for path in (ROOT / "pawl").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"read_settings\((\w+)\)", text)}
    assert read - {"kind"} <= {one.kind.__name__ for one in SECTIONS}


def test_every_packaged_recipe_has_a_column() -> None:
    files = {path.stem for path in (ROOT / "trainer" / "recipes").glob("*.toml")}
    assert set(packaged_recipes()) == files
    assert all(f"`{name}` |" in PAGES["recipe.md"] for name in files)


# Commands


def test_every_option_of_every_command_has_a_row() -> None:
    for name, command in commands().items():
        section = PAGES["cli.md"].partition(f"## `pawl {name}`\n")[2].partition("\n## ")[0]
        assert len(parameters(command)) == len(command.params)
        for one in command.params:
            assert one.opts[-1] in section or str(one.metavar) in section, (name, one.name)


def test_every_exit_status_of_the_commands_is_described() -> None:
    sources = [ROOT / "pawl" / "cli.py", *(ROOT / "pawl" / "commands").glob("*.py")]
    raised = {
        node.args[0].value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "SystemExit"
        and isinstance(node.args[0], ast.Constant)
    }
    assert raised | {0} == set(STATUSES)


# Metrics


def test_every_metric_has_a_row_and_every_label_a_meaning() -> None:
    metrics = [metric for module in MODULES.values() for metric in metrics_of(module)]
    assert CALLS in metrics
    assert all(f"| `{name_of(metric)}` |" in PAGES["metrics.md"] for metric in metrics)
    assert {label for metric in metrics for label in labels_of(metric)} == set(LABELS)


# Database


def test_every_column_has_a_meaning_and_every_meaning_a_column() -> None:
    columns = {f"{table.name}.{one.name}" for table in metadata.tables.values() for one in table.c}
    assert set(COLUMNS) <= columns
    assert set(TABLES) <= set(metadata.tables)


def test_a_column_may_bring_its_meaning_along() -> None:
    column: Column[int] = Column("size", Integer, doc="Size in bytes.")
    Table("things", MetaData(), column)
    assert meaning_of_column(column) == "Size in bytes."
