"""Describe a grammar that a reply was held to, as it is recorded and replayed (pure)."""

from typing import Any, Final, Literal, get_args

from store.records import Record

Kind = Literal["json", "regex", "choice", "grammar", "tools"]
KINDS: Final = get_args(Kind)
# The setting that holds it; no request has a field of this name that a server reads.
GRAMMAR: Final = "grammar"


class Grammar(Record, frozen=True, kw_only=True):
    """Hold what a model server makes its masks of; equal grammars are equal and hashable.

    `text` is a JSON schema (`json`) or a list of texts (`choice`) as JSON, whose order of keys
    counts, a regular expression, a grammar in EBNF or Lark, or what a structural tag is made of
    (`tools`, see `store.values.tool_tags`).
    """

    kind: Kind
    text: str


def read_grammar(value: Any) -> Grammar | None:
    """Return the recorded grammar, or None if `value` is none."""
    if not isinstance(value, dict) or value.keys() != {"kind", "text"}:
        return None
    known = value["kind"] in KINDS and isinstance(value["text"], str)
    return Grammar(kind=value["kind"], text=value["text"]) if known else None
