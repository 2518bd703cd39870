"""The page, in a real browser that reads a real API over loopback TCP."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

GIB = 1024**3
WAIT_S = 30


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--window-size=1200,900",
    ):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    driver = Chrome(options, ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


async def _shows(browser: Chrome, true: Callable[[Chrome], bool]) -> None:
    """Returns when the page has come to it; the API goes on answering meanwhile."""
    await asyncio.to_thread(WebDriverWait(browser, WAIT_S).until, true)


def _text(browser: Chrome, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


@pytest.mark.browser
async def test_the_page_shows_gpus_slices_and_what_happens_to_them(desk: Any, browser: Chrome) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "16GiB", "compute": "25%"})
    desk.guest_uses("alice", 4 * GIB)
    await desk.node.refresh_usage()
    # As a person comes in: by the bare address, as a browser asks for it.
    await asyncio.to_thread(browser.get, f"http://127.0.0.1:{desk.port}/")
    await _shows(browser, lambda b: "alice" in _text(b, "#slices"))
    assert browser.current_url.endswith("/page/")
    gpu = desk.node.view().inventory.gpus[0]
    assert gpu.product_name in _text(browser, "#gpus")
    assert "4 GiB of 16 GiB" in _text(browser, "#slices")
    share = desk.node.view().book.slices["alice"].shares[0]
    coloured = "return document.querySelectorAll('.cus i[title$=\"alice\"]').length"
    assert browser.execute_script(coloured) == share.granted_cus

    await desk.ask("PUT", "/v1/slices/bob", {"vram": "1GiB", "compute": "25%"})
    await _shows(browser, lambda b: "bob" in _text(b, "#slices") and "bob: slice.created" in _text(b, "#events"))
    await desk.ask("DELETE", "/v1/slices/alice?force=true")
    await _shows(browser, lambda b: "alice" not in _text(b, "#slices"))
    said: list[dict[str, str]] = browser.execute("getLog", {"type": "browser"})["value"]
    assert [entry for entry in said if entry["level"] == "SEVERE"] == []


@pytest.mark.browser
async def test_a_page_whose_daemon_has_gone_says_that_it_may_be_old(desk: Any, browser: Chrome) -> None:
    await asyncio.to_thread(browser.get, f"http://127.0.0.1:{desk.port}/page/")
    await _shows(browser, lambda b: "1.2.3" in _text(b, "#system"))
    await desk.stop()
    await _shows(browser, lambda b: _text(b, "#contact").startswith("What is shown may be old"))


async def test_a_client_of_the_api_is_not_sent_to_the_page(desk: Any) -> None:
    answer = await desk.ask("GET", "/", headers={"Accept": "application/json, */*"}, allow_redirects=False)
    assert (answer.status, answer.json["name"]) == (200, "amdvgpud")


@pytest.mark.parametrize("name", ["__init__.py", "..%2Frest.py", "page.html"])
async def test_nothing_but_the_pages_own_files_is_served_there(desk: Any, name: str) -> None:
    assert (await desk.ask("GET", f"/page/{name}", tcp=True)).status == 404


async def test_the_page_may_load_nothing_from_elsewhere(desk: Any) -> None:
    answer = await desk.ask("GET", "/page/", tcp=True)
    assert "default-src 'none'; script-src 'self';" in answer.headers["Content-Security-Policy"]
    again = await desk.ask("GET", "/page/", tcp=True, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status, again.text) == (304, "")


def test_the_package_brings_the_pages_files() -> None:
    import amdvgpud.serve.page as page

    there = {path.name for path in Path(page.__file__).parent.iterdir()}
    assert {"index.html", "page.css", "page.js"} <= there
