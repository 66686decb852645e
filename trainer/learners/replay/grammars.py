"""Make the masks that a grammar put on each token of a reply, as vLLM makes them with xgrammar.

The rules are those of `vllm/v1/structured_output/backend_xgrammar.py`, with vLLM's defaults
(`--structured-outputs-config`): backend "auto", any whitespace in JSON. A mask is packed: bit t
says whether token t may be sampled. After an end that the grammar took, every token may.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import structlog
import torch

from store.values.distribution import Distribution
from store.values.grammars import Grammar
from trainer.batches import Row
from trainer.errors import Unreplayable
from trainer.learners.replay.schemas import is_for_another
from trainer.learners.replay.tags import structural_tag

log = structlog.get_logger()

# Reasons why a call is not trained.
NO_GRAMMAR: Final = "grammar_not_built"
OUTSIDE: Final = "outside_grammar"
# Compiled grammars that are kept: a task mostly has few.
KEPT: Final = 256
_ESCAPES: Final = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_COMMENT: Final = re.compile(r"(#|//).*$")


class Grammars:
    """Compile grammars for one model's tokens, and follow replies through them."""

    def __init__(self, tokenizer: Any, words: int) -> None:
        """Store the tokenizer, and the number of tokens that the model has logits for."""
        self._tokenizer = tokenizer
        self._words = words
        self._compiler: Any = None
        self._compiled = lru_cache(KEPT)(self._compile)

    def with_masks(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows, those that a grammar held with the mask of each sampled token.

        Equal masks are one object: most of a reply's are.

        Raises:
            Unreplayable: a mask cannot be made; `why_not` says it before.
        """
        same: dict[bytes, bytes] = {}

        def masks_of(row: Row) -> tuple[bytes, ...]:
            made = self._each_mask(row.distribution, row.sampled_ids)
            return tuple(same.setdefault(mask, mask) for mask in made)

        return [
            row
            if row.distribution.grammar is None
            else msgspec.structs.replace(row, masks=masks_of(row))
            for row in rows
        ]

    def why_not(self, distribution: Distribution, sampled_ids: Sequence[int]) -> str | None:
        """Return why the masks of a reply cannot be made, or None if they can."""
        try:
            for _ in self._followed(distribution, sampled_ids):
                pass
        except Unreplayable as error:
            log.warning("grammar_not_replayed", reason=error.reason, why=str(error))
            return error.reason
        return None

    def masks(self, distribution: Distribution, sampled_ids: Sequence[int]) -> list[bytes]:
        """Return the mask of each sampled token.

        Raises:
            Unreplayable: xgrammar is missing or takes no such grammar, or a mask forbids a token.
        """
        return list(self._each_mask(distribution, sampled_ids))

    def _each_mask(self, distribution: Distribution, sampled_ids: Sequence[int]) -> Iterator[bytes]:
        bits = None
        for matcher in self._followed(distribution, sampled_ids):
            if bits is None:
                bits = _library().allocate_token_bitmask(1, self._words)
            if matcher.is_terminated():
                bits.fill_(-1)
            else:
                matcher.fill_next_token_bitmask(bits, 0)
            yield bits.numpy().tobytes()

    def _followed(self, distribution: Distribution, sampled_ids: Sequence[int]) -> Iterator[Any]:
        """Yield xgrammar's matcher as it stands before each sampled token."""
        assert distribution.grammar is not None
        try:
            matcher = _library().GrammarMatcher(
                self._compiled(distribution.grammar),
                override_stop_tokens=list(distribution.stop_token_ids) or None,
            )
            for place, token in enumerate(sampled_ids):
                yield matcher
                if not (matcher.is_terminated() or self._accepts(matcher, token)):
                    raise Unreplayable(f"its token {place} is outside its grammar", OUTSIDE)
        # xgrammar raises RuntimeError and its subclasses, json ValueError.
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise Unreplayable(f"a grammar cannot be built: {error!s:.200}", NO_GRAMMAR) from error

    def _accepts(self, matcher: Any, token: int) -> bool:
        return token < self._words and bool(matcher.accept_token(token))

    def _compile(self, grammar: Grammar) -> Any:
        xgrammar = _library()
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._words)
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return _COMPILE[grammar.kind](self._compiler, grammar.text)


def allowed(masks: Sequence[bytes], words: int, device: torch.device) -> torch.Tensor:
    """Return which of the `words` tokens each of R packed masks allows, (R, V)."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).to(device)
    bits = packed.view(len(masks), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=device)
    bits_of_words = (bits & 1).bool().flatten(1)[:, :words]
    # Rows of the head that stand for no token are never sampled.
    return torch.nn.functional.pad(bits_of_words, (0, words - bits_of_words.shape[1]))


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise Unreplayable(f"xgrammar cannot be imported: {error}", NO_GRAMMAR) from error
    return xgrammar


def _json(compiler: Any, text: str) -> Any:
    if is_for_another(json.loads(text)):
        raise Unreplayable("vLLM leaves this JSON schema to another library", NO_GRAMMAR)
    return compiler.compile_json_schema(text, any_whitespace=True, separators=None)


def _grammar(compiler: Any, text: str) -> Any:
    return compiler.compile_lark(text) if is_lark(text) else compiler.compile_grammar(text)


_COMPILE: Final[dict[str, Callable[[Any, str], Any]]] = {
    "json": _json,
    "regex": lambda compiler, text: compiler.compile_regex(text),
    "choice": lambda compiler, text: compiler.compile_grammar(ebnf_of(json.loads(text))),
    "grammar": _grammar,
    "tools": lambda compiler, text: compiler.compile_structural_tag(
        structural_tag(_library(), text)
    ),
}


def is_lark(text: str) -> bool:
    """Return whether a grammar is read as Lark: no line of it defines a rule as EBNF does."""
    return not any("::=" in _COMMENT.sub("", line) for line in text.split("\n"))


def ebnf_of(choices: Sequence[str]) -> str:
    """Return the grammar of a list of texts."""
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(letter: str) -> str:
    is_control = ord(letter) < 0x20 or ord(letter) == 0x7F
    return _ESCAPES.get(letter) or (f"\\u{ord(letter):04x}" if is_control else letter)
