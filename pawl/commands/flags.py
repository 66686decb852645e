"""Let a command that has many options take them as one record."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Flags = TypeVar("Flags")


def takes(flags: type[Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Give a command the fields of `flags` as its options.

    Typer reads a command's options from its signature. That of the command made here is the
    record's: a field's annotation says how the option is written, its default what it is without.
    """

    def make(run: Callable[[Flags], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            run(flags(**given))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__module__ = run.__module__
        command.__annotations__ = inspect.get_annotations(flags)
        command.__signature__ = inspect.signature(flags)  # type: ignore[attr-defined]
        return command

    return make
