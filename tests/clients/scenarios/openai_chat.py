"""Run openai-python's chat completions."""

from functools import partial

from conversation import MAX_TOKENS, MODEL, chat
from openai import OpenAI

with OpenAI() as client:
    settings = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
    chat("openai", partial(client.chat.completions.create, **settings))
