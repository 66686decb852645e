"""Answer arithmetic questions with a calculator tool, one model call a question.

Questions are JSON lines ({"id", "question"}) from a file or stdin, and each is asked as soon as its
line arrives. Each attempt is written as one JSON line. The model server is the one in
OPENAI_BASE_URL and OPENAI_API_KEY: any server that speaks the OpenAI chat API with tools.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from attempts import TOOL_NAME, Attempt, Call, Question, Reply, conclude
from openai import AsyncOpenAI, OpenAIError

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

SYSTEM = "Use the calculator."
MAX_TOKENS = 40
# A server that restarts is waited for: eight retries take about half a minute.
RETRIES = 8

TOOLS: list[ChatCompletionFunctionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Works out an expression of numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    }
]

# Worked examples, shown to the model as real earlier turns: (question, expression, result).
EXAMPLES = (
    ("What is 23 * 47?", "23 * 47", "1081"),
    ("What is 65 + 12 * 8?", "65 + 12 * 8", "161"),
)


# --- the model --------------------------------------------------------------------------------


def messages_for(question: str, examples: int) -> list[ChatCompletionMessageParam]:
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]
    for number, (asked, expression, result) in enumerate(EXAMPLES[:examples]):
        call_id = f"call_{number}"
        arguments = json.dumps({"expression": expression})
        messages.append({"role": "user", "content": asked})
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": TOOL_NAME, "arguments": arguments},
                    }
                ],
            }
        )
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    messages.append({"role": "user", "content": question})
    return messages


@dataclass(frozen=True)
class Model:
    client: AsyncOpenAI
    name: str
    examples: int
    max_tokens: int
    temperature: float
    stream: bool

    async def ask(self, question: str) -> Reply:
        return await (self._streamed(question) if self.stream else self._whole(question))

    async def _whole(self, question: str) -> Reply:
        completion = await self.client.chat.completions.create(
            model=self.name,
            messages=messages_for(question, self.examples),
            tools=TOOLS,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )
        message = completion.choices[0].message
        call = None
        # Further calls in the reply are ignored: one result answers the question.
        for asked in (message.tool_calls or [])[:1]:
            if asked.type == "function":
                call = Call(asked.id, asked.function.name, asked.function.arguments)
        return Reply(completion.id, message.content or "", call)

    async def _streamed(self, question: str) -> Reply:
        stream = await self.client.chat.completions.create(
            model=self.name,
            messages=messages_for(question, self.examples),
            tools=TOOLS,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            stream=True,
        )
        response_id, text, called = "", "", False
        call_id, name, arguments = "", "", ""
        async for chunk in stream:
            response_id = response_id or chunk.id
            if not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for part in delta.tool_calls or []:
                if part.index != 0:
                    continue
                called = True
                call_id = call_id or part.id or ""
                if part.function is not None:
                    name += part.function.name or ""
                    arguments += part.function.arguments or ""
        return Reply(response_id, text, Call(call_id, name, arguments) if called else None)


# --- as a function ----------------------------------------------------------------------------


@functools.cache
def warm_client() -> AsyncOpenAI:
    """Return the process's one client, which keeps its connections open between questions."""
    return AsyncOpenAI(max_retries=RETRIES)


async def answer(task: dict[str, Any], base_url: str, model: str) -> dict[str, Any]:
    """Ask one question; return the attempt as a dict with the fields of an output line."""
    question = Question(str(task["id"]), task["question"])
    one = Model(
        client=warm_client().with_options(base_url=base_url),
        name=model,
        examples=len(EXAMPLES),
        max_tokens=MAX_TOKENS,
        temperature=float(os.environ.get("AGENT_TEMPERATURE", "1")),
        stream=False,
    )
    return asdict(conclude(question, 0, await one.ask(question.text)))


async def result(task: dict[str, Any]) -> str | None:
    """Ask the model that the environment names, and return only the answer."""
    attempt = await answer(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_MODEL"])
    found: str | None = attempt["answer"]
    return found


# --- the run ----------------------------------------------------------------------------------


def parse_question(line: bytes) -> Question:
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise ValueError("no question in it")
    return Question(str(record.get("id", "")), record["question"])


def raw_lines(source: int) -> Iterator[bytes]:
    """Yield a file's lines, each as soon as it is complete; the last may lack its newline."""
    kept = b""
    try:
        while data := os.read(source, 1 << 16):
            *lines, kept = (kept + data).split(b"\n")
            yield from lines
    except OSError as error:
        print(f"the questions broke off: {error}", file=sys.stderr)
    yield kept


async def arriving(source: int, stop: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield the lines as they arrive, until the source ends or `stop` is set.

    A thread reads, because neither a regular file nor an idle pipe may hold up the loop; it is a
    daemon, so that a source that never ends does not hold up the exit either.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    room = threading.Semaphore(64)

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no lines are taken any more
            for line in raw_lines(source):
                if line.strip():
                    room.acquire()
                    loop.call_soon_threadsafe(queue.put_nowait, line)
            loop.call_soon_threadsafe(queue.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    stopped = asyncio.ensure_future(stop.wait())
    while not stop.is_set():
        following = asyncio.ensure_future(queue.get())
        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            following.cancel()
            break
        line = following.result()
        if line is None:
            break
        room.release()
        yield line
    stopped.cancel()


class Run:
    """Ask every question `samples` times, at most `concurrency` at once."""

    def __init__(self, model: Model, out: TextIO, samples: int, concurrency: int) -> None:
        self._model = model
        self._out = out
        self._samples = samples
        self._places = asyncio.Semaphore(concurrency)
        self._attempts: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self.unreadable = 0

    def stop(self) -> None:
        """Take no more questions; a second time: give up the attempts under way as well."""
        if self._stop.is_set():
            for attempt in self._attempts:
                attempt.cancel()
        self._stop.set()

    async def read(self, source: int) -> None:
        async for line in arriving(source, self._stop):
            try:
                question = parse_question(line)
            except ValueError as error:
                self.unreadable += 1
                print(f"a line that is no question: {error}", file=sys.stderr)
                continue
            await self._start(question)
        await asyncio.gather(*self._attempts, return_exceptions=True)

    async def _start(self, question: Question) -> None:
        for sample in range(self._samples):
            # Waiting here, not in the attempt, keeps a long input from piling up as tasks.
            await self._places.acquire()
            if self._stop.is_set():
                self._places.release()
                return
            attempt = asyncio.create_task(self._attempt(question, sample))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)

    async def _attempt(self, question: Question, sample: int) -> None:
        try:
            reply = await self._model.ask(question.text)
            self._write(conclude(question, sample, reply))
        except asyncio.CancelledError:
            self._write(Attempt(question.id, question.text, sample, error="given up: stopped"))
            raise
        except (OpenAIError, OSError, LookupError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
            self._write(Attempt(question.id, question.text, sample, error=message))
        finally:
            self._places.release()

    def _write(self, attempt: Attempt) -> None:
        self._out.write(json.dumps(asdict(attempt), ensure_ascii=False) + "\n")
        self._out.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("questions", nargs="?", default="-", help="JSON lines; '-' is stdin")
    parser.add_argument("--out", help="append the results here instead of printing them")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "calculator"))
    parser.add_argument("--samples", type=int, default=1, help="attempts at each question")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--examples", type=int, default=len(EXAMPLES), help="worked examples shown")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    temperature = float(os.environ.get("AGENT_TEMPERATURE", "1"))
    parser.add_argument("--temperature", type=float, default=temperature)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one model call")
    parser.add_argument("--stream", action="store_true", help="ask for streamed replies")
    return parser.parse_args()


async def work(options: argparse.Namespace, source: int, out: TextIO) -> int:
    async with AsyncOpenAI(timeout=options.timeout, max_retries=RETRIES) as client:
        model = Model(
            client=client,
            name=options.model,
            examples=options.examples,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stream=options.stream,
        )
        run = Run(model, out, options.samples, options.concurrency)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, run.stop)
        await run.read(source)
    return 1 if run.unreadable else 0


def main() -> int:
    options = arguments()
    with contextlib.ExitStack() as files:
        source = sys.stdin.fileno()
        if options.questions != "-":
            source = files.enter_context(open(options.questions, "rb")).fileno()
        out: TextIO = sys.stdout
        if options.out:
            out = files.enter_context(open(options.out, "a", encoding="utf-8"))
        return asyncio.run(work(options, source, out))


if __name__ == "__main__":
    sys.exit(main())
