"""Page in a real browser: each view with a run's data, live updates, keyboard, accessibility, phone, and empty states."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import WAIT_MILLISECONDS
from tests.browser.served import Served, served
from tests.support.made_runs import Folder, made, metrics_line, rollout
from tests.support.sets import few_in_gate

LAST = "/rollouts/5?step=3&order=worst&other=6"


def page_addresses(shown: Served) -> dict[str, str]:
    """Return the address of each page, by its name."""
    demo, other = (Folder(shown.folder / name).id for name in ("demo", "other"))
    return {
        "runs": shown.at("/"),
        "run": shown.at(f"/run/{demo}"),
        "failed": shown.at(f"/run/{other}"),
        "rollouts": shown.at(f"/run/{demo}/rollouts?step=3"),
        "rollout": shown.at(f"/run/{demo}{LAST}"),
        "compare": shown.at(f"/compare?run={demo}&run={other}"),
        "nothing": shown.at("/no/such/page"),
    }


PAGES = ("runs", "run", "failed", "rollouts", "rollout", "compare", "nothing")
READY = {
    "runs": "table tbody tr >> nth=1",
    "run": "section:has(#manifest) summary",
    "failed": "section:has(#attempts) table",
    "rollouts": "table tbody tr >> nth=15",
    "rollout": "ins >> nth=0",
    "compare": "section:has(#differences) table",
    "nothing": ".problem",
}


def visit_page(page: Page, shown: Served, name: str) -> None:
    """Open a page and wait for its content."""
    page.goto(page_addresses(shown)[name])
    expect(page.locator(READY[name])).to_be_visible()
    expect(page.get_by_text("Reading…")).to_have_count(0)
    if name in ("run", "compare"):
        expect(page.locator(".chart canvas").nth(3)).to_be_visible()


def test_overview_lists_all_runs(page: Page, shown: Served) -> None:
    visit_page(page, shown, "runs")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("Running")
    expect(rows.nth(0)).to_contain_text("120 / 400")
    expect(rows.nth(1)).to_contain_text("data/train.jsonl, line 7")


def test_run_page_shows_its_data(page: Page, shown: Served) -> None:
    visit_page(page, shown, "run")
    expect(page.locator("h1")).to_contain_text("demo")
    expect(page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over steps"))).to_be_visible()
    expect(page.locator("section:has(#times) table")).to_contain_text("waits for rollouts")
    expect(
        page.get_by_role("img", name=re.compile(r"^Peak memory of a trainer GPU over steps, in GiB.* 6[1-3]\.\d+ GiB"))
    ).to_be_visible()
    expect(
        page.get_by_role("img", name=re.compile(r"^Peak FLOP.s of the GPUs.*, in %.* (29|3[0-3])\.?\d* %"))
    ).to_be_visible()
    expect(page.locator("section:has(#staleness) table")).to_contain_text("Versions old")
    page.get_by_text("The resolved configuration").click()
    expect(page.locator("section:has(#manifest) pre")).to_contain_text("max_steps: 400")
    expect(page.locator("section:has(#manifest) pre")).not_to_contain_text("opensesame1")


def test_history_shows_changes_per_attempt(page: Page, shown: Served) -> None:
    visit_page(page, shown, "run")
    history = page.locator("section:has(> .head #history)")
    expect(history).to_contain_text("Edited once in 2 attempts.")
    expect(history.locator("h3")).to_contain_text("Attempt 2, from step 61")
    row = history.locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("th")).to_have_text("max_steps")
    expect(row.locator("del")).to_have_text("20")
    expect(row.locator("ins")).to_have_text("400")


def test_fork_and_origin_link_to_each_other(page: Page, shown: Served) -> None:
    visit_page(page, shown, "failed")
    forks = page.locator("section:has(#forks)")
    expect(forks).to_contain_text("Forked from demo at step 30, the checkpoint of its attempt 1.")
    expect(forks.locator("ins")).to_have_text("2e-05")
    forks.get_by_role("link", name="demo").press("Enter")
    expect(page.locator("h1")).to_contain_text("demo")
    expect(forks).to_contain_text("other was forked from this run at step 30, with changes of trainer.optimizer.lr.")
    forks.get_by_role("link", name="other").press("Enter")
    expect(page.locator("h1")).to_contain_text("other")


def test_failed_run_page_shows_cause(page: Page, shown: Served) -> None:
    visit_page(page, shown, "failed")
    why = page.locator("section:has(#why)")
    expect(why).to_contain_text("attempt 1 ended: DataError (trainer, exit code 65)")
    expect(why).to_contain_text("data/train.jsonl, line 7: no field `prompt`")
    expect(page.get_by_text("rlrun local run.yaml --resume").first).to_be_visible()


def test_curve_zoom_and_smoothing_are_kept_in_address(page: Page, shown: Served) -> None:
    visit_page(page, shown, "run")
    page.get_by_label("From step", exact=True).fill("20")
    page.get_by_label("From step", exact=True).press("Enter")
    page.get_by_label("To step", exact=True).fill("40")
    page.get_by_label("To step", exact=True).press("Enter")
    expect(
        page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over .* at step 40"))
    ).to_be_visible()
    page.get_by_label("Smooth").select_option("20")
    expect(page).to_have_url(re.compile("first=20&last=40.*smooth=20"))
    page.reload()
    expect(
        page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over .* at step 40"))
    ).to_be_visible()
    page.get_by_role("button", name="Show all steps").click()
    expect(
        page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over .* at step 120"))
    ).to_be_visible()


def test_dragging_over_a_curve_zooms(page: Page, shown: Served) -> None:
    visit_page(page, shown, "run")
    # Each part of the page that appears later moves the curves, also from under the mouse.
    for part in ("GPU use", "Changes with attempt 2", "Manifest"):
        expect(page.get_by_role("region", name=part, exact=True)).to_be_visible()
    curve = page.locator(".chart .u-over").first
    box = curve.bounding_box()
    assert box is not None
    left, right = ({"x": box["width"] * part, "y": 50.0} for part in (0.25, 0.5))
    curve.drag_to(curve, source_position=left, target_position=right)
    expect(page).to_have_url(re.compile(r"first=\d+&last=\d+"))


def test_rollouts_are_filtered_and_paged(page: Page, shown: Served) -> None:
    visit_page(page, shown, "rollouts")
    expect(page.locator("tbody tr").first).to_contain_text("group 0, 0")
    page.get_by_label("Environment").select_option("math")
    expect(page.locator("tbody tr")).to_have_count(8)
    page.get_by_text("More filters").click()
    page.get_by_label("Reward from").fill("2")
    page.get_by_label("Reward from").press("Enter")
    expect(page.get_by_text("No rollout matches these filters (of 16).")).to_be_visible()


def test_rollout_page_shows_tokens_and_second_rollout(page: Page, shown: Served) -> None:
    visit_page(page, shown, "rollout")
    expect(page.locator(".turns li.user").first).to_have_css("max-width", "none")  # It must be as wide as the others.
    expect(page.locator(".turns").first).to_contain_text("what is 1 + 1?")
    expect(page.locator(".call").first).to_contain_text('{"a": 2, "b": 2}')
    expect(page.locator(".tokens")).to_have_text("what is 1 + 1? it is 2")
    expect(page.locator(".tokens .given")).to_have_count(10)
    expect(page.locator(".tokens .deep-5, .tokens .deep-4")).not_to_have_count(0)
    page.get_by_label("Color by").select_option("advantage")
    expect(page.locator(".tokens [class^=bad]")).not_to_have_count(0)
    page.get_by_label("Color by").select_option("version")
    expect(page.locator(".tokens .deep-1")).to_have_count(4)
    expect(page.locator("ins").last).to_have_text("3")
    expect(page.locator("del").last).to_have_text("2")


def test_comparison_page_shows_two_runs(page: Page, shown: Served) -> None:
    visit_page(page, shown, "runs")
    page.get_by_label("Compare", exact=False).first.check()
    page.get_by_label("Compare", exact=False).nth(1).check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.get_by_role("img", name=re.compile("Reward over steps, in reward. demo: .*; other: "))).to_be_visible()
    expect(page.locator("section:has(#differences) table")).to_contain_text("lr")
    expect(page.locator("section:has(#means)")).to_contain_text("Based on the 80 steps")


def test_run_page_updates_without_reload(page: Page, run: Folder) -> None:
    with served(run.root.parent) as server:
        page.goto(server.at("/"))
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator(".live")).to_have_text("live")
        made(run.root.parent / "later")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.goto(server.at(f"/run/{run.id}"))
        image = page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over .* at step 10"))
        expect(image).to_be_visible()
        page.get_by_label("From step", exact=True).fill(
            "4"
        )  # not submitted yet: the typed text stays while the page is redrawn
        run.lines("metrics.jsonl", [metrics_line(11)], more=True)
        expect(
            page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over .* at step 11"))
        ).to_be_visible()
        expect(page.get_by_label("From step", exact=True)).to_have_value("4")
        page.get_by_label("From step", exact=True).press("Enter")
        expect(page).to_have_url(re.compile("first=4"))
        run.ends("Failed")
        expect(page.locator("h1")).to_contain_text("Failed")


def test_ended_server_is_reported(page: Page, run: Folder) -> None:
    with served(run.root.parent) as server:
        page.goto(server.at("/"))
        expect(page.locator(".live")).to_have_text("live")
        server.process.terminate()
        expect(page.locator(".live")).to_contain_text("not connected")


def test_page_works_with_keyboard_only(page: Page, shown: Served) -> None:
    visit_page(page, shown, "runs")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Filter")).to_be_focused()
    page.keyboard.type("demo")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Filter").fill("")
    page.locator("tbody a").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("demo")
    page.keyboard.press("r")
    expect(page.locator("h1")).to_have_text("demo: rollouts of step 3")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Step", exact=True)).to_be_focused()
    page.locator("tbody a").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("demo: rollout 0 of step 3")
    expect(page.locator("[data-next]")).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("demo: rollout 1 of step 3")
    expect(page.locator("[data-previous]")).to_be_visible()
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("demo: rollout 0 of step 3")
    page.locator(".tokens").focus()
    for _ in range(11):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".token")).to_contain_text("Token 10")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("g")
    expect(page.locator("h1")).to_have_text("All runs")


def test_skip_link_leads_to_content(page: Page, shown: Served) -> None:
    visit_page(page, shown, "runs")
    page.locator(".skip").focus()
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


@pytest.mark.parametrize(
    ("width", "scheme"), few_in_gate(product((1200, 360), ("light", "dark")), [(1200, "light"), (360, "dark")])
)
def test_axe_finds_no_violations_on_run_pages(
    browser: Browser, shown: Served, axe: str, scheme: Literal["light", "dark"], width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)
    try:
        for name in PAGES:
            visit_page(page, shown, name)
            found: Any = page.evaluate(f"{axe}; axe.run({{resultTypes: ['violations']}})")
            assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]] == [], (
                name
            )
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{name} is wider than a window of {width}"
    finally:
        context.close()


def test_color_scheme_can_be_chosen(page: Page, shown: Served) -> None:
    white, black = "rgb(255, 255, 255)", "rgb(18, 19, 22)"
    page.emulate_media(color_scheme="light")
    visit_page(page, shown, "runs")
    back = page.locator("html")
    expect(back).to_have_css("background-color", white)
    page.get_by_label("Colors").select_option("dark")
    expect(back).to_have_css("background-color", black)
    page.reload()
    expect(back).to_have_css("background-color", black)
    page.get_by_label("Colors").select_option("system")
    expect(back).to_have_css("background-color", white)
    page.emulate_media(color_scheme="dark")
    expect(back).to_have_css("background-color", black)


def test_empty_folder_and_missing_run_are_reported(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with served(folder) as server:
        page.goto(server.at("/"))
        expect(page.get_by_text(f"There are no runs in {folder} yet.")).to_be_visible()
        new = Folder(folder / "new")
        new.config()
        expect(page.locator("tbody tr")).to_have_count(1)
        page.goto(server.at(f"/run/{new.id}"))
        expect(page.get_by_text("No step has been trained yet; curves start with the first step.")).to_be_visible()
        expect(page.get_by_text("No step has been timed yet.")).to_be_visible()
        page.goto(server.at(f"/run/{new.id}/rollouts"))
        expect(page.get_by_text("No step has a trace yet")).to_be_visible()
        page.goto(server.at("/run/gone.12345678"))
        expect(page.get_by_role("alert")).to_have_text(
            "the run gone.12345678 does not exist; it may have been removed or renamed"
        )
        page.goto(server.at("/compare?run=one"))
        expect(page.get_by_text("Choose at least two runs")).to_be_visible()


def test_model_output_is_shown_as_text(page: Page, tmp_path: Path) -> None:
    evil = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>\u202e\u2066\u200b'
    run = made(tmp_path / "runs" / "<b>bold", name=evil)
    rows = [
        rollout(0, m, environment=evil, task_id=evil, messages=[{"role": evil, "content": evil + str(m)}])
        for m in (0, 1)
    ]
    run.lines("traces/step_00000003.jsonl", rows)
    run.lines("metrics.jsonl", [{"step": 1, "loss": 1.0, f"eval/{evil}/reward/mean": 1.0}])
    with served(run.root.parent) as server:
        for path in ("/", f"/run/{run.id}", f"/run/{run.id}/rollouts", f"/run/{run.id}/rollouts/0?step=3&other=1"):
            page.goto(server.at(path))
            expect(page.get_by_text("Reading…")).to_have_count(0)
            expect(page.locator("main")).to_contain_text(re.compile("<img src=x|<b>bold"))
            assert page.locator("main img, main script, main b").count() == 0
            assert page.title() != "owned"
            assert re.search("[\u202a-\u202e\u2066-\u2069\u200b]", page.inner_text("body") + page.title()) is None


def test_large_run_is_paged_and_downsampled(own_page: Page, tmp_path: Path) -> None:
    run = made(tmp_path / "runs" / "large")
    line = '{"step": %d, "attempt": 1, "reward/mean": %.3f, "time/step": 1.0}\n'
    run.write("metrics.jsonl", "".join(line % (step, step % 97 / 97) for step in range(1, 100_001)))
    run.lines("traces/step_00000003.jsonl", [rollout(n // 8, n % 8, n / 1e4) for n in range(10_000)])
    sizes: list[int] = []
    with served(run.root.parent) as server:
        own_page.on("response", lambda reply: sizes.append(len(reply.body())) if "/api/runs/" in reply.url else None)
        own_page.goto(server.at(f"/run/{run.id}"))
        expect(
            own_page.get_by_role("img", name=re.compile("^Reward(: training and held out)? over .* at step 100000"))
        ).to_be_visible()
        own_page.goto(server.at(f"/run/{run.id}/rollouts?order=best"))
        expect(own_page.locator("tbody tr")).to_have_count(50)
        own_page.keyboard.press("j")
        expect(own_page.get_by_text("51 to 100 of 10,000")).to_be_visible()
    assert max(sizes) < 200_000


def test_token_of_address_is_accepted_and_removed(page: Page, run: Folder) -> None:
    with served(run.root.parent, "--token") as server:
        plain = server.url.partition("?")[0]
        reply = page.goto(plain)
        assert reply is not None
        assert reply.status == 401
        page.goto(server.url)
        expect(page.locator("tbody tr")).to_have_count(1)
        assert "token" not in page.url
        expect(page.locator(".live")).to_have_text("live")
