"""Measure how soon the packaged model learns from a team's traffic with little feedback.

`pawl up` runs as it is, with vLLM, PostgreSQL and the recipe `default`, with times scaled from a
day to a minute. The calculator's agent plays production: each question, of five families, comes
only once. Rows:

- `rewards`: a third of the episodes are rewarded, 1 to 30 s later, a tenth of these wrongly;
- `next-turn`: no rewards; a user replies "Thanks." or "No, that is wrong.", the wrong reply in a
  fifth of the episodes, and the model that `pawl judge --next-turn` asks only looks for the word
  "wrong";
- `corrections`: as `rewards`, and the right reply is posted for a fifth of the failures;
- `teacher`: no rewards; `distill` learns from a finished version of `pawl demo`, which the same
  vLLM serves (run `make demo` first, or give `--teacher FOLDER`);
- `bad-judge`: a third of the episodes are rewarded rightly; a judge scores all others at random;
- `facts`: the same third is rewarded, without a judge.

Only the benchmark knows which answers are really right. Ends with status 1 if a bar does not hold;
a run's files are in its folder below `var/week`.

    python -m benchmarks.week --rows rewards next-turn --seeds 1
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from rich.progress import Progress

from benchmarks.report import Bar, Rows, bars_table, number
from benchmarks.stack import ROOT, free_port, running
from benchmarks.strangers.__main__ import count_events, running_stack, wait_until_idle
from pawl.scenarios.scenario import packaged_template
from pawl.stack.model import unpacked_model

sys.path.insert(0, str(ROOT / "examples" / "calculator"))
import agent
import attempts
import judge as rules
import questions

FOLDER: Final = ROOT / "var" / "week"
ROWS: Final = ("rewards", "next-turn", "corrections", "teacher", "bad-judge", "facts")
MODEL: Final = "smollm2"
BASE: Final = f"{MODEL}@0"
TEMPLATE: Final = packaged_template("smollm2_tools")
EPISODES, HELD_OUT, BLOCK, AT_ONCE = 4000, 240, 200, 8
REWARDED, WRONG, FLIPPED, CORRECTED = 1 / 3, 1 / 10, 1 / 5, 1 / 5
DELAY_S: Final = (1.0, 30.0)
# The bars: held-out success of the row `rewards` is at least HIGH; a row in TIMES reaches each of
# the MARKS of success within this many times the episodes of another row.
HIGH: Final = 0.9
MARKS: Final = (0.75, 0.9)
# A run ends early once live success is this high.
ENOUGH: Final = 0.95
TIMES: Final = {
    "next-turn": ("rewards", 1.5),
    "corrections": ("rewards", 0.8),
    "teacher": ("rewards", 0.3),
    "bad-judge": ("facts", 1.5),
}
# Added to the recipe `default`, whose times are scaled from a day to a minute.
RECIPE: Final = "\n[publish]\nreward_delay_s = 1.0\n"
TEACHER: Final = "teacher"
DISTILL: Final = """
learner = "distill"
dtype = "auto"
[teacher]
url = "http://127.0.0.1:{port}/v1"
model = "teacher"
finished_after_s = 5.0
[claim]
group_size = 1
groups = 64
max_age_s = 1.0
[credit]
baseline = "none"
normalisation = "none"
[batch]
steps = 2
micro_batch_tokens = 8192
[publish]
control_share = 0.0
"""
DICE: Final = """
import json, random, sys
episode = json.loads(sys.stdin.readline())["episode"]
print(json.dumps({"value": random.Random(episode).randint(0, 1)}))
"""


class Run(NamedTuple):
    """A run's results: true success on held-out questions, and on live ones in their order.

    The value is None for live questions that the control answered (the base model, once trained
    versions serve).
    """

    row: str
    seed: int
    before: float
    after: float
    live: list[float | None]
    updates: int
    seconds: float

    def until(self, mark: float) -> float:
        """Return the number of episodes until the mean of the last `BLOCK` first reached `mark`."""
        own = [(at, right) for at, right in enumerate(self.live, 1) if right is not None]
        for last in range(BLOCK, len(own) + 1):
            if fmean(right for _, right in own[last - BLOCK : last]) >= mark:
                return own[last - 1][0]
        return float("inf")


def mean_of(right: Sequence[float | None]) -> float:
    return fmean([one for one in right if one is not None] or [0.0])


def main() -> None:
    options = parse_arguments()
    console, runs = Console(), list[Run]()
    with Progress(console=console) as progress:
        for seed in options.seeds:
            for row in options.rows:
                runs.append(asyncio.run(measure_run(row, seed, options, progress)))
                console.print(table(runs[-1:]).rich())
    console.print(table(runs).rich())
    bars = bars_of(runs)
    console.print(bars_table(bars).rich())
    sys.exit(any(bar.holds is False for bar in bars))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=EPISODES, help="at most")
    parser.add_argument("--a-minute", type=float, default=250.0, help="episodes, at most")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose `pawl up` runs")
    parser.add_argument("--recipe", help="default: `default`, its times scaled")
    parser.add_argument(
        "--teacher", type=Path, default=ROOT / "var" / "demo", help="a folder with adapters"
    )
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    if TEACHER in options.rows:
        adapters = options.teacher.rglob("adapter_model.safetensors")
        newest = max(adapters, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            parser.error(
                "no adapter to learn from: run `make demo` first, or name --teacher FOLDER"
            )
        options.teacher = newest.parent.absolute()
    return options


async def measure_run(row: str, seed: int, options: argparse.Namespace, progress: Progress) -> Run:
    """Run `pawl up` and its simulated users, and return the results."""
    folder = options.out.absolute() / f"{row}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = free_port()
    recipe = folder / "week.toml"
    packaged = (ROOT / "trainer" / "recipes" / "default.toml").read_text()
    scaled = packaged.replace("max_age_s = 600.0", "max_age_s = 1.0") + RECIPE
    recipe.write_text(DISTILL.format(port=port) if row == TEACHER else scaled)
    chosen = argparse.Namespace(checkout=options.checkout, recipe=options.recipe or str(recipe))
    began = time.monotonic()
    arguments = "--enable-auto-tool-choice --tool-call-parser pythonic"
    if row == TEACHER:
        arguments += f" --lora-modules {TEACHER}={options.teacher}"
    settings = {
        "PAWL_VLLM_ARGS": arguments,
        "PAWL_VLLM_PORT": str(port),
        "PAWL_MODEL": str(model_with_template(folder / "model")),
        "PAWL_POLICY": MODEL,
    }
    with running_stack(folder, chosen, settings) as url:
        async with simulated_users(url, row, seed) as ask:
            before = await work(ask, HELD_OUT, seed, progress, f"{folder.name} before", held=True)
            async with running_judge(row, folder, url):
                live = await work(
                    ask, options.episodes, seed, progress, folder.name, options.a_minute
                )
                trainer = folder / "var" / "logs" / "trainer.log"
                await asyncio.to_thread(wait_until_idle, trainer)
            after = await work(ask, HELD_OUT, seed, progress, f"{folder.name} after", held=True)
        updates = count_events(trainer, "update_done")
    run = Run(row, seed, mean_of(before), mean_of(after), live, updates, time.monotonic() - began)
    (folder / "run.json").write_text(json.dumps(run._asdict()))
    return run


def model_with_template(folder: Path) -> Path:
    """Make a folder with the packaged model and the calculator's chat template, and return it.

    Corrections are tokenised by the template in the model's folder.
    """
    folder.mkdir()
    for file in unpacked_model(ROOT / "var" / "models").iterdir():
        source = TEMPLATE if file.name == "chat_template.jinja" else file
        (folder / file.name).symlink_to(source)
    return folder


@asynccontextmanager
async def simulated_users(url: str, row: str, seed: int) -> AsyncIterator[Any]:
    """Yield a function that asks a question as the row's users do, and returns 1 if it was right.

    The function returns 0 for a wrong answer, and None if the control answered.
    """
    dice, posts = random.Random(seed), set[asyncio.Task[None]]()
    answered = dict[str, str]()

    async def note(response: Any) -> None:
        # Only an answered request counts: the others are sent again.
        if response.is_success:
            name = str(response.url).partition("/episode/")[2][:16]
            answered.setdefault(name, response.headers["x-pawl-policy"])

    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        DefaultAsyncHttpxClient(event_hooks={"response": [note]}) as http,
        AsyncOpenAI(
            base_url=url, api_key="-", max_retries=agent.RETRIES, http_client=http
        ) as client,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):

        async def post(name: str, value: bool, **more: str) -> None:
            await asyncio.sleep(dice.uniform(*DELAY_S))
            statement = {"episode": name, "value": value, **more}
            async with session.post(f"{url}/feedback", json=statement) as reply:
                reply.raise_for_status()

        async def ask(question: questions.Question, *, held: bool) -> float | None:
            task = question.id.replace(" ", "-").replace("/", ":", 1).replace("/", "-")
            name = f"{dice.getrandbits(64):016x}"
            split = "/split/eval" if held else ""
            own = client.with_options(base_url=f"{url}/task/{task}/episode/{name}{split}/v1")
            model = agent.Model(own, MODEL, len(agent.EXAMPLES), agent.MAX_TOKENS, 1.0, False)
            reply = await model.ask(question.question)
            asked = attempts.Question(question.id, question.question)
            attempt = asdict(attempts.conclude(asked, 0, reply))
            right = rules.judge(attempt, question.answer).right
            if held:
                return float(right)
            if row == "next-turn":
                says = "Thanks." if right != (dice.random() < FLIPPED) else "No, that is wrong."
                await follow_up(own, question.question, reply, attempt, says)
            elif row == "corrections" and not right and dice.random() < CORRECTED:
                post_later(post(name, False, correction=right_reply(question.question)))
            elif row != TEACHER and dice.random() < REWARDED:
                is_wrong = row in ("rewards", "corrections") and dice.random() < WRONG
                post_later(post(name, right != is_wrong))
            is_control = answered[name] == BASE and set(answered.values()) != {BASE}
            return None if is_control else float(right)

        def post_later(posting: Coroutine[Any, Any, None]) -> None:
            task = asyncio.create_task(posting)
            posts.add(task)
            task.add_done_callback(posts.discard)

        yield ask
        await asyncio.gather(*posts)


def right_reply(question: str) -> str:
    """Return the right reply: a call of the calculator, as the chat template writes it."""
    stated = re.search(r"\d+( [*+-] \d+)+", question)
    expression = stated[0] if stated else " * ".join(re.findall(r"\d+", question))
    return f"[{attempts.TOOL_NAME}(expression={json.dumps(expression)})]"


async def follow_up(
    client: AsyncOpenAI, question: str, reply: attempts.Reply, attempt: Any, says: str
) -> None:
    """Send the user's next turn `says` in the same conversation, after the tool's result if any."""
    messages: list[Any] = [*agent.messages_for(question, len(agent.EXAMPLES))]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.call is not None:
        function = {"name": reply.call.name, "arguments": reply.call.arguments}
        call = {"id": reply.call.id, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": reply.call.id, "content": f"{attempt['answer']}"}
        messages += [message | {"tool_calls": [call]}, result]
    else:
        messages.append(message)
    messages.append({"role": "user", "content": says})
    await client.chat.completions.create(
        model=MODEL, messages=messages, tools=agent.TOOLS, max_tokens=4
    )


async def work(
    ask: Any,
    count: int,
    seed: int,
    progress: Progress,
    name: str,
    a_minute: float = 0.0,
    *,
    held: bool = False,
) -> list[float | None]:
    """Ask `count` questions, a few at once; return in order 1 (right), 0, or None (control)."""
    made = questions.questions(count, seed, "held-out" if held else "train")
    room, right = asyncio.Semaphore(AT_ONCE), list[float | None]()
    shown = progress.add_task(name, total=count)

    async def ask_one(question: questions.Question) -> None:
        try:
            right.append(await ask(question, held=held))
        finally:
            room.release()
        about = f"{name}, success {number(mean_of(right[-BLOCK:]), 2)}"
        progress.update(shown, completed=len(right), description=about)

    began = time.monotonic()
    async with asyncio.TaskGroup() as asked:
        for place, question in enumerate(made):
            if not held and len(right) >= BLOCK and mean_of(right[-BLOCK:]) >= ENOUGH:
                break
            due = began + 60 * place / a_minute if a_minute else 0.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await room.acquire()
            asked.create_task(ask_one(question))
    progress.remove_task(shown)
    return right


@asynccontextmanager
async def running_judge(row: str, folder: Path, url: str) -> AsyncIterator[None]:
    """Run the row's judge beside the stack, if it has one."""
    if row not in ("next-turn", "bad-judge"):
        yield
        return
    runner = web.AppRunner(judge_server())
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    judge = ["--model", "rule", "--next-turn", "--base-url", f"http://127.0.0.1:{port}/v1"]
    if row == "bad-judge":
        judge = ["--", sys.executable, "-c", DICE]
    command = ["env", "--chdir", str(folder), sys.executable, "-m", "pawl.cli", "judge"]
    settings = {"PAWL_LISTEN": url.removeprefix("http://"), "PYTHONPATH": str(ROOT)}
    try:
        with running([*command, "--quiet", "1", *judge], folder / "judge.log", settings) as process:
            yield
            if process.poll() is not None:
                sys.exit(f"the judge ended: {folder / 'judge.log'}")
    finally:
        await runner.cleanup()


def judge_server() -> web.Application:
    """Return a server that stands in for a judging model: it looks for the word "wrong"."""

    async def complete(request: web.Request) -> web.Response:
        asked = (await request.json())["messages"][-1]["content"]
        score = -1 if "wrong" in asked.rpartition("<next>")[2] else 1
        message = {"role": "assistant", "content": json.dumps({"why": "", "score": score})}
        return web.json_response({"choices": [{"message": message}]})

    server = web.Application()
    server.router.add_post("/v1/chat/completions", complete)
    return server


def table(runs: Sequence[Run]) -> Rows:
    """Return a table with a line for each run: success before, after and live, and the marks."""
    heads = ["", "seed", "held out", "live", *(f"episodes to {m}" for m in MARKS), "updates", "min"]
    lines = [
        [
            run.row,
            str(run.seed),
            f"{run.before:.2f} → {run.after:.2f}",
            " ".join(
                f"{mean_of(run.live[at : at + 2 * BLOCK]):.2f}"
                for at in range(0, len(run.live), 2 * BLOCK)
            ),
            *(number(run.until(mark), 0) for mark in MARKS),
            str(run.updates),
            f"{run.seconds / 60:.1f}",
        ]
        for run in runs
    ]
    return Rows(
        "A week",
        heads,
        lines,
        [f"live: true success, of {2 * BLOCK} episodes each, but the control's"],
    )


def bars_of(runs: Sequence[Run]) -> list[Bar]:
    bars = [
        Bar(f"rewards {run.seed}: held out", run.after, HIGH, at_least=True)
        for run in runs
        if run.row == "rewards"
    ]
    for row, (base, most) in TIMES.items():
        for mark in MARKS:
            own, others = (
                [run.until(mark) for run in runs if run.row == name] for name in (row, base)
            )
            if own and others:
                times = median(own) / median(others)
                bars.append(Bar(f"{row}: episodes to {mark}, times those of {base}", times, most))
    return bars


if __name__ == "__main__":
    main()
