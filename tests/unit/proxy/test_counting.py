"""Counters in shared memory: what several processes count adds up, whoever is killed when."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.counting.memory import NoBlock, is_held, make_block, read_block, take_block
from proxy.counting.shared import Together, forget

# Counts in a block, does what it is told line by line, and is killed.
PROCESS = """
import json, sys
from proxy.counting import shared
shared.share([int(fd) for fd in sys.argv[1:]])
from prometheus_client import Counter, Gauge, Histogram
calls = Counter("calls_total", "Calls.", ["policy"])
plain = Counter("plain_total", "Plain.")
seconds = Histogram("seconds", "Seconds.", ["stream"], buckets=(0.1, 1, 10))
busy = Gauge("busy", "Now.", multiprocess_mode="livesum")
lag = Gauge("lag", "Newest.", multiprocess_mode="livemostrecent")
drifted = Gauge("drifted", "Newest.", ["judge"], multiprocess_mode="livemostrecent")
stated = Gauge("stated", "Sum.", ["policy"], multiprocess_mode="sum")
print("up", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Process:
    """One that counts."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, blocks)],
            pass_fds=blocks,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("up")

    def _answer(self, wanted: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == wanted + "\n"

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer("done")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def made(count: int) -> Iterator[list[int]]:
    blocks = [make_block("test") for _ in range(count)]
    try:
        yield blocks
    finally:
        for block in blocks:
            os.close(block)


def scraped(blocks: Sequence[int]) -> dict[str, float]:
    """Every sample, by its name and labels."""
    registry = CollectorRegistry()
    registry.register(Together(blocks))
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{json.dumps(sample.labels) if sample.labels else ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_two_processes_count_together_and_the_dead_go_on_counting() -> None:
    with made(3) as blocks:
        first, second = Process(blocks), Process(blocks)
        for one in (first, second):
            one.do("calls.labels('m').inc(2); plain.inc(); seconds.labels('true').observe(0.5)")
            one.do("busy.set(3); stated.labels('m').inc(-0.5)")
        first.do("lag.set(7)")
        second.do("lag.set(9)")
        found = scraped(blocks)
        assert found['calls_total{"policy": "m"}'] == 4
        assert found["busy"] == 6
        assert found["lag"] == 9
        second.kill()
        found = scraped(blocks)
        assert found["plain_total"] == 2
        assert found['stated{"policy": "m"}'] == -1
        # It is not there any more to be busy.
        assert found["busy"] == 3
        assert found["lag"] == 7
        first.kill()
        # The next one goes on where the one was whose block it has.
        third = Process(blocks)
        third.do("calls.labels('m').inc(); plain.inc()")
        found = scraped(blocks)
        assert found['calls_total{"policy": "m"}'] == 5
        assert found["plain_total"] == 3
        assert found["busy"] == 0
        assert "lag" not in found
        assert [is_held(block) for block in blocks] == [True, False, False]
        third.kill()


def test_a_series_that_is_forgotten_is_not_shown_until_it_is_set_again() -> None:
    with made(1) as blocks:
        process = Process(blocks)
        process.do("drifted.labels('j').set(1); drifted.labels('k').set(0)")
        process.do("shared.forget(drifted, 'j'); shared.forget(drifted, 'never')")
        found = scraped(blocks)
        assert [name for name in found if "drifted" in name] == ['drifted{"judge": "k"}']
        process.do("drifted.labels('j').set(0.5)")
        assert scraped(blocks)['drifted{"judge": "j"}'] == 0.5
        process.kill()
    # So it is in a process that counts alone.
    registry = CollectorRegistry()
    alone = Gauge("alone", "Newest.", ["judge"], registry=registry)
    alone.labels("j").set(1)
    forget(alone, "j")
    assert registry.get_sample_value("alone", {"judge": "j"}) is None


def test_a_histogram_is_told_as_prometheus_client_tells_it() -> None:
    registry = CollectorRegistry()
    seconds = Histogram("seconds", "Seconds.", ["stream"], buckets=(0.1, 1, 10), registry=registry)
    with made(2) as blocks:
        process = Process(blocks)
        for value in (0.05, 0.1, 0.5, 5, 50, 50):
            seconds.labels("true").observe(value)
            process.do(f"seconds.labels('true').observe({value})")
        found = scraped(blocks)
        process.kill()
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert found[f"{sample.name}{json.dumps(sample.labels)}"] == sample.value


def test_a_block_grows_and_loses_nothing() -> None:
    with made(1) as blocks:
        block = take_block(blocks)
        for number in range(3000):
            block.set(block.place(f"a name of some length {number}"), number, 1.0)
        assert os.fstat(blocks[0]).st_size > 2 * 65536
        # All of it is there: no page has to be found when it is touched.
        assert os.fstat(blocks[0]).st_blocks * 512 >= os.fstat(blocks[0]).st_size
        found = list(read_block(blocks[0]))
        assert [number.value for number in found] == list(range(3000))
        assert block.get(block.place("a name of some length 77")) == 77


def test_where_every_block_is_held_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.counting.memory.WAIT_S", 0.1)
    with made(1) as blocks:
        held = take_block(blocks)
        with pytest.raises(NoBlock, match="all 1 blocks are held"):
            take_block(blocks)
        assert held.names == []


def test_every_metric_of_the_proxy_can_be_shared() -> None:
    script = (
        "import sys; from proxy.counting import shared; shared.share([int(sys.argv[1])]);"
        "import proxy.metrics"
    )
    with made(1) as blocks:
        command = [sys.executable, "-c", script, str(blocks[0])]
        subprocess.run(command, pass_fds=blocks, check=True)
        assert "pawl_records_total" in scraped(blocks)
