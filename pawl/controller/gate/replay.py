"""Compare what a candidate and what serves answered to the same recorded calls."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Annotated, Any, Final

import msgspec

from store.records import EVAL, Record, Split

# Bounds of a difference of log-probabilities: a token that is likelier by e⁵⁰, or less likely by
# more than any model says, is far apart by any rule.
HIGHEST: Final = 50.0
FARTHEST: Final = 1e6
# How often a state is asked about that fails for another reason than a server that is away.
TRIES: Final = 3
# A replay that could ask nothing is begun again this long after that was found.
AGAIN: Final = timedelta(minutes=10)


class ReplayRule(Record, frozen=True, kw_only=True):
    """Say how much a candidate must answer, and how far off it may be; keys of a recipe's `[gate]`.

    Attributes:
        replay_states: recorded calls to answer; 0: none, and its trial begins at once.
        replay_tokens: the most that each answer has.
        most_kl_to_serving: the largest KL to what serves, in nats a token.
        most_malformed: by how much the share of malformed tool calls may be above that of what
            serves.
    """

    replay_states: Annotated[int, msgspec.Meta(ge=0)] = 0
    replay_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    most_kl_to_serving: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    most_malformed: Annotated[float, msgspec.Meta(gt=0)] = 0.2


def replay_rule_of(gate: Mapping[str, Any]) -> ReplayRule:
    """Return the rule that a candidate was recorded with.

    Raises:
        msgspec.ValidationError: it is none.
    """
    return msgspec.convert(dict(gate), ReplayRule)


class Answer(Record, frozen=True, kw_only=True):
    """Hold what came of one state: log-probabilities (S,) of what the candidate sampled.

    `own` are the candidate's, `serving` those of what serves; both are empty if only the latter
    could be made to answer (`is_missing`). `malformed` says whether a tool call was, by the
    candidate and by what serves; None where there was none that can be judged.
    """

    split: Split
    own: tuple[float, ...] = ()
    serving: tuple[float, ...] = ()
    malformed: tuple[bool | None, bool | None] = (None, None)
    is_missing: bool = False


class Replayed(Record, frozen=True, kw_only=True):
    """Hold a verdict: `why_not` is why the candidate must not be tried, None if it may.

    Attributes:
        states: answers that it rests on; `held_out` of them are of evaluation.
        missing: states that what serves answered, and the candidate did not.
        left_out: states that neither could be asked about: their prompts are too long, say, or they
            were deleted meanwhile. `why_left_out` is why one of them could not, None without any.
        tokens: how many tokens the answers have.
        kl: estimated KL(candidate ‖ what serves), in nats a token; None without a token.
        malformed: share of malformed among the tool calls that could be judged, of the candidate
            and of what serves; None where there were none.
        judged_calls: how many tool calls these shares are of.
    """

    states: int
    held_out: int
    missing: int
    left_out: int
    tokens: int
    kl: float | None
    malformed: tuple[float | None, float | None]
    judged_calls: tuple[int, int]
    why_not: str | None
    why_left_out: str | None = None

    @property
    def why_waits(self) -> str | None:
        """Return why the candidate must neither be tried nor rejected; None if it need not wait.

        There were states, and neither version could be asked about any.
        """
        if self.states or self.missing or not self.left_out:
            return None
        return (
            f"in its replay none of {self.left_out} recorded calls could be asked about, of it or"
            f" of what serves ({self.why_left_out}), and no user is to meet what is unknown."
            f" It is asked again every {AGAIN.total_seconds() / 60:g} minutes: put the model server"
            " right, lower gate.replay_tokens if the prompts leave no room for an answer, or set"
            " gate.replay_states = 0 for the versions to come"
        )


def verdict(
    answers: Sequence[Answer], left_out: int, rule: ReplayRule, why_left_out: str | None = None
) -> Replayed:
    """Return what the answers say; of `left_out` states there is none, and `why_left_out` why."""
    given = [one for one in answers if not one.is_missing]
    missing = len(answers) - len(given)
    each = [_k3(*pair) for one in given for pair in zip(one.own, one.serving, strict=True)]
    kl = fmean(each) if each else None
    own, serving = (
        [flag for one in given if (flag := one.malformed[side]) is not None] for side in (0, 1)
    )
    shares = (_share(own), _share(serving))
    return Replayed(
        states=len(given),
        held_out=sum(one.split == EVAL for one in given),
        missing=missing,
        left_out=left_out,
        tokens=len(each),
        kl=kl,
        malformed=shares,
        judged_calls=(len(own), len(serving)),
        why_left_out=why_left_out,
        why_not=_unanswered(missing, len(answers)) or _far(kl, rule) or _worse(shares, rule),
    )


def _share(flags: Sequence[bool]) -> float | None:
    return fmean(flags) if flags else None


def _k3(own: float, other: float) -> float:
    """Return the k3 estimate of KL for a token that the first of the two sampled.

    It is unbiased and never negative (Schulman, "Approximating KL divergence", 2020). It is
    bounded, so that means are finite whatever a server says; NaN counts as far apart.
    """
    difference = max(-FARTHEST, min(HIGHEST, other - own))
    return math.exp(difference) - difference - 1.0


def _unanswered(missing: int, asked: int) -> str | None:
    if not missing:
        return None
    return (
        f"in the replay the model server refused {missing} of {asked} answers of its, each"
        f" {TRIES} times, and gave those of what serves: see the server's log"
    )


def _far(kl: float | None, rule: ReplayRule) -> str | None:
    if kl is None or kl <= rule.most_kl_to_serving:
        return None
    return (
        f"in the replay its KL to what serves is {kl:.4g} nats a token, and"
        f" gate.most_kl_to_serving is {rule.most_kl_to_serving:g}"
    )


def _worse(shares: tuple[float | None, float | None], rule: ReplayRule) -> str | None:
    own, serving = shares[0] or 0.0, shares[1] or 0.0
    if own - serving <= rule.most_malformed:
        return None
    return (
        f"in the replay {own:.0%} of its tool calls are malformed, and {serving:.0%} of those of"
        f" what serves: more by over gate.most_malformed, {rule.most_malformed:g}"
    )


# What a tool's arguments must be, by the tool's name: a JSON schema, or None for any object.
Tools = Mapping[str, Mapping[str, Any] | None]
BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
# Keys under which a call has its arguments.
_ARGUMENTS: Final = ("arguments", "parameters")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def offered_tools(request: bytes | None) -> Tools:
    """Return the tools that a request of any wire format offers, by name."""
    tools = _object(request or b"{}").get("tools")
    schemas: dict[str, Mapping[str, Any] | None] = {}
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        own = function if isinstance(function, dict) else tool
        schema = own.get("parameters", own.get("input_schema"))
        if isinstance(own.get("name"), str):
            schemas[own["name"]] = schema if isinstance(schema, dict) else None
    return schemas


def _object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; what is none, or is nested too deep, as an empty one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_malformed(text: str, tools: Tools, *, is_whole: bool) -> bool | None:
    """Return whether a call in `text` cannot be executed; None: it has none that can be judged.

    A call must be JSON, of a tool that was offered, with the arguments that it requires, of the
    types that its schema names. What was cut off (not `is_whole`) in the middle of a call is not
    judged for that.
    """
    calls = _calls(text, is_whole=is_whole)
    if not tools or not calls:
        return None
    return not all(_fits(call, tools) for call in calls)


def _calls(text: str, *, is_whole: bool) -> list[str]:
    """Return the text of each call."""
    if BEGIN in text:
        _, *parts = text.split(BEGIN)
        closed = [part.partition(END) for part in parts]
        return [call for call, end, _ in closed if end or is_whole]
    stripped = text.strip().removeprefix("<|python_tag|>")
    looks_so = stripped.startswith("{") and '"name"' in stripped
    return [stripped] if looks_so and is_whole else []


def _fits(call: str, tools: Tools) -> bool:
    fields = _object(call)
    name = fields.get("name")
    if not isinstance(name, str) or name not in tools:
        return False
    arguments: object = next((fields[key] for key in _ARGUMENTS if key in fields), {})
    if not isinstance(arguments, dict):
        return False
    schema = tools[name] or {}
    required = schema.get("required")
    if isinstance(required, list) and not set(map(str, required)) <= arguments.keys():
        return False
    properties = schema.get("properties")
    types = properties if isinstance(properties, dict) else {}
    return all(_is_of(value, types.get(key)) for key, value in arguments.items())


def _is_of(value: object, schema: object) -> bool:
    """Return whether a value has the type that its schema names, if it names one that is known."""
    named = schema.get("type") if isinstance(schema, dict) else None
    kinds = _TYPES.get(named) if isinstance(named, str) else None
    if kinds is None:
        return True
    return isinstance(value, kinds) and (named == "boolean" or not isinstance(value, bool))
