"""Run docker-compose.yml for real, as a user would: `make compose-test`.

In a folder with the Compose file, an `.env`, ports and a recipe of its own, an agent calls and
rewards, an update is published, the console shows it, Prometheus scrapes before and after keys
exist, every service is killed once, images of another tag replace these, and all of it stops and
starts again from a backup, with the first tag. What each step showed is printed, with its seconds.

The last line is the result. Exit status: 0 if all of it holds; 1 if not: then the reason and the
end of the logs come before that line, and the whole logs are kept in `var/`.

The images are those of `scripts/images.sh`, with a tag of this run's own. Where no registry is
reached, those of others have stand-ins of Debian's packages, of which Grafana's only says that it
is healthy. Containers, volumes and images that were not there before are removed at the end.
"""

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).parents[1]
# Two runs share an engine, and nothing in it but the images of others.
PROJECT: Final = f"pawl-compose-test-{secrets.token_hex(4)}"
ENGINE: Final = ("scripts/engine.sh", "compose", "--project-name", PROJECT)
# The engine is that of the folder, whose files it sees.
FILES: Final = (
    *("docker-compose.yml", "deploy/scale.yml"),
    *("dashboards", "config", "scripts/engine.sh"),
)
COMPOSE: Final = (ROOT / "docker-compose.yml").read_text()
# The variables of published ports.
PORTS: Final = tuple(re.findall(r"\$\{(\w+):-\d+\}:\d+\"", COMPOSE))
# Below those of `net.ipv4.ip_local_port_range`.
ASSIGNED: Final = range(20_000, 32_768)
BUILT: Final = ("proxy", "cpu")
NEXT: Final = f"{PROJECT}-next"
OURS: Final = tuple(f"pawl-{name}:{tag}" for name in BUILT for tag in (PROJECT, NEXT))
OTHERS: Final = tuple(
    image
    for image in re.findall(r"^    image: (\S+)$", COMPOSE, re.MULTILINE)
    if not image.startswith(("pawl-", "vllm/"))
)
# What the images are built from.
BASES: Final = tuple(
    image
    for file in ("Dockerfile.proxy", "scripts/stand_ins.Dockerfile")
    for image in re.findall(r"^FROM (\w+:\S+)", (ROOT / file).read_text(), re.MULTILINE)
)
OPERATE: Final = "docs/howto/operate.md"
KEYS: Final = "docs/howto/keys.md"
# What a user may set. It is not for this.
OFFERED: Final = frozenset(
    re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
)
# No call needs them: they are killed together.
WATCHING: Final = frozenset({"alertmanager", "console", "grafana", "prometheus"})
JOBS: Final = {"pawl-proxy", "pawl-trainer", "pawl-controller", "pawl-vllm"}
UP_S: Final = 900.0
STEP_S: Final = 600.0
# Longer than any command may take, so that one that hangs is a failure.
COMMAND_S: Final = UP_S + STEP_S
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


def wait_until(name: str, look: Callable[[], T], seconds: float = STEP_S) -> T:
    """Return what `look` returns once that is true.

    Raises:
        Failed: it is not after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise Failed(f"{name}: not within {seconds:.0f} s")
        time.sleep(PAUSE_S)
    return found


@contextlib.contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Print a line with the seconds that the block took, and the notes that it left.

    An error of the block is noted with `name`.
    """
    begun, notes = time.monotonic(), list[str]()
    try:
        yield notes
    except BaseException as error:
        error.add_note(name)
        raise
    print(f"{name:<34}{time.monotonic() - begun:>7.1f} s   {'; '.join(notes)}", flush=True)


def describe_error(error: BaseException) -> str:
    """Return in one line what failed, and why."""
    lines = str(error).strip().splitlines()
    # The first line is the command; programs say last why they end.
    said = [" … ".join(dict.fromkeys([lines[0], lines[-1]]))] if lines else []
    kind = [] if isinstance(error, Failed) else [type(error).__name__]
    return ": ".join([*getattr(error, "__notes__", []), *kind, *said])


class Containers:
    """Call `docker compose` in a folder of a user's own.

    Attributes:
        log: what commands that failed have printed, and all that the images' build prints.
    """

    def __init__(self, folder: Path) -> None:
        """Copy the Compose file and what it mounts, and write settings and a recipe."""
        self.folder = folder
        self.log = folder / "log"
        for name in FILES:
            source = ROOT / name
            (folder / name).parent.mkdir(exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        (folder / "config" / "recipe.toml").write_text(RECIPE)
        self.settings = {"COMPOSE_PROFILES": "cpu,watch", "PAWL_RECIPE": "config/recipe.toml"}
        self.change_settings(IMAGE_TAG=PROJECT)

    def change_settings(self, **settings: str) -> None:
        """Change settings in `.env`."""
        self.settings |= settings
        lines = [f"{name}={value}\n" for name, value in self.settings.items()]
        (self.folder / ".env").write_text("".join(lines))

    def compose(self, *words: str, check: bool = True) -> str:
        """Return what a command of `docker compose` prints.

        Raises:
            Failed: its exit status is not 0.
        """
        done = self._run([*ENGINE, *words])
        if check and done.returncode:
            raise Failed(f"`docker compose {' '.join(words)}`:\n{done.stdout}{done.stderr}")
        return done.stdout

    def engine(self, *words: str) -> bool:
        """Return whether a command of the engine succeeds."""
        return self._run([ENGINE[0], *words]).returncode == 0

    def build(self) -> None:
        """Build our images, and get those of others.

        Raises:
            Failed: one of them cannot be had.
        """
        for command in (["scripts/images.sh", *BUILT], [ENGINE[0], "--images", *OTHERS]):
            with self.log.open("a") as log:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"IMAGE_TAG": PROJECT},
                    stdout=log,
                    stderr=log,
                    check=False,
                )
            if done.returncode:
                end = self.log.read_text(errors="replace").splitlines()[-40:]
                raise Failed("\n".join([f"`{' '.join(command)}`:", *end]))

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
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=others,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        if done.returncode:
            with self.log.open("a") as log:
                log.write(f"{' '.join(command)}: status {done.returncode}\n")
                log.write(done.stdout + done.stderr)
        return done

    def up(self) -> None:
        """Start what is not running, and wait until it is healthy."""
        self.compose("up", "--no-build", "--detach", "--wait", "--wait-timeout", f"{UP_S:.0f}")

    def run_inside(self, service: str, *command: str) -> str:
        """Return what a command prints in a service's container."""
        return self.compose("exec", "-T", service, *command)

    def services(self) -> list[str]:
        """Return the services that go on running."""
        return sorted(set(self.compose("config", "--services").split()) - {"setup"})

    def states(self) -> list[dict[str, Any]]:
        """Return what `docker compose ps` says of each container that runs."""
        return [json.loads(line) for line in self.compose("ps", "--format", "json").splitlines()]

    def healthy(self) -> set[str]:
        """Return the services whose health check is passed."""
        return {state["Service"] for state in self.states() if state["Health"] == "healthy"}

    def tags(self) -> set[str]:
        """Return the tags of our images that run."""
        names = "\n".join(state["Image"] for state in self.states())
        return set(re.findall(r"^(?:localhost/)?pawl-\w+:(.+)$", names, re.MULTILINE))

    def post(
        self, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the answer of the proxy's data port: status, headers and body."""
        kind = {"Content-Type": "application/json"}
        return self._ask("PROXY_PORT", "POST", path, json.dumps(body), kind | headers)

    def page(self, path: str) -> tuple[int, str]:
        """Return the console's page: status and text."""
        status, _, body = self._ask("CONSOLE_PORT", "GET", path, None, {})
        return status, body.decode()

    def _ask(
        self, port: str, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", int(self.settings[port]), timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def jobs_up_since(self, moment: float) -> set[str]:
        """Return the jobs whose last scrape was after `moment`, and was answered.

        A Prometheus that does not answer yet has none.
        """
        query = f"up == 1 and timestamp(up) > {moment:.3f}"
        server = "http://127.0.0.1:9090"
        asked = ("promtool", "query", "instant", "-o", "json", server, query)
        try:
            said = self.run_inside("prometheus", *asked)
        except Failed:
            return set()
        return {series["metric"]["job"] for series in json.loads(said)}

    def show_end(self) -> Path:
        """Print the end of the logs, and return the file that has all of them."""
        print(self.compose("ps", "--all", check=False))
        print(self.compose("logs", "--no-color", "--tail", "40", check=False), flush=True)
        kept = ROOT / "var" / f"{PROJECT}.log"
        kept.parent.mkdir(exist_ok=True)
        logs = self.compose("logs", "--no-color", "--timestamps", check=False)
        before = self.log.read_text(errors="replace") if self.log.exists() else ""
        kept.write_text(before + logs)
        return kept

    def remove(self, images: Iterable[str]) -> None:
        """Remove containers, networks, volumes and these images, but for those that others use."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
        for image in images:
            self.engine("image", "rm", image)


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

    def wait_until_answered(self) -> None:
        """Wait until one more call is answered and rewarded."""
        count = len(self.rewarded)
        wait_until("a rewarded call", lambda: len(self.rewarded) > count or not self.is_alive())
        if not self.is_alive():
            raise Failed("the agent has ended, see its traceback above")

    def stop(self) -> None:
        """End after the call at hand and its reward."""
        # The reward of an answered call is sent before the next call is begun.
        self._ended.set()
        self.join(STEP_S)
        if self.is_alive():
            raise Failed(f"the agent's last reward is not taken within {STEP_S:.0f} s")


def free_ports(names: Iterable[str]) -> dict[str, str]:
    """Return for each name a port of its own, on which nobody listens now.

    They are none of those that Linux gives to whoever asks for any: while a container is started
    anew, nobody else gets its port.
    """
    ports = iter(secrets.SystemRandom().sample(ASSIGNED, len(ASSIGNED)))
    return {name: str(next(filter(is_free, ports))) for name in names}


def is_free(port: int) -> bool:
    """Return whether nobody listens on a port of this machine."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def lost_episodes(containers: Containers, agent: Agent) -> set[str]:
    """Return the episodes of which the database has not the call, or not the reward."""
    lines = [
        json.loads(line) for line in containers.run_inside("proxy", "pawl", "export").splitlines()
    ]
    stored = {
        line["episode"]: line["feedback"][-1]["value"]
        for line in lines
        if line["calls"] and line["feedback"]
    }
    return {name for name, value in agent.rewarded.items() if stored.get(name) != value}


def use_containers(containers: Containers, agent: Agent) -> None:
    """Do all that the containers are for, and all that may happen to them."""
    with step("no PostgreSQL beside one's own"):
        (containers.folder / "own.env").write_text("DATABASE_URL=postgresql://elsewhere/pawl\n")
        shown = containers.compose("--env-file", "own.env", "config", "--format", "json")
        if json.loads(shown)["services"]["postgres"].get("scale") != 0:
            raise Failed("PostgreSQL is started all the same")
    with step("up, until all are healthy") as notes:
        containers.change_settings(**free_ports(PORTS))
        containers.up()
        services = containers.services()
        if missing := set(services) - containers.healthy():
            raise Failed(f"not healthy: {', '.join(sorted(missing))}")
        notes.append(f"{len(services)} services")
    agent.start()
    with step("calls and rewards") as notes:
        wait_until("8 rewarded calls", lambda: len(agent.rewarded) >= 8)
        notes.append(f"{len(agent.rewarded)} so far")
    with step("an update is published") as notes:
        notes.append(
            wait_until("a call that a trained version answers", lambda: trained_version(agent))
        )
    with step("the console shows the policy"):
        if (status := containers.page("/")[0]) != 200:
            raise Failed(f"its first page has status {status}")
        wait_until(
            "figures of the policy", lambda: "smollm2" in containers.page("/overview/figures")[1]
        )
    with step("Prometheus scrapes without keys") as notes:
        wait_until("scrapes", lambda: containers.jobs_up_since(0) >= JOBS)
        notes.append(", ".join(sorted(JOBS)))
    with step("Prometheus scrapes with keys") as notes:
        containers.run_documented(KEYS, "docker compose restart prometheus")
        agent.key = containers.run_inside("proxy", "pawl", "keys", "create", "agent").strip()
        wait_until(
            "a call without a key is refused",
            lambda: containers.post("/v1/chat/completions", {}, {})[0] == 401,
        )
        moment = time.time()
        wait_until("scrapes", lambda: containers.jobs_up_since(moment) >= JOBS)
        notes.append("a call without one is refused")
    watching = sorted(WATCHING & set(services))
    for killed in (watching, *([service] for service in services if service not in watching)):
        with step(f"{killed[0] if killed != watching else 'all that watch'} is killed") as notes:
            before = agent.refused
            containers.compose("kill", *killed)
            containers.up()
            agent.wait_until_answered()
            notes.append(f"{agent.refused - before} requests unanswered meanwhile")
    upgrade(containers, agent)
    with step("nothing is lost") as notes:
        wait_until("a call that a trained version answers", lambda: trained_version(agent))
        agent.stop()
        wait_until(
            "all calls and rewards in the database", lambda: not lost_episodes(containers, agent)
        )
        notes.append(f"{len(agent.rewarded)} calls and rewards in the database")


def upgrade(containers: Containers, agent: Agent) -> None:
    """Go to images of another tag, as the page says it."""
    for name in BUILT:
        if not containers.engine("tag", f"pawl-{name}:{PROJECT}", f"pawl-{name}:{NEXT}"):
            raise Failed(f"pawl-{name} gets no other tag")
    with step("upgrade") as notes:
        before = agent.refused
        change_tag(containers, NEXT, "docker compose run --rm --no-deps proxy migrate")
        agent.wait_until_answered()
        notes.append(f"{agent.refused - before} requests unanswered meanwhile")


def change_tag(containers: Containers, tag: str, line: str) -> None:
    """Name the tag in `.env`, and run the page's commands that have this line."""
    containers.change_settings(IMAGE_TAG=tag)
    containers.run_documented(OPERATE, line)
    if (tags := containers.tags()) != {tag}:
        raise Failed(f"images with the tags {', '.join(sorted(tags))} run")


def trained_version(agent: Agent) -> str:
    """Return the version that a new episode gets, or "" if it is the base model."""
    version = agent.ask(f"look-{time.monotonic_ns()}", "look") or ""
    return version if version.partition("@")[2] not in ("", "0") else ""


def start_again(containers: Containers, agent: Agent) -> None:
    """Start the images before the upgrade, on new volumes with what a backup has."""
    with step("backup"):
        # The copies are of folders that are written to: see the page.
        containers.run_documented(OPERATE, "docker compose exec -T postgres pg_dump", attempts=5)
    with step("down, without volumes, and restored") as notes:
        containers.compose("down", "--volumes")
        containers.change_settings(IMAGE_TAG=PROJECT)
        containers.run_documented(OPERATE, "docker compose exec -T postgres pg_restore")
        notes.append(
            wait_until("a call that a trained version answers", lambda: trained_version(agent))
        )
        if missing := lost_episodes(containers, agent):
            raise Failed(f"{len(missing)} episodes are gone, such as {missing.pop()}")
        notes.append(f"{len(agent.rewarded)} calls and rewards in the database")
    with step("roll-back"):
        change_tag(containers, PROJECT, "docker compose up --no-build --remove-orphans")
    with step("Prometheus has a key again"):
        containers.run_documented(OPERATE, "docker compose exec -T proxy pawl keys revoke metrics")
        containers.run_documented(KEYS, "docker compose restart prometheus")
        moment = time.time()
        wait_until("scrapes", lambda: containers.jobs_up_since(moment) >= JOBS)


def main() -> None:
    """Build the images, run everything, and remove it again."""
    begun, result = time.monotonic(), "passed"
    # Whoever ends this, what it made is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pawl-compose-") as folder:
        containers = Containers(Path(folder))
        made = list(OURS)
        try:
            if not containers.engine("version"):
                raise Failed(containers.log.read_text())
            others = sorted({*OTHERS, *BASES})
            made += [one for one in others if not containers.engine("image", "inspect", one)]
            with step("images"):
                containers.build()
            agent = Agent(containers)
            use_containers(containers, agent)
            start_again(containers, agent)
        except (Exception, KeyboardInterrupt) as error:
            result = f"failed: {describe_error(error)}"
            print(f"{result}\n")
            traceback.print_exception(error, file=sys.stdout)
            result += f"; the logs are in {containers.show_end()}"
        finally:
            containers.remove(made)
    print(f"{result}, {time.monotonic() - begun:.1f} s")
    sys.exit(result != "passed")


if __name__ == "__main__":
    main()
