"""`pawl policies`: the policies, their versions, and what evaluation says of them."""

import asyncio
from typing import Annotated

import typer

from pawl.settings import StackSettings, read_settings

app = typer.Typer(no_args_is_help=True, help="Look at the policies and their versions.")

PolicyName = Annotated[str, typer.Argument(help="Name of the policy.", show_default=False)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON lines on a terminal too, not a table.")
]


@app.command()
def show(name: PolicyName, as_json: AsJson = False) -> None:
    """Show a policy's versions: their states, and the rewards of their evaluation.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it. `mean` is the mean reward of the version's episodes of the `eval` split; `low` and
    `high` are its 95 % interval: Wilson's where all rewards are 0 or 1, else Student's.

    Status 2: there is no such policy.
    """
    from pawl.policies.show import versions_of, write

    async def look() -> None:
        from pawl.stack.database import open_engine

        async with open_engine(read_settings(StackSettings)) as engine:
            write(await versions_of(engine, name), as_json=as_json)

    asyncio.run(look())
