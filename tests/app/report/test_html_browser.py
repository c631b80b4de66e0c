"""The report in a real browser: no script errors, no requests, controls that work, on a laptop and a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from softcell.app.report.page import write_report
from tests.helpers.browser import Browser, find_browser
from tests.helpers.report_runs import make_search, make_training

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here; `make browser` installs it, or set SOFTCELL_BROWSER"
)
SIZES = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    opened = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    search = make_search(folder / "search")
    training = make_training(folder / "training", classes=["a rather long name of a class, really", "b", "c", "d"])
    for k in (1, 2):
        make_training(training / f"random-{k}", method="random", seed=k, accuracy=0.8 + k / 50)
    return {
        "search": write_report([search], folder / "search.html"),
        "training": write_report([training], folder / "training.html"),
        "many": write_report([search, training], folder / "many.html"),
    }


@pytest.mark.parametrize("name", ["search", "training", "many"])
@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_a_page_opens_without_errors_and_fits(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, dark=dark)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(11, 14, 19)") is dark


@pytest.mark.parametrize("name", ["search", "training"])
def test_no_label_of_a_chart_is_cut_off(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    outside = """[...document.querySelectorAll('svg.chart')].flatMap((svg) => {
      const box = svg.viewBox.baseVal;
      return [...svg.querySelectorAll('text')].filter((text) => {
        const own = text.getBBox();
        return own.x < -0.5 || own.x + own.width > box.width + 0.5 || own.y + own.height > box.height + 0.5;
      }).map((text) => text.textContent);
    })"""
    assert browser.run("document.querySelectorAll('svg.chart text').length") > 10
    assert browser.run(outside) == []


def test_the_slider_shows_the_weights_of_every_epoch(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["search"])
    first = "document.querySelector('td[data-i=\"0\"]').textContent"
    assert browser.run(first) == "0.90"
    browser.run("s = document.querySelector('.epochs'); s.value = 0; s.dispatchEvent(new Event('input')); 0")
    assert browser.run(first) == "0.20"
    assert browser.run("document.querySelector('output').textContent") == "epoch 1"
    before = browser.run("[...document.querySelectorAll('.heat .picked')].map(c => c.dataset.i).join()")
    browser.run("document.querySelector('.epochs').focus(); 0")
    for kind in ("rawKeyDown", "keyUp"):  # a reader's own arrow key
        browser.send("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    assert browser.run("document.querySelector('output').textContent") == "epoch 2"
    assert browser.run("[...document.querySelectorAll('.heat .picked')].map(c => c.dataset.i).join()") != before
    browser.run("document.querySelector('.play').click()")
    browser.wait("document.querySelector('output').textContent === 'epoch 6'")
    browser.wait("document.querySelector('.play').textContent.includes('play')")
    assert browser.errors == []


def test_the_theme_can_be_chosen_against_the_system(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["search"], dark=True)
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.sc text')).fill,"
        "getComputedStyle(document.querySelector('.h9')).backgroundColor]"
    )
    dark = browser.run(colours)
    browser.run("document.querySelector('button.theme').click()")
    assert browser.run("document.querySelector('button.theme').textContent") == "theme: light"
    light = browser.run(colours)
    assert all(a != b for a, b in zip(light, dark, strict=True))  # page, pictures and tables
    browser.prefer(dark=False)
    browser.run("document.querySelector('button.theme').click()")
    assert browser.run(colours) == dark  # dark was chosen on a light system
    browser.run("document.querySelector('button.theme').click()")
    assert browser.run("document.querySelector('button.theme').textContent") == "theme: auto"
    assert browser.run(colours) == light


def test_charts_show_their_values_to_pointer_and_keys(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["search"])
    box = browser.run(
        "(() => { document.querySelector('.plot').scrollIntoView();"
        "const b = document.querySelector('.plot svg').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    readout = (
        "document.querySelector('.plot .readout').textContent + document.querySelector('.plot .legend b').textContent"
    )
    assert browser.run(readout) == "at the end91.7 %"
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 0.12, y=box[1] + box[3] / 2)
    browser.wait(f"({readout}) === 'epoch 150.0 %'")
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    browser.wait(f"({readout}).startsWith('at the end')")
    browser.run("document.querySelector('.plot').focus()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
    browser.wait(f"({readout}).startsWith('epoch 5')")


def test_runs_are_chosen_and_grad_cam_can_be_hidden(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["many"])
    shown = "[...document.querySelectorAll('.run')].filter(r => r.offsetParent).map(r => r.id).join()"
    assert browser.run(shown) == "run-0"
    browser.run("c = document.querySelector('.chooser'); c.value = 'run-1'; c.dispatchEvent(new Event('change')); 0")
    assert browser.run(shown) == "run-1"
    browser.run("document.querySelector('a[href=\"#run-0\"]').click()")
    browser.wait(f"({shown}) === 'run-0'")
    browser.open(pages["training"])
    seen = "[...document.querySelectorAll('img.cam')].filter(i => i.offsetParent).length"
    assert browser.run(seen) == 12
    assert browser.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    browser.run("document.querySelector('.cams').click()")
    assert browser.run(seen) == 0


def test_code_is_copied_or_selected(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["training"])
    browser.run("document.querySelector('.copy').click()")
    browser.wait("['copied', 'selected'].includes(document.querySelector('.copy').textContent)")


def test_text_has_enough_contrast(browser: Browser, pages: dict[str, Path]) -> None:
    """Contrast of WCAG AA for every piece of text outside of pictures, in both themes."""
    code = """(() => {
      const lum = (c) => {
        const l = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * l[0] + .7152 * l[1] + .0722 * l[2]; };
      const rgb = (t) => t.match(/[\\d.]+/g).map(Number);
      const ground = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
      const bad = new Set();
      for (const e of document.querySelectorAll('main *, header *')) {
        if (e.closest('svg') || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
        const a = lum(rgb(getComputedStyle(e).color).slice(0, 3)), b = lum(ground(e));
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.add(e.className + ': ' + e.textContent.slice(0, 20));
      }
      return [...bad];
    })()"""
    for dark in (False, True):
        browser.open(pages["many"], dark=dark)
        assert browser.run(code) == []
