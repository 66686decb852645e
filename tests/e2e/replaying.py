"""Ask a stack, read what it recorded, and compare its log-probabilities with the trainer's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch

from pawl.stack.stack import Stack
from store.database import make_engine
from store.records import TransitionRow
from store.values.packing import unpack_ids, unpack_logprobs
from store.values.sampling import distribution_of
from store.version_queries import list_versions
from tests.e2e.conftest import POLICY, episodes_of
from tests.support.waiting import eventually
from trainer.batches import Layout, Row
from trainer.learners.learner import Learner
from trainer.learners.scoring import score_rows

ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.02,
    "logit_bias": {"28": 2, "30": -3, "411": 1.5},
    "bad_words": ["the", "Paris"],
    "min_tokens": 12,
    "stop_token_ids": [28, 30],
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
}


async def post(url: str, path: str, body: Mapping[str, Any], episode: str) -> Mapping[str, str]:
    """Make a call of an episode, which succeeds, and return the reply's headers."""
    headers = {"x-pawl-episode": episode}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/{path}", json=body, headers=headers) as response,
    ):
        # A stream that is not read to its end is recorded as incomplete.
        reply = await response.read()
        assert response.status == 200, reply
        return response.headers


def row_of(call: TransitionRow) -> Row:
    return Row(
        episode_id=call.episode_id,
        agent="",
        position=0,
        prompt_ids=tuple(unpack_ids(call.tokens.prompt_ids)),
        sampled_ids=tuple(unpack_ids(call.tokens.sampled_ids)),
        sampled_logprobs=tuple(unpack_logprobs(call.tokens.sampled_logprobs)),
        distribution=distribution_of(call.sampling),
        r_total=0.0,
        advantage=0.0,
        weight=1.0,
        version=call.policy_version or 0,
    )


async def recorded_calls(
    stack: Stack, wanted: Mapping[str, str]
) -> tuple[dict[str, list[TransitionRow]], dict[int, str | None]]:
    """The calls of the episodes `wanted`, by what each stands for, and the versions' folders."""
    engine = make_engine(stack.database_url)
    calls: dict[str, list[TransitionRow]] = {}

    async def stored() -> bool:
        calls.clear()
        async with engine.connect() as connection:
            for episode in await episodes_of(connection, wanted):
                calls.setdefault(wanted[episode.key], []).extend(episode.calls)
        return sum(map(len, calls.values())) == len(wanted)

    assert await eventually(stored)
    async with engine.connect() as connection:
        folders = {v.version: v.adapter_path for v in await list_versions(connection, POLICY)}
    await engine.dispose()
    return calls, folders


def trainers_differences(
    learner: Learner,
    calls: dict[str, list[TransitionRow]],
    folders: dict[int, str | None],
    layouts: Sequence[Layout] = ("tree",),
) -> dict[str, float]:
    """The mean difference a token for each kind of sampling, by each of the rows' layouts.

    That the layouts agree with each other is shown in `tests/integration/trainer/learners`.
    """
    by_version: dict[int, list[tuple[str, Row]]] = {}
    for name, own in calls.items():
        for number, call in enumerate(own):
            row = msgspec.structs.replace(row_of(call), position=number)
            by_version.setdefault(row.version, []).append((name, row))
    found: dict[str, list[torch.Tensor]] = {}
    for version, named in by_version.items():
        path = folders[version]
        learner.restore(None if path is None else Path(path))
        # All at once: calls of the same prompt share its computation, where the layout allows.
        batch = learner._base.prepare_rows([row for _, row in named])
        lengths = [len(row.sampled_logprobs) for row in batch]
        for layout in layouts:
            with torch.no_grad():
                scores = score_rows(learner._model, batch, layout=layout).logprobs
            for (name, _), row, own in zip(named, batch, scores.split(lengths), strict=True):
                served = torch.tensor(row.sampled_logprobs)
                found.setdefault(f"{name}, {layout}", []).append((own - served).abs())
    return {name: float(torch.cat(differences).mean()) for name, differences in found.items()}


def recomputed_differences(
    learner: Learner,
    pairs: Mapping[str, Sequence[tuple[TransitionRow, TransitionRow]]],
    folders: dict[int, str | None],
) -> dict[str, float]:
    """The greatest difference of a token for each kind of sampling, from the server's own.

    Of two calls that are sampled alike, the first has no log-probabilities, and the other has.
    """
    greatest = dict.fromkeys(pairs, 0.0)
    by_version: dict[int, list[tuple[str, Row, TransitionRow]]] = {}
    for name, own in pairs.items():
        for call, twin in own:
            made = by_version.setdefault(call.policy_version or 0, [])
            silent = msgspec.structs.replace(row_of(call), position=len(made), recomputed=True)
            made.append((name, silent, twin))
            assert twin.policy_version == call.policy_version
    for version, made in by_version.items():
        path = folders[version]
        # All at once, as calls of the same prompt share its computation.
        found = learner.version_logprobs(
            None if path is None else Path(path), [silent for _, silent, _ in made]
        )
        for (name, _, twin), ours in zip(made, found, strict=True):
            theirs = unpack_logprobs(twin.tokens.sampled_logprobs)
            worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            greatest[name] = max(greatest[name], worst)
    return greatest


def assert_alike(call: TransitionRow, twin: TransitionRow) -> None:
    """Two calls have the same tokens, and were sampled from the same distribution."""
    assert unpack_ids(call.tokens.prompt_ids) == unpack_ids(twin.tokens.prompt_ids)
    assert unpack_ids(call.tokens.sampled_ids) == unpack_ids(twin.tokens.sampled_ids)
    assert distribution_of(call.sampling) == distribution_of(twin.sampling)
    assert twin.tokens.sampled_logprobs
