"""scripts/engine.sh and scripts/compose_test.py, with programs that stand for an engine."""

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from scripts import compose_test
from scripts.compose_test import OFFERED, Containers, Failed
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
def test_users_own_engine_gets_no_image_that_is_not_what_its_name_says(
    tmp_path: Path, podman: bool
) -> None:
    engines = (NONE, ENGINE) if podman else (ENGINE, NONE)
    said, told = engine(tmp_path, *engines, "--images", "postgres:18.6-trixie")
    assert said == "no registry answers"
    assert told.endswith("pull postgres:18.6-trixie\n")


def test_podman_without_compose_is_said_to_have_none(tmp_path: Path) -> None:
    said, _ = engine(tmp_path, NONE, ENGINE, "compose", "up")
    assert said.startswith("pawl: podman has no Compose: install podman-compose")


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Containers:
    """Compose that shows its environment instead."""
    monkeypatch.setattr(compose_test, "ENGINE", ("sh", "-c", "env"))
    return Containers(tmp_path)


def test_settings_of_whoever_runs_the_compose_test_do_not_reach_it(
    containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"BIND", "PROXY_PORT", "POSTGRES_PASSWORD", "DATABASE_URL"} < OFFERED
    for name in (*OFFERED, "PAWL_SEED", "COMPOSE_FILE", "ANOTHER"):
        monkeypatch.setenv(name, "x")
    shown = {line.partition("=")[0] for line in containers.compose().splitlines()}
    assert "ANOTHER" in shown
    assert not shown & {*OFFERED, "PAWL_SEED", "COMPOSE_FILE"}


def test_prometheus_that_does_not_answer_yet_has_scraped_nothing(
    containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose_test, "ENGINE", ("false",))
    assert containers.up_since(0) == set()


def test_documented_block_is_run_again_as_often_as_is_said(
    containers: Containers, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho >> runs\ntest $(wc -l < runs) = 3\n```\n")
    with pytest.raises(Failed):
        containers.run_documented(str(page), "echo", attempts=2)
    containers.run_documented(str(page), "echo")
