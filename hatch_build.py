"""Compiles the proxy when Pawl is built or installed; hatchling calls this hook.

Cython translates each module into a C extension of the same behaviour; a call then takes about
a tenth less time (docs/decisions/028-compiled.md). Without a C compiler or Python's headers
nothing is compiled, and the proxy runs from its sources.
"""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from proxy.outdated import NOTED, hashes, outdated

PACKAGE: Final = "proxy"
# These stay Python: pydantic must see the settings' class as Python defines it, and the check
# for outdated extensions must not itself be one.
LEFT_AS_THEY_ARE: Final = ("__init__.py", "settings.py", "outdated.py")
# Folder of the generated C, kept so that only changed sources are translated again.
WORK: Final = ".cython"
OPTIONS: Final = ["-O2", "-g0", "-Wno-array-bounds", "-Wno-unused-function"]


class Compiled(BuildHookInterface[Any]):  # type: ignore[misc]
    """The build hook; it puts extensions beside their sources, where editable installs use them."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile changed sources, and add the extensions to the wheel.

        Args:
            version: `standard` or `editable`; both are compiled alike.
            build_data: hatchling's description of the wheel, which is completed.
        """
        package = Path(self.root, PACKAGE)
        missing = _missing()
        if missing:
            _forget(package)
            self.app.display_warning(
                f"the proxy is not compiled, and about a tenth slower: there is no {missing}"
            )
            return
        _compile(package)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [f"{PACKAGE}/**/*{_suffix()}", f"{PACKAGE}/{NOTED}"]


def _suffix() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _missing() -> str:
    """Return what this machine lacks for a compilation; an empty text if nothing."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python headers (Python.h)"
    return ""


def _forget(package: Path) -> None:
    """Delete extensions of an earlier build: they may be outdated, and nothing can rebuild them."""
    (package / NOTED).unlink(missing_ok=True)
    for extension in package.rglob(f"*{_suffix()}"):
        extension.unlink()


def _compile(package: Path) -> None:
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    os.chdir(package.parent)
    for changed in outdated(package):
        if changed.exists():
            # Cython goes by modification times, and a file from elsewhere may look old.
            changed.touch()
        else:
            changed.with_suffix(_suffix()).unlink(missing_ok=True)
    # Deleted first and written last: a build that breaks off must not count as complete.
    noted = package / NOTED
    noted.unlink(missing_ok=True)
    sources = [
        path.relative_to(package.parent)
        for path in sorted(package.rglob("*.py"))
        if path.name not in LEFT_AS_THEY_ARE
    ]
    modules = [
        Extension(".".join(path.with_suffix("").parts), [str(path)], extra_compile_args=OPTIONS)
        for path in sources
    ]
    # Otherwise Cython would enforce annotations as types, and limit ints to those of C.
    directives = {"language_level": "3", "annotation_typing": False}
    cores = os.cpu_count() or 1
    extensions = cythonize(
        modules, nthreads=cores, compiler_directives=directives, build_dir=WORK, quiet=True
    )
    command = build_ext(Distribution({"name": PACKAGE, "ext_modules": extensions}))
    command.inplace = True
    command.build_temp = WORK
    command.parallel = cores
    command.ensure_finalized()
    command.run()
    written = noted.with_suffix(".new")
    written.write_text(json.dumps(hashes(package)))
    written.replace(noted)
