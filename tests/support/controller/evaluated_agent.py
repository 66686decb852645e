"""Answer an evaluation's tasks, right as often as the version that is asked is good."""

import json
import os
import random
from typing import Any, Final
from urllib.request import Request, urlopen

# How often the base model, a bad version and a good one are right. Of every five one is bad.
RIGHT: Final = {"base": 0.5, "bad": 0.1, "good": 0.9}
CYCLE, BAD = 5, 2


def answer(task: dict[str, Any]) -> str:
    """Make a call, and return what the task's field `right` is compared with."""
    model = os.environ["OPENAI_MODEL"]
    body = {"model": model, "prompt": (5, 6, 7, 8), "max_tokens": 2, "temperature": 1.0}
    asked = Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urlopen(asked, timeout=30.0).read()
    version = int(model.rpartition("@")[2])
    kind = "base" if not version else "bad" if version % CYCLE == BAD else "good"
    return "yes" if random.random() < RIGHT[kind] else "no"
