"""List the tool parsers of vLLM that hold a reply to a grammar in the model's own syntax (pure).

Where a parser names such a syntax, vLLM makes a structural tag of it if a call is forced, tools
are strict, or one call at most is allowed. With a parser that has none, `strict` changes nothing
that is sampled, and `parallel_tool_calls` nothing unless a call is forced. Parsers that are not
named here have rules of their own (`glm47` holds every call with tools), or a syntax that vLLM
builds by itself.

Source: vLLM 0.32, `tool_parsers/abstract_tool_parser.py` (`structural_tag_model`) and
`parser/abstract_parser.py`; `tests/integration/proxy/vllm/test_vllm_tool_parsers.py` compares.
"""

from collections.abc import Mapping
from typing import Final

WITHOUT_GRAMMARS: Final = frozenset(
    {
        *("cohere_command3", "cohere_command4", "ernie45", "granite-20b-fc", "hf", "hunyuan_a13b"),
        *("hy_v3", "llama4_pythonic", "olmo3", "phi4_mini_json", "pythonic", "xlam"),
    }
)

# The syntaxes whose tags the trainer can build, by parser.
TAGS: Final[Mapping[str, str]] = {
    "hermes": "hermes",
    "qwen3_json": "hermes",
    "longcat": "longcat",
    "llama3_json": "llama",
    "llama4_json": "llama",
    "qwen3_coder": "qwen_3_coder",
    "qwen3_xml": "qwen_3_coder",
    "step3p5": "qwen_3_coder",
    "mimo": "mimo",
    "kimi_k2": "kimi",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4_1",
}


def has_grammars(tool_parser: str | None) -> bool:
    """Return whether a server with this parser may hold a call to a grammar; None: unknown."""
    return tool_parser not in WITHOUT_GRAMMARS


def tag_model(tool_parser: str | None) -> str | None:
    """Return the syntax that a server with this parser holds calls to; None: unknown, or none."""
    return None if tool_parser is None else TAGS.get(tool_parser)
