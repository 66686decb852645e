"""Train each episode as one concatenated sequence: `pawl` with a trainer that does so.

    python -m benchmarks.concatenated demo --recipe mine.toml
    python -m benchmarks.concatenated trainer

Arguments and settings are those of `pawl`; of the processes that it starts only the trainer is
another. It is for a question that Agent Lightning (arXiv:2508.03680 §3.2) leaves open: what is lost
if the calls of an episode are not trained as they were made, each after its own prompt, but as one
text, each after all that came before it?

A call's prompt is replaced by the sequence so far, followed by what of the prompt does not repeat
its beginning. Where a conversation only grows, nothing changes. Elsewhere (several agents, thoughts
that are left out of the next prompt, a history that was cut) the policy is trained after texts that
it never saw, and the server's log-probabilities are not of them: those of the ratio are computed
anew by the version that sampled the reply, whose files must still be there. As rows, the calls of
an episode are prefixes of each other, so that merging computes each token of the sequence once.
Every sampled token of an episode has the same weight, as in a mean over one sequence.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from trainer.batches.rows import Row
from trainer.batches.trees import shared_prefix


def concatenated(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, each after the whole of its episode so far."""
    episodes: dict[UUID, list[Row]] = defaultdict(list)
    for row in rows:
        episodes[row.episode_id].append(row)
    return [row for own in episodes.values() for row in _one_sequence(own)]


def _one_sequence(calls: Sequence[Row]) -> list[Row]:
    weight = sum(call.weight for call in calls) / sum(len(call.sampled_ids) for call in calls)
    before: tuple[int, ...] = ()
    made = []
    for call in sorted(calls, key=lambda call: call.position):
        new = call.prompt_ids[shared_prefix(before, call.prompt_ids) :]
        row = msgspec.structs.replace(
            _after(call, before + new), weight=weight * len(call.sampled_ids)
        )
        before = row.ids
        made.append(row)
    return made


def _after(call: Row, prompt_ids: tuple[int, ...]) -> Row:
    """Return the call after another prompt, without log-probabilities: they are of its own."""
    if prompt_ids == call.prompt_ids:
        return call
    # A learner that imitates has none, and needs none.
    is_compared = bool(call.sampled_logprobs) or call.recomputed
    return msgspec.structs.replace(
        call, prompt_ids=prompt_ids, sampled_logprobs=(), recomputed=is_compared
    )


def _concatenate_updates() -> None:
    """Make the updates of this process concatenate their rows."""
    from trainer.updates import plan

    def of(make_rows: Callable[[Any], list[Row]]) -> Callable[[Any], list[Row]]:
        return lambda credited: concatenated(make_rows(credited))

    for name in ("training_rows", "imitated_rows"):
        setattr(plan, name, of(getattr(plan, name)))


def main() -> None:
    """Run `pawl`; its trainer, and what it starts, are this program again."""
    from pawl.cli import app
    from pawl.interpreter import run_module
    from pawl.stack import stack

    if sys.argv[1:2] == ["trainer"]:
        _concatenate_updates()
    setattr(stack, "run_module", lambda _: run_module("benchmarks.concatenated"))  # noqa: B010
    app()


if __name__ == "__main__":
    main()
