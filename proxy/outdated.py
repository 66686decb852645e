"""Whether what was compiled of this package is what its sources say.

`make install` compiles it (hatch_build.py); a source that is changed after that would not be
what runs.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def outdated(package: Path = Path(__file__).parent) -> list[Path]:
    """Sources that are newer than what they were compiled to."""
    found = []
    for source in package.rglob("*.py"):
        compiled = source.with_suffix(EXTENSION_SUFFIXES[0])
        if compiled.exists() and compiled.stat().st_mtime < source.stat().st_mtime:
            found.append(source)
    return sorted(found)
