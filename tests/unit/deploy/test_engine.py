"""scripts/engine.sh and scripts/compose_test.py, with programs that stand for an engine."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from scripts import compose_test
from scripts.compose_test import (
    PORTS,
    USER_SETTINGS,
    Containers,
    Failed,
    describe_error,
    free_ports,
    step,
)
from tests.conftest import ROOT

# An engine that answers, and has no registry.
ENGINE: Final = """#!/bin/sh
echo "$0 $*" >>"$LOG"
case "$1" in info | version) exit 0 ;; compose) [ "$2" != version ] || exit $COMPOSE ;; esac
echo "no registry answers" >&2
exit 1
"""
NONE: Final = "#!/bin/sh\nexit 1\n"


def engine(folder: Path, docker: str, podman: str, *words: str) -> tuple[str, str]:
    """Run the script where these answer; return its last line, and what they were told."""
    log = folder / "log"
    for name, text in (("docker", docker), ("podman", podman)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    # Here podman has no Compose.
    status = str(int(docker == NONE))
    told = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "COMPOSE": status}
    ran = subprocess.run(
        [ROOT / "scripts" / "engine.sh", *words],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    return ran.stderr.splitlines()[-1], log.read_text()


@pytest.mark.parametrize("podman", [False, True])
def test_users_own_container_engine_pulls_the_image_and_gets_no_stand_in(
    tmp_path: Path, podman: bool
) -> None:
    engines = (NONE, ENGINE) if podman else (ENGINE, NONE)
    said, told = engine(tmp_path, *engines, "--images", "postgres:18.6-trixie")
    assert said == "no registry answers"
    assert told.endswith("pull postgres:18.6-trixie\n")


def test_podman_without_compose_is_reported_with_the_remedy(tmp_path: Path) -> None:
    said, _ = engine(tmp_path, NONE, ENGINE, "compose", "up")
    assert said.startswith("pawl: podman has no Compose: install podman-compose")


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Containers:
    """Compose that shows its environment instead."""
    monkeypatch.setattr(compose_test, "ENGINE", ("sh", "-c", "env"))
    return Containers(tmp_path)


def test_callers_pawl_and_compose_variables_do_not_reach_the_compose_test(
    containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"BIND", "PROXY_PORT", "POSTGRES_PASSWORD", "DATABASE_URL"} < USER_SETTINGS
    for name in (*USER_SETTINGS, "PAWL_SEED", "COMPOSE_FILE", "ANOTHER"):
        monkeypatch.setenv(name, "x")
    shown = {line.partition("=")[0] for line in containers.compose().splitlines()}
    assert "ANOTHER" in shown
    assert not shown & {*USER_SETTINGS, "PAWL_SEED", "COMPOSE_FILE"}


def test_compose_test_takes_an_unreachable_prometheus_for_no_scraped_targets(
    containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose_test, "ENGINE", ("false",))
    assert containers.jobs_up_since(0) == set()


def test_documented_shell_block_is_retried_up_to_the_given_attempts(
    containers: Containers, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho >> runs\ntest $(wc -l < runs) = 3\n```\n")
    with pytest.raises(Failed):
        containers.run_documented(str(page), "echo", attempts=2)
    containers.run_documented(str(page), "echo")


def test_each_published_port_of_the_compose_test_is_free_and_unique(containers: Containers) -> None:
    published = re.findall(r"^    ports: (.+)$", compose_test.COMPOSE, re.MULTILINE)
    assert len(PORTS) == "".join(published).count('"') / 2 > 0
    ports = free_ports(map(str, range(200)))
    assert len(set(ports.values())) == 200
    for port in ports.values():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(port)))


def test_each_block_that_the_compose_test_runs_is_on_its_page() -> None:
    source = (ROOT / "scripts" / "compose_test.py").read_text()
    lines = re.findall(r'"(docker compose [^"`{]+)"', source)
    assert len(lines) > 5
    pages = [(ROOT / page).read_text() for page in (compose_test.OPERATE, compose_test.KEYS)]
    blocks = re.findall("```\\w+\n(.*?)```", "\n".join(pages), re.DOTALL)
    for line in lines:
        assert len([block for block in blocks if f"\n{line}" in f"\n{block}"]) == 1, line


def test_reason_of_a_failed_compose_test_names_step_command_and_last_output_line() -> None:
    said = "`docker compose up`:\n Container a  Waiting\naddress already in use\n"
    with pytest.raises(Failed) as failed, step("up"):
        raise Failed(said)
    assert describe_error(failed.value) == "up: `docker compose up`: … address already in use"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


# An engine that has three images, fails to build, and says what it was told.
BROKEN: Final = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    "image inspect postgres"* | "image inspect python"*) exit 0 ;;
    *"image inspect"* | build*) echo "the disk is full" >&2; exit 1 ;;
    compose*logs*) echo "the end of the logs" ;;
esac
"""


def test_failed_compose_test_prints_its_reason_and_removes_only_images_that_it_made(
    tmp_path: Path,
) -> None:
    # pip, which is asked for its configuration, takes seconds.
    for name, text in (("docker", BROKEN), ("python3", NONE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "compose_test.py"],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    lines = ran.stdout.splitlines()
    reason = "failed: images: `scripts/images.sh proxy cpu`: … the disk is full"
    assert lines[0] == reason
    assert "the end of the logs" in lines
    last = re.fullmatch(rf"{re.escape(reason)}; the logs are in (\S+), [0-9.]+ s", lines[-1])
    assert last, lines[-1]
    kept = Path(last[1])
    assert "the disk is full" in kept.read_text()
    kept.unlink()
    calls = log.read_text().splitlines()
    [project] = {name for call in calls for name in re.findall(r"--project-name (\S+)", call)}
    assert any(call.endswith("down --volumes --remove-orphans --timeout 5") for call in calls)
    removed = {call.removeprefix("image rm ") for call in calls if call.startswith("image rm ")}
    assert f"pawl-proxy:{project}" in removed
    assert any(image.startswith("grafana/") for image in removed)
    assert not any(image.startswith(("postgres", "python", "vllm")) for image in removed)
    assert not any(image.endswith(":0.1.0") for image in removed)
