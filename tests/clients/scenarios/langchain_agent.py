"""Run LangChain: its agent, and its chat model streamed."""

from typing import Any

from conversation import MAX_TOKENS, MODEL, TOOL_DESCRIPTION, chat_history, report, turns, weather
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

NAME = "LangChain"


def use_tool(model: ChatOpenAI) -> str:
    agent = create_agent(model, tools=[tool(description=TOOL_DESCRIPTION)(weather)])
    messages: Any = chat_history(NAME)
    return str(agent.invoke({"messages": messages})["messages"][-1].content)


def stream(model: ChatOpenAI) -> list[list[str]]:
    messages: list[Any] = []
    seen = []
    for turn in turns(NAME):
        messages.append(HumanMessage(turn))
        chunks = list(model.stream(messages))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        messages.append(whole)
        seen.append([str(chunk.content) for chunk in chunks])
    return seen


chat = ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=MAX_TOKENS)
report(use_tool(chat), stream(chat))
