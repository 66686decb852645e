"""Worked examples: questions with their queries, and a selector of those nearest to a question."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from langchain_core.example_selectors.base import BaseExampleSelector

# Question, query, and what became of an earlier, wrong query for it.
POOL = (
    (
        "How many employees have department Sales?",
        "SELECT COUNT(*) FROM employee WHERE department = 'Sales'",
        "no such column: Sales",
    ),
    (
        "How many employees have age above 50?",
        "SELECT COUNT(*) FROM employee WHERE age > 50",
        "no such table: employees",
    ),
    (
        "How many projects have hours below 100?",
        "SELECT COUNT(*) FROM project WHERE hours < 100",
        "no such table: projects",
    ),
    (
        "List the name of employees with salary above 9000.",
        "SELECT name FROM employee WHERE salary > 9000",
        'near "above": syntax error',
    ),
    (
        "List the name of employees with age below 30.",
        "SELECT name FROM employee WHERE age < 30",
        "nothing found",
    ),
    (
        "List the title of projects with hours above 300.",
        "SELECT title FROM project WHERE hours > 300",
        "no such column: name",
    ),
    (
        "What is the max salary of employees with department Legal?",
        "SELECT MAX(salary) FROM employee WHERE department = 'Legal'",
        "nothing found",
    ),
    (
        "What is the min age of employees with department Press?",
        "SELECT MIN(age) FROM employee WHERE department = 'Press'",
        "no such function: MINIMUM",
    ),
    (
        "What is the avg salary of employees with department Design?",
        "SELECT AVG(salary) FROM employee WHERE department = 'Design'",
        "nothing found",
    ),
    (
        "What is the age of the employee with name Ada?",
        "SELECT age FROM employee WHERE name = 'Ada'",
        "no such column: Ada",
    ),
    (
        "What is the department of the employee with name Hugo?",
        "SELECT department FROM employee WHERE name = 'Hugo'",
        "nothing found",
    ),
    (
        "What is the city of the department with name Sales?",
        "SELECT city FROM department WHERE name = 'Sales'",
        "no such column: Sales",
    ),
    (
        "List the name of employees whose department has city Rome.",
        "SELECT name FROM employee WHERE department IN "
        "(SELECT name FROM department WHERE city = 'Rome')",
        "no such column: city",
    ),
    (
        "List the title of projects whose department has city Oslo.",
        "SELECT title FROM project WHERE department IN "
        "(SELECT name FROM department WHERE city = 'Oslo')",
        "no such column: city",
    ),
)


class NearestExamples(BaseExampleSelector):
    """Selects the examples whose questions have most words in common with a question, rare ones
    before others (TF-IDF and cosine). The nearest comes last, where a small model heeds it most."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._examples = [
            {"question": question, "sql": sql, "result": result} for question, sql, result in POOL
        ]
        seen = Counter(word for question, _, _ in POOL for word in set(words(question)))
        self._weights = {word: math.log(1 + len(POOL) / times) for word, times in seen.items()}
        self._vectors = [self._vector(question) for question, _, _ in POOL]

    def _vector(self, text: str) -> dict[str, float]:
        vector = {word: self._weights.get(word, 0.0) for word in words(text)}
        length = math.sqrt(sum(value**2 for value in vector.values())) or 1.0
        return {word: value / length for word, value in vector.items()}

    def select_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        asked = self._vector(input_variables["question"])
        near = [
            sum(asked.get(word, 0.0) * value for word, value in vector.items())
            for vector in self._vectors
        ]
        order = sorted(range(len(near)), key=lambda place: near[place])
        return [self._examples[place] for place in order[-self._count :]]

    def add_example(self, example: dict[str, str]) -> None:
        raise NotImplementedError("the examples are fixed")


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())
