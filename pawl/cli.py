"""The command line: find a command, run it, and report expected failures in one line."""

from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from pawl.logs import configure_logging
from pawl.processes import wait_passively
from pawl.settings import UnreadSettings
from store import __version__
from store.errors import StoreError

# In the order of the help: `module:function`, or `module:app` for a group of commands.
COMMANDS: Final = {
    "proxy": "pawl.commands.processes:proxy",
    "trainer": "pawl.commands.processes:trainer",
    "controller": "pawl.commands.processes:controller",
    "adapters": "pawl.commands.processes:adapters",
    "console": "pawl.commands.processes:console",
    "up": "pawl.commands.local:up",
    "demo": "pawl.commands.local:demo",
    "example": "pawl.commands.local:example",
    "doctor": "pawl.commands.doctor:doctor",
    "plan": "pawl.commands.plan:plan",
    "run": "pawl.commands.run:run",
    "rollout": "pawl.commands.rollout:rollout",
    "evaluate": "pawl.commands.evaluate:evaluate_command",
    "export": "pawl.commands.episodes:export",
    "train": "pawl.commands.train:train",
    "judge": "pawl.commands.judging:judge",
    "credit": "pawl.commands.credit:credit",
    "spool": "pawl.commands.spool:spool",
    "migrate": "pawl.commands.processes:migrate",
    "episodes": "pawl.commands.episodes:app",
    "policies": "pawl.commands.policies:app",
    "keys": "pawl.commands.keys:app",
}


class Commands(TyperGroup):
    """The group of all commands; imports only the module of the command that runs, to save time."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        target = getattr(import_module(module), name)
        is_group = isinstance(target, typer.Typer)
        loaded = target if is_group else typer.Typer(add_completion=False)
        if not is_group:
            loaded.command(cmd_name)(target)
        for command in loaded.registered_commands:
            # typer keeps a docstring's line breaks except in its first paragraph; remove them, as
            # the help must wrap at the terminal's width.
            paragraphs = (getdoc(command.callback) or "").split("\n\n")
            command.help = "\n\n".join(" ".join(text.split("\n")) for text in paragraphs)
        if not is_group:
            return typer.main.get_command(loaded)
        group = typer.main.get_group(loaded)
        group.name = cmd_name
        return group


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Train the model behind your agents while they work.\n\n"
        "Start everything on this machine with `pawl up`, and set OPENAI_BASE_URL to the address "
        "that it prints. Settings are PAWL_* variables and DATABASE_URL, from the environment or "
        "`.env`; an unknown PAWL_* variable is an error.\n\n"
        "Exit status of every command: 0 if it did its work; 2 if it could not, for the reason "
        "given on standard error. The commands' own help names further ones."
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pawl {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; report an expected failure in one line, without a traceback."""
    from pawl.commands.common import fail
    from proxy.errors import ProxyError

    configure_logging()
    wait_passively()
    try:
        app()
    except (UnreadSettings, StoreError, ProxyError) as error:
        fail(str(error))
    except Exception as error:
        from store.database import explain_error, prevents_all_storing

        # An OSError from a connection to PostgreSQL has a built-in type and names no file.
        if isinstance(error, OSError) and error.filename is not None:
            fail(
                f"{error.filename} cannot be used: {error.strerror}: name another file, or correct"
                " this one"
            )
        is_from_library = isinstance(error, OSError) and (
            type(error).__module__ not in ("builtins", "socket", "ssl")
        )
        if is_from_library or not prevents_all_storing(error):
            raise
        fail(f"the database cannot be used: {explain_error(error)}")


if __name__ == "__main__":
    main()
