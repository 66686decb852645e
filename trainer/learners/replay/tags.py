"""Build the structural tag that held calls of tools, in the syntax of the model, as vLLM does.

xgrammar has the tags of most syntaxes (`get_model_structural_tag`). Those of Hermes' kind are
vLLM's own (`vllm/tool_parsers/structural_tag_registry.py`): a call is a JSON object between two
marks, with or without line breaks inside of them. A tag never covers a thought: vLLM lets a
grammar begin after it.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from store.values.tool_tags import OfferedTool, ToolTag, tag_from

# What stands between the angle brackets of the marks.
MARKS: Final[Mapping[str, str]] = {"hermes": "tool_call", "longcat": "longcat_tool_call"}
FIRST: Final = "stop_after_first"


def structural_tag(xgrammar: Any, text: str) -> str:
    """Return the tag of what was recorded, as JSON, made with the library.

    Raises:
        ValueError: the text is no such record, or the library knows no such syntax.
    """
    recorded = tag_from(text)
    tag = (
        _of_marks(xgrammar, recorded)
        if recorded.model in MARKS
        else _of_library(xgrammar, recorded)
    )
    if recorded.one_call:
        _end_after_one_call(tag.format)
    return json.dumps(tag.model_dump())


def _of_library(xgrammar: Any, recorded: ToolTag) -> Any:
    choice: Any = recorded.choice
    if choice == "forced":
        choice = {"type": "function", "function": {"name": recorded.tools[0].name}}
    tools = [_declared(tool) for tool in recorded.tools]
    return xgrammar.get_model_structural_tag(
        model=recorded.model, tools=tools, tool_choice=choice, reasoning="disabled"
    )


def _declared(tool: OfferedTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.parameters, "strict": True}
    return {"type": "function", "function": function}


def _of_marks(xgrammar: Any, recorded: ToolTag) -> Any:
    formats, mark = xgrammar.structural_tag, MARKS[recorded.model]
    begin, end = f"<{mark}>", f"</{mark}>"
    calls = [
        formats.TagFormat(
            begin=f'{begin}{line}{{"name": "{tool.name}", "arguments": ',
            content=formats.JSONSchemaFormat(
                json_schema=True if tool.parameters is None else tool.parameters
            ),
            end=f"}}{line}{end}",
        )
        for tool in recorded.tools
        for line in ("\n", "")
    ]
    if recorded.choice == "auto":
        return xgrammar.StructuralTag(
            format=formats.TriggeredTagsFormat(triggers=[begin], tags=calls)
        )
    only = recorded.choice == "forced"
    return xgrammar.StructuralTag(
        format=formats.TagsWithSeparatorFormat(
            tags=calls, separator="", at_least_one=True, stop_after_first=only
        )
    )


def _end_after_one_call(node: Any) -> None:
    """Let every list of calls in a part of a tag end after its first one.

    A schema is no part: it is a plain object.
    """
    if isinstance(node, list | tuple):
        for one in node:
            _end_after_one_call(one)
    elif isinstance(node, BaseModel):
        if FIRST in type(node).model_fields:
            setattr(node, FIRST, True)
        for name in type(node).model_fields:
            _end_after_one_call(getattr(node, name))
