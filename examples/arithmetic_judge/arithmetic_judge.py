"""Judge whether a calculation in an episode is right.

    pawl judge -- python examples/arithmetic_judge/arithmetic_judge.py

Standard input is one episode as a JSON line, in the format of `pawl export`. Standard output is its
value, in the format of /feedback; `{"value": null}` means that this judge cannot tell.
"""

import json
import re
import sys
from typing import Any

SUM = re.compile(r"(-?\d+)\s*([-+*])\s*(\d+)")
WORK = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def value_of(episode: dict[str, Any]) -> float | None:
    last = episode["calls"][-1]
    questions = [m["content"] for m in last["request"]["messages"] if m["role"] == "user"]
    asked = SUM.search(questions[-1]) if questions else None
    if asked is None or last["reply"] is None:
        return None
    first, sign, second = asked.groups()
    answer = last["reply"]["choices"][0]["message"]["content"] or ""
    right = str(WORK[sign](int(first), int(second))) in re.findall(r"-?\d+", answer)
    return 1.0 if right else 0.0


if __name__ == "__main__":
    print(json.dumps({"value": value_of(json.loads(sys.stdin.readline()))}))
