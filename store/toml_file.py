"""Read the TOML files that people write: recipes, policies, upstreams, redaction rules, scenarios.

If a file cannot be used, the error names it and each wrong key, and says what to write there.
Parsing is pure; `text_of` reads the file.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Model = TypeVar("Model", bound=BaseModel)

# Integers in TOML have 64 bits.
_INTEGERS: Final = range(-(2**63), 2**63)
_LONGEST_TEXT: Final = 65_536
# The middle of a longer message about one key is left out.
_LONGEST_MESSAGE: Final = 600
_NO_REMEDIES: Final[Mapping[str, str]] = MappingProxyType({})


class TomlFile(Generic[Model]):
    """Define one kind of file: the model of its content, and how its errors are worded."""

    def __init__(
        self,
        model: type[Model],
        *,
        error: type[Exception],
        remedies: Mapping[str, str] = _NO_REMEDIES,
        advice: str = "",
    ) -> None:
        """Define the kind of file.

        Args:
            model: the content; its fields are the keys.
            error: the type of the exception for a file that cannot be used.
            remedies: what to write, by key; not needed for a key whose checks name the remedy.
            advice: what to do about a file that cannot be read, for messages.
        """
        self._model = model
        self._error = error
        self._remedies = remedies
        self._advice = advice

    def text_of(self, path: Path, name: str = "") -> str:
        """Return the file's text; `name` stands for the path in messages.

        Raises:
            the kind's error: the file cannot be read.
        """
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            # A ValueError is text that is not UTF-8, or a path with U+0000.
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if isinstance(error, IsADirectoryError):
                reason = "it is a folder, as Docker makes where a mounted file is missing"
            raise self._error(
                _clipped(f"{name or path} cannot be read: {reason}{self._advice}")
            ) from error

    def parse(self, text: str, where: str) -> Model:
        """Return the content of `text`; `where` names the file in messages.

        Raises:
            the kind's error: the text is not TOML, or a value in it is invalid.
        """
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self._error(_clipped(f"{where} is not TOML: {error}")) from error
        except (ValueError, RecursionError) as error:
            is_number = isinstance(error, ValueError)
            reason = "a number has too many digits" if is_number else "it nests too deep"
            raise self._error(f"{where} cannot be read: {reason}; write it shorter") from error
        problems = list(_unstorable_values(values))
        if problems:
            raise self._error(f"{where}: {'; '.join(map(_clipped, problems))}")
        try:
            return self._model.model_validate(values)
        except ValidationError as error:
            problems = [self._problem(detail, values) for detail in self._details(error)]
            raise self._error(f"{where}: {'; '.join(map(_clipped, problems))}") from error

    def _details(self, error: ValidationError) -> Sequence[Any]:
        return error.errors()

    def _problem(self, detail: Any, values: Mapping[str, Any]) -> str:
        """Return the message for one of pydantic's `ErrorDetails`."""
        path = [str(part) for part in detail["loc"]]
        key = ".".join(path)
        if detail["type"] == "extra_forbidden":
            return f"unknown key {key!r:.80}: {_suggest_key(self._model, path)}"
        return self._message(detail, key, _field_at(self._model, path))

    def _message(self, detail: Any, key: str, field: FieldInfo | None) -> str:
        # Our own checks name the remedy themselves; pydantic's do not, so it is added to theirs.
        message = detail["msg"].removeprefix("Value error, ")
        remedy = self._remedies.get(key) or self._remedies.get(key.partition(".")[0])
        if remedy is not None:
            message += f"; write {remedy}"
        elif detail["type"] != "value_error" and field is not None:
            message += _default_of(field)
        return f"{key}: {message}" if key else message


class TableFile(TomlFile[BaseModel], Generic[Model]):
    """Define a file that is a list of tables of one kind: `[[policy]]`, `[[upstream]]`."""

    def __init__(
        self,
        spec: type[Model],
        table: str,
        *,
        thing: str,
        error: type[Exception],
        remedies: Mapping[str, str],
        setting: str,
        unset: str,
    ) -> None:
        """Define the kind of file.

        Args:
            spec: the model of one table.
            table: the tables' name.
            thing: the word for the thing that a table describes, for messages.
            error: the type of the exception for a file that cannot be used.
            remedies: what to write, by key; not needed for a key whose checks name the remedy.
            setting: the environment variable that names the file.
            unset: what unsetting this variable does, for messages.
        """
        fields: dict[str, Any] = {table: Annotated[tuple[spec, ...], Field(min_length=1)]}  # type: ignore[valid-type]
        config = ConfigDict(extra="forbid", frozen=True)
        file = create_model("_File", __config__=config, **fields)
        super().__init__(file, error=error, remedies=remedies, advice=f". Unset it {unset}")
        self._spec = spec
        self._table = table
        self._thing = thing
        self._setting = setting

    def text_of(self, path: Path, name: str = "") -> str:
        """Return the file's text; messages name the setting and the path, or `name` instead.

        Raises:
            the kind's error: the file cannot be read.
        """
        return super().text_of(path, name or f"{self._setting} names {path}, which")

    def tables(self, text: str, where: str) -> tuple[Model, ...]:
        """Return the tables in `text`; `where` names the file in messages.

        Raises:
            the kind's error: the text is not TOML, a value in it is invalid, or two tables have one
                name.
        """
        specs: tuple[Model, ...] = getattr(self.parse(text, where), self._table)
        names = [getattr(spec, "name", None) for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise self._error(
                    f"{where}: two tables [[{self._table}]] are named {name!r}; give each a name of"
                    " its own"
                )
        return specs

    def _details(self, error: ValidationError) -> Sequence[Any]:
        # pydantic also reports a list whose tables are invalid as too short.
        every = error.errors()
        return [detail for detail in every if detail["type"] != "too_short"] or every

    def _problem(self, detail: Any, values: Mapping[str, Any]) -> str:
        path = [part for part in detail["loc"] if not isinstance(part, int)]
        table, key = self._table_label(detail["loc"], values), ".".join(path[1:])
        if detail["type"] == "extra_forbidden":
            if not path[1:]:
                return (
                    f"unknown key {path[0]!r:.80}: every {self._thing} is a table [[{self._table}]]"
                )
            return f"{table}: unknown key {key!r:.80}: {_suggest_key(self._spec, path[1:])}"
        if not table:
            return f"there is no table [[{self._table}]]; write one for each {self._thing}"
        return f"{table}: {self._message(detail, key, _field_at(self._spec, path[1:]))}"

    def _table_label(self, loc: Sequence[str | int], values: Mapping[str, Any]) -> str:
        """Return a table's name for a message, or its number if it has none."""
        if len(loc) < 2 or not isinstance(loc[1], int):
            return ""
        table = values[self._table][loc[1]]
        name = table.get("name") if isinstance(table, dict) else None
        is_named = isinstance(name, str)
        return f"{self._table} {name!r:.80}" if is_named else f"{self._table} number {loc[1] + 1}"


def _unstorable_values(value: object, key: str = "") -> Iterator[str]:
    """Yield a message for each text or number that PostgreSQL cannot store."""
    if isinstance(value, dict):
        for name, member in value.items():
            inner = f"{key}.{name}" if key else name
            yield from _unstorable_values(name, f"the name {inner!r:.80}")
            yield from _unstorable_values(member, inner)
    elif isinstance(value, list):
        for member in value:
            yield from _unstorable_values(member, key)
    elif isinstance(value, str) and ("\x00" in value or len(value) > _LONGEST_TEXT):
        yield f"{key} has U+0000, or more than {_LONGEST_TEXT} characters; write a shorter text"
    elif isinstance(value, int) and value not in _INTEGERS:
        yield f"{key} is an integer of more than 64 bits; write a smaller number"


def _clipped(message: str) -> str:
    if len(message) <= _LONGEST_MESSAGE:
        return message
    return f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"


def _default_of(field: FieldInfo) -> str:
    """Return the end of a message that offers to leave a key out; empty if it is required."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return ""
    if default is None or isinstance(default, BaseModel):
        return "; or leave it out"
    return f"; or leave it out for {msgspec.json.encode(default).decode()}"


def _suggest_key(model: type[BaseModel], path: Sequence[str]) -> str:
    """Return the end of a message about the unknown key at `path`: a near key, or all keys."""
    holder = _model_at(model, path[:-1])
    known = [] if holder is None else list(holder.model_fields)
    near = get_close_matches(path[-1], known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _field_at(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    holder = _model_at(model, path[:-1]) if path else None
    return None if holder is None else holder.model_fields.get(path[-1])


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the model of the table at `path` within `model`, or None if there is none."""
    names = iter(path)
    for name in names:
        field = model.model_fields.get(name)
        if field is None:
            return None
        annotation = field.annotation
        if get_origin(annotation) is dict:
            # The user chooses the keys of a dictionary.
            next(names, None)
        kinds = (annotation, *get_args(annotation))
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model
