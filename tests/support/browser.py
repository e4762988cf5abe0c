"""A page in a headless browser, with everything that went wrong in it."""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


@contextmanager
def launched():
    """A browser; skips the test where there is none, unless SPARING_REQUIRE_BROWSER is set."""
    missing = pytest.fail if os.environ.get("SPARING_REQUIRE_BROWSER") else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed; run: pip install 'sparing[dev]'")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing(f"there is no browser: none of {', '.join(NAMES)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


class Visit:
    """A page that is open: `page` is playwright's."""

    def __init__(self, page, address):
        self.page, self._address, self._said = page, address, []
        page.on("request", lambda request: self._said.append(f"request of {request.url}"))
        page.on("console", lambda line: self._said.append(f"{line.type}: {line.text}"))
        page.on("pageerror", lambda error: self._said.append(f"exception: {error}"))
        page.on("dialog", lambda dialog: (self._said.append("dialog"), dialog.dismiss()))
        page.goto(address)

    def problems(self):
        """What a page by itself must not do: ask for anything, complain, run what is text."""
        own = (f"request of {self._address}", "request of data:", "request of blob:")
        ran = ["a text ran as a script"] if self.page.evaluate("window.stolen !== undefined") else []
        return [said for said in self._said if not said.startswith(own)] + ran


@contextmanager
def visit(browser, folder, text, *, width=1280, **options):
    """Open the page from a file."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    context.set_default_timeout(10_000)
    yield Visit(context.new_page(), path.as_uri())
    context.close()
