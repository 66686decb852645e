"""Make two calls as an agent for warm workers that needs the standard library alone."""

import json
import os
import urllib.request
from typing import Any


def answer(task: dict[str, Any]) -> str:
    ask("Think about it.")
    return ask(task["question"])


def ask(text: str) -> str:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        said: str = json.load(reply)["choices"][0]["message"]["content"]
    return said
