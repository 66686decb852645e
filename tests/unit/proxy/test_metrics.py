"""Metrics of several processes add up, whoever is killed when; and their labels are few."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest, values
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from proxy import metrics, shared_memory
from proxy.metrics import status_label
from proxy.shared_memory import (
    FILE_BYTES,
    FOLDER_VARIABLE,
    SharedFolder,
    registry,
    share_metrics_in,
)
from proxy.spool.folders import Lock

# Counts in the folder, does what each line says, and is killed.
PROCESS = """
import sys
from pathlib import Path
from proxy.shared_memory import share_metrics_in
share_metrics_in(Path(sys.argv[1]))
from prometheus_client import Counter, Gauge, Histogram
calls = Counter("calls_total", "Calls.", ["policy"])
plain = Counter("plain_total", "Plain.")
seconds = Histogram("seconds", "Seconds.", ["stream"], buckets=(0.1, 1, 10))
busy = Gauge("busy", "Now.", multiprocess_mode="livesum")
lag = Gauge("lag", "Newest.", multiprocess_mode="livemostrecent")
stated = Gauge("stated", "Sum.", ["policy"], multiprocess_mode="sum")
print("up", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Process:
    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("up")

    def _expect(self, answer: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == answer + "\n"

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._expect("done")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(autouse=True)
def in_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shared = SharedFolder()
    monkeypatch.setenv(FOLDER_VARIABLE, str(shared.path))
    yield shared.path
    shared.remove()
    assert not shared.path.exists()


def scraped() -> dict[str, float]:
    """Every sample, by its name and labels."""
    text = generate_latest(registry()).decode()
    return {
        f"{sample.name}{json.dumps(sample.labels) if sample.labels else ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_of_killed_processes_survive_and_their_gauges_do_not(folder: Path) -> None:
    first, second = Process(folder), Process(folder)
    for process in (first, second):
        process.do("calls.labels('m').inc(2); plain.inc(); seconds.labels('true').observe(0.5)")
        process.do("busy.set(3); stated.labels('m').inc(-0.5)")
    first.do("lag.set(7)")
    second.do("lag.set(9)")
    samples = scraped()
    assert samples['calls_total{"policy": "m"}'] == 4
    assert (samples["busy"], samples["lag"]) == (6, 9)
    second.kill()
    samples = scraped()
    assert samples["plain_total"] == 2
    assert samples['stated{"policy": "m"}'] == -1
    assert (samples["busy"], samples["lag"]) == (3, 7)
    first.kill()
    third = Process(folder)
    third.do("calls.labels('m').inc(); plain.inc()")
    samples = scraped()
    assert samples['calls_total{"policy": "m"}'] == 5
    assert samples["plain_total"] == 3
    assert samples["busy"] == 0
    third.kill()


def test_successive_processes_reuse_a_metrics_file(folder: Path) -> None:
    for _ in range(3):
        process = Process(folder)
        process.kill()
    assert len(list(folder.glob("counter_*.db"))) == 1


def test_histogram_over_processes_is_exposed_as_in_a_single_process(folder: Path) -> None:
    alone = CollectorRegistry()
    seconds = Histogram("seconds", "Seconds.", ["stream"], buckets=(0.1, 1, 10), registry=alone)
    process = Process(folder)
    for value in (0.05, 0.1, 0.5, 5, 50, 50):
        seconds.labels("true").observe(value)
        process.do(f"seconds.labels('true').observe({value})")
    samples = scraped()
    process.kill()
    for family in text_string_to_metric_families(generate_latest(alone).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert samples[f"{sample.name}{json.dumps(sample.labels)}"] == sample.value


def test_process_without_shared_memory_keeps_its_metrics_to_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = values.ValueClass
    with capture_logs() as logs:
        share_metrics_in(folder)
    assert [entry["event"] for entry in logs] == ["counts_alone"]
    assert values.ValueClass is before


def test_metrics_folder_of_a_killed_supervisor_is_removed(tmp_path: Path) -> None:
    in_use = SharedFolder()
    (abandoned := tmp_path / f"{shared_memory.PREFIX}killed").mkdir()
    (abandoned / shared_memory.OWNER_LOCK).touch()
    (foreign := tmp_path / f"{shared_memory.PREFIX}foreign").mkdir()
    new = SharedFolder()
    assert in_use.path.exists()
    assert foreign.exists()
    assert not abandoned.exists()
    in_use.remove()
    new.remove()


def test_metrics_folder_of_a_supervisor_that_starts_is_not_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, others = shared_memory.lock_file, list[SharedFolder]()
    with monkeypatch.context() as patch:

        def hold(path: Path) -> Lock:
            # Another supervisor starts between the moments at which the file is made and locked.
            patch.undo()
            path.touch()
            others.append(SharedFolder())
            return real(path)

        patch.setattr(shared_memory, "lock_file", hold)
        one = SharedFolder()
    assert {child.name for child in one.path.iterdir()} == {shared_memory.OWNER_LOCK}
    for folder in (one, *others):
        folder.remove()


def test_shared_memory_is_set_aside_for_every_kind_of_gauge() -> None:
    gauges = [metric for metric in vars(metrics).values() if isinstance(metric, Gauge)]
    assert {f"gauge_{gauge._multiprocess_mode}" for gauge in gauges} <= FILE_BYTES.keys()


def test_status_label_is_a_status_of_http_or_its_class() -> None:
    found = {status_label(status) for status in range(100, 1000)}
    assert {"200", "404", "429", "503", "5xx", "4xx", "9xx"} <= found
    assert len(found) < 90
    assert status_label(529) == "5xx"
