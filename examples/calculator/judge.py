"""Judge the calculator agent's results, and report each verdict to a feedback endpoint.

Reads the agent's result lines (a file, a file that still grows, or stdin) and the questions with
their answers; posts lists of feedback items. Undelivered verdicts are named on stderr, and the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import select
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Item = dict[str, Any]

# A right answer is worth most by far. A call that ran and was wrong is worth a little, so that a
# model that hardly ever calls the tool learns to call it; a wrong text is worth nothing.
RIGHT = 1.0
WRONG_CALL = 0.1
NOTHING = 0.0

# The calculator prints no more digits than this.
TOLERANCE = 1e-6
# The server is busy or starting; any other 4xx is a refusal, which a retry would only repeat.
RETRIED_STATUSES = frozenset({408, 425, 429})
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
POLL_SECONDS = 0.2


# --- scoring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    right: bool
    reward: float
    tool_status: str | None

    @property
    def well_formed(self) -> bool:
        """Return whether the reply called the tool in the right form."""
        return self.tool_status in ("ok", "error")


def as_number(text: str | None) -> float | None:
    """Return the number in a text, ignoring spaces around it, commas and a final full stop."""
    try:
        return float((text or "").strip().removesuffix(".").replace(",", ""))
    except ValueError:
        return None


def judge(result: Item, expected: float) -> Verdict:
    tool = result.get("tool")
    status = tool["status"] if tool else None
    number = as_number(result.get("answer"))
    # A malformed call has no result, and its text is no answer whatever number it ends in.
    right = status in (None, "ok") and number is not None and abs(number - expected) < TOLERANCE
    if right:
        return Verdict(True, RIGHT, status)
    return Verdict(False, WRONG_CALL if status == "ok" else NOTHING, status)


def feedback(result: Item, verdict: Verdict) -> list[Item]:
    response = result["response_id"]
    items: list[Item] = [
        {"metric": "reward", "value": verdict.reward, "response": response},
        {"metric": "success", "value": int(verdict.right), "response": response},
    ]
    if verdict.tool_status is not None:
        item = {"metric": "tool_status", "value": verdict.tool_status, "response": response}
        items.append(item | {"id": result["tool"]["id"], "name": result["tool"]["name"]})
    return items


def verdict(run: Item) -> list[Item]:
    """Return the feedback on one run: `run` has the task, with its answer, and the output line.

    The tool's status is about its call; the other items are about the whole run: they name no
    target.
    """
    result = json.loads(run["output"])
    judged = judge(result, float(run["task"]["answer"]))
    items = feedback(result, judged)
    items = [item if item["metric"] == "tool_status" else without_target(item) for item in items]
    return [*items, {"metric": "well_formed", "value": int(judged.well_formed)}]


def without_target(item: Item) -> Item:
    return {name: value for name, value in item.items() if name != "response"}


@dataclass
class Tally:
    """Counts the judged results, for the final summary."""

    verdicts: dict[str, list[Verdict]] = field(default_factory=lambda: defaultdict(list))
    failed_calls: int = 0
    unknown: int = 0

    def summary(self) -> Item:
        every = [verdict for group in self.verdicts.values() for verdict in group]
        mixed = [len({verdict.right for verdict in group}) > 1 for group in self.verdicts.values()]
        return {
            "results": len(every),
            "questions": len(self.verdicts),
            "success": mean(verdict.right for verdict in every),
            "reward": mean(verdict.reward for verdict in every),
            "well_formed": mean(verdict.well_formed for verdict in every),
            "spread": mean(mixed),
            "failed_calls": self.failed_calls,
            "unknown_questions": self.unknown,
        }


def mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return round(sum(every) / len(every), 4) if every else None


# --- delivery ---------------------------------------------------------------------------------


class Undelivered(Exception):
    """The endpoint refused a batch, or could not be reached in time."""


def post(url: str, key: str | None, body: bytes) -> None:
    """Post one batch; its idempotency key is a hash of it, so that a repeat is counted once."""
    headers = {
        "Content-Type": "application/json",
        "Idempotency-Key": hashlib.sha256(body).hexdigest(),
    }
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()


def is_permanent(error: Exception) -> bool:
    if not isinstance(error, urllib.error.HTTPError):
        return False
    return error.code < 500 and error.code not in RETRIED_STATUSES


def deliver(send: Callable[[bytes], None], items: list[Item], patience: float) -> None:
    """Send one batch; while the endpoint fails, try again for `patience` seconds."""
    body = json.dumps(items).encode()
    deadline, pause = time.monotonic() + patience, FIRST_PAUSE
    while True:
        try:
            return send(body)
        except (OSError, http.client.HTTPException) as error:
            late = time.monotonic() + pause > deadline
            if is_permanent(error) or late:
                raise Undelivered(describe(error)) from error
        time.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)


def describe(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        reason = error.read(500).decode(errors="replace")
        return f"{error.code} {error.reason}: {reason}"
    return f"{type(error).__name__}: {error}"


# --- reading ----------------------------------------------------------------------------------


class Interrupted:
    """A flag `yes`, set by SIGTERM and SIGINT: judge the result lines so far, then end."""

    def __init__(self) -> None:
        self.yes = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: object) -> None:
        self.yes = True


def chunks(source: int, follow: bool, stop: Callable[[], bool]) -> Iterator[list[bytes]]:
    """Yield lists of whole lines as they appear; a list has all lines of one read."""
    kept = b""
    while True:
        ending = (
            stop()
        )  # called before the read, so that the last read gets everything that was written
        ready = bool(select.select([source], [], [], POLL_SECONDS)[0])
        data = os.read(source, 1 << 20) if ready else b""
        *lines, kept = (kept + data).split(b"\n")
        if lines:
            yield lines
        ended = ready and not data and not follow
        if ended or (ending and not data):
            if kept.strip():
                yield [kept]
            return
        if not data and ready:
            time.sleep(POLL_SECONDS)


def load_answers(path: Path) -> dict[str, float]:
    records = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return {str(record["id"]): float(record["answer"]) for record in records}


class Judge:
    def __init__(self, answers: dict[str, float], options: argparse.Namespace) -> None:
        self._answers = answers
        self._url: str = options.feedback_url
        self._batch: int = options.batch
        self._patience: float = options.patience
        self.tally = Tally()
        self.undelivered = 0

    def take(self, lines: list[bytes]) -> None:
        """Judge result lines and report them in batches; a batch has all items of each result."""
        judged = [self._judge_line(line) for line in lines if line.strip()]
        judged = [items for items in judged if items]
        for start in range(0, len(judged), self._batch):
            batch = judged[start : start + self._batch]
            self._report([item for items in batch for item in items])

    def _judge_line(self, line: bytes) -> list[Item]:
        try:
            result = json.loads(line)
            question = str(result["id"])
        except (ValueError, KeyError, TypeError) as error:
            print(f"a line that is no result: {error!r}", file=sys.stderr)
            self.tally.unknown += 1
            return []
        if result.get("error") is not None or result.get("response_id") is None:
            # No response came back, so there is nothing to judge.
            self.tally.failed_calls += 1
            return []
        if question not in self._answers:
            self.tally.unknown += 1
            print(f"no answer is known for question {question!r}", file=sys.stderr)
            return []
        verdict = judge(result, self._answers[question])
        self.tally.verdicts[question].append(verdict)
        return feedback(result, verdict)

    def _report(self, items: list[Item]) -> None:
        if not self._url:
            return
        try:
            deliver(self._send, items, self._patience)
        except Undelivered as error:
            responses = sorted({item["response"] for item in items})
            self.undelivered += len(responses)
            print(f"not delivered ({error}): {' '.join(responses)}", file=sys.stderr)

    def _send(self, body: bytes) -> None:
        post(self._url, os.environ.get("FEEDBACK_API_KEY"), body)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", help="the agent's result lines; '-' is stdin")
    parser.add_argument("--answers", type=Path, required=True, help="questions --with-answers")
    parser.add_argument(
        "--feedback-url",
        default=os.environ.get("FEEDBACK_URL", ""),
        help="where verdicts go (or FEEDBACK_URL); without it they are only counted",
    )
    parser.add_argument("--follow", action="store_true", help="wait for more until SIGTERM")
    parser.add_argument("--batch", type=int, default=64, help="results in one request at most")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to keep trying")
    return parser.parse_args()


def open_results(path: str, follow: bool, stop: Callable[[], bool]) -> int | None:
    """Open the results; with `follow`, wait for the file. Return None if `stop` came first."""
    if path == "-":
        return sys.stdin.fileno()
    while follow and not os.path.exists(path):
        if stop():
            return None
        time.sleep(POLL_SECONDS)
    return os.open(path, os.O_RDONLY)


def main() -> int:
    options = arguments()
    interrupted = Interrupted()
    judging = Judge(load_answers(options.answers), options)
    follow = options.follow and options.results != "-"
    source = open_results(options.results, follow, lambda: interrupted.yes)
    if source is not None:
        with contextlib.closing(os.fdopen(source, "rb", closefd=options.results != "-")):
            for lines in chunks(source, follow, lambda: interrupted.yes):
                judging.take(lines)
    print(json.dumps(judging.tally.summary()))
    return 1 if judging.undelivered or judging.tally.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
