"""Compile the proxy when a wheel of Pawl is built; hatchling calls this hook.

Cython translates each module into a C extension of the same behaviour; a call then takes about
a tenth less time (docs/decisions/028-compiled.md). A checkout always runs its sources: an
editable installation compiles nothing, and no extension is ever put beside a source
(docs/decisions/037-compiled-in-wheels-only.md). Without a C compiler or Python's headers the
wheel holds the sources alone.

The attributes of most classes get places in C's layout (`class_layouts.py`), as if each class were
declared to Cython in a `.pxd` file beside its source.

Compiling takes minutes. Where `COMPILED_PROXY_CACHE` names a folder, each module's extension is
kept there under a hash of all that it follows from, and only what changed is compiled again.
`COMPILED_PROXY_OPTIMIZATION` replaces the C compiler's `-O2`: `-O0` takes a third of the time, for
those who test what Cython made of the sources (docs/decisions/037-compiled-in-wheels-only.md).
"""

import hashlib
import os
import runpy
import shlex
import shutil
import sys
import sysconfig
import tempfile
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE: Final = "proxy"
# These stay Python. pydantic must see the settings' class as Python defines it; and compiled code
# never lets another thread have the GIL, so that a long conversation must be read by a loop of
# Python's (docs/decisions/030-limits-on-what-is-parsed.md).
LEFT_AS_THEY_ARE: Final = ("__init__.py", "settings.py", "contents.py", "texts.py", "fields.py")
CACHE: Final = "COMPILED_PROXY_CACHE"
OPTIMIZATION: Final = os.environ.get("COMPILED_PROXY_OPTIMIZATION", "-O2")
OPTIONS: Final = [OPTIMIZATION, "-g0", "-Wno-array-bounds", "-Wno-unused-function"]
# Otherwise Cython would enforce annotations as types, and limit ints to those of C. Nothing of the
# proxy's is pickled.
DIRECTIVES: Final = {"language_level": "3", "annotation_typing": False, "auto_pickle": False}


class Compiled(BuildHookInterface[Any]):  # type: ignore[misc]
    """Add compiled extensions to a wheel, each beside its source."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the sources in a folder of their own, and add the extensions to the wheel.

        Args:
            version: `standard` or `editable`; only the former is compiled.
            build_data: hatchling's description of the wheel, which is completed.
        """
        if version != "standard":
            return
        missing = _missing()
        if missing:
            self.app.display_warning(
                f"the proxy is not compiled, and about a tenth slower: there is no {missing}"
            )
            return
        self._work = tempfile.TemporaryDirectory(prefix="pawl-build-")
        built = Path(self._work.name)
        _compile(Path(self.root), built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"] |= {
            str(path): path.relative_to(built).as_posix() for path in built.rglob(f"*{_suffix()}")
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the folder of the extensions: the wheel is complete."""
        if hasattr(self, "_work"):
            self._work.cleanup()


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


def _compile(root: Path, built: Path) -> None:
    """Compile the package of the checkout `root`; the extensions come to lie in `built`/proxy."""
    # In a copy, which gets the layouts. Paths are relative to it: they are what tracebacks show.
    copy = built / "sources"
    shutil.copytree(
        root / PACKAGE, copy / PACKAGE, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    # Before the working directory changes: it may be a relative path.
    cache = Path(os.environ[CACHE]).absolute() if os.environ.get(CACHE) else None
    with chdir(copy):
        sources = [
            path
            for path in sorted(Path(PACKAGE).rglob("*.py"))
            if path.name not in LEFT_AS_THEY_ARE
        ]
        # hatchling loads this file by its path alone, so that the other cannot be imported.
        layouts = runpy.run_path(str(root / "class_layouts.py"))["layouts"]
        for path in sources:
            path.with_suffix(".pxd").write_text(layouts(path.read_text()))
        kept = {path: _kept(path, cache) for path in sources}
        _compile_all([path for path in sources if not _restored(kept[path], path, built)], built)
        for path, cached in kept.items():
            _keep(built / path.with_suffix(_suffix()), cached)


def _kept(source: Path, cache: Path | None) -> Path | None:
    """Return where the cache has a module's extension, or None without a cache."""
    if cache is None:
        return None
    from Cython import __version__ as cython

    compiler = [os.environ.get(name) for name in ("CC", "CFLAGS", "LDFLAGS")]
    machine = f"{sys.version} {_suffix()} {sysconfig.get_platform()} {compiler}"
    digest = hashlib.sha256(f"{source} {machine} {cython} {OPTIONS} {DIRECTIVES} ".encode())
    digest.update(source.read_bytes())
    digest.update(source.with_suffix(".pxd").read_bytes())
    return cache / digest.hexdigest()


def _restored(cached: Path | None, source: Path, built: Path) -> bool:
    """Copy a module's extension from the cache, and return whether it is there."""
    if cached is None or not cached.exists():
        return False
    target = built / source.with_suffix(_suffix())
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy(cached, target)
    except FileNotFoundError:
        # Another build has just deleted it, as nobody had used it for long.
        return False
    # Used: what is not for long may be deleted. A cache that can only be read is one all the same.
    with suppress(OSError):
        os.utime(cached)
    return True


def _keep(extension: Path, cached: Path | None) -> None:
    """Copy an extension to the cache, where it is whole or not there.

    A cache that takes nothing costs the next build its time, and this one nothing.
    """
    if cached is None or cached.exists():
        return
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            file.write(extension.read_bytes())
        Path(file.name).replace(cached)


def _compile_all(sources: list[Path], built: Path) -> None:
    """Compile these modules; their paths are relative to the working directory."""
    if not sources:
        return
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    work = tempfile.mkdtemp(dir=built)
    cores = os.cpu_count() or 1
    modules = [
        Extension(".".join(path.with_suffix("").parts), [str(path)], extra_compile_args=OPTIONS)
        for path in sources
    ]
    extensions = cythonize(
        modules, nthreads=cores, compiler_directives=DIRECTIVES, build_dir=work, quiet=True
    )
    command = build_ext(Distribution({"name": PACKAGE, "ext_modules": extensions}))
    command.build_lib = str(built)
    command.build_temp = work
    command.parallel = cores
    command.ensure_finalized()
    command.run()
    shutil.rmtree(work)
