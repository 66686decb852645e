"""Commands that take their options as one record."""

from typing import Annotated

import typer
from typer.testing import CliRunner

from pawl.commands.common import takes
from store.records import Record


class Wanted(Record, frozen=True, kw_only=True):
    words: Annotated[list[str] | None, typer.Argument(help="What to say.")] = None
    times: Annotated[int, typer.Option("--times", "-n", min=1, help="How often.")] = 1
    loud: Annotated[bool, typer.Option("--loud", help="In capitals.")] = False


app = typer.Typer()


@app.command()
@takes(Wanted)
def say(flags: Wanted) -> None:
    """Say something."""
    line = " ".join(flags.words or ["nothing"])
    for _ in range(flags.times):
        typer.echo(line.upper() if flags.loud else line)


def test_fields_are_options_and_their_defaults_hold() -> None:
    run = CliRunner()
    assert run.invoke(app, []).output == "nothing\n"
    assert run.invoke(app, ["a", "b", "-n", "2", "--loud"]).output == "A B\nA B\n"


def test_limits_and_help_are_those_of_the_fields() -> None:
    run = CliRunner()
    assert run.invoke(app, ["--times", "0"]).exit_code == 2
    assert "Say something." in (shown := run.invoke(app, ["--help"]).output)
    assert "How often." in shown
