"""Record and read the grammar that constrained a reply, so that it can be replayed (pure)."""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import msgspec

from store.records import Record

Kind = Literal["json", "regex", "choice", "grammar", "tools"]
KINDS: Final = get_args(Kind)
# The recorded setting that holds a grammar. No server reads a request field of this name.
GRAMMAR: Final = "grammar"


class Grammar(Record, frozen=True, kw_only=True):
    """The grammar of a reply (structured output): the server masked all tokens that violate it.

    `text` is, by `kind`:

    - `json`: a JSON schema; the order of its keys counts
    - `choice`: a JSON list of the allowed replies
    - `regex`: a regular expression
    - `grammar`: a grammar in EBNF or Lark
    - `tools`: the inputs of a structural tag, a `ToolTag` as JSON
    """

    kind: Kind
    text: str


def read_grammar(value: Any) -> Grammar | None:
    """Return the recorded grammar, or None if `value` is not one."""
    if not isinstance(value, dict) or value.keys() != {"kind", "text"}:
        return None
    known = value["kind"] in KINDS and isinstance(value["text"], str)
    return Grammar(kind=value["kind"], text=value["text"]) if known else None


# Tool calls in a model's own syntax: vLLM calls such a grammar a structural tag. The tag's inputs
# are recorded: the tag itself is several times as long, and xgrammar makes it.

# Any call or none, any call, or a call of the only tool.
Choice = Literal["auto", "required", "forced"]


class OfferedTool(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that may be called; without `parameters` its arguments are any JSON."""

    name: str
    parameters: Mapping[str, Any] | None = None


class ToolTag(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The inputs from which xgrammar makes a structural tag; the tag itself is not stored.

    `model` is vLLM's and xgrammar's name for the syntax of tool calls. `one_call` says whether a
    reply may call one tool at most.
    """

    model: str
    choice: Choice
    tools: tuple[OfferedTool, ...]
    one_call: bool = False


def text_of_tag(tag: ToolTag) -> str:
    """Return a tag's inputs as JSON for `parse_tag`; schemas keep the order of keys: it matters."""
    return json.dumps(msgspec.to_builtins(tag), separators=(",", ":"))


def parse_tag(text: str) -> ToolTag:
    """Return a tag's inputs from the text that `text_of_tag` made.

    Raises:
        ValueError: the text is not from `text_of_tag`.
    """
    return msgspec.convert(json.loads(text), type=ToolTag)
