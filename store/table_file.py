"""Read a TOML file that is a list of tables of one kind: `[[policy]]`, `[[upstream]]`.

Parsing is pure; `text_of` reads the file. An error names the file, the table and the key, and says
what to write instead.
"""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

Spec = TypeVar("Spec", bound=BaseModel)


class TableFile(Generic[Spec]):
    """Define one kind of such a file: what its tables hold, and how its errors are worded."""

    def __init__(
        self,
        spec: type[Spec],
        table: str,
        *,
        thing: str,
        remedies: Mapping[str, str],
        error: type[Exception],
        setting: str,
        unset: str,
    ) -> None:
        """Store the kind.

        Args:
            spec: the model of one table.
            table: the tables' name.
            thing: what a table describes, in a message.
            remedies: what to write, by key; a key whose checks name the remedy may be missing.
            error: what is raised for a file that cannot be used.
            setting: the variable that names the file.
            unset: what unsetting it does, in a message.
        """
        self._spec = spec
        self._table = table
        self._thing = thing
        self._remedies = remedies
        self._error = error
        self._setting = setting
        self._unset = unset
        fields: dict[str, Any] = {table: Annotated[tuple[spec, ...], Field(min_length=1)]}  # type: ignore[valid-type]
        self._file = create_model(
            "_File", __config__=ConfigDict(extra="forbid", frozen=True), **fields
        )

    def text_of(self, path: Path) -> str:
        """Return the file's text.

        Raises:
            the kind's error: the file cannot be read.
        """
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(
                f"{self._setting} names {path}, which cannot be read: {error}. Unset it"
                f" {self._unset}"
            ) from error

    def parse(self, text: str, where: str) -> tuple[Spec, ...]:
        """Return the tables in `text`; `where` names the file in messages.

        Raises:
            the kind's error: the text is not TOML, or a value in it is invalid.
        """
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self._error(f"{where} is not TOML: {error}") from error
        try:
            specs: tuple[Spec, ...] = getattr(self._file.model_validate(values), self._table)
        except ValidationError as error:
            # Of a list whose tables are invalid, pydantic also says that it is too short.
            every = error.errors()
            details = [one for one in every if one["type"] != "too_short"] or every
            problems = "; ".join(self._problem(detail, values) for detail in details)
            raise self._error(f"{where}: {problems}") from error
        names = [getattr(spec, "name", None) for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise self._error(
                    f"{where}: two tables [[{self._table}]] are named {name!r}; give each a name of"
                    " its own"
                )
        return specs

    def _problem(self, detail: Any, values: Mapping[str, Any]) -> str:
        """Return the message for one of pydantic's `ErrorDetails`."""
        path = [part for part in detail["loc"] if not isinstance(part, int)]
        table, key = self._named(detail["loc"], values), ".".join(path[1:])
        if detail["type"] == "extra_forbidden":
            return self._unknown(table, path)
        if not table:
            return f"there is no table [[{self._table}]]; write one for each {self._thing}"
        # Our own checks name the remedy themselves; pydantic's do not, so it is added to theirs.
        message = detail["msg"].removeprefix("Value error, ")
        what = self._remedies.get(key) or (self._remedies.get(path[1]) if key else None)
        remedy = f"; write {what}" if what else ""
        return f"{table}: {key}: {message}{remedy}" if key else f"{table}: {message}"

    def _unknown(self, table: str, path: Sequence[str]) -> str:
        """Return the message for a key that is not known; `path` leads to it from the file."""
        if not path[1:]:
            return f"unknown key {path[0]!r}: every {self._thing} is a table [[{self._table}]]"
        return f"{table}: unknown key {'.'.join(path[1:])!r}: {instead(self._spec, path[1:])}"

    def _named(self, loc: Sequence[str | int], values: Mapping[str, Any]) -> str:
        """Return a table's name for a message, or its number if it has none."""
        if len(loc) < 2 or not isinstance(loc[1], int):
            return ""
        table = values[self._table][loc[1]]
        name = table.get("name") if isinstance(table, dict) else None
        return (
            f"{self._table} {name!r}"
            if isinstance(name, str)
            else f"{self._table} number {loc[1] + 1}"
        )


def instead(spec: type[BaseModel], path: Sequence[str]) -> str:
    """Return what an unknown key may have been meant for, to which `path` leads within `spec`."""
    known = list(_model_at(spec, path[:-1]).model_fields)
    near = get_close_matches(path[-1], known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _model_at(spec: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """Return the model of a table within a table, to which `path` leads."""
    names = iter(path)
    for name in names:
        annotation = spec.model_fields[name].annotation
        if get_origin(annotation) is dict:
            # Its keys are the user's.
            next(names, None)
        kinds = (annotation, *get_args(annotation))
        spec = next(one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel))
    return spec
