"""Six kinds of work that no example resembles: their tasks, and the reward of an answer.

A stranger's tasks are made from a seed, as many as are asked for, no two alike. Half of them or
more are of one family, as traffic is; the held-out ones are of each family alike.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True)
class Task:
    """One task: its family, what the agent gets, and what `Stranger.reward` compares with."""

    family: str
    given: Any
    right: Any


@dataclass(frozen=True)
class Stranger:
    """A kind of work: families with their shares of the traffic, and how an answer is rewarded.

    `make` returns a task of a family; `reward` says how good an answer is, from 0 to 1.
    """

    shares: Mapping[str, float]
    make: Callable[[random.Random, str], Task]
    reward: Callable[[Task, Any], float]
    names_tasks: bool = True


def make_tasks(stranger: Stranger, seed: int, count: int, *, held_out: bool) -> list[Task]:
    """Make tasks, no two alike; held-out ones are never among those that agents learn from."""
    rng = random.Random(HELD_OUT_SEED + seed if held_out else seed)
    families, shares = list(stranger.shares), list(stranger.shares.values())
    tasks: dict[str, Task] = {}
    number = 0
    while len(tasks) < count:
        [family] = [families[number % len(families)]] if held_out else rng.choices(families, shares)
        task = stranger.make(rng, family)
        key = json.dumps(task.given, sort_keys=True)
        # A task's words say on which side it is, whatever the seeds.
        if key not in tasks and (random.Random(key).random() < 0.3) == held_out:
            tasks[key] = task
            number += 1
    return list(tasks.values())


# --- naming one of several ----------------------------------------------------------------------

PRODUCTS = [
    "lamp",
    "kettle",
    "bicycle",
    "jacket",
    "printer",
    "camera",
    "tent",
    "mixer",
    "chair",
    "phone",
    "watch",
    "radio",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
]
PLACES = [
    "Lyon",
    "Porto",
    "Graz",
    "Turin",
    "Ghent",
    "Malmo",
    "Leeds",
    "Cork",
    "Basel",
    "Gdansk",
    "Split",
    "Bergen",
]
MESSAGES = {
    "billing": (
        "I was charged twice for the {product} in {month}.",
        "Please refund the {product}, order {number}.",
        "The invoice of {month} lists a {product} that I never bought.",
        "Why did {number} euros leave my card for a {product}?",
        "My {month} payment for the {product} was declined.",
        "The price of the {product} on the invoice is wrong, it says {number}.",
    ),
    "account": (
        "I cannot log in since {month}, user {number}.",
        "Please change my e-mail address, I moved to {place} in {month}.",
        "My password is refused, user name {product}{number}.",
        "Close my profile {number} please, I live in {place} now.",
        "The code you sent to my phone {number} does not work.",
        "How do I change my user name {product}{number}?",
    ),
    "shipping": (
        "My {product} has not arrived in {place} yet.",
        "Where is parcel {number} to {place}?",
        "The courier left the {product} at the wrong house in {place}.",
        "Can you deliver the {product} to {place} in {month}?",
        "Tracking number {number} shows nothing since {month}.",
        "The box with the {product} came open, parcel {number}.",
    ),
}


def make_message(rng: random.Random, desk: str) -> Task:
    text = rng.choice(MESSAGES[desk]).format(
        product=rng.choice(PRODUCTS),
        month=rng.choice(MONTHS),
        place=rng.choice(PLACES),
        number=rng.randint(100, 9999),
    )
    return Task(desk, text, desk)


def reward_message(task: Task, answer: str) -> float:
    return float(answer.strip().strip(".").lower() == task.right)


# --- formatting as JSON -------------------------------------------------------------------------

NAMES = [
    "Anna",
    "Boris",
    "Chloe",
    "David",
    "Elena",
    "Felix",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Klara",
    "Louis",
    "Marta",
    "Nils",
]
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}


def make_order(rng: random.Random, form: str) -> Task:
    word = rng.choice(list(COUNTS))
    product, place, name = rng.choice(PRODUCTS[:10]), rng.choice(PLACES), rng.choice(NAMES)
    right = {"item": product, "count": COUNTS[word], "city": place}
    text = {
        "plain": f"{word.capitalize()} {product}s to {place}, for {name}.",
        "polite": f"Hello, this is {name}. Could you send {word} {product}s to {place}?",
        "turned": f"{name} lives in {place} and would like {product}s, {word} of them.",
    }[form]
    return Task(form, text, right)


def reward_order(task: Task, answer: str) -> float:
    """Return the share of fields that are right; what is no JSON object has none."""
    try:
        given = json.loads(answer)
    except ValueError:
        return 0.0
    if not isinstance(given, dict) or set(given) != set(task.right):
        return 0.0
    return fmean(given[key] == value for key, value in task.right.items())


# --- choosing a tool ----------------------------------------------------------------------------

TOOLS = {
    "weather": (
        "How warm is it in {place}?",
        "Is it cold in {place}?",
        "Does it rain in {place}?",
        "Is it sunny in {place}?",
        "Do I need a coat in {place}?",
        "Is there snow in {place}?",
    ),
    "clock": (
        "How late is it in {place}?",
        "What time is it in {place}?",
        "Is it noon in {place}?",
        "Is it night in {place}?",
    ),
    "people": (
        "How many people live in {place}?",
        "How big is {place}?",
        "Is {place} a large town?",
    ),
    "trains": ("When does a train leave for {place}?", "Is there a train to {place}?"),
}
TOWN_BEGINS = [
    "Bar",
    "Wes",
    "Nor",
    "Kil",
    "Hol",
    "Tam",
    "Ros",
    "Fen",
    "Mil",
    "Ash",
    "Dun",
    "Har",
    "Lin",
    "Pen",
    "Sal",
    "Thor",
    "Wal",
    "Wick",
    "Burn",
    "Cal",
]
TOWN_ENDS = [
    "ton",
    "field",
    "stead",
    "brook",
    "more",
    "ham",
    "ley",
    "bury",
    "dale",
    "worth",
    "ford",
    "gate",
]


def make_question(rng: random.Random, tool: str) -> Task:
    town = rng.choice(TOWN_BEGINS) + rng.choice(TOWN_ENDS)
    asked = rng.choice(TOOLS[tool]).format(place=town)
    return Task(tool, asked, {"tool": tool, "town": town})


def reward_question(task: Task, answer: Mapping[str, str]) -> float:
    """Half for the right tool, a quarter for the right town, a quarter for saying what it gave."""
    if answer["tool"] != task.right["tool"]:
        return 0.0
    is_town = bool(answer["town"] == task.right["town"])
    return 0.5 + 0.25 * is_town + 0.25 * (is_town and answer["found"] in answer["said"])


# --- converting units ---------------------------------------------------------------------------

UNITS = {"km": ("m", 1000), "m": ("cm", 100), "kg": ("g", 1000), "cm": ("mm", 10)}


def make_length(rng: random.Random, unit: str) -> Task:
    number = rng.randint(2, 999)
    other, factor = UNITS[unit]
    return Task(unit, f"{number} {unit} in {other}", f"{number * factor} {other}")


def reward_length(task: Task, answer: str) -> float:
    return float(answer.strip().strip(".") == task.right)


# --- short and long answers ---------------------------------------------------------------------

THINGS = (
    "animals",
    "fruits",
    "countries",
    "colours",
    "tools",
    "rivers",
    "jobs",
    "sports",
    "trees",
    "vegetables",
    "cities",
    "drinks",
    "birds",
    "flowers",
    "metals",
    "games",
    "planets",
    "boats",
)


def make_list(rng: random.Random, size: str) -> Task:
    count = rng.randint(*{"short": (2, 5), "long": (8, 20)}[size])
    thing = rng.choice(THINGS)
    return Task(
        size, f"Write {count} {thing} for {rng.choice(NAMES)}, of {rng.choice(PLACES)}.", count
    )


def reward_list(task: Task, answer: str) -> float:
    """Right is a list of so many numbered lines, of one to three words each, no two alike.

    Each line too many, too few, twice or in another form costs its share.
    """
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    found = [re.fullmatch(rf"{n}\. (\w+( \w+){{0,2}})\.?", line) for n, line in enumerate(lines, 1)]
    entries = len({match[1].lower() for match in found if match})
    wrong = abs(entries - task.right) + len(lines) - entries
    return float(max(0.0, 1 - wrong / task.right))


# --- one to four calls --------------------------------------------------------------------------

JOBS = [
    "baker",
    "nurse",
    "pilot",
    "farmer",
    "painter",
    "lawyer",
    "tailor",
    "singer",
    "driver",
    "plumber",
    "miner",
    "cook",
]
FIELDS = ("name", "age", "city", "job")


def make_form(rng: random.Random, calls: str) -> Task:
    person = {
        "name": rng.choice(NAMES),
        "age": str(rng.randint(18, 90)),
        "city": rng.choice(PLACES),
        "job": rng.choice(JOBS),
    }
    text = "name: {name}, age: {age}, city: {city}, job: {job}.".format(**person)
    asked = rng.sample(FIELDS, int(calls[0]))
    return Task(calls, {"text": text, "asked": asked}, [person[name] for name in asked])


def reward_form(task: Task, answer: list[str]) -> float:
    pairs = zip(answer, task.right, strict=True)
    return fmean(float(given.strip().strip(".") == known) for given, known in pairs)


STRANGERS = {
    "desk": Stranger(
        {"billing": 0.55, "account": 0.15, "shipping": 0.3}, make_message, reward_message
    ),
    "order": Stranger({"plain": 0.6, "polite": 0.25, "turned": 0.15}, make_order, reward_order),
    "tool": Stranger(
        {"weather": 0.5, "clock": 0.25, "people": 0.15, "trains": 0.1},
        make_question,
        reward_question,
    ),
    "unit": Stranger({"km": 0.5, "m": 0.2, "kg": 0.2, "cm": 0.1}, make_length, reward_length),
    "list": Stranger({"short": 0.6, "long": 0.4}, make_list, reward_list, names_tasks=False),
    "form": Stranger({"1 call": 0.5, "2 calls": 0.2, "4 calls": 0.3}, make_form, reward_form),
}
