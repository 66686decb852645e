"""Makes `.venv-clients` and `tests/clients/node/node_modules`: the clients that the tests drive.

Their packages contradict the model server's, so they get an environment of their own, from
uv in `.venv`. It brings Node too. A second run with nothing changed returns at once.
"""

import hashlib
import os
import shutil
import subprocess
import sys

from install import ROOT, VENV, run

CLIENTS = os.path.join(ROOT, ".venv-clients")
NODE = os.path.join(ROOT, "tests", "clients", "node")
MODULES = os.path.join(NODE, "node_modules")
STAMP = os.path.join(CLIENTS, ".pawl-installed")
LOCK = os.path.join(ROOT, "requirements", "clients.txt")
NODE_LOCK = os.path.join(NODE, "package-lock.json")
THIS = os.path.abspath(__file__)


def fingerprint() -> str:
    """What the installation depends on."""
    digest = hashlib.sha256(sys.version.encode())
    for name in (LOCK, NODE_LOCK, THIS):
        with open(name, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def is_current(wanted: str) -> bool:
    """Whether all of it is there, made from the same."""
    if not (os.path.exists(STAMP) and os.path.isdir(MODULES)):
        return False
    with open(STAMP) as file:
        return file.read() == wanted


def install_python() -> None:
    """The Python clients; a failure ends it all."""
    uv = os.path.join(VENV, "bin", "uv")
    run("making .venv-clients", uv, "venv", "--quiet", "--clear", "-p", sys.executable, CLIENTS)
    environment = dict(os.environ, VIRTUAL_ENV=CLIENTS)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode"]
    run("installing the clients that the tests drive", *install, "-r", LOCK, env=environment)


def install_node() -> bool:
    """The Node clients; without them (no way to npm's registry) their tests are skipped."""
    print("pawl: installing the Node clients that the tests drive", flush=True)
    binaries = os.path.join(CLIENTS, "bin")
    environment = dict(os.environ, PATH=binaries + os.pathsep + os.environ["PATH"])
    quiet = ["--no-audit", "--no-fund", "--loglevel", "error", "--fetch-retries", "1"]
    status = subprocess.call(
        [os.path.join(binaries, "npm"), "ci", *quiet], env=environment, cwd=NODE
    )
    if status:
        shutil.rmtree(MODULES, ignore_errors=True)
        print("pawl: without them, for the reason above; their tests are skipped", file=sys.stderr)
    return status == 0


def main() -> None:
    """Install what is not there yet."""
    wanted = fingerprint()
    if is_current(wanted):
        return
    install_python()
    if install_node():
        with open(STAMP, "w") as file:
            file.write(wanted)


if __name__ == "__main__":
    main()
