"""Write a page of figures: its own words stay, the figures between its marks are replaced."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.proxy.tables import Rows

PAGE = Path("docs/explanation/benchmarks.md")
PICTURE = Path("docs/images/benchmarks.png")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


class NoMarks(Exception):
    """Report that the page has no lines that mark where the figures begin and end."""


def with_figures(page: str, tables: Sequence[Rows], machine: str, picture: Path = PICTURE) -> str:
    """Return the page with its figures replaced by these, and `picture` from the images folder.

    Raises:
        NoMarks: see there.
    """
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise NoMarks(f"the page needs a line {BEGIN} and a line {END}")
    parts = [f"Measured on {machine}.", f"![the figures as a picture](../images/{picture.name})"]
    parts += [f"## {table.title}\n\n{table.markdown()}" for table in tables]
    body = "\n\n".join(parts)
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"
