"""The code in documents is code: it parses, and its commands, options, keys and files exist.

What can be run without a model is run: by `tests/integration/docs/test_code_blocks.py`, the pages
about clients by `test_client_guides.py` there, and the example of credit by
`test_credit_command.py`. Those in YAML are values of the chart: `tests/unit/deploy/test_chart.py`.
"""

import ast
import json
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proxy.feedback_body import parse_feedback
from proxy.redaction import parse_rules
from proxy.upstreams.file import parse_upstreams
from store.policy_table import parse_policies
from tests.conftest import ROOT
from tests.support.docs.documents import Block, split_blocks
from tests.support.docs.guides import client_pages
from tests.support.docs.shell_lines import why_wrong
from tests.unit.docs.test_docs import OTHER_PAGES, PAGES
from trainer.recipes.recipe import Recipe

LANGUAGES = {"", "console", "js", "json", "mermaid", "python", "sh", "sql", "toml", "yaml"}
# Only what is a whole command: `make` alone, or a part of one, is prose.
COMMAND = re.compile(r"`((?:make [a-z]+|python -m|\.venv/bin/\w+|pawl [a-z]+)(?: [^`…]*)?)`")
PLACEHOLDER = re.compile(r"\b[A-Z]+$|\.NAME\b")
BLOCKS = [
    block for page in (*PAGES, *OTHER_PAGES) for block in split_blocks(page, page.read_text())[1]
]


def blocks(language: str) -> list[Block]:
    """The code blocks of a language."""
    return [block for block in BLOCKS if block.language == language]


def where(block: Block) -> str:
    """A test's name: page and line."""
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def test_every_code_block_of_the_docs_is_in_a_checked_language() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES


@pytest.mark.parametrize("block", blocks("sh"), ids=where)
def test_shell_blocks_of_the_docs_use_existing_commands_and_files(block: Block) -> None:
    folder = block.page.parent if "examples" in block.page.parts else ROOT
    assert why_wrong(block.text, folder) == ""


@pytest.mark.parametrize("block", blocks("python"), ids=where)
def test_python_blocks_of_the_docs_compile(block: Block) -> None:
    assert ast.parse(block.text).body


def test_js_blocks_are_only_on_doc_pages_that_a_test_runs() -> None:
    assert {block.page for block in blocks("js")} <= set(client_pages())


@pytest.mark.parametrize("block", blocks("json"), ids=where)
def test_json_blocks_of_the_docs_are_json_or_json_lines(block: Block) -> None:
    try:
        told = json.loads(block.text)
    except json.JSONDecodeError:
        told = [json.loads(line) for line in block.text.splitlines()]
    assert told


@pytest.mark.parametrize("block", blocks("toml"), ids=where)
def test_toml_blocks_of_the_docs_are_valid_upstreams_policies_rules_or_recipes(
    block: Block,
) -> None:
    keys = tomllib.loads(block.text).keys()
    if "upstream" in keys:
        assert parse_upstreams(block.text, where(block))
    elif "policy" in keys:
        assert parse_policies(block.text, where(block)).specs
    elif "rule" in keys:
        assert parse_rules(block.text, where(block)).fields
    else:
        assert Recipe.model_validate(tomllib.loads(block.text))


def test_feedback_example_of_the_reward_guide_is_accepted() -> None:
    [example] = [block for block in blocks("json") if block.page.name == "rewards.md"]
    assert len(parse_feedback(example.text.encode(), datetime.now(UTC), None).items) == 3


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "cli.md"],  # typer wrote that
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_pawl_commands_named_in_the_text_of_the_docs_exist(page: Path) -> None:
    said = [found[1] for found in COMMAND.finditer(split_blocks(page, page.read_text())[0])]
    wrong = {command: why_wrong(command) for command in said if not PLACEHOLDER.search(command)}
    # A text may name an option without its value.
    assert not [why for why in wrong.values() if why and "requires an argument" not in why]
