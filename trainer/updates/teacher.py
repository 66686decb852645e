"""Ask a teacher for the log-probabilities of what a policy sampled: on-policy distillation.

A teacher is a model that a vLLM serves, with the policy's tokenizer. Its log-probabilities are
those at temperature one, whatever settings or grammar the policy sampled with.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

from pydantic import SecretStr

from trainer.batches import Row, RowKey
from trainer.errors import TOO_LONG, PublishError, TeacherError, Unusable, UpstreamAway
from trainer.publishing.model_server import ModelServer
from trainer.recipes.recipe import TeacherOptions

# Requests that a teacher computes at once.
AT_ONCE: Final = 8


class Teacher(NamedTuple):
    """Ask a policy's teacher model for log-probabilities of what the policy sampled.

    `probe` returns a text that different tokenizers split differently, and its token ids by the
    policy's tokenizer: the teacher's must be the same.
    """

    options: TeacherOptions
    probe: Callable[[], tuple[str, Sequence[int]]]
    key: SecretStr | None

    async def logprobs(self, rows: Sequence[Row]) -> dict[RowKey, list[float]]:
        """Return the teacher's log-probabilities (S,) of each row's sampled tokens, by row.

        Raises:
            TeacherError: the teacher does not answer, or its tokenizer is not the policy's.
            Unusable: some rows are too long for the teacher's context.
        """
        name = self.options.model
        key = self.key.get_secret_value() if self.key else None
        try:
            async with ModelServer(self.options.url, key=key) as server:
                listed = await server.models()
                if name not in listed:
                    raise PublishError(f"{server.url} serves {', '.join(sorted(listed))}")
                text, ids = self.probe()
                if await server.token_ids(name, text) != list(ids):
                    raise PublishError("the teacher's tokenizer is not the policy's")
                # The teacher also samples one token.
                most = listed[name].get("max_model_len") or inf
                too_long = {row.episode_id: str(row.size) for row in rows if row.size >= most}
                if too_long:
                    why = f"some calls are too long for the teacher's context of {most} tokens"
                    raise Unusable(why, too_long, TOO_LONG)
                return await self._ask(server, rows)
        except (UpstreamAway, PublishError) as error:
            raise TeacherError(
                f"the teacher {name!r} cannot be asked, and nothing is trained or spent: {error}:"
                " serve it, or name in [teacher] another model with the policy's tokenizer"
                " (PAWL_TEACHER_API_KEY holds the key, if one is asked for)"
            ) from error

    async def _ask(self, server: ModelServer, rows: Sequence[Row]) -> dict[RowKey, list[float]]:
        chains, room = chains_of_beginnings(rows), asyncio.Semaphore(AT_ONCE)

        async def ask(row: Row) -> list[float]:
            async with room:
                return await server.prompt_logprobs(self.options.model, row.ids)

        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(chain[0])) for chain in chains]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return {
            # The first token of a prompt has no log-probability.
            row.key: answer.result()[len(row.prompt_ids) - 1 : row.size - 1]
            for chain, answer in zip(chains, asked, strict=True)
            for row in chain
        }


def chains_of_beginnings(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows, such as an episode's calls, that are prefixes of the first row of their group."""
    chains: list[list[Row]] = []
    # In this order a row follows the rows that it is a prefix of.
    for row in sorted(rows, key=lambda row: row.ids.tobytes(), reverse=True):
        if chains and chains[-1][0].ids.tobytes().startswith(row.ids.tobytes()):
            chains[-1].append(row)
        else:
            chains.append([row])
    return chains
