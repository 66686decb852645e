"""Read a model's reply: its tool call, the tool's result, and the answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from calculator import CalculationError, MalformedExpression, calculator

ToolStatus = Literal["ok", "error", "malformed"]

TOOL_NAME = "calculator"


@dataclass(frozen=True)
class Question:
    id: str
    text: str


@dataclass(frozen=True)
class Call:
    """A tool call as the API returned it."""

    id: str | None
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    response_id: str
    text: str
    call: Call | None


@dataclass(frozen=True)
class ToolUse:
    id: str | None
    name: str
    arguments: str
    status: ToolStatus
    detail: str


@dataclass(frozen=True)
class Attempt:
    """An attempt at a question, written as one line of output."""

    id: str
    question: str
    sample: int
    response_id: str | None = None
    answer: str | None = None
    tool: ToolUse | None = None
    error: str | None = None


# Matches a reply that tried to call the tool in a wrong form.
LOOKS_LIKE_CALL = re.compile(
    rf"{TOOL_NAME}\s*\(|^\s*\[?\s*\w+\(\s*\w+\s*=|<tool_call|\"arguments\""
)


def read_expression(call: Call) -> str:
    """Return the expression in a call's arguments, or raise MalformedExpression."""
    if call.name != TOOL_NAME:
        raise MalformedExpression("there is no tool of that name")
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        raise MalformedExpression("the arguments are not JSON") from error
    match arguments:
        case {"expression": str(expression)} if len(arguments) == 1:
            return expression
    raise MalformedExpression("expression, a string, is the one argument")


def run_call(call: Call) -> ToolUse:
    """Run the tool that the model called; `detail` is the result or the error."""
    status: ToolStatus
    try:
        status, detail = "ok", calculator(read_expression(call))
    except MalformedExpression as error:
        status, detail = "malformed", str(error)
    except CalculationError as error:
        status, detail = "error", str(error)
    return ToolUse(call.id, call.name, call.arguments, status, detail)


def tool_use(reply: Reply) -> ToolUse | None:
    if reply.call is not None:
        return run_call(reply.call)
    if LOOKS_LIKE_CALL.search(reply.text):
        return ToolUse(None, TOOL_NAME, reply.text, "malformed", "not in the form of a call")
    return None


def conclude(question: Question, sample: int, reply: Reply) -> Attempt:
    """Return the attempt; its answer is the tool's result, or the reply's text if there is none."""
    tool = tool_use(reply)
    answer = tool.detail if tool is not None and tool.status == "ok" else reply.text
    return Attempt(question.id, question.text, sample, reply.response_id, answer, tool)
