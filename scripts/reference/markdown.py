"""Build Markdown: tables, code spans and the notes below a table."""

import re
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Final

WIDTH: Final = 100
# A table's cell holds this many characters; the rest of a longer text is a note below the table.
CELL: Final = 110
# A full stop before a capital letter, a digit or a code span.
_SENTENCE_END: Final = re.compile(r"(?<=[\w)\]`”\"'])\. (?=[A-Z0-9`])")
_SHORT_CODE: Final = re.compile(r"`[^`]{1,50}`")
# Stands for a space that no line may end at.
_SPACE: Final = "\x00"
GENERATED: Final = "<!-- Generated from the code by `make docs`; do not edit by hand. -->"


def page(title: str, *blocks: str) -> str:
    """Return a whole page: title, the generator's mark, and the blocks that are not empty."""
    return "\n\n".join([f"# {title}", GENERATED, *(block for block in blocks if block)]) + "\n"


def code(text: object) -> str:
    """Return a code span."""
    return f"`{text}`"


def paragraph(text: str) -> str:
    """Return a paragraph, wrapped; a short code span is not broken."""
    return _wrapped(text)


def bullets(items: Iterable[str]) -> str:
    """Return a list, each item wrapped."""
    return "\n".join(_wrapped(item, "- ", "  ") for item in items)


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    kept = _SHORT_CODE.sub(lambda span: span[0].replace(" ", _SPACE), " ".join(text.split()))
    lines = fill(
        kept,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_SPACE, " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the characters that would end a cell are escaped."""
    lines = [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    shown = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(shown)} |"


def sentence(text: str) -> str:
    """Return `text` as a sentence: capital letter first, full stop last."""
    text = " ".join(text.split())
    first = text[:1].upper() + text[1:] if text[:2].islower() or text[1:2] == " " else text
    return first if not first or first.endswith((".", "!", "?")) else first + "."


def in_two(text: str) -> tuple[str, str]:
    """Return what of `text` a table's cell holds, and the rest, for a note.

    A short text is not split. A longer one is split after its first sentence, or, if that is
    long itself, at its first semicolon.
    """
    whole = sentence(text)
    if len(whole) <= CELL:
        return whole, ""
    first, *rest = _SENTENCE_END.split(whole, maxsplit=1)
    if len(first) > CELL and "; " in first:
        first, _, after = first.partition("; ")
        rest = [sentence(after), *rest]
    return sentence(first), " ".join(rest)


def table_with_notes(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose last cells are short; a list below it has the rest of their texts."""
    short, notes = [], []
    for *cells, text in rows:
        first, rest = in_two(text)
        short.append([*cells, first])
        if rest:
            notes.append(f"{cells[0]}: {rest}")
    return "\n\n".join([table(head, short), *([bullets(notes)] if notes else [])])
