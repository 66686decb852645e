"""A real trainer, started misconfigured: it says why and spends nothing; repaired, it learns."""

from pathlib import Path

import pytest

from benchmarks.misconfigured.__main__ import measured
from benchmarks.misconfigured.faults import FAULTS


@pytest.mark.timeout(300)
def test_what_the_check_at_the_start_knows_costs_nothing(tmp_path: Path) -> None:
    faults = [one for one in FAULTS if one.name in ("rank", "full memory")]
    outcomes = measured(tmp_path, faults, ["at the start"])
    assert {one.fault: one.missed for one in outcomes} == {"rank": [], "full memory": []}
    assert {(one.status, one.spent) for one in outcomes} == {(2, 0)}
