"""Create `.venv` (`make install`) with all packages, and with Pawl as this checkout has it.

Uses the standard library only, and syntax that any Python 3 reads, so that an unfit Python gets
a clear message. The machine is checked before anything is changed. A second run with nothing
changed returns at once. Exit status: 0 if `.venv` is ready; 1 if not, with the reason.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, ".pawl-installed")
UV = "uv==0.13.8"
OLDEST, NEWEST = (3, 11), (3, 13)
DISK_GIB = 8
GIB = 2**30
INPUTS = (
    "pyproject.toml",
    "plugins/cpu_lora/pyproject.toml",
    "requirements/cpu.txt",
    "requirements/gpu.txt",
    "scripts/install.py",
)


def fail(message: str) -> NoReturn:
    """Print a message to standard error, and end with status 1."""
    print("pawl: " + message, file=sys.stderr)
    raise SystemExit(1)


def check_machine() -> None:
    """Check Python, system and disk; if one does not suffice, end with the remedy."""
    version = sys.version_info[:2]
    if not OLDEST <= version <= NEWEST:
        fail(
            f"Python {version[0]}.{version[1]} cannot be used: Pawl needs 3.11 to 3.13. Install one"
            " and run `make install PYTHON=python3.11`"
        )
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        fail("the packages are locked for Linux on x86-64 only: install Pawl on such a machine")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail("this Python has no module venv: install it (Debian: apt install python3-venv)")
    free = shutil.disk_usage(ROOT).free / GIB
    if free < DISK_GIB:
        fail(f"{free:.1f} GiB are free on this disk, {DISK_GIB} are needed: delete files")


def fingerprint(inputs: "tuple[str, ...]") -> str:
    """Return a hash of this Python and of the files that an installation depends on."""
    digest = hashlib.sha256(sys.version.encode())
    for name in inputs:
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def is_current(stamp: str, wanted: str) -> bool:
    """Return whether an installation left the fingerprint `wanted` in the file `stamp`."""
    if not os.path.exists(stamp):
        return False
    with open(stamp) as file:
        return file.read() == wanted


def run(step: str, *command: str, env: "dict[str, str] | None" = None) -> None:
    """Print the name of a step and run its command; if that fails, end with status 1."""
    print("pawl: " + step, flush=True)
    status = subprocess.call(command, env=env, cwd=ROOT)
    if status:
        fail(f"{step} failed (exit status {status}); the reason is above")


def torch_source(gpu: bool) -> "tuple[dict[str, str], list[str]]":
    """Return the environment and the options with which uv finds the right build of torch.

    The CPU build comes from the folder that this machine's `find-links` setting names, or else from
    PyTorch's index. uv does not read pip's settings, so they are passed on.
    """
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    if not links:
        configured = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        links = configured.stdout.decode().strip()
    environment = dict(os.environ)
    if links and not gpu:
        environment["UV_FIND_LINKS"] = ",".join(links.split())
        return environment, []
    return environment, ["--torch-backend", "auto" if gpu else "cpu"]


def install_packages(uv: str, gpu: bool) -> None:
    """Create `.venv` if there is none, and install Pawl's dependencies in locked versions."""
    python = os.path.join(VENV, "bin", "python")
    if not os.path.exists(python):
        run("making .venv", sys.executable, "-m", "venv", VENV)
    run("installing uv", python, "-m", "pip", "install", "--quiet", UV)
    environment, backend = torch_source(gpu)
    lock = os.path.join(ROOT, "requirements", "gpu.txt" if gpu else "cpu.txt")
    run(
        "installing the locked packages (a few GiB: this can take minutes)",
        *(uv, "pip", "install", "--no-deps", *backend, "--compile-bytecode", "-r", lock),
        env=environment | {"VIRTUAL_ENV": VENV},
    )


def install_pawl(uv: str, gpu: bool) -> None:
    """Install Pawl itself in editable form: what runs is the sources of this checkout."""
    run(
        "installing Pawl",
        *(uv, "pip", "install", "--no-deps", "--quiet", "-e", "."),
        *([] if gpu else ["-e", "plugins/cpu_lora"]),
        env=dict(os.environ) | {"VIRTUAL_ENV": VENV},
    )


def main() -> None:
    """Check the machine, and install what is missing."""
    check_machine()
    wanted = fingerprint(INPUTS)
    if is_current(STAMP, wanted):
        return
    gpu = shutil.which("nvidia-smi") is not None
    uv = os.path.join(VENV, "bin", "uv")
    if os.path.exists(STAMP):
        os.remove(STAMP)
    install_packages(uv, gpu)
    install_pawl(uv, gpu)
    with open(STAMP, "w") as file:
        file.write(wanted)
    print("pawl: installed; the command is .venv/bin/pawl", flush=True)


if __name__ == "__main__":
    main()
