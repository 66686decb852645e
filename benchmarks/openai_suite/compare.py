"""Compare two runs of one suite, test by test, and what was asked of the server (pure)."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from proxy.door.routes import find_route
from proxy.errors import NotAllowed
from store.records import Record

# The allow-list's own words (`proxy.door.routes`).
REFUSAL = "is not a path that Pawl serves"
REQUEST = re.compile(r"\] (?P<method>[A-Z]+) (?P<path>/v1/[^? ]*)")


class Outcome(Record, frozen=True, kw_only=True):
    """State how one test ended; `text` is its failure's."""

    state: str
    text: str = ""


class Comparison(Record, frozen=True, kw_only=True):
    """Sort tests by what became of them: the same, refused by the allow-list, or different."""

    same: Mapping[str, int]
    refused: tuple[str, ...]
    different: tuple[str, ...]


def outcomes(report: Path) -> dict[str, Outcome]:
    """Return each test's outcome, from a JUnit report."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        while name in found:  # parameters that print alike
            name += "'"
        found[name] = Outcome(state="passed")
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                text = f"{child.get('message')}\n{child.text}"
                found[name] = Outcome(state=child.tag, text=text)
    return found


def compare(direct: Mapping[str, Outcome], proxied: Mapping[str, Outcome]) -> Comparison:
    """Put each test of either run in exactly one place."""
    same: Counter[str] = Counter()
    refused, different = [], []
    missing = Outcome(state="missing")
    for name in sorted({*direct, *proxied}):
        here, there = direct.get(name, missing), proxied.get(name, missing)
        if here.state == there.state:
            same[here.state] += 1
        elif REFUSAL in there.text:
            refused.append(name)
        else:
            different.append(f"{name}: {here.state} direct, {there.state} through the proxy")
    return Comparison(same=same, refused=tuple(refused), different=tuple(different))


def requests_seen(log: str, known: Iterable[str]) -> Counter[tuple[str, str]]:
    """Count the requests in the mock server's log by method and path template."""
    patterns = [(re.compile(_pattern(path)), path) for path in known]
    seen: Counter[tuple[str, str]] = Counter()
    for match in REQUEST.finditer(log):
        fitting = (path for pattern, path in patterns if pattern.fullmatch(match["path"]))
        # A fixed path goes before one with a parameter in its place.
        template = min(fitting, key=lambda path: path.count("{"), default=match["path"])
        seen[match["method"], template] += 1
    return seen


def _pattern(template: str) -> str:
    return re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(template))


def is_served(method: str, template: str) -> bool:
    """Return whether the proxy lets such a request through."""
    try:
        find_route(method, re.sub(r"\{[^}]*\}", "x", template))
    except NotAllowed:
        return False
    return True
