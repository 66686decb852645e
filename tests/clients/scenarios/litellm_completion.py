"""Run litellm's completion()."""

from functools import partial

import litellm
from conversation import MAX_TOKENS, MODEL, chat

settings = {"model": f"openai/{MODEL}", "max_tokens": MAX_TOKENS, "temperature": 0}
chat("litellm", partial(litellm.completion, **settings))
