"""Run docker-compose.yml for real, as a user would: `make compose-test`.

The containers run in a temporary folder with the Compose file, an `.env`, free ports and a recipe.
An agent makes calls and rewards them. Meanwhile an update is published, the console shows it,
Prometheus scrapes without and with keys, every service is killed once (those that calls can do
without, together), and images with another tag replace the first. At last everything is stopped
and restored from a backup, with the first tag. Each step prints its seconds and its findings.

The last line is the result. Exit status: 0 if every step passed; 1 if not: then the reason and the
end of the logs come before that line, and the complete logs are kept in `var/`.

`scripts/images.sh` builds Pawl's images, with a tag of this run. Where no registry can be reached,
stand-ins made of Debian's packages replace the images of others; Grafana's stand-in only reports
that it is healthy. Containers, volumes and images that this run made are removed at the end.
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
# Runs at the same time share only the container engine and the images of others.
PROJECT: Final = f"pawl-compose-test-{secrets.token_hex(4)}"
ENGINE: Final = ("scripts/engine.sh", "compose", "--project-name", PROJECT)
# `engine.sh` is copied too: it makes the files of its own checkout visible to the engine.
FILES: Final = (
    *("docker-compose.yml", "deploy/scale.yml"),
    *("dashboards", "config", "scripts/engine.sh"),
)
COMPOSE: Final = (ROOT / "docker-compose.yml").read_text()
# The variables of published ports.
PORTS: Final = tuple(re.findall(r"\$\{(\w+):-\d+\}:\d+\"", COMPOSE))
# Ports below those of `net.ipv4.ip_local_port_range`, which Linux assigns automatically.
UNASSIGNED_PORTS: Final = range(20_000, 32_768)
BUILT_IMAGES: Final = ("proxy", "cpu")
NEXT_TAG: Final = f"{PROJECT}-next"
TAGGED_IMAGES: Final = tuple(
    f"pawl-{name}:{tag}" for name in BUILT_IMAGES for tag in (PROJECT, NEXT_TAG)
)
IMAGES_OF_OTHERS: Final = tuple(
    image
    for image in re.findall(r"^    image: (\S+)$", COMPOSE, re.MULTILINE)
    if not image.startswith(("pawl-", "vllm/"))
)
# The images in the `FROM` lines of the Dockerfiles.
BASE_IMAGES: Final = tuple(
    image
    for file in ("Dockerfile.proxy", "scripts/stand_ins.Dockerfile")
    for image in re.findall(r"^FROM (\w+:\S+)", (ROOT / file).read_text(), re.MULTILINE)
)
OPERATE: Final = "docs/howto/operate.md"
KEYS: Final = "docs/howto/keys.md"
# Variables that users set for Compose: they must not reach this test.
USER_SETTINGS: Final = frozenset(
    re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
)
# Calls are answered without the others, which are killed together.
NEEDED: Final = frozenset({"postgres", "proxy", "vllm-cpu"})
JOBS: Final = {"pawl-proxy", "pawl-trainer", "pawl-controller", "pawl-vllm"}
UP_S: Final = 900.0
STEP_S: Final = 600.0
# Longer than any command may take, so that one that hangs is a failure.
COMMAND_S: Final = UP_S + STEP_S
PAUSE_S: Final = 1.0
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
    """A step of the test failed; the message is the reason."""


def wait_until(name: str, check: Callable[[], T], seconds: float = STEP_S) -> T:
    """Call `check` until its result is true, and return this result.

    Raises:
        Failed: the result is not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (result := check()):
        if time.monotonic() > deadline:
            raise Failed(f"{name}: not within {seconds:.0f} s")
        time.sleep(PAUSE_S)
    return result


@contextlib.contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Yield a list for notes; after the block, print `name`, its seconds and the notes.

    `name` is added to an error of the block as a note.
    """
    begun, notes = time.monotonic(), list[str]()
    try:
        yield notes
    except BaseException as error:
        error.add_note(name)
        raise
    print(f"{name:<34}{time.monotonic() - begun:>7.1f} s   {'; '.join(notes)}", flush=True)


def describe_error(error: BaseException) -> str:
    """Return a line with the failed step, the kind of error, and the reason."""
    lines = str(error).strip().splitlines()
    # The first line is the command; programs say last why they end.
    said = [" … ".join(dict.fromkeys([lines[0], lines[-1]]))] if lines else []
    kind = [] if isinstance(error, Failed) else [type(error).__name__]
    return ": ".join([*getattr(error, "__notes__", []), *kind, *said])


class Containers:
    """Runs `docker compose` in a folder, as a user would.

    Attributes:
        log: the output of failed commands and of the images' build.
    """

    def __init__(self, folder: Path) -> None:
        """Copy the Compose file and the files that it mounts, and write settings and a recipe."""
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
        """Run a command of `docker compose`, and return its output.

        Raises:
            Failed: its exit status is not 0.
        """
        done = self._run([*ENGINE, *words])
        if check and done.returncode:
            raise Failed(f"`docker compose {' '.join(words)}`:\n{done.stdout}{done.stderr}")
        return done.stdout

    def engine(self, *words: str) -> bool:
        """Run a command of the container engine; return whether it succeeded."""
        return self._run([ENGINE[0], *words]).returncode == 0

    def build(self) -> None:
        """Build Pawl's images, and pull those of others.

        Raises:
            Failed: an image cannot be built or pulled.
        """
        for command in (
            ["scripts/images.sh", *BUILT_IMAGES],
            [ENGINE[0], "--images", *IMAGES_OF_OTHERS],
        ):
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
        """Run the page's code block that has a line beginning with `line`.

        Raises:
            Failed: a command of the block failed, in each attempt.
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
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in USER_SETTINGS and not name.startswith(("PAWL_", "COMPOSE_"))
        }
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
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
        """Start the services that do not run, and wait until all are healthy."""
        self.compose("up", "--no-build", "--detach", "--wait", "--wait-timeout", f"{UP_S:.0f}")

    def run_inside(self, service: str, *command: str) -> str:
        """Run a command in a service's container, and return its output."""
        return self.compose("exec", "-T", service, *command)

    def services(self) -> list[str]:
        """Return the services that keep running: all but `setup`."""
        return sorted(set(self.compose("config", "--services").split()) - {"setup"})

    def states(self) -> list[dict[str, Any]]:
        """Return the record of each running container from `docker compose ps`."""
        return [json.loads(line) for line in self.compose("ps", "--format", "json").splitlines()]

    def healthy(self) -> set[str]:
        """Return the services whose container is healthy."""
        return {state["Service"] for state in self.states() if state["Health"] == "healthy"}

    def tags(self) -> set[str]:
        """Return the tags of Pawl's images that running containers have."""
        names = "\n".join(state["Image"] for state in self.states())
        return set(re.findall(r"^(?:localhost/)?pawl-\w+:(.+)$", names, re.MULTILINE))

    def post(
        self, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Post JSON to the proxy's data port; return status, headers and body of the answer."""
        kind = {"Content-Type": "application/json"}
        return self._ask("PROXY_PORT", "POST", path, json.dumps(body), kind | headers)

    def page(self, path: str) -> tuple[int, str]:
        """Return the status and text of a page of the console."""
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
        """Return Prometheus's jobs whose last scrape was after `moment` and succeeded.

        The result is empty while Prometheus does not answer.
        """
        query = f"up == 1 and timestamp(up) > {moment:.3f}"
        server = "http://127.0.0.1:9090"
        command = ("promtool", "query", "instant", "-o", "json", server, query)
        try:
            output = self.run_inside("prometheus", *command)
        except Failed:
            return set()
        return {series["metric"]["job"] for series in json.loads(output)}

    def show_end(self) -> Path:
        """Print the end of the logs, and return the path of a file with the complete logs."""
        print(self.compose("ps", "--all", check=False))
        print(self.compose("logs", "--no-color", "--tail", "40", check=False), flush=True)
        kept = ROOT / "var" / f"{PROJECT}.log"
        kept.parent.mkdir(exist_ok=True)
        logs = self.compose("logs", "--no-color", "--timestamps", check=False)
        before = self.log.read_text(errors="replace") if self.log.exists() else ""
        kept.write_text(before + logs)
        return kept

    def remove(self, images: Iterable[str]) -> None:
        """Remove containers, networks, volumes and these images, except images in use elsewhere."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
        for image in images:
            self.engine("image", "rm", image)


class Agent(threading.Thread):
    """Makes one call after another and rewards each, even while services are killed."""

    def __init__(self, containers: Containers) -> None:
        """Store the containers; calls are made without a key until `key` is set."""
        super().__init__(daemon=True)
        self._containers = containers
        self._ended = threading.Event()
        self.key = ""
        # Whether rewards differ within a task: without a difference there is nothing to learn.
        self.teaches = True
        # The accepted rewards by episode.
        self.rewarded: dict[str, float] = {}
        self.refused = 0

    def run(self) -> None:
        """Make calls and reward them until `stop`."""
        number = 0
        while not self._ended.wait(1.0):
            number += 1
            episode, task = f"run-{number}", number // 4
            value = float((number if self.teaches else task) % 2)
            if self.ask(episode, f"sum-{task}") is None:
                continue
            body = {"metric": "reward", "value": value, "episode": episode}
            while not self._send("/feedback", body, episode):
                time.sleep(PAUSE_S)
            self.rewarded[episode] = value

    def ask(self, episode: str, task: str) -> str | None:
        """Make a call; return the version that answered it, or None if the call failed."""
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
        """Stop the agent, and wait until its current call is rewarded."""
        # The reward of an answered call is sent before the next call is begun.
        self._ended.set()
        self.join(STEP_S)
        if self.is_alive():
            raise Failed(f"the agent's last reward is not taken within {STEP_S:.0f} s")


def free_ports(names: Iterable[str]) -> dict[str, str]:
    """Return a different free port for each name.

    Linux assigns none of these automatically, so none is taken while its container restarts.
    """
    ports = iter(secrets.SystemRandom().sample(UNASSIGNED_PORTS, len(UNASSIGNED_PORTS)))
    return {name: str(next(filter(is_free, ports))) for name in names}


def is_free(port: int) -> bool:
    """Return whether a port of this machine is free."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def lost_episodes(containers: Containers, agent: Agent) -> set[str]:
    """Return the rewarded episodes whose call or reward is missing in the database."""
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
    """Run all steps from the start to the upgrade, and check that nothing is lost."""
    with step("no PostgreSQL beside one's own"):
        (containers.folder / "own.env").write_text("DATABASE_URL=postgresql://elsewhere/pawl\n")
        shown = containers.compose("--env-file", "own.env", "config", "--format", "json")
        if json.loads(shown)["services"]["postgres"].get("scale") != 0:
            raise Failed("PostgreSQL is started although DATABASE_URL is set")
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
        agent.teaches = False
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
    others = [service for service in services if service not in NEEDED]
    for killed in (others, *([service] for service in sorted(NEEDED))):
        with step(f"killed: {', '.join(killed)}") as notes:
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
    """Upgrade to images with another tag, by the documented commands."""
    for name in BUILT_IMAGES:
        if not containers.engine("tag", f"pawl-{name}:{PROJECT}", f"pawl-{name}:{NEXT_TAG}"):
            raise Failed(f"pawl-{name} cannot be given another tag")
    with step("upgrade") as notes:
        before = agent.refused
        change_tag(containers, NEXT_TAG, "docker compose run --rm --no-deps proxy migrate")
        agent.wait_until_answered()
        notes.append(f"{agent.refused - before} requests unanswered meanwhile")


def change_tag(containers: Containers, tag: str, line: str) -> None:
    """Set the tag in `.env`, and run the documented code block that has this line."""
    containers.change_settings(IMAGE_TAG=tag)
    containers.run_documented(OPERATE, line)
    if (tags := containers.tags()) != {tag}:
        raise Failed(f"images with the tags {', '.join(sorted(tags))} run, not with {tag}")


def trained_version(agent: Agent) -> str:
    """Return the version that a new episode gets, or "" if it is the base model."""
    version = agent.ask(f"look-{time.monotonic_ns()}", "look") or ""
    return version if version.partition("@")[2] not in ("", "0") else ""


def start_again(containers: Containers, agent: Agent) -> None:
    """Restore a backup into new volumes, and run the images from before the upgrade on them."""
    with step("backup"):
        # Copying a folder that is written to can fail: see the page.
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
    """Build the images, run all steps, and remove everything that this run made."""
    begun, result = time.monotonic(), "passed"
    # The clean-up must also run after SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pawl-compose-") as folder:
        containers = Containers(Path(folder))
        made = list(TAGGED_IMAGES)
        try:
            if not containers.engine("version"):
                raise Failed(containers.log.read_text())
            others = sorted({*IMAGES_OF_OTHERS, *BASE_IMAGES})
            made += [image for image in others if not containers.engine("image", "inspect", image)]
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
