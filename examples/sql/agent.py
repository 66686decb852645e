"""Answer questions about a SQLite database with LangGraph: three agents on one graph.

A writer writes a query, which is executed; a checker looks at what came of it; and where that is
wrong, a rewriter gets one more try, which is executed and checked like the first. As a program, it
reads one question as a line of JSON ({"question": "..."}), and prints the query. The model server
is whatever OPENAI_BASE_URL and OPENAI_API_KEY point at; the agents ask it for the models
WRITER_MODEL, REWRITER_MODEL and CHECKER_MODEL.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from typing import Any, TypedDict

from company import company, is_empty, rows_of
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, FewShotChatMessagePromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from worked import NearestExamples

TABLES = (
    "employee(name, department, age, salary)\n"
    "department(name, city, budget)\n"
    "project(title, department, hours)"
)
SYSTEM = f"Write a SQLite query that answers the question.\n{TABLES}"
CHECK = "Does the result answer the question? Say yes or no."
MOST_TRIES = 2
ASKED = "{question}"
ASKED_AGAIN = "{question}\nPrevious: {result}"


class State(TypedDict, total=False):
    question: str
    tries: int
    sql: str
    result: str
    found: bool
    accepted: bool


def prompt(asked: str) -> ChatPromptTemplate:
    examples = FewShotChatMessagePromptTemplate(
        input_variables=["question"],
        example_selector=NearestExamples(2),
        example_prompt=ChatPromptTemplate.from_messages([("human", asked), ("ai", "{sql}")]),
    )
    return ChatPromptTemplate.from_messages([("system", SYSTEM), examples, ("human", asked)])


def execute(state: State) -> State:
    """Run the query; what comes of it, rows or an error, is an object in JSON."""
    try:
        rows = rows_of(company(), state["sql"])
    except (sqlite3.Error, sqlite3.Warning) as error:
        return {"result": json.dumps({"error": str(error)}), "found": False}
    return {"result": json.dumps({"rows": rows[:5]}), "found": not is_empty(rows)}


def after_check(state: State) -> str:
    return END if state["accepted"] or state["tries"] == MOST_TRIES else "rewrite"


def shown(result: str) -> str:
    """Return a result in the words of the examples."""
    told = json.loads(result)
    if "error" in told:
        return str(told["error"])[:80]
    return json.dumps(told["rows"])[:80] if told["rows"] else "nothing found"


class Agents:
    def __init__(self, base_url: str) -> None:
        usual: dict[str, Any] = {"base_url": base_url, "max_tokens": 64}
        names = {
            role: os.environ.get(f"{role.upper()}_MODEL", role)
            for role in ("writer", "rewriter", "checker")
        }
        writer = ChatOpenAI(model=names["writer"], temperature=1.0, **usual)
        rewriter = ChatOpenAI(model=names["rewriter"], temperature=1.0, **usual)
        self._writer = prompt(ASKED) | writer
        self._rewriter = prompt(ASKED_AGAIN) | rewriter
        self._checker = ChatOpenAI(
            model=names["checker"], temperature=0.0, base_url=base_url, max_completion_tokens=4
        )

    async def write(self, state: State) -> State:
        reply = await self._writer.ainvoke({"question": state["question"]})
        return {"sql": str(reply.content).strip(), "tries": 1}

    async def check(self, state: State) -> State:
        """Accept what the model accepts, unless the query failed or found nothing."""
        tool_id = f"execute_{state['tries']}"
        call = {"id": tool_id, "name": "execute_sql", "args": {"query": state["sql"]}}
        reply = await self._checker.ainvoke(
            [
                SystemMessage(CHECK),
                HumanMessage(state["question"]),
                AIMessage("", tool_calls=[call]),
                ToolMessage(state["result"], tool_call_id=tool_id),
            ]
        )
        refused = str(reply.content).strip().lower().startswith("no")
        return {"accepted": state["found"] and not refused}

    async def rewrite(self, state: State) -> State:
        told = {"question": state["question"], "result": shown(state["result"])}
        reply = await self._rewriter.ainvoke(told)
        return {"sql": str(reply.content).strip(), "tries": state["tries"] + 1}

    def graph(self) -> Any:
        graph = StateGraph(State)
        graph.add_node("write", self.write)
        graph.add_node("execute", execute)
        graph.add_node("check", self.check)
        graph.add_node("rewrite", self.rewrite)
        graph.add_edge(START, "write")
        graph.add_edge("write", "execute")
        graph.add_edge("execute", "check")
        graph.add_conditional_edges("check", after_check, [END, "rewrite"])
        graph.add_edge("rewrite", "execute")
        return graph.compile()


async def answer(task: dict[str, Any], base_url: str | None = None) -> str:
    """Return the query that the agents end with."""
    agents = Agents(base_url or os.environ["OPENAI_BASE_URL"])
    state = await agents.graph().ainvoke({"question": task["question"]})
    return str(state["sql"])


if __name__ == "__main__":
    print(asyncio.run(answer(json.loads(sys.stdin.readline()))))
