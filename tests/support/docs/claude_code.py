"""Speak as Claude Code does, which is not installed here: its settings, session and results.

It reads what Claude Code reads from the environment, and sends what that sends with a call: the
session id in `metadata.user_id`, and each tool's result with `is_error`.
"""

import json
import os
import sys
from typing import Any
from uuid import uuid4

from anthropic import Anthropic

SESSION = {"device_id": "d", "account_uuid": "", "session_id": str(uuid4())}
TOOLS: Any = [
    {
        "name": "Bash",
        "description": "Run a command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
]
# The tools of the tests know one of the cities that their model asks for.
FAILS = "Lima"


def main(prompt: str) -> None:
    """Work on the prompt until the model asks for no tool any more, as `claude -p` does."""
    client = Anthropic(default_headers={"x-claude-code-session-id": SESSION["session_id"]})
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        message = client.messages.create(
            model=os.environ["ANTHROPIC_MODEL"],
            max_tokens=64,
            messages=messages,
            tools=TOOLS,
            metadata={"user_id": json.dumps(SESSION)},
        )
        results: Any = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": "done",
                "is_error": FAILS in json.dumps(block.input),
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]
    sys.stdout.write(f"{message.content}\n")


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("-p") + 1])
