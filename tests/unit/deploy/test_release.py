"""`make release`, but for what it builds: tests/integration/docs tries the wheel and the images."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from scripts import release
from store import __version__

# Docker, as far as it is asked.
ENGINE: Final = """#!/bin/sh
echo "$*" >>"$LOG"
[ "$1" != "$FAILS" ]
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands that an engine was given; it fails at that of $FAILS."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(ENGINE)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(docker.parent), prepend=":")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", "nowhere")
    # This machine's own wheels are not copied.
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "log"


def test_release_saves_each_built_image_to_a_tar_file(engine: Path, tmp_path: Path) -> None:
    release.build_images(tmp_path)
    calls = [line.split() for line in engine.read_text().splitlines()]
    built = [call[call.index("--tag") + 1] for call in calls if call[0] == "build"]
    assert built == [f"pawl-{name}:{__version__}" for name in ("proxy", "trainer", "cpu")]
    saved = {call[-1]: call[-2] for call in calls if call[0] == "save"}
    assert saved == {name: f"{tmp_path}/{name.replace(':', '-')}.tar" for name in built}


@pytest.mark.parametrize(
    ("fails", "said"), [("build", "without-images.* failed"), ("save", "saving pawl-proxy failed")]
)
def test_release_stops_at_the_build_or_save_step_that_failed(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, said: str
) -> None:
    monkeypatch.setenv("FAILS", fails)
    with pytest.raises(SystemExit, match=said):
        release.build_images(tmp_path)
    assert engine.read_text().splitlines()[-1].startswith(fails)


def test_release_checksums_pass_sha256sum(tmp_path: Path) -> None:
    for name in ("pawl-0.1.0.tgz", "pawl_rl-0.1.0.tar.gz", ".gitignore"):
        (tmp_path / name).write_text(name)
    release.write_checksums(tmp_path)
    checked = subprocess.check_output(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, text=True
    )
    assert checked == "pawl-0.1.0.tgz: OK\npawl_rl-0.1.0.tar.gz: OK\n"


def test_release_from_a_checkout_with_uncommitted_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "pawl.py").touch()
    earlier = tmp_path / "dist" / "pawl-0.1.0.tgz"
    earlier.parent.mkdir()
    earlier.touch()
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    monkeypatch.setattr("sys.argv", ["release"])
    with pytest.raises(SystemExit, match="git status"):
        release.main()
    assert earlier.exists()
