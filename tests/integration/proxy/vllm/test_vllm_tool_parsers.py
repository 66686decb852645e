"""What a server's tool parser makes of tools is what is recorded, or the call is not trainable."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.formats.sampling import WITHOUT_GRAMMARS, has_grammars
from store.values.sampling import distribution_of
from tests.support.proxy.grammars import (
    CHAT,
    CHOICES,
    FORMS,
    FUNCTIONS,
    OWN,
    RESPONSES,
    TOOLS,
    F,
    held,
    recorded,
)

# Importing vLLM takes its time.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@settings(max_examples=400)
@given(FORMS, st.none() | OWN, FUNCTIONS, CHOICES, st.sampled_from([None, True, False]))
def test_grammar_of_a_models_own_tool_syntax_is_never_recorded_as_unconstrained(
    hermes_grammar: Any, form: Any, own: Any, functions: Any, choice: Any, several: Any
) -> None:
    """What held a trainable call is recorded, but for a forced call, whose reply shows it."""
    fields: dict[str, Any] = {**CHAT, "response_format": form, "structured_outputs": own}
    fields["tools"] = [{"type": "function", "function": one} for one in functions] or None
    fields |= {"tool_choice": choice, "parallel_tool_calls": several}
    fields = {name: value for name, value in fields.items() if value is not None}
    theirs, (found, reason) = hermes_grammar("chat", fields), recorded("chat", json.dumps(fields))
    if theirs == "refused" or reason is not None:
        return
    forced = choice not in (None, "auto", "none")
    ours = distribution_of(found).grammar
    assert (theirs.kind if forced else theirs) == ("structural_tag" if forced else ours)


@settings(max_examples=400)
@given(
    *(st.sampled_from(["chat", "responses"]), FORMS, FUNCTIONS, CHOICES),
    st.sampled_from([None, True, False]),
)
def test_record_of_a_trainable_call_to_a_parser_without_grammars_has_vllms_grammar(
    vllm_grammar: Any, api: str, form: Any, functions: Any, choice: Any, several: Any
) -> None:
    """A server that is known to have such a parser leaves strict tools free, and we know it."""
    chat = api == "chat"
    fields: dict[str, Any] = {**CHAT, "response_format": form} if chat else dict(RESPONSES)
    if functions:
        fields["tools"] = [
            {"type": "function", "function": one} if chat else {"type": "function", **one}
            for one in functions
        ]
    fields |= {"tool_choice": choice, "parallel_tool_calls": several}
    fields = {name: value for name, value in fields.items() if value is not None}
    both = held(vllm_grammar, api, fields, tool_grammars=False)
    assert both.ours == both.theirs


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_calls_with_strict_tools_are_trainable_only_if_the_tool_parser_is_known(
    vllm_grammar: Any, api: str
) -> None:
    tool: dict[str, Any] = F | {"strict": True}
    asked = CHAT | {"tools": [{"type": "function", "function": tool}]}
    if api == "responses":
        asked = RESPONSES | {"tools": [{"type": "function", **tool}]}
    both = held(vllm_grammar, api, asked, tool_grammars=False)
    assert both.is_trained
    assert both.ours == both.theirs
    assert not held(vllm_grammar, api, asked).is_trained


def test_tool_parsers_listed_as_without_grammars_have_none_in_vllm() -> None:
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers.abstract_tool_parser import ToolParser

    for name in WITHOUT_GRAMMARS:
        parser = ToolParserManager.get_tool_parser(name)
        assert (parser.structural_tag_model, parser.default_tool_strict_level) == (None, None), name
        assert parser.get_structural_tag is ToolParser.get_structural_tag, name
        assert parser.adjust_request is ToolParser.adjust_request, name
        assert not parser.engine_based_streaming, name
        assert not has_grammars(name)
    assert has_grammars("hermes")
    assert has_grammars(None)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_parallel_tool_calls_off_is_recorded_as_constrained_as_some_parsers_enforce_it(
    hermes_grammar: Any, vllm_grammar: Any, choice: str | None
) -> None:
    asked = {**CHAT, "tools": TOOLS, "parallel_tool_calls": False}
    asked |= {"tool_choice": choice} if choice else {}
    assert hermes_grammar("chat", asked).kind == "structural_tag"
    assert vllm_grammar("chat", asked) is None
    assert recorded("chat", json.dumps(asked))[1] == "constrained_sampling"
    several = asked | {"parallel_tool_calls": True}
    assert hermes_grammar("chat", several) is None
    assert recorded("chat", json.dumps(several))[1] is None
