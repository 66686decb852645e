"""Run LangGraph: a graph of two of LangChain's agents (`create_agent`), writer and checker."""

import asyncio

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from task import INSTRUCTIONS, MODEL, TOKENS, ask_all, calculator, messages, search

MOST_STEPS = 8


async def main() -> None:
    model = ChatOpenAI(model=MODEL, max_completion_tokens=TOKENS)
    graph = StateGraph(MessagesState)
    graph.add_node("writer", create_agent(model, [calculator, search], system_prompt=INSTRUCTIONS))
    graph.add_node("checker", create_agent(model, [calculator], system_prompt="Check it."))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "checker")
    graph.add_edge("checker", END)
    team = graph.compile()
    await ask_all(
        lambda question: team.ainvoke(
            {"messages": messages(question)}, {"recursion_limit": MOST_STEPS}
        )
    )


asyncio.run(main())
