"""Speak `/v1/completions`: a text goes on; a request holds no turns of a conversation (pure)."""

from typing import Final

import msgspec

from proxy.formats.choices.choices import ChoicesFormat
from proxy.formats.choices.reply_filter import IDS, LOGPROBS
from proxy.formats.completions.sampling import CompletionsSampling
from proxy.formats.completions.turns import CompletionsTurns

COMPLETIONS: Final = ChoicesFormat(
    name="completions",
    title="OpenAI completions",
    path="/v1/completions",
    reply_object="text_completion",
    turns=CompletionsTurns(),
    sampling=CompletionsSampling(),
    unread=("prompt",),
    # Here `logprobs` is a number: how many alternatives beside the sampled token.
    wanted={LOGPROBS: msgspec.Raw(b"0"), IDS: msgspec.Raw(b"true")},
    numbers=(LOGPROBS,),
    # With ids asked for, the prompt's text is left out of the echo.
    spoiling=("echo",),
)
