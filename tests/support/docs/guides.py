"""Make a page's code blocks one shell script, run as a reader would run them one after another."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.conftest import ROOT
from tests.support.docs.documents import Block, links, split_blocks

# The address on the pages; a test puts its proxy's in its place.
LISTEN: Final = "127.0.0.1:8100"
CLIENTS: Final = ROOT / ".venv-clients/bin"
NODE_MODULES: Final = ROOT / "tests/clients/node/node_modules"
CLAUDE: Final = ROOT / "tests/support/docs/claude_code.py"
SHELL: Final = "sh"
# Languages of programs: the file of one, and what runs it.
PROGRAMS: Final = {"python": ("{}.py", "python"), "js": ("{}.mjs", "node")}


class NotRun(Exception):
    """Report a code block that no test would run."""


def client_pages() -> list[Path]:
    """Return the pages about one client each, which the index names under "Connect a client"."""
    index = ROOT / "docs/index.md"
    listed = index.read_text().split("Connect a client:")[1].split("\n\n")[1]
    pages = [(index.parent / link).resolve() for link in links(listed)]
    return [page for page in pages if page.name != "clients.md"]


def write_script(page: Path, program: str, listen: str, folder: Path) -> Path:
    """Write a page's blocks into `folder` as one shell script, and return it.

    A block of shell stands as it is, so what it exports is the environment of what follows. Blocks
    of `program` between two of shell are one program; the page's other programs are left out.

    Raises:
        NotRun: a block is neither of shell nor of a known program.
    """
    lines: list[str] = []
    for number, (language, text) in enumerate(_parts(page, program)):
        if language == SHELL:
            lines.append(text)
            continue
        name, runner = PROGRAMS[language]
        file = folder / name.format(number)
        file.write_text(text.replace(LISTEN, listen))
        lines.append(f"{runner} {file.name}\n")
    script = folder / "page.sh"
    script.write_text("".join(lines).replace(LISTEN, listen))
    return script


def _parts(page: Path, program: str) -> Iterator[tuple[str, str]]:
    """Yield the page's parts in order: its language, and the text of its blocks."""
    language, texts = "", list[str]()
    for block in _blocks(page, program):
        if texts and not block.language == language == program:
            yield language, "\n".join(texts)
            texts = []
        language = block.language
        texts.append(block.text)
    yield language, "\n".join(texts)


def _blocks(page: Path, program: str) -> list[Block]:
    blocks = split_blocks(page, page.read_text())[1]
    for block in blocks:
        if block.language not in (SHELL, *PROGRAMS):
            raise NotRun(
                f"{page.name}:{block.line}: no test runs {block.language or 'plain'} blocks"
            )
    return [block for block in blocks if block.language in (SHELL, program)]


def environment(folder: Path) -> dict[str, str]:
    """Return what a page finds before its first line: the clients, and nothing of their settings.

    Node finds its packages beside the program, and `claude` is what speaks as Claude Code does.
    """
    (folder / "node_modules").symlink_to(NODE_MODULES)
    claude = folder / "claude"
    claude.write_text(f'#!/bin/sh\nexec python {CLAUDE} "$@"\n')
    claude.chmod(0o755)
    path = [str(CLIENTS), str(folder), os.environ["PATH"]]
    return {"PATH": os.pathsep.join(path), "HOME": str(folder)}
