"""Whether what was compiled of this package is what its sources say.

`make install` compiles it (hatch_build.py) and notes each source's hash; a source that is
changed after that would not be what runs.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Final

NOTED: Final = "compiled.json"


def hashes(package: Path) -> dict[str, str]:
    """The SHA-256 of each source, by its path within the package."""
    return {
        source.relative_to(package).as_posix(): sha256(source.read_bytes()).hexdigest()
        for source in sorted(package.rglob("*.py"))
    }


def outdated(package: Path = Path(__file__).parent) -> list[Path]:
    """Sources that are not what was compiled, or are gone; none where nothing was compiled.

    Extensions without a note are of a compilation that did not end: of no source is it known.
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
