"""Read Markdown documents: links, anchors, code blocks, and the citations in any text (pure)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FENCE: Final = re.compile(r"^ {0,3}(`{3,})(.*)$")
LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()]*\))?)\)")
HEADING: Final = re.compile(r"^#{1,6} (.+?)\s*$")
INLINE_CODE: Final = re.compile(r"`[^`\n]+`")


@dataclass(frozen=True)
class Block:
    """Hold a fenced code block: its language (the word after the fence), text, and first line."""

    page: Path
    line: int
    language: str
    text: str


def split_blocks(page: Path, text: str) -> tuple[str, list[Block]]:
    """Return the prose of a page (fenced lines emptied), and its code blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if not fence and match:
            fence, language, inside = match[1], match[2].strip(), list[str]()
            first = number + 1
        elif fence and match and match[1] == fence and not match[2].strip():
            blocks.append(Block(page, first, language, "\n".join(inside) + "\n"))
            fence = ""
        elif fence:
            inside.append(line)
            prose.append("")
            continue
        else:
            prose.append(line)
            continue
        prose.append("")
    assert not fence, f"{page}: a code block is not closed"
    return "\n".join(prose), blocks


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = LINK.sub(lambda found: found[0][1 : found[0].index("]")], heading).replace("`", "")
    kept = "".join(letter for letter in text.lower() if letter.isalnum() or letter in "-_ ")
    return kept.replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return all anchors of a page; a repeated heading gets `-1`, `-2`, … ."""
    found: dict[str, int] = {}
    for line in split_blocks(Path(), text)[0].splitlines():
        if heading := HEADING.match(line):
            name = slug(heading[1])
            found[name] = found.get(name, -1) + 1
    return set(found) | {
        f"{name}-{number}" for name, count in found.items() for number in range(1, count + 1)
    }


def links(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures, those in code left out."""
    prose = split_blocks(Path(), text)[0]
    for found in LINK.finditer(INLINE_CODE.sub(_blank, prose)):
        yield found[1]


def _blank(code: re.Match[str]) -> str:
    # A link's text may be code: only what looks like a link within code is no link.
    return code[0].replace("](", "] (")
