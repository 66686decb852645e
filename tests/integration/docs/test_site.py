"""The documentation as a site."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_site_has_all_pages_and_no_broken_link() -> None:
    subprocess.run(["make", "-o", "install", "site"], cwd=ROOT, check=True)
    pages = list((ROOT / "build" / "pages" / "docs").rglob("*.md"))
    assert len(pages) >= 50
    for page in pages:
        name = page.relative_to(ROOT / "build" / "pages").with_suffix("")
        folder = name.parent if name.name in ("index", "README") else name
        assert (ROOT / "build" / "site" / folder / "index.html").exists(), name
