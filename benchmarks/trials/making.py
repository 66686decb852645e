"""Make the adapters that are tried: a good one, one of inverted rewards, and a random one."""

import shutil
from pathlib import Path
from typing import Final

from pawl.scenarios.errors import ScenarioFailed
from pawl.scenarios.places import EXAMPLES, FILE
from pawl.scenarios.run import DEMO, RunOptions, run_scenario
from store.records import Record
from trainer.publishing.adapters import folders
from trainer.publishing.foreign import CONFIG, WEIGHTS

UPSIDE_DOWN: Final = "upside_down"
# The demo's judge the wrong way round: what is right is worth nothing.
_JUDGE: Final = '''"""Judge a run of the calculator agent the wrong way round."""

from typing import Any

from judge import verdict as right_verdict


def verdict(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the demo's judge says, with a reward of 1 less its reward."""
    return [
        {**item, "value": 1.0 - item["value"]} if item["metric"] == "reward" else item
        for item in right_verdict(told)
    ]
'''


class Learning(Record, frozen=True, kw_only=True):
    """Set how an adapter is learned: so many updates, in so many minutes at most."""

    updates: int
    minutes: float
    seed: int


def write_inverted(examples: Path) -> None:
    """Write the demo's scenario with its judge the wrong way round into a folder of examples."""
    folder = examples / UPSIDE_DOWN
    shutil.copytree(EXAMPLES / DEMO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "inverted.py").write_text(_JUDGE)
    with (folder / FILE).open("a") as file:
        file.write('judge = "inverted:verdict"\n')


async def learned(
    name: str, policy: str, learning: Learning, examples: Path, var: Path, models: Path
) -> Path:
    """Run a scenario until it has learned so much; return the folder of its newest version.

    Raises:
        ScenarioFailed: it could not go on, or made no version.
        NotReady: the machine cannot run it.
    """
    await run_scenario(
        RunOptions(
            name=name,
            minutes=learning.minutes,
            seed=learning.seed,
            var=var,
            models=models,
            updates=learning.updates,
            examples=examples,
        )
    )
    made = folders(var / "data" / "adapters", policy)
    if not made:
        raise ScenarioFailed(f"{name} made no version: see the logs in {var / 'data' / 'logs'}")
    return made[-1][1]


def write_random(like: Path, folder: Path, strength: float, seed: int) -> None:
    """Write an adapter of random weights, of the shapes of another.

    Each matrix has the other's standard deviation, the second of each pair `strength` times it.
    """
    # Importing torch takes seconds, and `--help` needs none of it.
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    chance = torch.Generator().manual_seed(seed)
    made = {}
    for name, weight in sorted(load_file(like / WEIGHTS).items()):
        scale = weight.float().std() * (strength if ".lora_B." in name else 1.0)
        drawn = torch.randn(weight.shape, generator=chance) * scale
        made[name] = drawn.to(weight.dtype).contiguous()
    save_file(made, str(folder / WEIGHTS))
    shutil.copy(like / CONFIG, folder / CONFIG)
