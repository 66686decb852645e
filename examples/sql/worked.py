"""A selector of the worked examples that are nearest to a question."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from langchain_core.example_selectors.base import BaseExampleSelector
from shown import POOL


class NearestExamples(BaseExampleSelector):
    """Selects the examples whose questions are nearest to a question (TF-IDF and cosine).

    The nearest comes last, where a small model heeds it most.
    """

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
