"""List the frameworks that are measured, each by a program of its own in `programs/`."""

from pathlib import Path
from typing import Final, NamedTuple

PROGRAMS: Final = Path(__file__).parent / "programs"
# The name under which the programs ask for the model.
MODEL: Final = "agent"


class Row(NamedTuple):
    """Name a framework in one way of using it; `key` names its calls in the ledger."""

    key: str
    title: str
    program: str
    arguments: tuple[str, ...] = ()


ROWS: Final = (
    Row("langgraph", "LangGraph: a graph of two agents", "langgraph_agents.py"),
    Row("agents-chat", "Agents SDK: chat, strict tools", "openai_agents.py", ("chat",)),
    Row(
        "agents-responses",
        "Agents SDK: responses, strict tools",
        "openai_agents.py",
        ("responses",),
    ),
    Row(
        "agents-streamed",
        "Agents SDK: responses, streamed, strict tools",
        "openai_agents.py",
        ("streamed",),
    ),
    Row(
        "agents-loose",
        "Agents SDK: responses, tools not strict",
        "openai_agents.py",
        ("responses", "loose"),
    ),
    Row(
        "agents-streamed-loose",
        "Agents SDK: responses, streamed, tools not strict",
        "openai_agents.py",
        ("streamed", "loose"),
    ),
    Row("autogen", "AutoGen: an agent that reflects", "autogen_agent.py"),
    Row("pydantic-ai", "pydantic-ai: structured output", "pydantic_ai_agent.py"),
    Row("anthropic", "anthropic: tool runner", "anthropic_tools.py", ("whole",)),
    Row(
        "anthropic-streamed",
        "anthropic: tool runner, streamed",
        "anthropic_tools.py",
        ("streamed",),
    ),
    Row("openai-thinking", "openai: a thinking model's settings", "openai_chat.py", ("thinking",)),
    Row("openai-penalties", "openai: penalties", "openai_chat.py", ("penalties",)),
    Row("openai-schema", "openai: a JSON schema", "openai_chat.py", ("schema",)),
)
