"""Run openai-python: chat completions with the settings that the last argument names.

Every second reply is streamed.
"""

import asyncio
import sys

from openai import AsyncOpenAI
from task import MODEL, QUESTIONS, TOKENS, ask_all

ANSWER = {
    "type": "object",
    "properties": {"value": {"type": "integer"}},
    "required": ["value"],
    "additionalProperties": False,
}
SETTINGS = {
    # What the cards of models that think recommend.
    "thinking": {"temperature": 0.6, "top_p": 0.95, "extra_body": {"top_k": 20}},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "extra_body": {"repetition_penalty": 1.1},
    },
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": ANSWER, "strict": True},
        }
    },
}


async def main(settings: dict) -> None:
    async with AsyncOpenAI() as client:

        async def ask(question: str) -> None:
            streamed = QUESTIONS.index(question) % 2 == 1
            reply = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question}],
                max_tokens=TOKENS,
                stream=streamed,
                **settings,
            )
            if streamed:
                async for _ in reply:
                    pass

        await ask_all(ask)


asyncio.run(main(SETTINGS[sys.argv[2]]))
