"""Install the clients that tests drive: `.venv-clients`, `tests/clients/node/node_modules`.

Their packages conflict with the model server's, so they get an environment of their own, made
by the uv in `.venv`. It also contains Node, the frameworks of the examples' agents, and Debian's
Prometheus if this machine has none. With `--python`, only the Python packages are installed: the
examples need no more. As root on Debian, Chromium is installed for the console's tests. A second
run with nothing changed returns at once. Exit status: 0, even if npm or apt failed; 1 if the Python
clients could not be installed.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile

from install import ROOT, VENV, fingerprint, is_current, run

CLIENTS = os.path.join(ROOT, ".venv-clients")
NODE = os.path.join(ROOT, "tests", "clients", "node")
MODULES = os.path.join(NODE, "node_modules")
STAMP = os.path.join(CLIENTS, ".pawl-installed")
NODE_STAMP = os.path.join(CLIENTS, ".pawl-node-installed")
LOCK = os.path.join(ROOT, "requirements", "clients.txt")
NODE_LOCK = os.path.join(NODE, "package-lock.json")
INPUTS = (LOCK, os.path.abspath(__file__))
NODE_INPUTS = (*INPUTS, NODE_LOCK)


def install_python() -> None:
    """Install the Python clients; if that fails, end with status 1."""
    uv = os.path.join(VENV, "bin", "uv")
    run("making .venv-clients", uv, "venv", "--quiet", "--clear", "-p", sys.executable, CLIENTS)
    environment = dict(os.environ, VIRTUAL_ENV=CLIENTS)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode"]
    run("installing the clients that the tests drive", *install, "-r", LOCK, env=environment)


def install_node() -> bool:
    """Install the Node clients, and return whether that succeeded.

    If it failed, as without access to npm's registry, the tests of these clients are skipped.
    """
    print("pawl: installing the Node clients that the tests drive", flush=True)
    binaries = os.path.join(CLIENTS, "bin")
    environment = dict(os.environ, PATH=binaries + os.pathsep + os.environ["PATH"])
    quiet = ["--no-audit", "--no-fund", "--loglevel", "error", "--fetch-retries", "1"]
    status = subprocess.call(
        [os.path.join(binaries, "npm"), "ci", *quiet], env=environment, cwd=NODE
    )
    if status:
        shutil.rmtree(MODULES, ignore_errors=True)
        print(
            "pawl: the Node clients could not be installed, for the reason above: their tests are"
            " skipped",
            file=sys.stderr,
        )
    return status == 0


def install_prometheus() -> None:
    """Unpack Debian's `prometheus`, `promtool` and `amtool` into `.venv-clients`.

    This needs no root. If there is no apt, or Debian cannot be reached, the reason is printed, and
    the tests with Prometheus are skipped.
    """
    binaries = os.path.join(CLIENTS, "bin")
    wanted = ("prometheus", "promtool", "amtool")
    path = binaries + os.pathsep + os.environ["PATH"]
    if all(shutil.which(name, path=path) for name in wanted):
        return
    print("pawl: unpacking the Prometheus that the tests drive", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        own = ["-o", "Dir::State::Lists=" + folder, "-o", "Dir::Cache=" + folder]
        options = ["-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=20", *own]
        apt = ["apt-get", "-qq", *options]
        try:
            subprocess.check_call([*apt, "update"], cwd=folder)
            packages = ["prometheus", "prometheus-alertmanager"]
            subprocess.check_call([*apt, "download", *packages], cwd=folder)
            for package in glob.glob(os.path.join(folder, "*.deb")):
                subprocess.check_call(["dpkg-deb", "--extract", package, folder])
            for name in wanted:
                shutil.copy2(os.path.join(folder, "usr", "bin", name), binaries)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"pawl: no Prometheus ({error}): its tests are skipped", file=sys.stderr)


def install_chromium() -> None:
    """Install Debian's Chromium on this machine if this is root on Debian; else print a hint."""
    if shutil.which("chromium"):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print("pawl: no Chromium: the console's tests fail until you install it", file=sys.stderr)
        return
    print("pawl: installing the Chromium that the console's tests drive", flush=True)
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    packages = ["chromium", "fonts-dejavu-core"]
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        if status := subprocess.call(["apt-get", "-qq", *command], env=environment):
            print(f"pawl: no Chromium: apt-get ended with status {status}", file=sys.stderr)
            return


def main() -> None:
    """Install the clients that are missing or outdated; with `--python`, only Python packages."""
    wanted = fingerprint(INPUTS)
    if not is_current(STAMP, wanted):
        install_python()
        _write(STAMP, wanted)
    if "--python" in sys.argv[1:]:
        return
    wanted = fingerprint(NODE_INPUTS)
    if not (os.path.isdir(MODULES) and is_current(NODE_STAMP, wanted)) and install_node():
        _write(NODE_STAMP, wanted)
    install_prometheus()
    install_chromium()


def _write(stamp: str, wanted: str) -> None:
    with open(stamp, "w") as file:
        file.write(wanted)


if __name__ == "__main__":
    main()
