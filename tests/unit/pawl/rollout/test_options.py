"""The options: a rollout's files are all different ones, and its proxy has an address."""

import re
from pathlib import Path
from typing import Any

import pytest

from pawl.rollout.errors import RolloutError
from pawl.rollout.options import RolloutOptions, base_address, check_files

WARM = {"python": "agent:answer", "judge_python": "judge:verdict"}


def checked(journal: str, **named: Any) -> None:
    options: dict[str, Any] = {"tasks": Path("tasks.jsonl"), "url": "", "metrics_url": ""}
    check_files(RolloutOptions(**(options | named)), Path(journal))


@pytest.mark.parametrize(
    ("journal", "named", "said"),
    [
        ("tasks.jsonl", {}, "--tasks and --journal would be one file, tasks.jsonl"),
        ("j", {"summary": Path("x/../tasks.jsonl")}, "--tasks and --summary would be one file"),
        ("j", {"summary": Path("j")}, "--journal and --summary would be one file, j: name"),
        ("j.log", WARM, "--journal and the log of --python would be one file, j.log"),
        ("t", WARM | {"tasks": Path("t.log")}, "--tasks and the log of --python would be one"),
        ("j", WARM | {"summary": Path("j.judge.log")}, "the log of --judge-python and --summary"),
        (".", WARM, "--journal: . cannot be opened: it is a folder"),
    ],
)
def test_no_file_of_a_rollout_is_written_over_by_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    journal: str,
    named: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RolloutError, match=re.escape(said)):
        checked(journal, **named)


def test_a_link_to_the_tasks_is_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.json").symlink_to("tasks.jsonl")
    with pytest.raises(RolloutError, match="--tasks and --summary would be one file"):
        checked("j", summary=Path("s.json"))


def test_files_apart_are_taken() -> None:
    checked("j.jsonl", summary=Path("s.json"), **WARM)


@pytest.mark.parametrize(
    "url",
    ["localhost:1", "http://", "http://[::1", "http://h:port", "http://h:99999", "http://h:0"],
)
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(RolloutError, match=r"--url: .* is no http:// or https:// URL: give the"):
        base_address(url)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/pawl/", "https://h/pawl"),
        ("http://[::1]:8100", "http://[::1]:8100"),
    ],
)
def test_an_address_has_no_version_and_no_last_slash(url: str, address: str) -> None:
    assert base_address(url) == address
