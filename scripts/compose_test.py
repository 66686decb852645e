"""Run docker-compose.yml for real, as a user would: `make compose-test`.

In a folder with the Compose file, an `.env` and a recipe of its own, an agent calls and rewards, an
update is published, Prometheus scrapes before and after keys exist, every service is killed once, a
backup is taken, and all of it stops and starts again. What each step showed is printed, with its
seconds. Exit status: 0 if all of it holds; 1 if not, with the reason and the end of the logs.

The images are those of `scripts/images.sh`. Where no registry is reached, those of others have
stand-ins of Debian's packages, of which Grafana's only says that it is healthy.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).parents[1]
ENGINE: Final = ("scripts/engine.sh", "compose", "--project-name", "pawl-compose-test")
# The engine is that of the folder, whose files it sees.
FILES: Final = ("docker-compose.yml", "dashboards", "config", "scripts/engine.sh")
OPERATE: Final = "docs/howto/operate.md"
KEYS: Final = "docs/howto/keys.md"
# What a user may set. It is not for this.
OFFERED: Final = frozenset(
    re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
)
SERVICES: Final = (
    *("postgres", "vllm-cpu", "proxy", "trainer-cpu"),
    *("controller", "prometheus", "alertmanager", "grafana"),
)
JOBS: Final = {"pawl-proxy", "pawl-trainer", "pawl-controller", "pawl-vllm"}
UP_S: Final = 900.0
STEP_S: Final = 600.0
PAUSE_S: Final = 0.3
# A rank that the default recipe's server would refuse, and updates of four episodes.
RECIPE: Final = """
learner = "grpo"
[claim]
group_size = 2
groups = 2
max_age_s = 30.0
[batch]
micro_batch_tokens = 256
[lora]
rank = 24
[publish]
control_share = 0.0
"""
T = TypeVar("T")


class Failed(Exception):
    """Report that the containers did not do what they should."""


def until(what: str, look: Callable[[], T], seconds: float = STEP_S) -> T:
    """Return what `look` returns once that is true.

    Raises:
        Failed: it is not after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {seconds:.0f} s")
        time.sleep(PAUSE_S)
    return found


@contextlib.contextmanager
def step(what: str) -> Iterator[list[str]]:
    """Print a line with the seconds that the block took, and the notes that it left."""
    begun, notes = time.monotonic(), list[str]()
    yield notes
    print(f"{what:<34}{time.monotonic() - begun:>7.1f} s   {'; '.join(notes)}", flush=True)


class Containers:
    """Call `docker compose` in a folder of a user's own."""

    def __init__(self, folder: Path) -> None:
        """Copy the Compose file and what it mounts, and write settings and a recipe."""
        self.folder = folder
        self.port = free_port()
        for name in FILES:
            source = ROOT / name
            (folder / name).parent.mkdir(exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        (folder / "config" / "recipe.toml").write_text(RECIPE)
        (folder / ".env").write_text(
            "COMPOSE_PROFILES=cpu,watch\nPAWL_RECIPE=config/recipe.toml\n"
            f"PROXY_PORT={self.port}\nGRAFANA_PORT={free_port()}\n"
        )

    def compose(self, *words: str, check: bool = True) -> str:
        """Return what a command of `docker compose` prints.

        Raises:
            Failed: its exit status is not 0.
        """
        done = self._run([*ENGINE, *words])
        if check and done.returncode:
            raise Failed(f"`docker compose {' '.join(words)}`: {done.stdout}{done.stderr}")
        return done.stdout

    def run_documented(self, page: str, line: str, attempts: int = 1) -> None:
        """Run the commands of the page's block in which a line begins like this one.

        Raises:
            Failed: one of them fails, at each attempt.
        """
        [block] = [
            block
            for block in re.findall("```\\w+\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
            if f"\n{line}" in f"\n{block}"
        ]
        for _ in range(attempts):
            done = self._run(["sh", "-ec", block.replace("docker compose", " ".join(ENGINE))])
            if done.returncode == 0:
                return
        raise Failed(f"{block}{done.stdout}{done.stderr}")

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        others = {
            name: value
            for name, value in os.environ.items()
            if name not in OFFERED and not name.startswith(("PAWL_", "COMPOSE_"))
        }
        return subprocess.run(
            command, cwd=self.folder, env=others, capture_output=True, text=True, check=False
        )

    def up(self) -> None:
        """Start what is not running, and wait until it is healthy."""
        self.compose("up", "--no-build", "--detach", "--wait", "--wait-timeout", f"{UP_S:.0f}")

    def inside(self, service: str, *command: str) -> str:
        """Return what a command prints in a service's container."""
        return self.compose("exec", "-T", service, *command)

    def healthy(self) -> set[str]:
        """Return the services whose health check is passed."""
        lines = self.compose("ps", "--format", "json").splitlines()
        states = [json.loads(line) for line in lines]
        return {state["Service"] for state in states if state["Health"] == "healthy"}

    def post(
        self, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the answer of the proxy's data port: status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            kind = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), kind | headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def up_since(self, moment: float) -> set[str]:
        """Return the jobs whose last scrape was after `moment`, and was answered.

        A Prometheus that does not answer yet has none.
        """
        query = f"up == 1 and timestamp(up) > {moment:.3f}"
        server = "http://127.0.0.1:9090"
        asked = ("promtool", "query", "instant", "-o", "json", server, query)
        try:
            said = self.inside("prometheus", *asked)
        except Failed:
            return set()
        return {series["metric"]["job"] for series in json.loads(said)}


class Agent(threading.Thread):
    """Answer questions one after the other and reward each answer, whatever is killed meanwhile."""

    def __init__(self, containers: Containers) -> None:
        """Start with no key, as long as there are none."""
        super().__init__(daemon=True)
        self._containers = containers
        self._ended = threading.Event()
        self.key = ""
        # Rewards that the proxy took, by the episode whose call it answered.
        self.rewarded: dict[str, float] = {}
        self.refused = 0

    def run(self) -> None:
        """Work until told to stop."""
        number = 0
        while not self._ended.wait(1.0):
            number += 1
            episode, value = f"run-{number}", float(number % 2)
            if self.ask(episode, f"sum-{number // 4}") is None:
                continue
            body = {"metric": "reward", "value": value, "episode": episode}
            while not self._send("/feedback", body, episode):
                time.sleep(PAUSE_S)
            self.rewarded[episode] = value

    def ask(self, episode: str, task: str) -> str | None:
        """Return the version that answered a call, or None where nobody did."""
        question = {"role": "user", "content": f"What is {task.removeprefix('sum-')} + 3?"}
        body = {"model": "smollm2", "messages": [question], "max_tokens": 6}
        headers = self._send("/v1/chat/completions", body, episode, task)
        return None if headers is None else headers["x-pawl-policy"]

    def _send(self, path: str, body: Any, episode: str, task: str = "") -> dict[str, str] | None:
        headers = {"x-pawl-episode": episode, "Authorization": f"Bearer {self.key}"}
        if task:
            headers["x-pawl-task"] = task
        else:
            headers["Idempotency-Key"] = episode
        try:
            status, answered, _ = self._containers.post(path, body, headers)
        except (OSError, http.client.HTTPException):
            status, answered = 0, {}
        if status in (200, 202):
            return answered
        self.refused += 1
        return None

    def works(self) -> None:
        """Wait until one more call is answered and rewarded."""
        count = len(self.rewarded)
        until("a rewarded call", lambda: len(self.rewarded) > count)

    def stop(self) -> None:
        """End after the call at hand and its reward."""
        # The reward of an answered call is sent before the next call is begun.
        self._ended.set()
        self.join()


def free_port() -> int:
    """Return a port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def lost(containers: Containers, agent: Agent) -> set[str]:
    """Return the episodes of which the database has not the call, or not the reward."""
    lines = [json.loads(line) for line in containers.inside("proxy", "pawl", "export").splitlines()]
    stored = {
        line["episode"]: line["feedback"][-1]["value"]
        for line in lines
        if line["calls"] and line["feedback"]
    }
    return {name for name, value in agent.rewarded.items() if stored.get(name) != value}


def use(containers: Containers, agent: Agent) -> None:
    """Do all that the containers are for, and all that may happen to them."""
    with step("up, until all are healthy") as notes:
        containers.up()
        if missing := set(SERVICES) - containers.healthy():
            raise Failed(f"not healthy: {', '.join(sorted(missing))}")
        notes.append(f"{len(SERVICES)} services")
    agent.start()
    with step("calls and rewards") as notes:
        until("8 rewarded calls", lambda: len(agent.rewarded) >= 8)
        notes.append(f"{len(agent.rewarded)} so far")
    with step("an update is published") as notes:
        notes.append(until("a call that a trained version answers", lambda: trained(agent)))
    with step("Prometheus scrapes without keys") as notes:
        until("scrapes", lambda: containers.up_since(0) >= JOBS)
        notes.append(", ".join(sorted(JOBS)))
    with step("Prometheus scrapes with keys") as notes:
        containers.run_documented(KEYS, "docker compose restart prometheus")
        agent.key = containers.inside("proxy", "pawl", "keys", "create", "agent").strip()
        until(
            "a call without a key is refused",
            lambda: containers.post("/v1/chat/completions", {}, {})[0] == 401,
        )
        moment = time.time()
        until("scrapes", lambda: containers.up_since(moment) >= JOBS)
        notes.append("a call without one is refused")
    for service in SERVICES:
        with step(f"{service} is killed") as notes:
            before = agent.refused
            containers.compose("kill", service)
            containers.up()
            agent.works()
            notes.append(f"{agent.refused - before} requests unanswered meanwhile")
    with step("nothing is lost") as notes:
        until("a call that a trained version answers", lambda: trained(agent))
        agent.stop()
        until("all calls and rewards in the database", lambda: not lost(containers, agent))
        notes.append(f"{len(agent.rewarded)} calls and rewards in the database")


def trained(agent: Agent) -> str:
    """Return the version that a new episode gets, or "" if it is the base model."""
    version = agent.ask(f"look-{time.monotonic_ns()}", "look") or ""
    return version if version.partition("@")[2] not in ("", "0") else ""


def start_again(containers: Containers, agent: Agent) -> None:
    """Start new containers on the volumes, and then on new volumes what a backup has."""

    def all_is_there(notes: list[str]) -> None:
        notes.append(until("a call that a trained version answers", lambda: trained(agent)))
        if missing := lost(containers, agent):
            raise Failed(f"{len(missing)} episodes are gone, such as {missing.pop()}")
        notes.append(f"{len(agent.rewarded)} calls and rewards in the database")

    with step("down and up") as notes:
        containers.compose("down")
        containers.up()
        all_is_there(notes)
    with step("backup"):
        # The copies are of folders that are written to: see the page.
        containers.run_documented(OPERATE, "docker compose exec -T postgres pg_dump", attempts=5)
    with step("down, without volumes, and restored") as notes:
        containers.compose("down", "--volumes")
        containers.run_documented(OPERATE, "docker compose exec -T postgres pg_restore")
        all_is_there(notes)
    with step("Prometheus has a key again"):
        containers.run_documented(OPERATE, "docker compose exec -T proxy pawl keys revoke metrics")
        containers.run_documented(KEYS, "docker compose restart prometheus")
        moment = time.time()
        until("scrapes", lambda: containers.up_since(moment) >= JOBS)


def main() -> None:
    """Build the images, run everything, and remove it again."""
    begun = time.monotonic()
    with step("images"):
        subprocess.run(["scripts/images.sh", "proxy", "cpu"], cwd=ROOT, check=True)
        named = re.findall(r"^    image: (\S+)$", (ROOT / FILES[0]).read_text(), re.MULTILINE)
        others = [image for image in named if not image.startswith(("pawl-", "vllm/"))]
        subprocess.run(["scripts/engine.sh", "--images", *others], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(prefix="pawl-compose-") as folder:
        containers = Containers(Path(folder))
        agent = Agent(containers)
        try:
            containers.compose("down", "--volumes", "--remove-orphans")
            use(containers, agent)
            start_again(containers, agent)
        except Failed as error:
            print(containers.compose("ps", "--all", check=False))
            print(containers.compose("logs", "--tail", "40", check=False))
            sys.exit(f"pawl: {error}")
        finally:
            containers.compose("down", "--volumes", "--timeout", "5", check=False)
    print(f"{'all of it':<34}{time.monotonic() - begun:>7.1f} s")


if __name__ == "__main__":
    main()
