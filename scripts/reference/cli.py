"""Write the page of commands: every command and option of `pawl`, with the exit statuses."""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import typer

from pawl.cli import app

from .markdown import bullets, code, page, paragraph, sentence, table_with_notes

INTRODUCTION: Final = """
`pawl --help` lists the commands, and `pawl COMMAND --help` explains one. Results go to standard
output; progress and errors go to standard error. The environment variables that a command reads
are in [settings.md](settings.md).
"""
STATUSES: Final = {
    0: "Success; for `pawl proxy`, `pawl trainer` and `pawl up` also the end after SIGTERM or "
    "Ctrl-C.",
    1: "`pawl judge` could not judge some episodes, or did not score some sentinels; runs of `pawl "
    "rollout` failed or could not be judged; records of what `pawl episodes delete` deleted still "
    "wait in the spool; `pawl policies check` found faults; or a failure that Pawl does not "
    "expect, with a traceback.",
    2: "An expected failure, such as a wrong setting, a port in use or an unusable recipe. One "
    "line on standard error, `pawl: MESSAGE`, says what happened and what to do. Usage errors "
    "(an unknown option, a value out of range) exit with 2, too.",
    3: "A judge has drifted: `pawl judge --sentinels-once` and `pawl sentinels show`.",
    130: "The command was stopped with Ctrl-C before its end.",
}
HEAD: Final = ("option", "default, limits", "meaning")


class Parameter(NamedTuple):
    """Describe an option or argument: how it is written, its default and limits, and its help."""

    usage: str
    limits: str
    help: str


def cli_page() -> str:
    """Return `cli.md`."""
    return page(
        "Command line",
        paragraph(INTRODUCTION),
        "## Exit statuses",
        bullets(f"`{status}`: {meaning}" for status, meaning in STATUSES.items()),
        *(_command(name, command) for name, command in commands().items()),
    )


def commands() -> dict[str, Any]:
    """Return the commands of `pawl` by name, in the order of its help, each of a group apart."""
    return dict(_commands(typer.main.get_command(app)))


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def parameters(command: Any) -> list[Parameter]:
    """Return a command's arguments and options, as its own `--help` shows them."""
    context = command.make_context(command.name, [], resilient_parsing=True)
    records = ((one, one.get_help_record(context)) for one in command.params)
    return [_parameter(one, *record) for one, record in records if record is not None]


def _parameter(parameter: Any, usage: str, text: str) -> Parameter:
    """Split a help record: typer appends default and limits to the text, in brackets."""
    meaning = parameter.help or ""
    extra = text.removeprefix(meaning).strip().removeprefix("[").removesuffix("]")
    extra = re.sub(r"\b([\d.]+)<=x<=([\d.]+)", r"\1 to \2", extra.replace("default: ", ""))
    limits = extra.replace("x>=", "≥ ").replace("x<=", "≤ ").replace(";", ",")
    return Parameter(usage, limits, meaning)


def _command(name: str, command: Any) -> str:
    rows = [(code(one.usage), one.limits, one.help) for one in parameters(command)]
    blocks = [f"## `pawl {name}`", paragraph(sentence(command.help or ""))]
    if rows:
        blocks.append(table_with_notes(HEAD, rows))
    return "\n\n".join(blocks)
