"""Find docstrings whose first line is not an imperative sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

# The verbs that docstrings here begin with; a new one is added where it is first used.
VERBS: Final = frozenset(
    re.findall(
        r"[a-z]+",
        """
    abandon accept add adopt allow annotate answer append apply ask assemble assign attach attend
    avoid batch be begin bet bind bound break bring budget build cache call cancel capture carry
    centre change charge check choose claim clean clear close collect combine communicate compare
    compile
    compose compress compute configure connect consume continue control convert copy count create
    credit cut decide declare decode define delete derive describe detach detect die discard
    distinguish divide do downgrade drain draw drop encode end enter estimate evaluate exclude
    exempt expand expire explain explore export express extract fail feed fetch fill filter find
    finish fit fix flush follow force forget fork format forward free freeze gather generate give go
    group guard hand handle have hide hold identify ignore import index ingest insert install
    interrupt join judge keep kill know lay lead learn leave let limit link list load lock log look
    make map mark mask match measure merge migrate mix mount move multiply name note notice observe
    open order overwrite pack pair parse pass patch pause place plan play post prefix prepare print
    probe profile promise promote prove provide publish put query queue raise read rebuild receive
    record recover redact reduce refresh refuse register rehearse reject release remember remove
    rename render repeat replace replay reply report request reserve reset resolve restart restore
    resume retire retry return rewrite roll round route run sample save say scale schedule score
    script seal search select send serve set settle shape shard share show shrink shut simulate skip
    sleep sort speak split spool stage stand start state stop store stream subtract sum sweep switch
    take tell test throw time title track train transform translate treat try turn undo unload
    unlock unpack update upgrade use validate verify wait walk warn watch weigh word work wrap write
    yield
        """,
    )
)
# What a phrase or a clause begins with, and never a request to do something.
HEADLESS: Final = frozenset(
    re.findall(
        r"[a-z]+",
        """
    a all an any as both each every for from her his how if in it its no none nothing of on one our
    same see so some that the their there these this those two until was what when where whether
    which while who whose why with without
        """,
    )
)


class Opening(NamedTuple):
    """Name the place of a docstring, with its first line."""

    place: str
    line: str

    @property
    def is_headless(self) -> bool:
        """Return whether the line is a phrase or a clause."""
        return _words(self.line)[0] in HEADLESS

    @property
    def is_imperative(self) -> bool:
        """Return whether the line begins with a verb that is not followed as a noun would be."""
        first, second = [*_words(self.line), "", ""][:2]
        return first in VERBS and second != "of" and not self.line.split()[0].endswith(":")


def openings(path: Path, root: Path) -> Iterator[Opening]:
    """Yield the first line of each docstring of a file, under its path below `root`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = "" if isinstance(node, ast.Module) else f":{node.name}"
            if text := ast.get_docstring(node):
                yield Opening(f"{path.relative_to(root)}{name}", text.splitlines()[0])


def _words(line: str) -> list[str]:
    return [word.strip(".,:;`").lower() for word in line.split()[:2]] or [""]
