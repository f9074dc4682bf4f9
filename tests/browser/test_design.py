"""Design rules of the page, on runs as long and uneven as real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import WAIT_MILLISECONDS
from tests.browser.served import Served, served
from tests.support.made_runs import Folder
from tests.support.pictured_runs import COMPLETE, FAILED, RUNNING, SFT, TRACED, make_pictured_runs

PHONE = 390
TOUCH = 44
"""Minimum height of touch targets, in pixels."""
_TOO_WIDE = """() => [document.documentElement, ...document.querySelectorAll('.wide, .tokens, .text, pre')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.outerHTML.slice(0, 120))"""
_TOO_SMALL = """(least) => [...document.querySelectorAll('main button, main .button, main select, main input, main nav a, main .tick')]
  .filter((one) => one.type !== 'checkbox' && one.getBoundingClientRect().height > 0 && one.getBoundingClientRect().height < least - 0.5)
  .map((one) => one.outerHTML.slice(0, 120))"""
_TEXTS = """
  window.drawnTexts = new Set();
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.drawnTexts.add(text);
    return draw.call(this, text, ...place);
  };"""
UNITS = {
    "step",
    "reward",
    "loss",
    "nats/token",
    "tokens",
    "L2 norm",
    "versions",
    "tokens/s",
    "s",
    "% of tasks",
    "%",
    "GiB",
}
_DRAWN = """(figure) => {
  // The share of the plot's height that the first curve takes between 10 % and 40 % of the steps, below the words on outliers.
  const shown = figure.querySelector('canvas'), over = figure.querySelector('.u-over'), scale = devicePixelRatio;
  const at = over.getBoundingClientRect(), from = shown.getBoundingClientRect();
  const canvas = Object.assign(document.createElement('canvas'), { width: shown.width, height: shown.height });
  const copy = canvas.getContext('2d', { willReadFrequently: true });
  copy.drawImage(shown, 0, 0);
  const [left, top, width, height] = [at.left - from.left, at.top - from.top, at.width, at.height].map((one) => Math.round(one * scale));
  const rows = [], blue = [11, 92, 173];
  const { data, width: columns } = copy.getImageData(left + 0.1 * width, top, 0.3 * width, height);
  for (let at = 0; at < data.length; at += 4) {
    const row = at / 4 / columns, isBlue = blue.every((one, part) => Math.abs(data[at + part] - one) < 12);
    if (isBlue && data[at + 3] > 200 && row > 20 * scale) rows.push(row);
  }
  return (rows.reduce((a, b) => Math.max(a, b), 0) - rows.reduce((a, b) => Math.min(a, b), Infinity)) / height;
}"""


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pictured") / "runs"
    make_pictured_runs(folder)
    with served(folder) as server:
        yield server


def list_places(pictured: Served) -> dict[str, tuple[str, str]]:
    """Return address and title of each page."""
    run, complete, failed, sft = (Folder(pictured.folder / name).id for name in (RUNNING, COMPLETE, FAILED, SFT))
    return {
        "runs": ("/", "All runs"),
        "run": (f"/run/{run}", f"{RUNNING}: Running"),
        "complete": (f"/run/{complete}", f"{COMPLETE}: Complete"),
        "failed": (f"/run/{failed}", f"{FAILED}: Failed"),
        "sft": (f"/run/{sft}", f"{SFT}: Complete"),
        "rollouts": (f"/run/{run}/rollouts", f"{RUNNING}: rollouts of step {TRACED}"),
        "held out": (
            f"/run/{run}/rollouts?evaluation={TRACED}",
            f"{RUNNING}: held-out answers of version {TRACED}",
        ),
        "rollout": (
            f"/run/{run}/rollouts/9?step={TRACED}&other=8",
            f"{RUNNING}: rollout 9 of step {TRACED}",
        ),
        "compare": (f"/compare?run={run}&run={complete}", f"{RUNNING}, {COMPLETE} compared"),
        "nothing": ("/no/such/page", "Not a page"),
    }


def open_page(page: Page, pictured: Served, name: str) -> None:
    """Open a page and wait until it is complete."""
    address, title = list_places(pictured)[name]
    page.goto(pictured.at(address))
    expect(page).to_have_title(f"{title} · RLRun")
    expect(page.get_by_text("Reading…")).to_have_count(0)
    if name in ("run", "complete", "failed", "sft", "compare"):
        expect(page.locator(".chart canvas").nth(3)).to_be_visible()


def test_pages_fit_a_phone_and_have_titles(browser: Browser, pictured: Served) -> None:
    context = browser.new_context(viewport={"width": PHONE, "height": 844}, has_touch=True)
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)
    try:
        for name in list_places(pictured):
            open_page(page, pictured, name)
            assert page.evaluate(_TOO_WIDE) == [], f"{name}: wider than {PHONE} pixels"
            assert page.evaluate(_TOO_SMALL, TOUCH) == [], f"{name}: less than {TOUCH} pixels high"
            if name in ("complete", "sft"):
                expect(page.get_by_text("–", exact=True)).to_have_count(0)
    finally:
        context.close()


def test_curves_have_units_and_tolerate_outliers(own_page: Page, pictured: Served) -> None:
    own_page.add_init_script(_TEXTS)
    open_page(own_page, pictured, "run")
    assert set(own_page.evaluate("[...window.drawnTexts]")) >= UNITS, "labels of the axes"
    duration = own_page.locator("figure", has=own_page.get_by_text("Duration of a step"))
    expect(duration.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("^Duration of a step over steps, in s")
    )
    expect(duration).to_contain_text(
        "time/step; mean of 16 steps; 3 outliers outside of the scale: up to 301.8 s at step 1"
    )
    assert _measure_height(duration) > 0.3
    bars = own_page.locator(".times g").nth(1).locator("rect")
    heights = bars.evaluate_all("(all) => all.reduce((sum, one) => sum + Number(one.getAttribute('height')), 0)")
    assert heights > 20, "the bars of usual steps are flat"
    expect(own_page.locator(".times .cut")).to_have_count(3)
    own_page.get_by_role("combobox", name="Scale").select_option("all")
    expect(duration).not_to_contain_text("outliers")
    assert _measure_height(duration) < 0.1
    own_page.get_by_role("combobox", name="Scale").select_option("log")
    expect(own_page.locator("figure", has=own_page.get_by_text("loss; mean of"))).to_contain_text(
        "linear: some values are 0 or less"
    )
    expect(own_page).to_have_url(re.compile("scale=log"))


def _measure_height(figure: Locator) -> float:
    found: float = figure.evaluate(_DRAWN)
    return found


def test_held_out_reward_is_next_to_training_reward(page: Page, pictured: Served) -> None:
    open_page(page, pictured, "run")
    first = page.locator(".charts figure").first
    expect(first).to_contain_text(
        re.compile("Reward: training and held out.*training 0.8.*held out: gsm8k 0.8.*held out: math 0.7")
    )
    first.get_by_role("img").focus()
    page.keyboard.press("End")
    expect(first.locator(".readout")).to_contain_text(
        re.compile(r"Step 320: training [\d.]+, mean 0.8\d+; held out: gsm8k 0.8")
    )


def test_worst_rollouts_come_first_and_runs_have_curves(page: Page, pictured: Served) -> None:
    open_page(page, pictured, "runs")
    for name in (RUNNING, COMPLETE, FAILED, SFT):
        expect(page.get_by_role("img", name=re.compile(f"^(Reward|Loss) of .*{name}: from "))).to_be_visible()
    open_page(page, pictured, "rollouts")
    expect(page.get_by_label("Order")).to_have_value("worst")
    rewards = [float(one) for one in page.locator("td.reward").all_inner_texts()]
    assert len(rewards) == 50
    assert rewards == sorted(rewards)
    second = page.locator("tbody a").nth(1).inner_text()
    page.locator("tbody a").first.click()
    page.locator("[data-next]").click()
    group, member = re.findall(r"\d+", second)
    expect(page.locator("main .facts")).to_contain_text(f"{group}, rollout {member}")
