"""Decide a call's split: training, or evaluation that must never be trained on (pure)."""

from collections.abc import Iterable, Mapping
from typing import Final

from proxy.identity.names import Name
from store.records import EVAL, SPLITS, TRAIN, Split

# Unless PAWL_EVAL_TASKS says otherwise, a task of this beginning is evaluation.
EVAL_TASKS: Final = "eval/"
# How much of an unknown split a warning says back.
SAID_BACK: Final = 40
_KNOWN: Final[Mapping[str, Split]] = {TRAIN: TRAIN, EVAL: EVAL}


def split_of(
    names: Iterable[Name], task: str | None, eval_tasks: str, warnings: list[str]
) -> Split:
    """Return the first known split that is named, else the one that the task's name tells.

    Args:
        names: what the call says, the first to count first.
        task: the call's task, if it names one.
        eval_tasks: how the names of tasks begin whose episodes are evaluation.
        warnings: gets a warning for each unknown split before the one that counts.
    """
    for name in names:
        split = _KNOWN.get(name.value.lower())
        if split is not None:
            return split
        shown, known = ascii(name.value[:SAID_BACK]), " and ".join(SPLITS)
        warnings.append(f"{name.where} {shown} is no split ({known} are); ignored")
    return EVAL if task is not None and task.startswith(eval_tasks) else TRAIN
