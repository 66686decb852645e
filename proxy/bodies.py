"""Reading a request's body, up to the size that the proxy takes."""

from aiohttp import web

from proxy.errors import TooLarge


async def read_body(request: web.BaseRequest) -> bytes:
    """The whole body.

    Raises:
        TooLarge: it is larger than `PAWL_MAX_BODY_MB`.
    """
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(
            "The request's body is larger than this proxy takes; PAWL_MAX_BODY_MB sets how much"
        ) from error
