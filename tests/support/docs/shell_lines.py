"""Check shell lines of documents without running them: do their commands and options exist?"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer
from typer.core import TyperGroup

from pawl.cli import app
from pawl.settings import known_variables
from tests.conftest import ROOT

# Programs of the system, or of the reader, whose options are not ours to check.
OTHERS: Final = frozenset(
    {
        "claude",
        "createdb",
        "curl",
        "docker",
        "echo",
        "mkdir",
        "nginx",
        "pg_dump",
        "pg_restore",
        "pip",
        "rm",
    }
    | {"accelerate", "ray", "uv", "vllm"}
)
# Programs that a reader has.
THEIR_OWN: Final = frozenset({"my_agent.py", "my_judge.py"})
JOINTS: Final = frozenset({"|", "&&", ";", "||"})
REDIRECTS: Final = frozenset({">", ">>", "<"})
ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=")
# A variable that takes what a command prints.
SUBSTITUTION: Final = re.compile(r"[A-Za-z_]\w*=\$\((.+)\)")

PAWL: Final = typer.main.get_command(app)
TARGETS: Final = frozenset(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class NoSuchCommand(Exception):
    """Report a line of a document that does not work as it is written."""


def why_wrong(text: str, folder: Path = ROOT) -> str:
    """Return what does not work in a shell block that is run in `folder`; empty: nothing.

    That is a program, sub-command, option, target, file or setting that does not exist.
    """
    try:
        for line in text.replace("\\\n", " ").splitlines():
            for words in commands(line):
                check_command(words, folder)
    except NoSuchCommand as error:
        return str(error) or repr(error)
    return ""


def commands(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line, without comments and redirections."""
    printed = SUBSTITUTION.fullmatch(line.strip())
    line = line if printed is None else printed[1]
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in lexer:
        if word in JOINTS:
            yield words
            words = []
        elif word in REDIRECTS:
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(word)
    if words:
        yield words


def check_command(words: list[str], folder: Path) -> None:
    """Check one command."""
    while words and ASSIGNMENT.match(words[0]):
        check_variable(words.pop(0))
    if not words:
        return
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    match program, arguments:
        case "export", _:
            for assignment in arguments:
                check_variable(assignment)
        case "pawl", _:
            check_pawl(arguments)
        case "python", []:
            return
        case "python", ["-m", module, *_]:
            place = ROOT.joinpath(*module.split("."))
            is_ours = place.is_dir() or place.with_suffix(".py").is_file()
            require(is_ours or module in ("build", "venv", "pip", "pytest"), f"no module {module}")
        case "python", [script, *_]:
            require(script in THEIR_OWN or (folder / script).is_file(), f"no program {script}")
        case "make", _:
            check_make(arguments)
        case "cp", _:
            source = next(each for each in arguments if not each.startswith("-"))
            require("$" in source or (folder / source).exists(), f"no file {source}")
        case _:
            require(program in OTHERS, f"no program {program!r} is known here")


def require(holds: bool, message: str) -> None:
    """Raise NoSuchCommand unless it `holds`."""
    if not holds:
        raise NoSuchCommand(message)


def check_variable(assignment: str) -> None:
    """Check the name in `NAME=value`; those of other programs are not known."""
    name = assignment.partition("=")[0]
    require(not name.startswith("PAWL_") or name in known_variables(), f"nothing reads {name}")


def check_pawl(arguments: list[str]) -> None:
    """Parse a line of `pawl` as it would be parsed, without running it."""
    assert isinstance(PAWL, TyperGroup)
    if not arguments:
        return
    name, rest = arguments[0], arguments[1:]
    command = PAWL.get_command(typer.Context(PAWL), name)
    if command is None:
        raise NoSuchCommand(f"pawl has no command {name!r}")
    try:
        command.make_context(f"pawl {name}", list(rest))
    except typer.Exit:
        return
    except Exception as error:  # a usage error: typer does not export their class
        raise NoSuchCommand(f"pawl {shlex.join(arguments)}: {error}") from error


def check_make(arguments: list[str]) -> None:
    """Check the targets of the Makefile, and what `pawl demo` and `pawl example` are told."""
    for word in arguments:
        name, assigned, value = word.partition("=")
        if not assigned:
            require(word in TARGETS, f"make has no target {word!r}")
        elif name == "ARGS" and arguments[0] in ("demo", "example"):
            check_pawl([arguments[0], *shlex.split(value)])
        elif name == "NAME":
            known = (ROOT / "examples" / value / "example.toml").is_file()
            require(known, f"there is no example {value!r}")
        else:
            require(name in ("ARGS", "PAWL", "PYTHON"), f"the Makefile has no use for {name}")
