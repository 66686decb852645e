"""A line of the log stays small whatever a client says, and a full disk stops no process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pawl.logs import NeverRaisingFile, shortened

# Logs what a client said, as a worker (gathered) and as the other processes do.
SCRIPT = """
import logging, sys, structlog
from pawl.logs import configure_logging
configure_logging(buffered=sys.argv[1] == "gather")
log = structlog.get_logger()
long = "é\\n\\"" * 700_000
log.debug("call", model=long, agent=long, episode="e-1", bytes=7, served=None, first_chunk_ms=1.5)
log.warning("models_unknown", reason={"model": long, "tried": [long[:9000]] * 300}, call="c-1")
try:
    raise ValueError(long + "the end")
except ValueError:
    log.exception("request_failed", method=long)
"""
FIELDS = """
log.debug("call", model="m", level="mine", event_id=1)
log.debug("%s of %s", "one", "two", model="m")
log.bind(worker=1).debug("bound", model="m")
"""
LIBRARY = """
log = logging.getLogger("aiohttp.server")
log.info("nobody wants to know")
log.warning("from %s", "a\\n{}" * 1_000)
try:
    raise ValueError("bytes of a stranger: \\n{}" * 1_000)
except ValueError:
    log.exception("Error handling request")
"""
HOW = ("gather", "plain")


def logged(script: str, how: str, level: str = "debug") -> list[bytes]:
    """The lines that a program logs; with an empty `level` it has none of its own."""
    command = [sys.executable, "-c", script, how]
    environment = os.environ | {"PAWL_LOG_LEVEL": level}
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    return done.stderr.splitlines()


class Lines(NamedTuple):
    """What a program logs: long texts, fields, and records of a library."""

    long: list[bytes]
    fields: list[bytes]
    library: list[bytes]


@pytest.fixture(scope="module")
def told() -> dict[str, Lines]:
    """The lines of a worker, and of another process."""
    every = {how: logged(SCRIPT + FIELDS + LIBRARY, how) for how in HOW}
    return {how: Lines(lines[:3], lines[3:-2], lines[-2:]) for how, lines in every.items()}


@pytest.mark.parametrize("how", HOW)
def test_long_texts_of_clients_are_cut_in_every_log_line(how: str, told: dict[str, Lines]) -> None:
    lines = told[how].long
    assert max(map(len, lines[::2])) < 30_000
    assert len(lines[1]) < 100_000
    call, unknown, failed = map(json.loads, lines)
    assert call["event"] == "call"
    assert 250 < len(call["model"]) < 300
    assert "2100000" not in call["model"]
    assert "2099744 characters" in call["model"]
    assert (call["episode"], call["bytes"], call["served"]) == ("e-1", 7, None)
    assert call["first_chunk_ms"] == 1.5
    assert len(unknown["reason"]["tried"]) == 100
    assert failed["exception"].startswith("Traceback")
    assert failed["exception"].endswith("the end")


def test_long_field_names_and_deep_values_of_log_lines_are_cut() -> None:
    nested: object = "x"
    for _ in range(3000):
        nested = [nested]
    found = shortened({"k" * 5000: "v", "nested": [[[["deep"] * 9000]]], "ok": True})
    assert max(map(len, found)) < 300
    assert len(str(found["nested"])) < 1000
    assert found["ok"] is True


@pytest.mark.parametrize("how", HOW)
def test_log_on_a_full_disk_ends_no_process(how: str) -> None:
    script = SCRIPT + "\nprint('still here')\n"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, how],
            check=False,
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (0, b"still here\n")


def test_number_of_lost_log_lines_is_logged_once_there_is_room_again() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    file = NeverRaisingFile(writing)
    line = b"x" * 1023 + b"\n"
    for _ in range(100):
        file.write(line)
    held = os.read(reading, 2**20)
    file.write(b"after\n")
    file.write(b"and on\n")
    told = os.read(reading, 2**20)
    os.close(reading)
    os.close(writing)
    assert held == line * 64
    lost, *rest = told.splitlines()
    assert json.loads(lost) == {"event": "log_lines_lost", "lines": 36, "level": "error"}
    assert rest == [b"after", b"and on"]


def test_log_line_gathered_from_a_worker_has_the_fields_of_any_log_line(
    told: dict[str, Lines],
) -> None:
    gathered, plain = ([json.loads(line) for line in told[how].fields] for how in HOW)
    for line in (*gathered, *plain):
        assert line.pop("timestamp")
    assert gathered == plain
    assert [line["event"] for line in gathered] == ["call", "one of two", "bound"]


LEVELS = """
import sys, structlog
from pawl.logs import configure_logging
configure_logging(buffered=sys.argv[1] == "gather")
log = structlog.get_logger()
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)(f"a line of {level}", level_of=1)
"""


@pytest.mark.parametrize(
    ("how", "level", "kept"),
    [
        ("gather", "debug", ["debug", "info", "warning", "error"]),
        ("gather", "warning", ["warning", "error"]),
        ("plain", "", ["info", "warning", "error"]),
        ("plain", "error", ["error"]),
    ],
)
def test_log_lines_below_the_level_are_left_out(how: str, level: str, kept: list[str]) -> None:
    lines = [json.loads(line) for line in logged(LEVELS, how, level)]
    assert [(line["level"], line["event"]) for line in lines] == [
        (one, f"a line of {one}") for one in kept
    ]


@pytest.mark.parametrize("how", HOW)
def test_log_record_of_a_library_becomes_a_log_line_like_any_other(
    how: str, told: dict[str, Lines]
) -> None:
    warned, failed = map(json.loads, told[how].library)
    assert (warned["event"], warned["library"]) == ("library", "aiohttp.server")
    assert (warned["level"], failed["level"]) == ("warning", "error")
    assert warned["said"].startswith("from a\n{}a")
    assert len(warned["said"]) < 300
    assert failed["exception"].startswith("Traceback")
    assert len(failed["exception"]) < 10_000
