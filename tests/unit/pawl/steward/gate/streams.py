"""Make episodes for the gate's tests."""

from random import Random

from pawl.steward.gate.records import BASE, CANARY, SERVING, Arm, Episode


def arm_of(random: Random, canary: float = 0.1, base: float = 0.02) -> Arm:
    drawn = random.random()
    if drawn < base:
        return BASE
    return CANARY if drawn < base + canary else SERVING


def stream(
    count: int, means: dict[Arm, float], seed: int = 0, canary: float = 0.1, base: float = 0.02
) -> list[Episode]:
    """Return episodes that are right with the probability of their arm, else wrong."""
    random = Random(seed)
    arms = [arm_of(random, canary, base) for _ in range(count)]
    return [Episode(arm, "one", float(random.random() < means[arm])) for arm in arms]
