"""Browser tests of the page of a real comparison: drawing, sorting, tooltips, themes, printing and saving."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_on_disk import read_batch_sizes, write_batch_sizes
from commands import paceline
from contrast import contrast
from examinations import examination, rank_info
from experiments_on_disk import falling, read_comparison, write_experiment
from paceline.records.examination import write_examination
from paceline.records.experiment.design import Candidate
from paceline.report.page.batch import write_batch_page
from paceline.report.page.comparison import write_page
from paceline.report.page.scaling import write_scaling_page
from scaling_on_disk import read_scaling, write_scaling

playwright_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.takes(55),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]

WIDE = {"width": 1280, "height": 900}
SMALL = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 844}
PAPER = {"width": 704, "height": 1000}
READABLE = 4.5
TEXT_OF_FIGURES = ".plot .main-svg text:not(.bartext)"
"""Text of plots without the labels on bars, whose colours have separate tests."""

COLOURS_OF_TEXT = """
selector => {
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return /, 0\\)$/.test(colour) && element.parentElement ? ground(element.parentElement) : colour;
  };
  const shown = [...document.querySelectorAll(selector)].filter(e => e.textContent.trim() && e.getClientRects().length);
  return shown.map(e => {
    const style = getComputedStyle(e);
    return [e.textContent.trim().slice(0, 40), e instanceof SVGElement ? style.fill : style.color, ground(e)];
  });
}
"""
FITS = "[...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg').clientWidth <= p.clientWidth)"


INSIDE_WORDS = r"""
selector => {
  const found = [];
  for (const element of document.querySelectorAll(selector)) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    let before = null, read = "";
    while (walker.nextNode()) {
      const node = walker.currentNode;
      for (let place = 0; place < node.length; place++) {
        const range = document.createRange();
        range.setStart(node, place);
        range.setEnd(node, place + 1);
        const box = range.getClientRects()[0], letter = node.data[place];
        if (!box) continue;
        const broken = before && box.top > before.top + 2 && /[A-Za-z0-9]/.test(before.letter);
        if (broken && /[a-z0-9]/.test(letter)) found.push(read.slice(-20) + "|" + letter);
        before = { top: box.top, letter };
        read += letter;
      }
    }
  }
  return found;
}
"""
"""Function (selector) -> places where a line ends between two letters of a word; `ErrorFeedback` is two words."""
COVERED = """
() => {
  const bars = [...document.querySelectorAll(".bar, .part, td")].map(e => [e, e.getBoundingClientRect()]);
  const found = [];
  for (const name of document.querySelectorAll("th .tag, th .name, .reasons .name")) {
    const own = name.getBoundingClientRect();
    for (const [bar, other] of bars) {
      const across = own.right > other.left + 1 && own.left < other.right - 1;
      const down = own.bottom > other.top + 1 && own.top < other.bottom - 1;
      if (own.width && other.width && across && down) found.push(name.textContent.trim() + " over " + bar.className);
    }
  }
  return found;
}
"""
"""Function () -> names and labels that lie over a bar or over another cell."""
OVERFLOWING = """
() => {
  const found = [];
  for (const cell of document.querySelectorAll("tbody td, tbody th")) {
    const own = cell.getBoundingClientRect(), contents = document.createRange();
    contents.selectNodeContents(cell);
    for (const box of contents.getClientRects()) {
      if (own.width && (box.left < own.left - 1 || box.right > own.right + 1)) found.push(cell.textContent.trim());
    }
  }
  return found;
}
"""
"""Function () -> cells whose contents are wider than they are."""
BROKEN_INTERVALS = """
() => {
  const lines = (e) => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).fontSize);
  return [...document.querySelectorAll(".interval")].filter(e => lines(e) > 2).map(e => e.textContent);
}
"""
"""Function () -> intervals that need more than one line."""
CUT_OFF = """
() => [...document.querySelectorAll(".scroll")]
  .filter(e => e.getClientRects().length && e.scrollWidth > e.clientWidth)
  .map(e => [e.getAttribute("aria-label"), getComputedStyle(e.previousElementSibling).display !== "none"
    && e.previousElementSibling.classList.contains("sideways")])
"""
"""Function () -> tables that are wider than their area, and whether a visible hint says so."""


@pytest.fixture(scope="session")
def real_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of a small comparison that was really run."""
    folder = tmp_path_factory.mktemp("real")
    what = ["compare", "cnn", "--strategies", "single,none,allreduce,ddp", "--ranks", "2", "--steps", "8"]
    how = ["--repeats", "2", "--max-repeats", "2", "--lr", "0.01", "--no-doctor", "--out", str(folder / "experiment")]
    paceline(*what, *how)
    write_examination(folder / "experiment", examination(rank_info(0, busy_cores=1.5), rank_info(1)))
    write_page(read_comparison(folder / "experiment"), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Opened:
    """Page in the browser, with its console messages and requests."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": WIDE, "color_scheme": "light"} | options))
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = file.as_uri()
        self.page.goto(self.address)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *failure: object) -> None:
        quiet = failure[0] is None
        self.context.close()
        if quiet:  # Do not hide a failed assertion.
            assert self.complaints == []
            assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.address]

    def names(self, table: str = "#comparison") -> list[str]:
        """Return the first column of a table, from top to bottom."""
        found: list[str] = self.page.locator(f"{table} tbody th .name").all_inner_texts()
        return found

    def paths(self, figure: str) -> list[str]:
        """Return the SVG paths of the curves of a plot."""
        found: list[str] = self.page.eval_on_selector_all(
            f"[data-figure={figure}] .scatterlayer path.js-line", "paths => paths.map(p => p.getAttribute('d'))"
        )
        return found


@pytest.fixture(scope="module")
def shared(browser: Any, real_page: Path) -> Iterator[Opened]:
    """Page shared by tests that use different parts of it, since drawing it takes more than a second."""
    with Opened(browser, real_page, permissions=["clipboard-read", "clipboard-write"]) as opened:
        check_that_every_figure_is_drawn(opened)  # Before a test chooses what they show.
        yield opened


@pytest.fixture
def opened(shared: Opened) -> Iterator[Opened]:
    """Shared page, with the mouse, the focus and the size of the window reset."""
    shared.page.mouse.move(5, 5)
    shared.page.evaluate("document.activeElement.blur()")
    yield shared
    shared.page.set_viewport_size(WIDE)


@pytest.fixture(scope="module")
def dark(browser: Any, real_page: Path) -> Iterator[Opened]:
    """The same page in the dark theme, for tests that do not change it."""
    with Opened(browser, real_page, color_scheme="dark") as opened:
        yield opened


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true; playwright's own wait evaluates text, which the page's policy forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def least_contrast(page: Any, selector: str) -> float:
    """Return the lowest contrast of all text that a selector finds."""
    found = page.evaluate(COLOURS_OF_TEXT, selector)
    assert found, f"nothing to read in {selector}"
    ratios = {contrast(_hex(colour), _hex(ground)): text for text, colour, ground in found}
    print(selector, min(ratios), ratios[min(ratios)])
    return min(ratios)


def _hex(colour: str) -> str:
    scale = 255 if colour.startswith("color(srgb") else 1  # A mixed colour is given in shares.
    red, green, blue = (round(scale * float(part)) for part in re.findall(r"[\d.]+(?:e-\d+)?", colour)[:3])
    return f"#{red:02x}{green:02x}{blue:02x}"


def check_that_every_figure_is_drawn(opened: Opened) -> None:
    page = opened.page
    assert page.locator("h1").inner_text()
    assert page.locator("[data-figure=bars] .bars path:not(.xerror)").count() == 4 * 4, (
        "four figures of four strategies"
    )
    assert len(opened.paths("losses")) == 2 * 4, "losses and learning rates of four strategies"
    assert len(opened.paths("times")) == 1 + 3 * 2, "a line per rank"
    assert page.locator("[data-figure=times] .scatterlayer .points path").count() == 7, "first steps are marked"
    assert page.locator("[data-figure] .main-svg text").count() > 20
    assert page.locator(".modebar").count() == 0


def test_sorting_by_click_and_by_key(opened: Opened) -> None:
    page = opened.page
    best_first = opened.names()
    page.get_by_role("button", name="Strategy").first.click()
    assert opened.names() == sorted(best_first)
    page.get_by_role("button", name="Strategy").first.press("Enter")
    assert opened.names() == sorted(best_first, reverse=True)
    exposed = page.locator("#comparison button[data-define=split_exposed]")
    for way in ("ascending", "descending"):
        exposed.click()
        assert page.locator("#comparison [aria-sort]:not([aria-sort=none])").get_attribute("aria-sort") == way
        assert set(opened.names()[2:]) == {"single", "none"}, "rows without a value stay last"
    time = page.locator("#comparison button[data-define=step_s]")
    time.click()
    cells = page.locator("#comparison tbody tr td:nth-of-type(1)").evaluate_all(
        "cells => cells.map(c => +c.dataset.sort)"
    )
    assert cells == sorted(cells)


def test_definitions_are_reached_by_mouse_and_keyboard(opened: Opened) -> None:
    page = opened.page
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator("#comparison button[data-define=split_exposed]").hover()
    assert tip.is_visible()
    assert "communication is in progress and the rank computes nothing" in tip.inner_text()
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    page.locator("#comparison button[data-define=step_s]").focus()
    page.keyboard.press("Tab")
    assert tip.is_visible()
    assert "paired by repeat" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    described = page.locator("[aria-describedby]").evaluate_all(
        "elements => elements.filter(e => !document.getElementById(e.getAttribute('aria-describedby'))).length"
    )
    assert described == 0


def test_steps_on_a_timeline_can_be_chosen_and_zoomed(browser: Any, real_page: Path) -> None:
    with Opened(browser, real_page) as opened:
        page = opened.page
        figure = page.locator("[data-figure=timeline]")
        bars = figure.locator(".barlayer .point")
        names = [
            button.inner_text() for button in figure.get_by_role("group", name="Strategy").get_by_role("button").all()
        ]
        assert names == ["All", *opened.names()]
        assert figure.locator(".annotation-text").all_text_contents()[::2] == opened.names(), "a panel for each"
        everything = bars.count()
        figure.get_by_role("button", name="ddp").click()
        assert 2 * 4 < bars.count() < everything, "four phases and an operation on two ranks"
        before = marks(figure)
        figure.get_by_role("button", name="Zoom in").click()
        assert marks(figure) != before
        figure.get_by_role("button", name="Show the whole step").click()
        assert marks(figure) == before
        figure.get_by_role("button", name="slowest step").click()
        assert figure.locator(".annotation-text").first.text_content() == "ddp"
        drag(page, figure.locator(".nsewdrag"), 0.4, 0.6)
        zoomed = marks(figure)
        assert zoomed != before
        page.locator("#theme").click()
        assert marks(figure) == zoomed, "the zoom stays when the theme changes"
        figure.locator(".nsewdrag").dblclick()
        until(page, "[...document.querySelectorAll('[data-figure=timeline] .xtick')].some(t => t.textContent === '0')")


def test_a_bar_of_the_timeline_has_a_tooltip(opened: Opened) -> None:
    figure = opened.page.locator("[data-figure=timeline]")
    figure.get_by_role("button", name="allreduce").click()
    figure.scroll_into_view_if_needed()
    place = figure.locator(".nsewdrag").bounding_box()
    said = set()
    for across in range(8, 100, 12):
        for down in (0.14, 0.36):  # Computing of rank 0, and its communication.
            opened.page.mouse.move(place["x"] + across / 100 * place["width"], place["y"] + down * place["height"])
            opened.page.wait_for_timeout(60)
            said |= set(figure.locator(".hoverlayer .hovertext").all_text_contents())
    tooltips = " ".join(said)
    assert re.search(r"rank 0: (forward|backward)", tooltips)
    assert re.search(r"rank 0: all_reduce of gradients, [\d.]+ k?B", tooltips)


def test_the_split_of_strategies_and_of_ranks(opened: Opened) -> None:
    figure = opened.page.locator("[data-figure=split]")
    assert figure.locator(".ytick").count() == 4
    assert figure.locator(".keys span").count() == 4
    figure.get_by_role("button", name="By rank").click()
    assert figure.locator(".ytick").count() == 1 + 3 * 2
    opened.page.locator(".reasons a").first.click()
    target = opened.page.locator("td:target")
    assert target.count() == 1
    assert target.is_visible()
    opened.page.get_by_text("The same for every rank").click()
    assert len(opened.names("#splits-by-rank")) == 7


def marks(figure: Any) -> list[str]:
    """Return the tick labels of the horizontal axis, in any order."""
    return sorted(figure.locator(".xtick text").all_text_contents())


def drag(page: Any, area: Any, start: float, end: float) -> None:
    """Drag over a part of an area's width."""
    area.scroll_into_view_if_needed()
    place = area.bounding_box()
    height = place["y"] + place["height"] / 2
    page.mouse.move(place["x"] + start * place["width"], height)
    page.mouse.down()
    page.mouse.move(place["x"] + end * place["width"], height, steps=4)
    page.mouse.up()
    page.wait_for_timeout(200)


def test_choosing_what_the_loss_figure_shows(opened: Opened) -> None:
    page = opened.page
    figure = page.locator("[data-figure=losses]")
    before = opened.paths("losses")
    assert len(set(before)) < len(before), "equal losses coincide"
    figure.get_by_role("button", name="Wall time").click()
    assert figure.locator(".xtitle").text_content() == "wall time, s"
    after = opened.paths("losses")
    assert len(set(after)) == len(after), "but not over wall time"
    figure.get_by_role("button", name="Epoch").click()
    assert figure.locator(".xtitle").text_content() == "epoch"
    figure.locator("select").select_option("1")
    assert opened.paths("losses") != before
    figure.locator("select").select_option("all")
    assert len(opened.paths("losses")) == 2 * 8, "losses and learning rates"
    figure.get_by_role("button", name="ddp").click()
    assert len(opened.paths("losses")) == 2 * 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(opened: Opened, dark: Opened, scheme: str) -> None:
    page = (opened if scheme == "light" else dark).page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for selector in (
        "h1, h2, p, li, a, dt, dd, code",
        "thead th, td, th, .tag, .interval",
        "button, select, figcaption",
    ):
        assert least_contrast(page, selector) >= READABLE
    assert least_contrast(page, TEXT_OF_FIGURES) >= READABLE


def test_the_theme_can_be_switched_and_figures_follow(browser: Any, real_page: Path) -> None:
    with Opened(browser, real_page) as opened:
        page = opened.page
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert least_contrast(page, TEXT_OF_FIGURES) >= READABLE
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark", "the choice is kept"
        opened.requests.pop()


def test_print_is_light_whole_and_without_controls(browser: Any, real_page: Path) -> None:
    with Opened(browser, real_page, color_scheme="dark") as opened:
        page = opened.page
        page.evaluate(
            "addEventListener('beforeprint', () => (document.title = document.querySelector('.main-svg').clientWidth))"
        )
        assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
        assert 600 < int(page.title()) <= PAPER["width"], "plots have the width of the paper before printing"
        assert page.evaluate("document.documentElement.dataset.theme") == "dark", "the theme is restored after printing"
        until(page, "document.querySelector('.main-svg').clientWidth > 1000")
        page.set_viewport_size(PAPER)
        page.emulate_media(media="print")
        until(page, "document.documentElement.dataset.theme === 'light'")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert least_contrast(page, f"{TEXT_OF_FIGURES}, td, th, p") >= READABLE
        for selector in ("nav", ".save", ".copy", ".switch", "select"):
            assert page.locator(f"{selector}:visible").count() == 0, selector
        assert page.evaluate("document.documentElement.scrollWidth") <= PAPER["width"]
        until(page, FITS)


@pytest.fixture(scope="session")
def batch_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of an experiment over batch sizes with all its sections."""
    folder = tmp_path_factory.mktemp("batch")
    experiment = write_batch_sizes(folder / "experiment", is_tested=True)
    write_examination(experiment, examination(rank_info(0, busy_cores=1.5), rank_info(1)))
    write_batch_page(read_batch_sizes(experiment), folder / "batch.html")
    return folder / "batch.html"


@pytest.fixture(scope="module")
def batch_sizes(browser: Any, batch_page: Path) -> Iterator[Opened]:
    """The same page in the browser."""
    with Opened(browser, batch_page) as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 1000, 760])
@pytest.mark.parametrize("name", ["batch_sizes", "opened"])
def test_the_navigation_shows_every_section(request: pytest.FixtureRequest, name: str, width: int) -> None:
    page = request.getfixturevalue(name).page
    page.set_viewport_size({"width": width, "height": 900})
    boxes = [link.bounding_box() for link in page.locator(".top li a").all()]
    assert len(boxes) > 6
    bar = page.locator(".top").bounding_box()
    brand, button = (page.locator(own).bounding_box() for own in (".top .brand", "#theme"))
    for box in boxes:
        assert brand["x"] + brand["width"] <= box["x"], "no link is under the name"
        assert box["x"] + box["width"] <= button["x"], "no link is cut off"
        assert box["y"] >= bar["y"]
        assert box["y"] + box["height"] <= bar["y"] + bar["height"]
    lines = {round(box["y"]) for box in boxes}
    assert len(lines) == 1 or width < 1280, "in a wide window, all are in one line"


def test_a_window_made_narrow_needs_no_sideways_scrolling(opened: Opened) -> None:
    opened.page.set_viewport_size(PHONE)
    until(opened.page, FITS)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    widths = opened.page.locator(".plot .main-svg").evaluate_all("figures => figures.map(f => f.clientWidth)")
    assert max(widths) <= PHONE["width"]


def test_figures_can_be_saved(dark: Opened, tmp_path: Path) -> None:
    for figure, kind, start in (
        ("losses", "svg", b"<svg"),
        ("timeline", "svg", b"<svg"),
        ("bars", "png", b"\x89PNG"),
    ):
        with dark.page.expect_download() as download:
            dark.page.locator(f"[data-figure={figure}] [data-save={kind}]").click()
        assert download.value.suggested_filename == f"paceline-{figure}.{kind}"
        download.value.save_as(tmp_path / figure)
        assert (tmp_path / figure).read_bytes().startswith(start)
    saved = (tmp_path / "losses").read_text()
    assert "Training loss" in saved
    assert saved.count("legendtext") == 4, "with a legend, since the page's is not part of it"
    assert "rgb(255, 255, 255)" in saved, "on white, whatever the page's theme"
    steps = (tmp_path / "timeline").read_text()
    assert "Typical steps, rank by rank: All, median steps" in steps
    assert 5 <= steps.count("legendtext") <= 8, "phases, waiting, and operations"


def test_a_command_can_be_copied(opened: Opened) -> None:
    opened.page.locator(".copy").first.click()
    opened.page.get_by_text("Copied").wait_for()
    copied = opened.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("paceline compare cnn --strategies single,none,allreduce,ddp")


def test_names_given_by_users_are_never_executed(browser: Any, tmp_path: Path) -> None:
    nasty = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
    experiment = write_experiment(
        tmp_path / "experiment",
        [Candidate(nasty, "ddp"), Candidate("<b>bold</b> %{y}", "p2p")],
        settings={"workload": f"my:{nasty}"},
        provenance={"command": nasty},
    )
    write_page(read_comparison(experiment), tmp_path / "report.html")
    with Opened(browser, tmp_path / "report.html") as opened:
        page = opened.page
        assert page.locator(".what strong").inner_text() == f"my:{nasty}"
        assert set(opened.names()) == {nasty, "<b>bold</b> %{y}"}
        labels = page.locator("[data-figure=bars] .ytick text").all_text_contents()
        assert "<b>bold</b> %{y}" in [label.strip() for label in labels]
        page.locator("[data-figure=losses] .nsewdrag").hover()
        assert page.title() != "run"
        assert page.locator("img").count() == 0


@pytest.fixture(scope="module")
def scaling_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of a scaling experiment, with one and with two ranks on a host."""
    folder = tmp_path_factory.mktemp("scaling")
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    strategies = ["single", "none", "ddp", "allreduce", "p2p", "gather_scatter"]
    write_scaling_page(
        read_scaling(write_scaling(folder / "e", strategies, shapes, events=True)), folder / "report.html"
    )
    return folder / "report.html"


@pytest.fixture(scope="module")
def scaling(browser: Any, scaling_page: Path) -> Iterator[Opened]:
    """Page of a scaling experiment, shared by tests of different parts of it."""
    with Opened(browser, scaling_page) as opened:
        check_that_labels_do_not_overlap(opened)  # Before a test changes the size of the window.
        yield opened


def check_that_labels_do_not_overlap(opened: Opened) -> None:
    for name in ("strong-curves", "weak-curves"):
        figure = opened.page.locator(f"[data-figure={name}]")
        boxes = figure.locator(".textpoint text").evaluate_all(
            "texts => texts.map(t => t.getBoundingClientRect()).map(b => [b.x, b.y + 2, b.right, b.bottom - 2])"
        )
        assert len(boxes) == 11 + 11 + 6
        assert all(right > left for left, _, right, _ in boxes), "plotly hides what is out of range"
        for (left, top, right, bottom), other in itertools.combinations(boxes, 2):
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, "labels overlap"


def test_scaling_curves_can_be_relative_to_one_rank(scaling: Opened) -> None:
    page = scaling.page
    assert "ddp on 4 ranks over 4 hosts" in page.locator("h1").inner_text()
    before = scaling.paths("strong-curves")
    page.locator("[data-figure=strong-curves]").get_by_role("button", name="Relative to itself on 1 rank").click()
    assert scaling.paths("strong-curves") != before
    assert page.locator("[data-figure=strong-split] .ytick").count() == 1 + 5 * 5
    page.locator("#strong-points button[data-define=efficiency]").first.hover()
    assert "T₁/(N·T_N)" in page.locator("#tip").inner_text()


def test_tables_of_a_comparison_need_no_scrolling_on_a_small_screen(opened: Opened) -> None:
    opened.page.set_viewport_size(SMALL)
    for table in ("comparison", "splits", "bytes", "operations", "hosts", "by-rank"):
        region = opened.page.locator(f".scroll:has(#{table})")
        assert region.evaluate("own => own.scrollWidth - own.clientWidth") == 0, table


def test_tables_of_scaling_need_no_scrolling_on_a_small_screen(scaling: Opened) -> None:
    scaling.page.set_viewport_size(SMALL)
    for table in ("strong-points", "strong-parts", "weak-points", "weak-parts"):
        region = scaling.page.locator(f".scroll:has(#{table})")
        assert region.evaluate("own => own.scrollWidth - own.clientWidth") == 0, table
    assert scaling.page.locator(".matrix").count() == 4


ASYNCHRONOUS = "parameter_server:asynchronous=true"
LONG_NAMES = {
    "strategies": [
        Candidate("single", "single", role="baseline"),
        Candidate("none", "none", role="bound", lossless=False),
        Candidate(ASYNCHRONOUS, ASYNCHRONOUS, lossless=False),
        Candidate("parameter_server:mode=asynchronous,max_staleness=4,servers=2", ASYNCHRONOUS, lossless=False),
        Candidate("parameter_server:servers=2,colocated=true", "parameter_server:servers=2"),
        Candidate("my_package.strategies.gradient_compression:TopKWithErrorFeedback", "ddp"),
        Candidate("ddp", "ddp"),
    ],
    "asynchronous": [
        Candidate(ASYNCHRONOUS, ASYNCHRONOUS, lossless=False),
        Candidate("parameter_server:mode=asynchronous,max_staleness=4", ASYNCHRONOUS, lossless=False),
    ],
    "settings": [
        Candidate(f"ddp precision={precision} bn={bn} channels_last=true", "ddp", {"precision": precision, "bn": bn})
        for precision in ("fp32", "bf16")
        for bn in ("broadcast", "sync")
    ],
}
"""Candidates with names that need several lines, by kind of comparison."""
STALENESS: dict[str, Any] = {
    "gradients": 10,
    "mean": 2.0,
    "median": 2,
    "max": 3,
    "max_allowed": 2,
    "damped": 1,
    "dropped": 0,
}
STALENESS |= {"counts": [[2, 9], [3, 1]]}


@pytest.fixture(scope="module", params=LONG_NAMES)
def long_names(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of a comparison whose candidates have long names, one of which is also in the headline."""
    return write_page_of_all_columns(tmp_path_factory.mktemp("long"), LONG_NAMES[request.param])


def write_page_of_all_columns(folder: Path, candidates: Sequence[Candidate], **changes: Any) -> Path:
    """Write the page of a comparison whose tables have all columns that they can have."""
    settings = {"slow_rank": "1:3"}
    path = write_experiment(folder / "e", candidates, repeats=4, events=True, settings=settings, **changes)
    for file in path.rglob("summary.json"):
        content = json.loads(file.read_text())
        content["ranks"] = [rank | {"cpu_share": 0.9} for rank in content["ranks"]]
        if content["strategy"] == ASYNCHRONOUS:
            content["staleness"] = STALENESS
        file.write_text(json.dumps(content))
    write_examination(path, examination(rank_info(0, busy_cores=1.5), rank_info(1)))
    write_page(read_comparison(path), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def with_long_names(browser: Any, long_names: Path) -> Iterator[Opened]:
    """The same page in the browser, with all tables shown."""
    with Opened(browser, long_names) as opened:
        opened.page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        yield opened


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_long_names_break_between_their_words_and_cover_nothing(
    with_long_names: Opened, viewport: dict[str, int]
) -> None:
    page = with_long_names.page
    page.set_viewport_size(viewport)
    until(page, FITS)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate(INSIDE_WORDS, "header h1, header .lead, header li, .findings td, th .name, .reasons h3") == []
    assert page.evaluate(COVERED) == []
    until(page, f"({CUT_OFF})().every(([_, hasHint]) => hasHint)")
    if viewport is WIDE:
        assert page.evaluate(CUT_OFF) == []


PICKS = {
    "short": "shared_memory",
    "two words": "parameter_server",
    "long": "parameter_server:servers=2,colocated=true",
}
"""Candidates that may be picked, by the length of their names."""


def varying(candidate: Candidate, repeat: int, step: int) -> float:
    """Return a loss that differs between repeats by so much that its interval is as long as a real one."""
    return falling(candidate, repeat, step) * (1 + 0.05 * repeat)


@pytest.fixture(scope="module", params=PICKS)
def with_a_pick(
    browser: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    """Page of a comparison of usual strategies, with all columns, one of which is tagged as the pick."""
    pick = PICKS[request.param]
    ring = Candidate("ring", "ring:compress=true", lossless=False)
    names = ["gather_scatter", "p2p", "allreduce", "priority", "ddp"]
    candidates = [
        *LONG_NAMES["strategies"][:3],
        ring,
        Candidate(pick, pick),
        *(Candidate(name, name) for name in names),
    ]
    step_s = {each.name: 0.0123 + 0.001 * place for place, each in enumerate(candidates)} | {pick: 0.00523}
    folder = tmp_path_factory.mktemp("pick")
    file = write_page_of_all_columns(folder, candidates, step_s=step_s, losses=varying)
    with Opened(browser, file) as opened:
        opened.page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        assert opened.page.locator("#comparison tbody tr.best .tag").inner_text() == "pick"
        assert opened.page.locator("#comparison thead th").count() >= 12
        yield opened


@pytest.mark.parametrize("viewport", [WIDE, SMALL, PHONE], ids=["wide", "small", "phone"])
def test_tags_cover_no_bar_and_cells_hold_their_contents(with_a_pick: Opened, viewport: dict[str, int]) -> None:
    page = with_a_pick.page
    page.set_viewport_size(viewport)
    until(page, FITS)
    assert page.evaluate(COVERED) == []
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(INSIDE_WORDS, "th .name") == []
    if viewport is not SMALL:
        assert page.evaluate(BROKEN_INTERVALS) == []
    if viewport is not PHONE:
        assert page.evaluate(CUT_OFF) == []


@pytest.fixture(scope="module")
def on_a_phone(browser: Any, scaling_page: Path) -> Iterator[Opened]:
    """Page of a scaling experiment that was opened on a phone."""
    with Opened(browser, scaling_page, viewport=PHONE) as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_scaling_can_be_read_on_a_phone_too(on_a_phone: Opened, scheme: str) -> None:
    page = on_a_phone.page
    page.emulate_media(color_scheme=scheme)
    until(page, f"document.documentElement.dataset.theme === '{scheme}'")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    until(page, FITS)
    assert least_contrast(page, TEXT_OF_FIGURES) >= READABLE
    assert least_contrast(page, "h1, h2, p, li, thead th, td, th, .interval, button, figcaption") >= READABLE
