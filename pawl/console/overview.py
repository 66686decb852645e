"""The screen Overview: what the doctor says, and how rewards, traffic and training go."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pawl.console.pages import page, reading

TITLE: Final = "Overview"


async def overview(request: Request) -> Response:
    """Show the overview."""
    async with reading(request):
        pass
    return page(request, "overview.html")


ROUTES: Final = [Route("/", overview, name="overview")]
