"""Facts about invented towns: no model knows them, so it has to search."""

from __future__ import annotations

import random
from typing import NamedTuple

RELATIONS = ("mayor", "year", "river", "dish")
QUESTIONS = {
    "mayor": "Who is the mayor of {town}?",
    "year": "When was {town} founded?",
    "river": "Which river flows through {town}?",
    "dish": "What is the favourite dish of {town}?",
}
SENTENCES = {
    "mayor": "The mayor of {town} is {value}.",
    "year": "{town} was founded in {value}.",
    "river": "The river {value} flows through {town}.",
    "dish": "The favourite dish of {town} is {value}.",
}
BORN = "{mayor} was born in {value}."
TWO_HOP_QUESTION = "In which town was the mayor of {town} born?"
STARTS = "Bel Cor Dun Fal Gar Hol Kel Lor Mar Nor Pel Ros Sel Tor Vel".split()  # noqa: SIM905
ENDS = ("bury", "dale", "ford", "ham", "mere", "stead", "ton", "wick")
FIRST = "Anna Boris Clara Dmitri Elsa Felix Greta Henrik Irma Jonas Karin Lukas Mira Nils Olga Petra".split()  # noqa: E501, SIM905
LAST = "Abel Brandt Castor Dahl Egger Frost Graf Holm Isler Jansen Keller Lind Moser Nagel Otto Pohl".split()  # noqa: E501, SIM905
RIVERS = "Asta Brin Calla Dree Elva Fenn Gild Hyrn Ista Jorl Kess Loma Mirn Nedda Orsa Pryl".split()  # noqa: SIM905
FOODS = ("bread", "cake", "dumplings", "noodles", "pie", "salad", "soup", "stew")
TASTES = "barley bean carrot cherry fennel leek lentil mushroom onion plum pumpkin trout".split()  # noqa: SIM905


class Town(NamedTuple):
    """A town, and the facts about it by relation."""

    name: str
    known: dict[str, str]
    mayor_born_in: str


def towns() -> list[Town]:
    """Return all towns; they are the same in each process."""
    rng = random.Random("towns")
    names = [start + end for start in STARTS for end in ENDS]
    people = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(names)
    rng.shuffle(people)
    made = []
    for name, mayor in zip(names, people[: len(names)], strict=True):
        known = {
            "mayor": mayor,
            "year": str(rng.randint(1100, 1899)),
            "river": rng.choice(RIVERS),
            "dish": f"{rng.choice(TASTES)} {rng.choice(FOODS)}",
        }
        made.append(Town(name, known, rng.choice(names)))
    return made


def corpus() -> list[str]:
    """Return all facts, a sentence each."""
    sentences = []
    for town in towns():
        sentences += [
            SENTENCES[relation].format(town=town.name, value=town.known[relation])
            for relation in RELATIONS
        ]
        sentences.append(BORN.format(mayor=town.known["mayor"], value=town.mayor_born_in))
    return sentences
