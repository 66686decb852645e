"""Ask a teacher for log-probabilities of tokens that a policy sampled: on-policy distillation.

A teacher is a model with the policy's tokenizer, served by vLLM. Its log-probabilities are those at
temperature one, whatever settings or grammar the policy sampled with.
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

# Requests that are sent to a teacher at once.
AT_ONCE: Final = 8


class Teacher(NamedTuple):
    """A policy's teacher model, which is asked for log-probabilities of sampled tokens.

    `probe` returns a text that different tokenizers split differently, and its ids by the policy's
    tokenizer. The teacher's tokenizer must give the same ids.
    """

    options: TeacherOptions
    probe: Callable[[], tuple[str, Sequence[int]]]
    key: SecretStr | None

    async def logprobs(self, rows: Sequence[Row]) -> dict[RowKey, list[float]]:
        """Return the teacher's log-probabilities (S,) of each row's sampled tokens, by row key.

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
                # The teacher's context must also have room for one token that it samples.
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
                " (set PAWL_TEACHER_API_KEY if its server asks for a key)"
            ) from error

    async def _ask(self, server: ModelServer, rows: Sequence[Row]) -> dict[RowKey, list[float]]:
        groups, room = group_prefixes(rows), asyncio.Semaphore(AT_ONCE)

        async def ask(row: Row) -> list[float]:
            async with room:
                return await server.prompt_logprobs(self.options.model, row.ids)

        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(group[0])) for group in groups]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return {
            # The first token of a prompt has no log-probability.
            row.key: answer.result()[len(row.prompt_ids) - 1 : row.size - 1]
            for group, answer in zip(groups, asked, strict=True)
            for row in group
        }


def group_prefixes(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows so that each is a prefix of the first row of its group, as an episode's calls."""
    groups: list[list[Row]] = []
    # In this order a row follows directly after the rows that it is a prefix of.
    for row in sorted(rows, key=lambda row: row.ids.tobytes(), reverse=True):
        if groups and groups[-1][0].ids.tobytes().startswith(row.ids.tobytes()):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
