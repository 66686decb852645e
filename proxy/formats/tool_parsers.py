"""List the tool parsers of vLLM that hold no reply to a grammar of their own (pure).

Where xgrammar knows the syntax of a model's calls, vLLM makes a structural tag if tools are strict,
or one call at most is allowed. The parsers named here have none: `strict` changes nothing that is
sampled, and `parallel_tool_calls` nothing unless a call is forced.

Source: vLLM 0.32, `tool_parsers/abstract_tool_parser.py` (`structural_tag_model`) and
`parser/abstract_parser.py`; `tests/integration/proxy/test_vllm_grammars.py` compares.
"""

from typing import Final

WITHOUT_GRAMMARS: Final = frozenset(
    {
        *("cohere_command3", "cohere_command4", "ernie45", "granite-20b-fc", "hf", "hunyuan_a13b"),
        *("hy_v3", "llama4_pythonic", "olmo3", "phi4_mini_json", "pythonic", "xlam"),
    }
)


def has_grammars(tool_parser: str | None) -> bool:
    """Return whether a server with this parser may hold a call to a grammar; None: unknown."""
    return tool_parser not in WITHOUT_GRAMMARS
