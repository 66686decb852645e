"""Speak `/v1/chat/completions` (pure)."""

from typing import Final

import msgspec

from proxy.formats.chat.sampling import ChatSampling
from proxy.formats.chat.turns import ChatTurns
from proxy.formats.choices.choices import ChoicesFormat
from proxy.formats.choices.reply_filter import IDS, LOGPROBS

CHAT: Final = ChoicesFormat(
    name="chat",
    title="OpenAI chat completions",
    path="/v1/chat/completions",
    reply_object="chat.completion",
    turns=ChatTurns(),
    sampling=ChatSampling(),
    unread=("messages",),
    wanted={LOGPROBS: msgspec.Raw(b"true"), IDS: msgspec.Raw(b"true")},
    # vLLM refuses these two without the client's own `logprobs`.
    spoiling=("top_logprobs", "logprob_token_ids"),
    spared_by=LOGPROBS,
)
