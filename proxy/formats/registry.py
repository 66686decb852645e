"""All dialects by name."""

from collections.abc import Mapping
from typing import Final

from proxy.formats.base import Dialect
from proxy.formats.choices.choices import CHAT, COMPLETIONS
from proxy.formats.messages.messages import MESSAGES
from proxy.formats.responses.responses import RESPONSES

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
}
