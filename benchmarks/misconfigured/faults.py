"""Define the six misconfigurations: how each is made, before or beneath a trainer, and repaired."""

from collections.abc import Callable
from importlib.resources import files
from typing import Final, Literal, NamedTuple

from benchmarks.misconfigured.server import MAX_RANK, ModelServer, Settings
from benchmarks.misconfigured.trainer import Trainer

Moment = Literal["at the start", "while it runs"]
MOMENTS: Final[tuple[Moment, ...]] = ("at the start", "while it runs")
HIGH_RANK: Final = 64
LOW_RANK: Final = 8
# A layer of the model that a server may have no LoRA for, and the others.
ODD_LAYER: Final = "down_proj"
OTHER_LAYERS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


class Fault(NamedTuple):
    """Define a misconfiguration, and words of what an operator is told to do.

    `breaks` changes the server's settings; `recipe` are lines of `[lora]` that are the fault at the
    start instead, and `repaired` those that repair it where the server stays as it is.
    """

    name: str
    remedy: str
    breaks: Callable[[Settings], None] | None = None
    recipe: str = ""
    repaired: str = ""
    fills_memory: bool = False
    takes_server_away: bool = False


def _low_rank(settings: Settings) -> None:
    settings.max_rank = LOW_RANK


def _without_a_layer(settings: Settings) -> None:
    settings.without_lora = {ODD_LAYER}


def _raw(settings: Settings) -> None:
    settings.raw = True


def _wrong_base(settings: Settings) -> None:
    settings.wrong_base = True


FAULTS: Final = (
    Fault("rank", "--max-lora-rank", _low_rank, recipe=f"rank = {HIGH_RANK}"),
    Fault(
        "target modules",
        "lora.target_modules",
        _without_a_layer,
        repaired=f"target_modules = {OTHER_LAYERS}",
    ),
    Fault("raw logprobs", "--logprobs-mode processed_logprobs", _raw),
    Fault("wrong base", "PAWL_MODEL", _wrong_base),
    Fault("full memory", "batch.micro_batch_tokens", fills_memory=True),
    Fault("server away", "does not answer", takes_server_away=True),
)


def packaged_recipe(lora: str = "") -> str:
    """Return the packaged recipe of training runs, but for a line of `[lora]`: versions go live."""
    text = (files("trainer.recipes") / "rollout.toml").read_text()
    if not lora:
        return text
    key = lora.partition(" ")[0]
    kept = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
    return "\n".join(kept).replace("[lora]", f"[lora]\n{lora}") + "\n"


async def inject(fault: Fault, moment: Moment, server: ModelServer, trainer: Trainer) -> None:
    """Make the fault; the server is changed without being away, unless that is the fault."""
    at_start = moment == "at the start"
    if at_start and fault.recipe:
        trainer.recipe.write_text(packaged_recipe(fault.recipe))
    elif fault.breaks is not None:
        fault.breaks(server.settings)
    if fault.fills_memory:
        trainer.full.touch()
    if fault.takes_server_away:
        await server.stop()


async def repair(fault: Fault, moment: Moment, server: ModelServer, trainer: Trainer) -> None:
    """Do what the trainer told, and start it again if it has ended."""
    at_start = moment == "at the start"
    if at_start and fault.repaired:
        trainer.recipe.write_text(packaged_recipe(fault.repaired))
    else:
        trainer.recipe.write_text(packaged_recipe())
        server.settings.max_rank, server.settings.without_lora = MAX_RANK, ()
        server.settings.raw = server.settings.wrong_base = False
    trainer.full.unlink(missing_ok=True)
    await server.start()
    await trainer.start()
