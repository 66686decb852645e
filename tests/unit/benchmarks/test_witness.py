"""The machine's own stalls are found, and nothing is left of the process that finds them."""

from pathlib import Path

from benchmarks.witness import Witness


def test_a_witness_tells_of_the_longest_stall(tmp_path: Path) -> None:
    with Witness(tmp_path) as witness:
        assert witness.longest_s == 0.0
    assert 0.0 < witness.longest_s < 60.0
    assert list(tmp_path.iterdir()) == []
