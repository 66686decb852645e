"""Share the grammars that vLLM makes of requests, with a tool parser of each kind."""

import warnings
from typing import Any

import pytest

from tests.support.proxy.grammars import grammars_with


@pytest.fixture(scope="module")
def vllm_grammar() -> Any:
    """The grammar that vLLM makes of a request, with a tool parser that reads JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser

        return grammars_with(PythonicToolParser)


@pytest.fixture(scope="module")
def hermes_grammar() -> Any:
    """The same with a tool parser whose model has a syntax of its own, `pawl up`'s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

        return grammars_with(Hermes2ProToolParser)
