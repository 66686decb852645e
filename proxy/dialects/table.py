"""Every dialect by its name."""

from collections.abc import Mapping
from typing import Final

from proxy.dialects.base import Dialect
from proxy.dialects.choices import CHAT, COMPLETIONS
from proxy.dialects.plain import MESSAGES, RESPONSES

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
}
