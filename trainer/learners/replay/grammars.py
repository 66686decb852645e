"""Compute the masks by which a grammar limited each token of a reply, as vLLM does with xgrammar.

The rules are those of `vllm/v1/structured_output/backend_xgrammar.py`, with vLLM's defaults
(`--structured-outputs-config`): backend "auto", any whitespace in JSON. A mask is packed: bit t
says whether token t may be sampled. After the end of the grammar, every token may be sampled.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import structlog
import torch
from pydantic import BaseModel

from store.values.grammars import Grammar, ToolTag, parse_tag
from store.values.sampling import Distribution
from trainer.batches import Row
from trainer.errors import Unreplayable

log = structlog.get_logger()

# Reasons why a call is not trained.
GRAMMAR_NOT_BUILT: Final = "grammar_not_built"
OUTSIDE_GRAMMAR: Final = "outside_grammar"
# Compiled grammars in the cache: a task mostly has few.
CACHED_GRAMMARS: Final = 256
# Syntaxes that put a tool call between two tags, and the name of the tag.
CALL_TAGS: Final[Mapping[str, str]] = {"hermes": "tool_call", "longcat": "longcat_tool_call"}
# A field of tags in xgrammar: whether the grammar ends after the first call.
STOP_AFTER_FIRST: Final = "stop_after_first"
# String formats that vLLM leaves to xgrammar, and keys of arrays that it does not.
SUPPORTED_FORMATS: Final = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
UNSUPPORTED_ARRAY_KEYS: Final = ("uniqueItems", "contains", "minContains", "maxContains")
_ESCAPES: Final = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_COMMENT: Final = re.compile(r"(#|//).*$")


class Grammars:
    """Compile grammars for one model's tokens, and compute the masks along replies."""

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        """Store the tokenizer, and the number of logits of the model."""
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._compiler: Any = None
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    def with_masks(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows; those with a grammar get the mask of each sampled token.

        Equal masks share one object: most of a reply's masks are equal.

        Raises:
            Unreplayable: a mask cannot be made; `why_no_masks` checks that beforehand.
        """
        same: dict[bytes, bytes] = {}

        def masks_of(row: Row) -> tuple[bytes, ...]:
            made = self.masks(row.distribution, row.sampled_ids)
            return tuple(same.setdefault(mask, mask) for mask in made)

        return [
            row
            if row.distribution.grammar is None
            else msgspec.structs.replace(row, masks=masks_of(row))
            for row in rows
        ]

    def why_no_masks(self, distribution: Distribution, sampled_ids: Sequence[int]) -> str | None:
        """Log and return why the masks of a reply cannot be made, or return None if they can."""
        try:
            for _ in self._follow(distribution, sampled_ids):
                pass
        except Unreplayable as error:
            log.warning("grammar_not_replayed", reason=error.reason, why=str(error))
            return error.reason
        return None

    def masks(self, distribution: Distribution, sampled_ids: Sequence[int]) -> Iterator[bytes]:
        """Yield the mask of each sampled token.

        Raises:
            Unreplayable: xgrammar is missing or rejects the grammar, or a mask forbids a token.
        """
        bits = None
        for matcher in self._follow(distribution, sampled_ids):
            if bits is None:
                bits = _import_xgrammar().allocate_token_bitmask(1, self._vocabulary_size)
            if matcher.is_terminated():
                bits.fill_(-1)
            else:
                matcher.fill_next_token_bitmask(bits, 0)
            yield bits.numpy().tobytes()

    def _follow(self, distribution: Distribution, sampled_ids: Sequence[int]) -> Iterator[Any]:
        """Yield xgrammar's matcher before each sampled token, advanced by the tokens before."""
        assert distribution.grammar is not None
        try:
            matcher = _import_xgrammar().GrammarMatcher(
                self._compiled(distribution.grammar),
                override_stop_tokens=list(distribution.stop_token_ids) or None,
            )
            for place, token in enumerate(sampled_ids):
                yield matcher
                if matcher.is_terminated():
                    continue
                if token >= self._vocabulary_size or not matcher.accept_token(token):
                    raise Unreplayable(
                        f"token {place} of the reply is outside its grammar", OUTSIDE_GRAMMAR
                    )
        # xgrammar raises RuntimeError and its subclasses, json ValueError.
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise Unreplayable(
                f"a grammar cannot be built: {error!s:.200}", GRAMMAR_NOT_BUILT
            ) from error

    def _compile(self, grammar: Grammar) -> Any:
        xgrammar = _import_xgrammar()
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocabulary_size
            )
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return _COMPILE[grammar.kind](self._compiler, grammar.text)


def allowed_tokens(masks: Sequence[bytes], count: int, device: torch.device) -> torch.Tensor:
    """Return which of the first `count` token ids each of R packed masks allows, (R, V)."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).to(device)
    bits = packed.view(len(masks), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=device)
    allowed = (bits & 1).bool().flatten(1)[:, :count]
    # Ids past the masks stand for no token, and are never sampled.
    return torch.nn.functional.pad(allowed, (0, count - allowed.shape[1]))


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise Unreplayable(f"xgrammar cannot be imported: {error}", GRAMMAR_NOT_BUILT) from error
    return xgrammar


def _compile_json_schema(compiler: Any, text: str) -> Any:
    if needs_other_library(json.loads(text)):
        raise Unreplayable("vLLM leaves this JSON schema to another library", GRAMMAR_NOT_BUILT)
    return compiler.compile_json_schema(text, any_whitespace=True, separators=None)


def _compile_grammar(compiler: Any, text: str) -> Any:
    return compiler.compile_lark(text) if is_lark(text) else compiler.compile_grammar(text)


_COMPILE: Final[dict[str, Callable[[Any, str], Any]]] = {
    "json": _compile_json_schema,
    "regex": lambda compiler, text: compiler.compile_regex(text),
    "choice": lambda compiler, text: compiler.compile_grammar(ebnf_of(json.loads(text))),
    "grammar": _compile_grammar,
    "tools": lambda compiler, text: compiler.compile_structural_tag(
        structural_tag(_import_xgrammar(), text)
    ),
}


def is_lark(text: str) -> bool:
    """Return whether vLLM reads a grammar as Lark: no line defines a rule in EBNF (`::=`)."""
    return not any("::=" in _COMMENT.sub("", line) for line in text.split("\n"))


def ebnf_of(choices: Sequence[str]) -> str:
    """Return an EBNF grammar that allows exactly the given texts."""
    return "root ::= " + " | ".join(f'"{"".join(map(_escape, choice))}"' for choice in choices)


def _escape(letter: str) -> str:
    is_control = ord(letter) < 0x20 or ord(letter) == 0x7F
    return _ESCAPES.get(letter) or (f"\\u{ord(letter):04x}" if is_control else letter)


Schema = dict[str, Any]


def needs_other_library(schema: Any) -> bool:
    """Return whether vLLM uses another library, with other masks, for a JSON schema.

    The rules are those of `has_xgrammar_unsupported_json_features` in vLLM's module above.
    """
    return any(map(_is_unsupported, _schema_objects(schema)))


def _schema_objects(schema: Any) -> Iterator[Schema]:
    """Yield all objects in a schema; lists within lists are not looked into."""
    waiting = [schema] if isinstance(schema, dict) else []
    while waiting:
        node = waiting.pop()
        yield node
        for value in node.values():
            parts = value if isinstance(value, list) else [value]
            waiting += [part for part in parts if isinstance(part, dict)]


def _is_unsupported(schema: Schema) -> bool:
    types, all_of = _types(schema), schema.get("allOf")
    return (
        (bool(types & {"integer", "number"}) and "multipleOf" in schema)
        or ("array" in types and any(key in schema for key in UNSUPPORTED_ARRAY_KEYS))
        or ("string" in types and (_has_odd_format(schema) or _limits_pattern_length(schema)))
        or ("object" in types and _limits_names_twice(schema))
        or (isinstance(all_of, list) and len(all_of) >= 2)
    )


def _types(schema: Schema) -> set[str]:
    types = schema.get("type")
    return {
        part for part in (types if isinstance(types, list) else [types]) if isinstance(part, str)
    }


def _has_odd_format(schema: Schema) -> bool:
    return "format" in schema and not (
        isinstance(schema["format"], str) and schema["format"] in SUPPORTED_FORMATS
    )


def _limits_pattern_length(schema: Schema) -> bool:
    return ("pattern" in schema or "format" in schema) and (
        "minLength" in schema or "maxLength" in schema
    )


def _limits_names_twice(schema: Schema) -> bool:
    """Return whether a schema limits an object's property names in two ways at once."""
    patterns = schema.get("patternProperties")
    two_patterns = isinstance(patterns, dict) and ("properties" in schema or len(patterns) > 1)
    if two_patterns or "propertyNames" not in schema:
        return two_patterns
    names = schema["propertyNames"]
    return (
        (isinstance(names, dict) and _limits_pattern_length(names))
        or "patternProperties" in schema
        or "properties" in schema
        or schema.get("unevaluatedProperties", True) is not True
    )


def structural_tag(xgrammar: Any, text: str) -> str:
    """Return the structural tag made from a recorded `ToolTag`, as JSON, in the model's syntax.

    xgrammar has the tags of most syntaxes (`get_model_structural_tag`). For Hermes and its like,
    vLLM makes them (`vllm/tool_parsers/structural_tag_registry.py`): a call is a JSON object
    between two tags, with or without line breaks inside. Thoughts are not covered: vLLM starts the
    grammar after them.

    Raises:
        ValueError: the text is no `ToolTag`, or the library does not know its syntax.
    """
    recorded = parse_tag(text)
    tag = (
        _marked_tag(xgrammar, recorded)
        if recorded.model in CALL_TAGS
        else _library_tag(xgrammar, recorded)
    )
    if recorded.one_call:
        _end_after_one_call(tag.format)
    return json.dumps(tag.model_dump())


def _library_tag(xgrammar: Any, recorded: ToolTag) -> Any:
    choice: Any = recorded.choice
    if choice == "forced":
        choice = {"type": "function", "function": {"name": recorded.tools[0].name}}
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "parameters": tool.parameters, "strict": True},
        }
        for tool in recorded.tools
    ]
    return xgrammar.get_model_structural_tag(
        model=recorded.model, tools=tools, tool_choice=choice, reasoning="disabled"
    )


def _marked_tag(xgrammar: Any, recorded: ToolTag) -> Any:
    formats, tag = xgrammar.structural_tag, CALL_TAGS[recorded.model]
    begin, end = f"<{tag}>", f"</{tag}>"
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
    """Limit every list of calls within a part of a structural tag to one call.

    JSON schemas, which are plain objects, are not searched.
    """
    if isinstance(node, list | tuple):
        for part in node:
            _end_after_one_call(part)
    elif isinstance(node, BaseModel):
        if STOP_AFTER_FIRST in type(node).model_fields:
            setattr(node, STOP_AFTER_FIRST, True)
        for name in type(node).model_fields:
            _end_after_one_call(getattr(node, name))
