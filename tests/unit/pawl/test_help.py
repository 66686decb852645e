"""The help of each command is wrapped where the terminal ends, not where the source is."""

import typer.main
from typer import Context
from typer.core import TyperGroup

from pawl.cli import app


def helps(group: TyperGroup, name: str) -> dict[str, str]:
    """Return the help of a group's commands, by what is typed."""
    texts: dict[str, str] = {}
    context = Context(group)
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        assert command is not None
        if isinstance(command, TyperGroup):
            texts |= helps(command, f"{name} {verb}")
        else:
            texts[f"{name} {verb}"] = command.help or ""
    return texts


def test_no_paragraph_of_a_commands_help_is_broken_into_lines() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    texts = helps(command, "pawl")
    assert {"pawl up", "pawl policies retrain", "pawl keys create"} <= texts.keys()
    assert all(texts.values())
    broken = [name for name, text in texts.items() if "\n" in text.replace("\n\n", "")]
    assert broken == []
