"""Take pictures of the console's screens, for the pages about it: `docs/images/console-*.png`.

`python -m scripts.screenshots DEMO EXAMPLE` reads the folders that `make demo` and `make example
NAME=sql` leave behind (`var/demo`, `var/examples/sql`). Needs Chromium (Debian: `chromium`).
"""

import argparse
import asyncio
import io
from pathlib import Path
from typing import Final

import asyncpg
from PIL import Image
from playwright.async_api import Browser

from console.app import serving
from pawl.settings import ConsoleSettings
from store.embedded import EmbeddedPostgres
from tests.support.browser import NARROW, WIDE, chromium, view

IMAGES: Final = Path(__file__).resolve().parents[1] / "docs" / "images"
# Tallest picture by width, in pixels: the rest of a page is cut off.
TALLEST: Final = {WIDE: 1100, NARROW: 1100}
COLOURS: Final = 128
# SQL: an episode of many calls, if possible a trained one; an update that made a version.
_LONGEST: Final = """
    SELECT e.id FROM episodes e JOIN transitions t ON t.episode_id = e.id
    LEFT JOIN consumptions c ON c.episode_id = e.id WHERE e.root IS NULL
    GROUP BY e.id ORDER BY bool_or(c.trained) DESC NULLS LAST, count(*) DESC, e.id LIMIT 1
"""
_UPDATE: Final = """
    SELECT policy, version, id FROM updates WHERE state = 'done' AND version IS NOT NULL
    ORDER BY claimed_at DESC OFFSET 1 LIMIT 1
"""


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("demo", type=Path)
    parser.add_argument("example", type=Path)
    options = parser.parse_args()
    asyncio.run(_take_pictures(options.demo, options.example))


async def _take_pictures(demo: Path, example: Path) -> None:
    async with chromium() as browser:
        for folder, wanted in (
            (demo, ("overview", "versions", "version", "updates", "update", "review")),
            (example, ("episodes", "episode")),
        ):
            server = EmbeddedPostgres(folder / "data")
            url = server.ensure_running()
            try:
                addresses = await _addresses(url)
                async with serving(ConsoleSettings(console_listen="127.0.0.1:0"), url) as address:
                    for name in wanted:
                        for width in (WIDE, NARROW):
                            picture = await _take_picture(browser, address, addresses[name], width)
                            picture.save(IMAGES / f"console-{name}-{width}.png", optimize=True)
            finally:
                server.stop()


async def _addresses(url: str) -> dict[str, str]:
    connection = await asyncpg.connect(url)
    episode = await connection.fetchval(_LONGEST)
    made = await connection.fetchrow(_UPDATE)
    await connection.close()
    own, version, update = made or ("", 0, None)
    return {
        "overview": "/?days=1",
        "episodes": "/episodes",
        "episode": f"/episodes/{episode}",
        "versions": f"/versions?policy={own}",
        "version": f"/versions/{own}/{version}",
        "updates": f"/updates?policy={own}",
        "update": f"/updates/{update}",
        "review": "/review",
    }


async def _take_picture(browser: Browser, address: str, path: str, width: int) -> Image.Image:
    async with view(browser, address, width) as tab:
        await tab.open(path)
        png = await tab.page.screenshot(full_page=True, animations="disabled")
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    shown = whole.crop((0, 0, width, min(whole.height, TALLEST[width])))
    return shown.quantize(COLOURS, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
