"""Run the serving role's tests on the Python that runs this, without torch (`make serving`).

These are the unit tests, which import and call everything, and those of faults, whose processes
wait, are killed and start again. The others try the same code with other requests, which hardly
depends on Python's version; nor do more examples of a property.

The tests run in an environment of their own, `var/serving-3.13` for Python 3.13, that holds what
`requirements/serving-tests.txt` locks. A second run with nothing changed installs nothing. The
arguments go to pytest. Exit status: pytest's; 1 if the environment could not be made.
"""

import os
import sys

from install import ROOT, UV, fingerprint, is_current, run

NAME = f"serving-{sys.version_info[0]}.{sys.version_info[1]}"
VENV = os.path.join(ROOT, "var", NAME)
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".pawl-installed")
LOCK = os.path.join(ROOT, "requirements", "serving-tests.txt")
INPUTS = (LOCK, os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__))
TESTS = ("tests/unit/store", "tests/unit/proxy", "tests/integration/faults")


def install(wanted: str) -> None:
    """Make the environment, and install this checkout in it; if that fails, end with status 1."""
    run(f"making var/{NAME}", sys.executable, "-m", "venv", "--clear", VENV)
    run("installing uv", PYTHON, "-m", "pip", "install", "--quiet", UV)
    uv = [os.path.join(VENV, "bin", "uv"), "pip", "install", "--quiet", "--no-deps"]
    packages, environment = ["--compile-bytecode", "-r", LOCK], dict(os.environ, VIRTUAL_ENV=VENV)
    run("installing the serving role and its tests' tools", *uv, *packages, env=environment)
    run("installing Pawl", *uv, "-e", ".", env=environment)
    with open(STAMP, "w") as file:
        file.write(wanted)


def main() -> None:
    """Make the environment if it is missing or outdated, and replace this process by pytest."""
    wanted = fingerprint(INPUTS)
    if not is_current(STAMP, wanted):
        install(wanted)
    os.chdir(ROOT)
    command = [PYTHON, "-m", "pytest", "-m", "not vllm and not slow"]
    command += ["--hypothesis-profile", "few", "--numprocesses", "auto", "--maxprocesses", "4"]
    os.execv(PYTHON, [*command, *TESTS, *sys.argv[1:]])


if __name__ == "__main__":
    main()
