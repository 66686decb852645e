"""Read what the console shows of many episodes and calls at once, in bounded time.

Every list goes on from a key, and none counts what it leaves out.
"""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

# What a page asks differs from one to the next, so a plan for any values is a bad one; and no query
# of a page is so long that compiling it pays.
_BEGIN: Final = text(
    """
    SELECT set_config('statement_timeout', :limit_ms, true),
        set_config('plan_cache_mode', 'force_custom_plan', true), set_config('jit', 'off', true)
    """
)


async def begin(connection: AsyncConnection, limit_s: float) -> None:
    """Have each statement of this transaction end within `limit_s` seconds, or fail."""
    await connection.execute(_BEGIN, {"limit_ms": str(round(1000 * limit_s))})
