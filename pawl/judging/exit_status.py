"""Judge by the last test command that an episode ran: did its tests pass?

The command's exit status decides if it is that of the tests; that of `pytest | tail` is tail's.
Otherwise the test runner's summary in the result decides ("2 failed, 31 passed").
"""

import re
import shlex
from typing import Any, Final

import msgspec

from pawl.judging.answers import JudgeError, Statement
from pawl.judging.executions import Execution, Line, executions

RUNS_TESTS: Final = r"""(?x)^(?:(?:[A-Za-z_]\w*=\S*|sudo|env|time|nice|exec|command
    |timeout\s(?:-\S+\s)*\S+|(?:npx|bunx|pnpm|yarn)(?:\s-\S+|\sexec)*
    |(?:uv|poetry|pdm|pipenv|hatch|bundle)\s(?:run|exec))\s)*(?:\S*/)?
    (?:pytest|py\.test|tox|nox|ctest|jest|vitest|mocha|rspec|phpunit
    |python[\d.]*\s(?:-[A-Za-ln-z]\S*\s(?:[^-\s]\S*\s)?)*-m\s(?:pytest|unittest|tox|nox)
    |python[\d.]*\s\S*manage\.py\stest|(?:npm|pnpm|yarn|bun|deno)\s(?:run\s)?(?:t|test\S*)
    |(?:go|dotnet|swift|rake|mix)\stest|cargo\s(?:\+\S+\s)?(?:test|nextest)
    |(?:make|just)\s(?:\S+\s)*(?:test|check)\S*
    |(?:mvn|mvnw|gradle|gradlew)\s(?:\S+\s)*(?:\S*:)?(?:test|verify|check))(?=\s|$)
    (?!.*\s(?:--version|--help|-h|--collect-only|--co|--listTests)\s)"""
_FAILED: Final = re.compile(
    r"(?m)\b[1-9]\d* (?:failed|failures?|failing|errors?)\b|(?:ailures|Errors|failed)[=:] ?[1-9]"
    r"|^(?:--- )?FAIL(?:ED)?\b|test result: FAILED|^not ok\b|^# fail [1-9]"
)
_PASSED: Final = re.compile(
    r"(?m)\b[1-9]\d* pass(?:ed|ing)\b|^OK\b|^ok\s+\S|test result: ok|^Tests run: [1-9]|^# pass \d"
)
# Codex continues a long command by another tool call, which names the command's session.
_SESSION: Final = re.compile(r"(?m)^Process running with session ID (\d+)$")
_QUOTED: Final = re.compile(r"'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"")


class ExitStatusJudge:
    """Reward 1 if an episode's last tests passed, 0 if they failed; no statement if unknown."""

    def __init__(self, pattern: str = RUNS_TESTS, *, name: str | None = None):
        """Store the regular expression that finds commands that run tests.

        Raises:
            JudgeError: the pattern is not a regular expression.
        """
        self.name = name or ("tests" if pattern == RUNS_TESTS else f"tests by {pattern}")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise JudgeError(f"--test-command is no regular expression: {error}") from error

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Return the reward by the episode's last command that ran tests, or no statement."""
        passed: bool | None = None
        sessions: dict[str, str] = {}
        for execution in executions(msgspec.json.decode(line, type=Line)):
            script = _shell_command(execution.arguments, sessions)
            is_own = has_tests_status(script, self.pattern)
            if is_own is not None:
                passed = _passed(execution, is_own)
                if session := _SESSION.search(execution.text):
                    sessions[session[1]] = script
        return [] if passed is None else [{"value": int(passed), "episode": episode}]


def _shell_command(arguments: Any, sessions: dict[str, str]) -> str:
    """Return the shell command of a tool call, or of the session that it continues; else ""."""
    given = arguments if isinstance(arguments, dict) else {}
    command = given.get("command") or given.get("cmd") or sessions.get(str(given.get("session_id")))
    if isinstance(command, list):
        is_shell = len(command) == 3 and command[1] in ("-c", "-lc")
        return str(command[2]) if is_shell else shlex.join(map(str, command))
    return command if isinstance(command, str) else ""


def has_tests_status(script: str, pattern: re.Pattern[str]) -> bool | None:
    """Return whether a command's exit status is that of its last tests; None without tests."""
    script = _QUOTED.sub(lambda quoted: re.sub(r"[();|&]", "_", quoted[0][1:-1]), script)
    script = re.sub(r"\\\n|\d?>&\d?|&>", " ", script)
    # Commands at even places, the operators between them at odd ones.
    parts = [" ".join([*part.split(), ""]) for part in re.split(r"([();|&\n]+)", script)]
    tests = [place for place in range(0, len(parts), 2) if pattern.search(parts[place])]
    if not tests:
        return None
    after = parts[tests[-1] + 1 :]
    return not "".join(after[1::2]).strip() and "&" not in "".join(after[::2])


def _passed(execution: Execution, is_own: bool) -> bool | None:
    """Return whether a command's tests passed, or None if that is unknown.

    Its exit status counts if it is the tests' own (`is_own`) and the command ran in the foreground;
    else the output decides.
    """
    given = execution.arguments if isinstance(execution.arguments, dict) else {}
    in_background = any("background" in name and on for name, on in given.items())
    if is_own and not in_background and execution.succeeded is not None:
        return execution.succeeded
    if _FAILED.search(execution.text):
        return False
    return True if _PASSED.search(execution.text) else None
