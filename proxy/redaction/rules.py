"""Read the TOML file of redaction rules: what of a call is never stored, by pattern or by field.

Parsing is pure; `open_rules` reads the file. Patterns are RE2's: a match takes a time that is
linear in the text, whatever the pattern and the text are, so that no text can stop the storing.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from proxy.errors import BadRedaction
from proxy.redaction.calls import FieldRule, Rules
from proxy.redaction.texts import Finder, Pattern, Patterns
from store.table_file import TableFile

TABLE: Final = "rule"
REMEDIES: Final[Mapping[str, str]] = {
    "name": 'name = "cards", of letters, digits and . _ -',
    "pattern": r"pattern = '\b[0-9]{16}\b', a regular expression as RE2 reads it",
    "field": 'field = "request.metadata.user_id", or "reply.choices.*.message.content"',
    "replacement": 'replacement = "[card]", a text that takes the place of what is found',
}
SIDES: Final = ("request", "reply")
Name = Annotated[str, Field(min_length=1)]


class RuleSpec(BaseModel):
    """Describe a rule by one table of the file: it has a pattern, or a field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    pattern: Name | None = None
    field: Name | None = None
    replacement: str = "[redacted]"

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        if value is not None and compiled(value).search(b"") is not None:
            raise ValueError("it matches the empty text, and so everywhere; make it ask for more")
        return value

    @field_validator("field")
    @classmethod
    def _is_a_path(cls, value: str | None) -> str | None:
        parts = [] if value is None else value.split(".")
        if value is not None and (parts[0] not in SIDES or len(parts) < 2 or "" in parts):
            raise ValueError(
                f"{value!r} is no path of a field: write request. or reply., and the names that "
                "lead to it with dots between them, * for each member of a list or an object"
            )
        return value

    @model_validator(mode="after")
    def _looks_for_one_thing(self) -> "RuleSpec":
        if (self.pattern is None) == (self.field is None):
            raise ValueError("write either pattern or field, and a rule of its own for another")
        return self


FILE: Final = TableFile(RuleSpec, TABLE, thing="rule", remedies=REMEDIES, error=BadRedaction)


def compiled(pattern: str) -> Finder:
    """Return what finds a regular expression.

    Raises:
        ValueError: RE2 cannot read it; the message says why, and what to do.
    """
    # Only where there is a rule: a proxy without any does not load the library.
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        finder: Finder = re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason: Any = error.args[0] if error.args else error
        why = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(
            f"RE2 cannot read {pattern!r} ({why}). It has no look-around and no back-references, "
            "so that no text can make it slow: write the rule without them, or use a program"
        ) from error
    return finder


def open_rules(path: Path | None) -> Rules | None:
    """Return the rules in the file that the settings name, or None if they name none.

    Raises:
        BadRedaction: the file cannot be read or is invalid.
    """
    if path is None:
        return None
    text = FILE.text_of(path, "PAWL_REDACTION", "to store calls as they are")
    return parse_rules(text, str(path))


def parse_rules(text: str, where: str) -> Rules:
    """Return the rules in `text`; `where` names the file in messages.

    Raises:
        BadRedaction: the text is not TOML, or a value in it is invalid.
    """
    specs = FILE.parse(text, where)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise BadRedaction(
                f"{where}: two rules are named {name!r}; give each a name of its own"
            )
    try:
        return rules_of(specs)
    except ValueError as error:
        raise BadRedaction(f"{where}: the patterns are too large together: {error}") from error


def rules_of(specs: Iterable[RuleSpec]) -> Rules:
    """Return what applies the rules.

    Raises:
        ValueError: RE2 does not take the patterns together.
    """
    patterns, fields = [], []
    for spec in specs:
        if spec.pattern is not None:
            instead = spec.replacement.encode(errors="replace")
            patterns.append((spec.name, spec.pattern, instead))
        elif spec.field is not None:
            side, *path = spec.field.split(".")
            instead = msgspec.json.encode(spec.replacement)
            fields.append(FieldRule(spec.name, side == "reply", tuple(path), instead))
    any_of = compiled("|".join(f"(?:{pattern})" for _, pattern, _ in patterns) or "x")
    finders = [Pattern(name, compiled(pattern), instead) for name, pattern, instead in patterns]
    return Rules(Patterns(finders, any_of), fields)
