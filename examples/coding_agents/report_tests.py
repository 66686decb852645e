"""Run the tests when a coding agent stops, and post the result as the reward of its session.

A Stop hook for Claude Code and Codex, which needs nothing but Python:

    python3 report_tests.py claude-code
    python3 report_tests.py codex http://127.0.0.1:8100/v1

`TEST_COMMAND` is the shell command that runs the tests; without it the hook does nothing. The
argument after the client is its base URL (default: `ANTHROPIC_BASE_URL`). `PAWL_API_KEY` is sent if
it is set.

The hook always ends with status 0, so that neither failing tests nor a proxy that is away stops the
agent. It reports on standard error, in one line.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from urllib.parse import unquote

# Parts of a proxy's address that may come before the path of the API.
NAMES = re.compile(r"/(?:task|episode|agent|split)/[^/]+")
EPISODE = re.compile(r"/episode/([^/]+)")
HEADER = re.compile(r"^x-pawl-episode:\s*(\S.*?)\s*$", re.IGNORECASE | re.MULTILINE)
# Statuses of a shell that could not run a command (126, 127), or whose command was killed by signal
# N (128 + N, up to 64 of them).
NOT_RUN = range(126, 193)


def episode_of(client: str, session: str, url: str) -> str:
    """Return the key of the session's episode, as the proxy names it."""
    if header := HEADER.search(os.environ.get("ANTHROPIC_CUSTOM_HEADERS", "")):
        return header[1]
    named = EPISODE.search(url)
    return unquote(named[1]) if named else f"{client}:{session}"


def post(url: str, statement: dict[str, object]) -> None:
    address = NAMES.sub("", url).rstrip("/").removesuffix("/v1") + "/feedback"
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PAWL_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(address, json.dumps(statement).encode(), headers)
    with urllib.request.urlopen(request, timeout=10):
        pass


def report(client: str, url: str) -> str:
    command = os.environ.get("TEST_COMMAND")
    if not command:
        return "TEST_COMMAND is not set: no tests were run"
    hook = json.load(sys.stdin)
    folder = os.environ.get("CLAUDE_PROJECT_DIR") or hook["cwd"]
    # Output is discarded, because clients read standard output.
    status = subprocess.run(
        command,
        check=False,
        shell=True,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ).returncode
    if status in NOT_RUN or status < 0:
        return f"{command!r} could not be run, or was killed (status {status}): no reward"
    episode = episode_of(client, hook["session_id"], url)
    post(url, {"metric": "reward", "value": int(status == 0), "episode": episode})
    return f"reward {int(status == 0)} for {episode}"


def main() -> None:
    try:
        client, *address = sys.argv[1:]
        message = report(client, address[0] if address else os.environ["ANTHROPIC_BASE_URL"])
    except Exception as error:
        message = f"no reward: {error!r}"
    print(f"report_tests: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
