"""Make episodes for the gate's tests."""

from random import Random

from pawl.controller.gate.records import BASE, CANARY, SERVING, Decision, Episode, GateOptions
from pawl.controller.gate.trial import Trial
from store.records import Arm


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


def decided(episodes: list[Episode], options: GateOptions) -> Decision:
    """Return what a gate comes to that looks after every episode."""
    trial = Trial(options)
    for episode in episodes:
        trial.extend([episode])
        if trial.is_decided:
            break
    return trial.decide(0)


def decide(episodes: list[Episode], options: GateOptions, age_s: float) -> Decision:
    """Return what is to be done with a canary of this age, of all its episodes at once."""
    trial = Trial(options)
    trial.extend(episodes)
    return trial.decide(age_s)
