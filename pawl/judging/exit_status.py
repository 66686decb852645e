"""Judge by the last test command that an episode ran: did its tests pass?

The exit status tells it where it is the tests' own: not in `pytest | tail`, whose status is
tail's. Otherwise the runner's summary in the result does ("2 failed, 31 passed").
"""

import re
import shlex
from collections.abc import Iterable
from typing import Any, Final, Literal

from pawl.judging.answers import JudgeError, Statement
from pawl.judging.executions import Execution, executions, shown_calls

RUNS_TESTS: Final = r"""^(?:(?:[A-Za-z_]\w*=\S*|sudo|env|time|nice|exec|command
    |timeout\s(?:-\S+\s)*\S+|(?:npx|bunx|pnpm|yarn)(?:\s-\S+|\sexec)*|(?:uv|poetry|pdm|pipenv|hatch|bundle)\s(?:run|exec)
    )\s)*(?:\S*/)?(?:pytest|py\.test|tox|nox|ctest|jest|vitest|mocha|rspec|phpunit
    |python[\d.]*\s(?:-[A-Za-ln-z]\S*\s(?:[^-\s]\S*\s)?)*(?:-m\s(?:pytest|unittest|tox|nox)|\S*manage\.py\stest)
    |(?:npm|pnpm|yarn|bun|deno)\s(?:run\s)?(?:t|test\S*)|(?:go|dotnet|swift|rake|mix)\stest
    |cargo\s(?:\+\S+\s)?(?:test|nextest)|(?:make|just)\s(?:\S+\s)*(?:test|check)\S*
    |(?:mvn|mvnw|gradle|gradlew)\s(?:\S+\s)*(?:\S*:)?(?:test|verify|check))(?=\s|$)
    (?!.*\s(?:--version|--help|-h|--collect-only|--co|--listTests)\s)"""
# Whose status a command line's is: the tests'; theirs at least if it is 0; another command's.
Trust = Literal["status", "zero", "nothing"]
_FAILED: Final = re.compile(
    r"\b[1-9]\d* (?:failed|failures?|failing|errors?)\b|(?:[Ff]ailures|[Ee]rrors|failed)[=:] ?[1-9]"
    r"|^(?:--- )?FAIL(?:ED)?\b|test result: FAILED|^not ok\b|^# fail [1-9]",
    re.MULTILINE,
)
_PASSED: Final = re.compile(
    r"\b[1-9]\d* (?:passed|passing)\b|^OK\b|^ok\s+\S|test result: ok|^Tests run: [1-9]"
    r"|^# pass [1-9]",
    re.MULTILINE,
)
# Codex goes on with a long command by another tool call, which names its session.
_SESSION: Final = re.compile(r"^Process running with session ID (\d+)$", re.MULTILINE)


class ExitStatusJudge:
    """State 1 if an episode's last tests passed, 0 if they failed; nothing if it ran none."""

    def __init__(self, pattern: str | None = None, *, name: str | None = None):
        """Store the regular expression that finds commands that run tests; None: the usual ones.

        Raises:
            JudgeError: it is no regular expression.
        """
        self.name = name or ("tests" if pattern is None else f"tests by {pattern}")
        try:
            self.pattern = re.compile(pattern) if pattern else re.compile(RUNS_TESTS, re.VERBOSE)
        except re.error as error:
            raise JudgeError(f"--test-command {pattern!r} is no regular expression: {error}") from (
                error
            )

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Return the reward of the episode's last test command; no statement if it is unknown."""
        passed = self._passed(executions(shown_calls(line)))
        return [] if passed is None else [{"value": int(passed), "episode": episode}]

    def _passed(self, executed: Iterable[Execution]) -> bool | None:
        passed: bool | None = None
        sessions: dict[str, str] = {}
        for one in executed:
            script = _script(one.arguments, sessions)
            trust = None if script is None else trust_in(script, self.pattern)
            if script is None or trust is None:
                continue
            if session := _SESSION.search(one.text):
                sessions[session[1]] = script
            starts_only = any(
                "background" in name and one.arguments[name] for name in one.arguments
            )
            succeeded = None if starts_only else one.succeeded
            if succeeded is not None and (trust == "status" or (succeeded and trust == "zero")):
                passed = succeeded
            else:
                passed = _by_summary(one.text)
        return passed


def _script(arguments: Any, sessions: dict[str, str]) -> str | None:
    """Return the shell command of a tool call, or the one whose session it goes on with."""
    given = arguments if isinstance(arguments, dict) else {}
    command = given.get("command") or given.get("cmd") or sessions.get(str(given.get("session_id")))
    if isinstance(command, list) and all(isinstance(word, str) for word in command):
        is_shell = len(command) == 3 and command[1] in ("-c", "-lc")
        return command[2] if is_shell else shlex.join(command)
    return command if isinstance(command, str) else None


def trust_in(script: str, pattern: re.Pattern[str]) -> Trust | None:
    """Return how far a shell command's status is that of its last tests; None: it runs none."""
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters = " \t\r", ""
    lexer.whitespace_split = True
    commands, joints = [""], list[str]()
    try:
        for token in lexer:
            if set(token) <= set("();|&\n"):
                joints.append(token.strip("()\n"))
                commands.append("")
            else:
                commands[-1] += token + " "
    except ValueError:
        # Quotes that do not match, as in the text of a here-document.
        parts = re.split(r"[();|&\n]+", script)
        return "nothing" if any(pattern.search(part.strip() + " ") for part in parts) else None
    tests = [place for place, command in enumerate(commands) if pattern.search(command)]
    if not tests:
        return None
    after = {joint for joint in joints[tests[-1] :] if joint}
    if not "".join(commands[tests[-1] + 1 :]):
        return "nothing" if "&" in after else "status"
    harmless = {"&&", "|"} if "pipefail" in script else {"&&"}
    return "zero" if after and after <= harmless else "nothing"


def _by_summary(text: str) -> bool | None:
    if _FAILED.search(text):
        return False
    return True if _PASSED.search(text) else None
