"""Answer questions about a SQLite database with LangGraph: three agents on one graph.

A writer writes a query, which is executed; a checker looks at the result. If the checker rejects
it, a rewriter writes another query, which is executed and checked like the first. As a program, it
reads one question as a line of JSON ({"question": "..."}), and prints the query. The model server
is the one in OPENAI_BASE_URL and OPENAI_API_KEY; the agents request the models in WRITER_MODEL,
REWRITER_MODEL and CHECKER_MODEL.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import sys
from typing import Any, TypedDict

from company import is_empty, rows_of
from databases import create, database
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
SYSTEM_OF_MANY = (
    "Write a SQLite query that answers the question. Answer with the query alone.\n{tables}"
)
CHECK = "Does the result answer the question? Say yes or no."
MOST_TRIES = 2
ASKED = "{question}"
ASKED_AGAIN = "{question}\nPrevious: {result}"
FENCED = re.compile(r"```(?:\w*\n)?(.*?)```", re.DOTALL)


class State(TypedDict, total=False):
    question: str
    schema: str | None
    tries: int
    sql: str
    result: str
    found: bool
    accepted: bool


def prompt(asked: str, schema: str | None) -> ChatPromptTemplate:
    """Return an agent's prompt; for the small company it has the nearest worked examples."""
    if schema is not None:
        system = SYSTEM_OF_MANY.format(tables=create(schema))
        return ChatPromptTemplate.from_messages([("system", system), ("human", asked)])
    examples = FewShotChatMessagePromptTemplate(
        input_variables=["question"],
        example_selector=NearestExamples(2),
        example_prompt=ChatPromptTemplate.from_messages([("human", asked), ("ai", "{sql}")]),
    )
    return ChatPromptTemplate.from_messages([("system", SYSTEM), examples, ("human", asked)])


def execute(state: State) -> State:
    """Run the query; the result is a JSON object with rows or an error."""
    try:
        rows = rows_of(database(state["schema"]), state["sql"])
    except (sqlite3.Error, sqlite3.Warning) as error:
        return {"result": json.dumps({"error": str(error)}), "found": False}
    return {"result": json.dumps({"rows": rows[:5]}), "found": not is_empty(rows)}


def next_node(state: State) -> str:
    return END if state["accepted"] or state["tries"] == MOST_TRIES else "rewrite"


def describe_result(result: str) -> str:
    """Return a result as the worked examples state it."""
    outcome = json.loads(result)
    if "error" in outcome:
        return str(outcome["error"])[:80]
    return json.dumps(outcome["rows"])[:80] if outcome["rows"] else "nothing found"


def query_in(reply: str) -> str:
    """Return the query in a reply, without the code fence that most models write around it."""
    fenced = FENCED.search(reply)
    return (fenced[1] if fenced else reply).strip()


class Agents:
    def __init__(self, base_url: str, schema: str | None) -> None:
        max_tokens = 64 if schema is None else 160
        options: dict[str, Any] = {"base_url": base_url, "max_tokens": max_tokens}
        names = {
            role: os.environ.get(f"{role.upper()}_MODEL", role)
            for role in ("writer", "rewriter", "checker")
        }
        writer = ChatOpenAI(model=names["writer"], temperature=1.0, **options)
        rewriter = ChatOpenAI(model=names["rewriter"], temperature=1.0, **options)
        self._writer = prompt(ASKED, schema) | writer
        self._rewriter = prompt(ASKED_AGAIN, schema) | rewriter
        self._checker = ChatOpenAI(
            model=names["checker"], temperature=0.0, base_url=base_url, max_completion_tokens=4
        )

    async def write(self, state: State) -> State:
        reply = await self._writer.ainvoke({"question": state["question"]})
        return {"sql": query_in(str(reply.content)), "tries": 1}

    async def check(self, state: State) -> State:
        """Accept the query if the model does, unless the query failed or found nothing."""
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
        inputs = {"question": state["question"], "result": describe_result(state["result"])}
        reply = await self._rewriter.ainvoke(inputs)
        return {"sql": query_in(str(reply.content)), "tries": state["tries"] + 1}

    def graph(self) -> Any:
        graph = StateGraph(State)
        graph.add_node("write", self.write)
        graph.add_node("execute", execute)
        graph.add_node("check", self.check)
        graph.add_node("rewrite", self.rewrite)
        graph.add_edge(START, "write")
        graph.add_edge("write", "execute")
        graph.add_edge("execute", "check")
        graph.add_conditional_edges("check", next_node, [END, "rewrite"])
        graph.add_edge("rewrite", "execute")
        return graph.compile()


async def answer(task: dict[str, Any], base_url: str | None = None) -> str:
    """Return the agents' last query."""
    schema = task.get("schema")
    agents = Agents(base_url or os.environ["OPENAI_BASE_URL"], schema)
    state = await agents.graph().ainvoke({"question": task["question"], "schema": schema})
    return str(state["sql"])


if __name__ == "__main__":
    print(asyncio.run(answer(json.loads(sys.stdin.readline()))))
