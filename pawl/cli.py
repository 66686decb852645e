"""Put the commands together, run one, and report what is expected in one line.

Each command imports only what it needs, so that none starts slower for the sake of another.
"""

from collections.abc import Iterable
from inspect import getdoc
from typing import Final

import typer
from typer.models import CommandInfo

from pawl.commands.common import fail
from pawl.commands.deleting import app as episodes
from pawl.commands.episodes import credit, export
from pawl.commands.judging import judge
from pawl.commands.keys import app as keys
from pawl.commands.local import demo, example, up
from pawl.commands.moving import freeze, promote, retrain, rollback
from pawl.commands.policies import app as policies
from pawl.commands.processes import proxy, steward, trainer
from pawl.commands.records import migrate, spool
from pawl.commands.rollout import rollout
from pawl.logs import configure_logging
from pawl.settings import UnreadSettings
from store.errors import StoreError

# In the order of the help.
COMMANDS: Final = (
    proxy,
    trainer,
    steward,
    up,
    demo,
    example,
    rollout,
    export,
    judge,
    credit,
    spool,
    migrate,
)

app = typer.Typer(
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
for command in COMMANDS:
    app.command()(command)
for verb in (promote, rollback, retrain, freeze):
    policies.command()(verb)


def wrap_to_the_terminal(commands: Iterable[CommandInfo]) -> None:
    """Let the help of commands be wrapped where the terminal ends, and not where the source does.

    typer keeps the line breaks of a docstring, but for those of its first paragraph.
    """
    for one in commands:
        paragraphs = (getdoc(one.callback) or "").split("\n\n")
        one.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


for group in (app, episodes, policies, keys):
    wrap_to_the_terminal(group.registered_commands)
app.add_typer(episodes, name="episodes")
app.add_typer(policies, name="policies")
app.add_typer(keys, name="keys")


def main() -> None:
    """Run the command line; report an expected failure in one line, without a traceback."""
    from proxy.errors import ProxyError

    configure_logging()
    try:
        app()
    except (UnreadSettings, StoreError, ProxyError) as error:
        fail(str(error))
    except Exception as error:
        if not _is_database_away(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        fail(f"the database went away, or cannot be reached: {reason:.200}")


def _is_database_away(error: Exception) -> bool:
    from store.connection.availability import is_unavailable

    # An OSError of a connection is Python's own, and names no file.
    is_other = isinstance(error, OSError) and (
        error.filename is not None or type(error).__module__ != "builtins"
    )
    return is_unavailable(error) and not is_other


if __name__ == "__main__":
    main()
