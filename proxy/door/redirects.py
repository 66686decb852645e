"""Refuse redirects by which a client would show its API key to somebody else (pure).

Clients follow a redirect by themselves, and some show the new place all of their headers: HTTP
libraries leave out `Authorization` where the host is another, and `x-api-key` not.
"""

import re
from typing import Final

from proxy.errors import Redirected
from proxy.upstreams.model_server import Reply

LOCATION: Final = b"location"
REDIRECTS: Final = range(300, 400)
# Of what is relative to this proxy a path's beginning is all that there is. Browsers' rules take a
# backslash for a slash, and leave tabs out.
_STAYS: Final = re.compile(rb"(?:/(?![/\\\t])|\?|#|\.{1,2}(?:/|\Z)|\Z)")


def check_redirect(reply: Reply, api_key: str | None) -> None:
    """Check that a reply sends nobody who has one of this proxy's keys to another place.

    Args:
        reply: the upstream's.
        api_key: the id of the key that the request came with; None: no key is asked for.

    Raises:
        Redirected: it does.
    """
    if api_key is None or reply.status not in REDIRECTS:
        return
    for name, value in reply.headers:
        if name.lower() == LOCATION and _STAYS.match(value.strip()) is None:
            raise Redirected(
                f"The model server answered {reply.status} and sends the client to another "
                "address. That is not passed on, as the client would show its API key of this "
                "proxy there. Set the upstream's address to the one that it names",
                code="upstream_redirects",
            )
