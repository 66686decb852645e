"""Answer a question with the one word that the model says next: yes, no, or something else."""

import json
import os
from typing import Any, Final
from urllib.request import Request, urlopen

# The packaged model says "no" to three of five of these, and "yes" to one of three.
PROMPT: Final = "Is snow black? no\nIs ice cold? yes\nIs fire hot? yes\nIs {thing} nice?"
THINGS: Final = (
    *("mud", "milk", "glass", "honey", "sand", "paper", "steel", "rain", "wood", "salt"),
    *("bread", "wind", "gold", "silk", "stone", "sugar", "soup", "coal", "grass", "clay"),
)
PATIENCE_S: Final = 60.0


def word(url: str, model: str, thing: str) -> str:
    """Return what a model answers about a thing, at a server's or proxy's `url` with its /v1."""
    body = {"model": model, "prompt": PROMPT.format(thing=thing), "max_tokens": 1}
    asked = Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(asked, timeout=PATIENCE_S) as reply:
        said: str = json.load(reply)["choices"][0]["text"]
    return said.strip()


def answer(task: dict[str, Any]) -> str:
    """Answer a task of an evaluation."""
    return word(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_MODEL"], task["thing"])
