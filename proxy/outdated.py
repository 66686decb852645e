"""Finds sources of this package that changed since they were compiled.

`make install` compiles the package (hatch_build.py) and saves each source's hash. A source that
was changed after that is not what runs.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Final

NOTED: Final = "compiled.json"


def hashes(package: Path) -> dict[str, str]:
    """Return the SHA-256 of each source as hex digits, by its path within the package."""
    return {
        source.relative_to(package).as_posix(): sha256(source.read_bytes()).hexdigest()
        for source in sorted(package.rglob("*.py"))
    }


def outdated(package: Path = Path(__file__).parent) -> list[Path]:
    """Return the sources that were changed, added or deleted since the package was compiled.

    If nothing was compiled there are none. Extensions without saved hashes come from a compilation
    that did not finish: every source counts as changed then.
    """
    noted = package / NOTED
    if noted.exists():
        compiled = json.loads(noted.read_text())
    elif next(package.rglob("*.so"), None) is None:
        return []
    else:
        compiled = {}
    now = hashes(package)
    names = sorted({*compiled, *now})
    return [package / name for name in names if compiled.get(name) != now.get(name)]
