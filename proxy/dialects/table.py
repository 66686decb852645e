"""All dialects by name."""

from collections.abc import Mapping
from typing import Final

from proxy.dialects.base import Dialect
from proxy.dialects.choices import CHAT, COMPLETIONS
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
}
