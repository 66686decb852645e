"""A real trainer, started misconfigured: it says why and spends nothing; repaired, it learns."""

from pathlib import Path

import pytest

from benchmarks.misconfigured.__main__ import measured
from benchmarks.misconfigured.faults import FAULTS


@pytest.mark.timeout(900)
def test_what_the_check_at_the_start_knows_costs_nothing(tmp_path: Path) -> None:
    faults = [one for one in FAULTS if one.name in ("rank", "full memory")]
    outcomes = measured(tmp_path, faults, ["at the start"])
    assert [one.fault for one in outcomes] == ["rank", "full memory"]
    # Full memory may pass: that is waited for.
    assert [one.status for one in outcomes] == [2, None]
    for one in outcomes:
        assert one.spent == 0
        assert one.remedy in one.told
        # How soon is the benchmark's affair: tests share their machine.
        assert one.learns_after_s is not None
