"""The log may be on a full disk: that costs its lines, and nothing else."""

import json
from io import FileIO
from pathlib import Path

from pawl.logs import GatheringLogger, SteadyFile


def test_a_full_disk_costs_lines_and_they_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with FileIO("/dev/full", "wb") as full, FileIO(path, "wb") as free:
        steady = SteadyFile(full)
        logger = GatheringLogger(steady)
        logger.error(b"one")
        logger.info(b"two")
        logger.error(b"three")
        steady._file = free
        logger.error(b"four")
    told, line = path.read_bytes().splitlines()
    assert json.loads(told)["lines"] == 3
    assert line == b"four"
