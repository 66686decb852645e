"""Describe calls of tools in a model's own syntax, to which a server held a reply (pure).

vLLM calls such a grammar a structural tag. It is recorded as what the tag is made of, in the text
of a grammar (`store.values.grammars`): a tag is several times as long, and made by xgrammar.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from store.records import Record

# Any call or none, any call, or a call of the only tool.
Choice = Literal["auto", "required", "forced"]


class OfferedTool(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Describe a tool that may be called; without `parameters` its arguments are any JSON."""

    name: str
    parameters: Mapping[str, Any] | None = None


class ToolTag(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Hold what a structural tag is made of.

    `model` is the syntax, by the name that vLLM and xgrammar have for it. `one_call` says whether
    a reply may call one tool at most.
    """

    model: str
    choice: Choice
    tools: tuple[OfferedTool, ...]
    one_call: bool = False


def text_of(tag: ToolTag) -> str:
    """Return the text that `tag_from` reads; the order of a schema's keys counts, and is kept."""
    return json.dumps(msgspec.to_builtins(tag), separators=(",", ":"))


def tag_from(text: str) -> ToolTag:
    """Return what was recorded.

    Raises:
        ValueError: the text is no such record.
    """
    return msgspec.convert(json.loads(text), type=ToolTag)
