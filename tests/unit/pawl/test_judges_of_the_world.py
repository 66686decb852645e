"""Judges that read what became of an episode's work: its last test command, and the next commit."""

import asyncio
import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pawl.judging.answers import Judge, JudgeError, NotYet
from pawl.judging.exit_status import ExitStatusJudge, has_tests_status
from pawl.judging.git import GitJudge
from store.ids import lowest_id_at

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
# Arguments of a tool call, and the text of its result.
Step = tuple[Any, str]


def chat(asked: Any, result: str, tool_id: str) -> list[Any]:
    function = {"name": "t", "arguments": asked if isinstance(asked, str) else json.dumps(asked)}
    return [
        {"role": "assistant", "tool_calls": [{"id": tool_id, "function": function}]},
        {"role": "tool", "tool_call_id": tool_id, "content": result},
    ]


def messages(asked: Any, result: str, tool_id: str) -> list[Any]:
    use = {"type": "tool_use", "id": tool_id, "name": "t", "input": asked}
    told = {"type": "tool_result", "tool_use_id": tool_id, "content": result}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]


def responses(asked: Any, result: str, tool_id: str) -> list[Any]:
    call = {"type": "function_call", "name": "t", "arguments": json.dumps(asked)}
    if isinstance(asked, str):
        call = {"type": "custom_tool_call", "name": "t", "input": asked}
    output = {"type": "function_call_output", "call_id": tool_id, "output": result}
    return [call | {"call_id": tool_id}, output]


WRITERS = {"chat": chat, "messages": messages, "responses": responses}


def line(*steps: Step, api: str = "chat", statuses: Any = (), began: datetime = NOW) -> bytes:
    """An export line of an episode with a call a minute; each repeats what went before."""
    shown: list[Any] = [{"role": "user", "content": "go on"}]
    calls = []
    for number in range(len(steps) + 1):
        if number:
            shown = shown + WRITERS[api](*steps[number - 1], f"call_{number}")
        request = {"input" if api == "responses" else "messages": shown}
        moment = began + timedelta(minutes=number)
        calls.append({"call": str(lowest_id_at(moment)), "request": request, "tool_events": []})
    events = [{"id": name, "status": status} for name, status in dict(statuses).items()]
    calls[-1]["tool_events"] = events
    return json.dumps({"episode": "e", "calls": calls}).encode()


def value(judge: Judge, shown: bytes) -> float | None:
    """What a judge states of an episode."""
    statements = asyncio.run(judge.judge("e", shown))
    assert all(statement["episode"] == "e" for statement in statements)
    return statements[0]["value"] if statements else None


# By the exit status of the last test command


def passed(*steps: Step, **more: Any) -> float | None:
    return value(ExitStatusJudge(), line(*steps, **more))


CODEX = "Chunk ID: 4447ed\nWall time: 0.1 seconds\nProcess exited with code {}\nOutput:\n.\n"
QWEN = (
    "Command: pytest\nDirectory: (root)\nOutput: x\nError: (none)\nExit Code: {}\nSignal: (none)"
    "\nProcess Group PGID: 7"
)
AGENTS = {
    "claude code": ("messages", {"command": "pytest -q"}, "Exit code {}\n.."),
    "codex": ("responses", {"cmd": "pytest -q"}, CODEX),
    "codex before": ("responses", {"command": ["bash", "-lc", "pytest"]}, "Exit code: {}\nx"),
    "qwen code": ("chat", {"command": "pytest"}, QWEN),
    "mini": ("chat", {"command": "pytest"}, '{{"returncode": {}, "output": ".."}}'),
}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_of_a_test_command_is_read_from_each_coding_agents_output(
    agent: str, code: int
) -> None:
    api, asked, result = AGENTS[agent]
    assert passed((asked, result.format(code)), api=api) == 1 - code


def test_timed_out_test_command_has_no_verdict_despite_its_output() -> None:
    late = "Command timed out after 1500ms before it could complete. Below is the output before it"
    assert passed(({"command": "pytest"}, f"{late} timed out:\nexit code: 0"), api="chat") is None


def test_last_test_command_of_an_episode_decides_its_verdict() -> None:
    bad, good = ({"command": "npm test"}, "Exit code 1"), ({"command": "npm test"}, "Exit code 0")
    other = ({"command": "ls"}, "Exit code 2")
    assert passed(bad, good, other) == 1
    assert passed(good, bad, other) == 0
    assert passed(other) is None
    assert passed() is None


@pytest.mark.parametrize(("status", "expected"), [("ok", 1), ("error", 0), ("timeout", None)])
def test_tool_status_decides_if_the_output_has_no_exit_code(
    status: str, expected: int | None
) -> None:
    assert passed(({"command": "pytest"}, "."), statuses={"call_1": status}) == expected


@pytest.mark.parametrize("status", ["denied", "malformed"])
def test_test_command_that_was_not_executed_is_not_the_last(status: str) -> None:
    steps = ({"command": "pytest"}, "Exit code 0"), ({"command": "pytest"}, "no")
    assert passed(*steps, statuses={"call_2": status}) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("== 2 failed, 31 passed in 0.1s ==", 0),
        ("== 31 passed in 0.1s ==", 1),
        ("Ran 3 tests in 0.1s\n\nFAILED (failures=1)", 0),
        ("Ran 3 tests in 0.1s\n\nOK", 1),
        ("Tests:       1 failed, 2 total", 0),
        ("Tests:       0 failed, 2 passed, 2 total", 1),
        ("--- FAIL: TestX (0.00s)\nFAIL\tpkg\t0.1s", 0),
        ("ok  \tpkg\t0.1s", 1),
        ("test result: FAILED. 1 passed; 1 failed;", 0),
        ("test result: ok. 1 passed; 0 failed;", 1),
        ("Tests run: 3, Failures: 1, Errors: 0", 0),
        ("Tests run: 3, Failures: 0, Errors: 0", 1),
        ("collecting ...", None),
    ],
)
def test_printed_summary_of_tests_decides_if_the_exit_status_is_of_another_command(
    text: str, expected: int | None
) -> None:
    piped = {"command": "pytest 2>&1 | tail -20"}
    assert passed((piped, text), statuses={"call_1": "ok"}) == expected
    assert passed(({"command": "pytest"}, text)) == expected


def test_test_command_in_the_background_has_no_verdict() -> None:
    started = {"command": "pytest", "run_in_background": True}
    assert passed((started, "running in background"), statuses={"call_1": "ok"}) is None


def test_exit_code_of_codexs_long_test_command_is_read_from_a_later_call() -> None:
    running = "Chunk ID: 1\nWall time: 10 seconds\nProcess running with session ID 7\nOutput:\n"
    waits = {"session_id": 7, "chars": ""}
    steps = ({"cmd": "pytest"}, running), (waits, CODEX.format(1))
    assert passed(*steps, api="responses") == 0
    assert passed(*steps[:1], api="responses") is None


@pytest.mark.parametrize(
    ("script", "is_own"),
    [
        ("pytest", True),
        ("cd a && CI=1 timeout 60 uv run pytest -k 'a or b; c' 2>&1", True),
        ("(cd a; python -m unittest)", True),
        ("python3 -u -X dev -m pytest;", True),
        ("python3 -m pytest;", True),
        ("/usr/bin/make -C a test", True),
        ("npx --yes vitest run", True),
        ("pnpm run test:unit", True),
        ("./gradlew :app:test", True),
        ("cargo +nightly test --all", True),
        ("pip install x\ngo test ./...", True),
        ("pytest && git commit -m x", False),
        ("pytest | tail", False),
        ("set -o pipefail; pytest | tail", False),
        ("pytest || true", False),
        ("pytest; echo done", False),
        ("pytest\necho done", False),
        ("pytest &", False),
        ("cat > a <<E\nit's\nE\npytest", True),
        ("pip install pytest", None),
        ("grep -r pytest .", None),
        ("pytest --version", None),
        ("pytest --collect-only -q", None),
        ("npm run build", None),
        ("echo 'a; pytest'", None),
    ],
)
def test_exit_status_is_trusted_only_if_it_is_the_tests_own(
    script: str, is_own: bool | None
) -> None:
    assert has_tests_status(script, ExitStatusJudge().pattern) is is_own


def test_users_test_command_is_found_by_a_regular_expression() -> None:
    judge = ExitStatusJudge(r"scripts/check\b")
    shown = line(({"command": "sh scripts/check"}, "Exit code 1"), ({"command": "pytest"}, "OK"))
    assert value(judge, shown) == 0
    assert judge.name != ExitStatusJudge().name
    with pytest.raises(JudgeError, match="regular expression"):
        ExitStatusJudge("(")


# By the next commit


class Repository:
    """A repository in which an agent worked at `NOW`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str, at: datetime = NOW) -> None:
        stamp = str(int(at.timestamp()))
        dates = {f"GIT_{who}_DATE": f"{stamp} +0000" for who in ("AUTHOR", "COMMITTER")}
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(
            ["git", *who, *arguments], cwd=self.folder, env=os.environ | dates, check=True
        )

    def commit(self, minutes: float, **files: str) -> None:
        """Commit files, whose names have no dot here, at a time from `NOW` on."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "x", at=NOW + timedelta(minutes=minutes))

    def value(self, *steps: Step, **more: Any) -> float | None:
        return value(GitJudge(self.folder), line(*steps, **more))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "here")
    made.commit(-60, a="one\ntwo\n")
    return made


def edit(path: Any, old: str = "two", new: str = "two\nthree\nfour") -> Step:
    return {"file_path": str(path), "old_string": old, "new_string": new}, "ok"


def test_git_judges_value_is_the_share_of_edited_lines_kept_by_the_next_commit(
    repository: Repository,
) -> None:
    step = edit(repository.folder / "a.py")
    with pytest.raises(NotYet):
        repository.value(step)
    repository.commit(10, b="other\n")
    with pytest.raises(NotYet):
        repository.value(step)
    repository.commit(20, a="one\ntwo\nthree\n")
    assert repository.value(step) == 0.5
    repository.commit(30, a="one\ntwo\n")
    assert repository.value(step) == 0.5


@pytest.mark.parametrize(
    ("committed", "share"), [("one\ntwo\n  three\nfour\n", 1.0), ("one\n2\n", 0.0)]
)
def test_kept_edit_scores_1_and_reverted_edit_scores_0(
    repository: Repository, committed: str, share: float
) -> None:
    repository.commit(20, a=committed)
    assert repository.value(edit("a.py")) == share


PATCH = """*** Begin Patch
*** Update File: a.py
@@
 one
-two
+three
*** Add File: b.py
+four
*** Delete File: c.py
*** End Patch"""


@pytest.mark.parametrize(
    ("api", "asked"),
    [
        ("messages", {"file_path": "a.py", "content": "one\nthree\nfour\n"}),
        ("messages", {"file_path": "a.py", "edits": [{"old_string": "", "new_string": "four"}]}),
        ("chat", {"filePath": "a.py", "oldString": "two", "newString": "four"}),
        ("chat", {"path": "a.py", "edits": [{"oldText": "two", "newText": "four"}]}),
        ("responses", PATCH),
        ("responses", {"cmd": f"apply_patch <<'E'\n{PATCH}\nE"}),
        ("chat", {"patchText": PATCH}),
    ],
)
def test_edits_of_the_agents_are_read(repository: Repository, api: str, asked: Any) -> None:
    step = (asked, "done")
    repository.commit(20, a="one\n5\n", b="6\n")
    assert repository.value(step, api=api) == 0.0
    repository.git("reset", "-q", "--hard", "HEAD^")
    repository.commit(20, a="one\nthree\nfour\n", b="four\n")
    assert repository.value(step, api=api) == 1.0


def test_file_that_a_patch_moves_is_looked_for_under_its_new_name(repository: Repository) -> None:
    moved = PATCH.replace("a.py", "a.py\n*** Move to: new.py")
    (repository.folder / "a.py").unlink()
    repository.commit(20, new="one\nthree\n", b="four\n")
    assert repository.value((moved, "done"), api="responses") == 1.0


def test_line_that_the_episode_took_out_again_is_not_counted(repository: Repository) -> None:
    steps = edit("a.py"), edit("a.py", old="four", new="five")
    repository.commit(20, a="one\ntwo\nthree\nfive\n")
    assert repository.value(*steps) == 1.0


def test_failed_edit_is_not_counted_as_an_edit(repository: Repository) -> None:
    repository.commit(20, a="1\n")
    assert repository.value(edit("a.py"), statuses={"call_1": "error"}) is None


def test_edits_outside_the_repository_and_of_uncommitted_new_files_are_not_counted(
    repository: Repository, tmp_path: Path
) -> None:
    repository.commit(20, a="one\ntwo\nthree\nfour\n")
    elsewhere = edit(tmp_path / "a.py", new="x"), edit("../b.py", new="x"), edit("/", new="x")
    assert repository.value(*elsewhere) is None
    # A scratch file that nobody committed.
    assert repository.value(edit("a.py"), edit("scratch.py", new="x"), *elsewhere) == 1.0


def test_edits_of_a_tracked_file_left_out_of_the_commit_count_as_not_kept(
    repository: Repository,
) -> None:
    repository.commit(-50, b="one\n")
    repository.commit(20, a="one\ntwo\nthree\nfour\n")
    assert repository.value(edit("a.py"), edit("b.py", new="five\nsix")) == 0.5


def test_edits_of_a_deleted_file_count_as_not_kept(repository: Repository) -> None:
    (repository.folder / "a.py").unlink()
    repository.commit(20)
    assert repository.value(edit("a.py")) == 0.0


def test_commits_of_other_branches_count(repository: Repository) -> None:
    repository.git("checkout", "-qb", "other")
    repository.commit(20, a="one\ntwo\nthree\nfour\n")
    repository.git("checkout", "-q", "main")
    assert repository.value(edit("a.py")) == 1.0


def test_edits_are_valued_at_the_first_commit_of_a_repository(tmp_path: Path) -> None:
    fresh = Repository(tmp_path / "fresh")
    with pytest.raises(NotYet):
        fresh.value(edit("a.py"))
    fresh.commit(20, a="two\nthree\nfour\n")
    assert fresh.value(edit("a.py")) == 1.0


def test_git_judge_does_not_wait_for_a_commit_after_an_episode_without_edits(
    repository: Repository,
) -> None:
    assert repository.value(({"command": "ls"}, "a.py")) is None


def test_git_judge_refuses_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(JudgeError, match=re.escape(str(folder))):
            GitJudge(folder)
