"""No folder holds more modules than a newcomer reads at once (decision 038)."""

from collections import Counter

import pytest

from tests.conftest import ROOT

CODE = (
    "benchmarks",
    "examples",
    "migrations",
    "pawl",
    "plugins",
    "proxy",
    "scripts",
    "store",
    "tests",
    "trainer",
)
MOST_MODULES = 16


@pytest.mark.parametrize("package", CODE)
def test_no_folder_holds_more_modules_than_a_newcomer_reads(package: str) -> None:
    # A module has a name that can be imported: an `__init__` names its room, and revisions of the
    # schema begin with a number.
    modules = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if path.stem.isidentifier() and path.stem != "__init__"
        if "node_modules" not in path.parts
    )
    assert modules.total() > 0
    assert {room: held for room, held in modules.items() if held > MOST_MODULES} == {}
