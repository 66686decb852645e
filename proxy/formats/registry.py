"""List all wire formats by name."""

from typing import Final

from proxy.formats.base import WireFormat
from proxy.formats.chat import CHAT
from proxy.formats.completions import COMPLETIONS
from proxy.formats.messages import MESSAGES
from proxy.formats.responses import RESPONSES

_ALL: Final[tuple[WireFormat, ...]] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
FORMATS: Final[dict[str, WireFormat]] = {wire_format.name: wire_format for wire_format in _ALL}
