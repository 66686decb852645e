"""Judge an episode by the share of its written lines that are in the next commit.

Lines that a file had before the episode, or that the episode removed again, are not counted.
"""

import asyncio
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from pawl.judging.answers import JudgeError, JudgeFailed, NotYet, Statement
from pawl.judging.executions import Execution, Line, executions
from pawl.programs import last_line
from store.ids import time_of

# Argument names of the edit tools of coding agents.
_PATHS: Final = ("file_path", "filePath", "path", "absolute_path", "file")
_OLD: Final = ("old_string", "oldString", "old_str", "oldText")
_NEW: Final = ("new_string", "newString", "new_str", "newText", "insert_text")
_WHOLE: Final = ("content", "contents", "file_text")
# The beginning of a file's part in a patch for Codex's `apply_patch`, also when run by a shell.
_FILE: Final = re.compile(r"(?m)^\*\*\* (?:Add|Update) File: ")
_MOVED: Final = re.compile(r"(?m)^\*\*\* Move to: (.+)$")
LIMIT_S: Final = 60


class GitJudge:
    """Rewards an episode with the share of its lines that the next commit of their files has."""

    def __init__(self, folder: Path, *, name: str | None = None):
        """Store the folder in which the agents worked.

        Raises:
            JudgeError: the folder is in no checkout of a repository.
        """
        self.name = name or f"git {folder}"
        self._folder = self._root = folder.resolve()
        try:
            self._root = Path(self._git("rev-parse", "--show-toplevel").strip())
        except JudgeFailed as error:
            raise JudgeError(f"--git {folder} names no checkout: {error}") from error

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Return the share as the episode's reward; no statement if it added no line to the folder.

        Raises:
            NotYet: none of the files was committed after the episode's last call.
            JudgeFailed: git fails.
        """
        share = await asyncio.to_thread(self._committed_share, msgspec.json.decode(line, type=Line))
        return [] if share is None else [{"value": share, "episode": episode}]

    def _committed_share(self, line: Line) -> float | None:
        times = [int(time_of(call.call).timestamp()) for call in line.calls]
        files = {self._repo_path(name): of for name, of in lines_written(executions(line)).items()}
        written = {path: lines for path, lines in files.items() if path and lines}
        # On any local or remote branch; the newest commit comes first.
        since = ("rev-list", "--branches", "--remotes", f"--max-age={max(times) + 1}", "--")
        found = {path: self._git(*since, path).split() for path in written}
        commits = {path: of_file[-1] for path, of_file in found.items() if of_file}
        if written and not commits:
            raise NotYet("no commit after the episode touches a file that it edited")
        kept = total = 0
        for path, lines in written.items():
            # A file that no commit touches is compared at another file's: its edits were lost.
            commit = commits.get(path) or next(iter(commits.values()))
            after = self._lines_at_commit(commit, path)
            if path in commits or after is not None:
                base = self._git("rev-list", "-1", f"--min-age={min(times)}", commit).strip()
                own = lines - ((self._lines_at_commit(base, path) if base else None) or set())
                kept, total = kept + len(own & (after or set())), total + len(own)
        return kept / total if total else None

    def _repo_path(self, name: str) -> str | None:
        """Return a file's path in the repository; None if it is outside."""
        try:
            path = Path(os.path.realpath(self._folder / name))
        except ValueError:
            # The name has a zero byte.
            return None
        return str(path.relative_to(self._root)) if path.is_relative_to(self._root) else None

    def _lines_at_commit(self, commit: str, path: str) -> set[str] | None:
        """Return the lines of a file in a commit; None if the commit lacks the file."""
        if not self._git("ls-tree", commit, "--", path):
            return None
        return lines_of(self._git("cat-file", "blob", f"{commit}:{path}"))

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._root), "--literal-pathspecs", *arguments]
        try:
            ended = subprocess.run(command, check=False, capture_output=True, timeout=LIMIT_S)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise JudgeFailed(f"git {arguments[0]} did not run: {error}") from error
        if ended.returncode:
            raise JudgeFailed(f"git {arguments[0]} failed: {last_line(ended.stderr)}")
        return ended.stdout.decode(errors="replace")


def lines_of(text: str) -> set[str]:
    """Return a text's stripped, non-empty lines."""
    return {line.strip() for line in text.splitlines()} - {""}


def lines_written(executed: Iterable[Execution]) -> dict[str, set[str]]:
    """Return by file name the lines that an episode's calls wrote and no later one removed."""
    written: dict[str, set[str]] = {}
    for execution in executed:
        for path, old, new in () if execution.succeeded is False else _edits(execution.arguments):
            kept = set() if old is None else written.get(path, set()) - lines_of(old)
            written[path] = kept | lines_of(new)
    return written


def _edits(arguments: Any) -> Iterator[tuple[str, str | None, str]]:
    """Yield the edits of a tool call: file, removed text (None: all), and added text."""
    given = arguments if isinstance(arguments, dict) else {"patch": arguments}
    if (path := _first_text(given, _PATHS)) is not None:
        if (whole := _first_text(given, _WHOLE)) is not None:
            yield path, None, whole
        parts = given.get("edits")
        for part in (given, *(parts if isinstance(parts, list) else ())):
            if isinstance(part, dict) and (new := _first_text(part, _NEW)) is not None:
                yield path, _first_text(part, _OLD) or "", new
    for patch in given.values():
        for part in _FILE.split(patch)[1:] if isinstance(patch, str) else ():
            path, _, body = part.partition("\n")
            moved = _MOVED.search(body)
            old, new = ("\n".join(re.findall(rf"(?m)^[{sign}](.*)$", body)) for sign in "-+")
            yield moved[1] if moved else path, old, new


def _first_text(given: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the value of the first of `names` that has a text in `given`, also an empty one."""
    return next((given[name] for name in names if isinstance(given.get(name), str)), None)
