"""The HTML report in a browser: it draws, sorts, answers mouse and keyboard, and asks the network for nothing."""

import re

import pytest

from sparing.report.page import page
from sparing.workbench.comparison.judgement import FASTER, SLOWER, UNSAFE
from tests.support.browser import launched, visit
from tests.support.comparisons import BAD, FAST, REASON, SLOW, example, measured
from tests.support.generations import row_of

HOSTILE = "<script>window.stolen=1</script><img src=x onerror=window.stolen=2>a_long_name_without_a_space.jsonl"


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def shared(browser, tmp_path_factory):
    """The page that the tests below look at, one after the other."""
    with visit(browser, tmp_path_factory.mktemp("page"), page(example())) as visited:
        yield visited


@pytest.fixture
def seen(shared):
    yield shared.page
    assert shared.problems() == []


def column(seen, title):
    titles = [text.strip() for text in seen.locator("#rows thead th").all_inner_texts()]
    place = next(i for i, text in enumerate(titles) if text.startswith(title))
    return [cell.strip() for cell in seen.locator(f"#rows tbody tr > :nth-child({place + 1})").all_inner_texts()]


def head(seen, title):
    return seen.locator("#rows thead th", has=seen.get_by_role("button", name=title, exact=True))


def test_the_table_sorts_by_numbers(seen):
    before = column(seen, "method")
    head(seen, "change").get_by_role("button").click()
    assert column(seen, "change") == ["0%", "0.05%", "0.20%", "0.60%", "12%", "not finite", ""]
    assert column(seen, "method")[1] == SLOW != before[1]
    assert head(seen, "change").get_attribute("aria-sort") == "ascending"
    head(seen, "change").get_by_role("button").click()
    assert column(seen, "change") == ["12%", "0.60%", "0.20%", "0.05%", "0%", "not finite", ""], (
        "what is missing stays last"
    )
    assert head(seen, "change").get_attribute("aria-sort") == "descending"
    head(seen, "verdict").get_by_role("button").click()
    assert head(seen, "change").get_attribute("aria-sort") == "none"
    assert column(seen, "verdict")[0] == "safe and faster"
    assert column(seen, "verdict")[-1] == "refused"


def test_the_table_sorts_by_keyboard(seen):
    seen.locator("#rows thead button").first.focus()
    seen.keyboard.press("Tab")
    seen.keyboard.press("Tab")
    assert seen.evaluate("document.activeElement.innerText.trim()") == "change"
    outline = seen.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    head(seen, "method").get_by_role("button").press("Enter")
    names = column(seen, "method")
    assert names == sorted(names)
    head(seen, "method").get_by_role("button").press("Space")
    assert column(seen, "method") == names[::-1]


def test_a_point_tells_what_it_is(seen):
    seen.locator("#trade").scroll_into_view_if_needed()
    drawn = seen.locator("#trade .scatterlayer .trace").filter(has=seen.locator(".points path"))
    box = drawn.nth(1).locator(".points path").bounding_box()
    seen.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    text = seen.locator("#trade .hoverlayer .hovertext")
    text.wait_for()
    assert text.text_content().startswith(
        f"{FAST}safe and fasterchange 0.2%interval 0.1% to 0.3%1.25x as fast as exact"
    )


def test_arrow_keys_walk_through_the_points(seen):
    now = seen.locator("#trade-now")
    seen.focus("#trade")
    said = []
    for _ in range(5):
        seen.keyboard.press("ArrowRight")
        said.append(now.text_content().partition(";")[0])
    assert said == ["the model's own attention", FAST, SLOW, BAD, "top_keys(keys=64)"]
    seen.locator("#trade .hoverlayer .hovertext", has_text="top_keys").wait_for()
    seen.focus("#crossover")
    assert now.text_content() == ""
    seen.keyboard.press("ArrowLeft")
    assert "2048 tokens" in seen.locator("#crossover-now").text_content()


def test_boxes_hide_what_they_name(seen):
    points = seen.locator("#trade .scatterlayer .points path")
    before = points.count()
    box = seen.locator("#trade-keys").get_by_label("not safe")
    box.press("Space")
    assert points.count() < before
    box.press("Space")
    assert points.count() == before


def test_another_head_has_other_pictures(seen):
    maps = seen.locator("#maps canvas")
    labels = [each.get_attribute("aria-label") for each in maps.all()]
    assert labels == [f"where {method} looks: layer 1, head 0" for method in ("exact", FAST, SLOW)]
    corner = "canvas => [...canvas.getContext('2d').getImageData(0, 0, 1, 1).data]"
    before = maps.nth(1).evaluate(corner)
    assert maps.nth(2).evaluate(corner) != before, "each method has its own"
    seen.get_by_label("Head", exact=True).select_option(label="layer 2, head 2 (encoder.layer.2.attention.self)")
    assert maps.first.get_attribute("aria-label") == "where exact looks: layer 2, head 2"
    assert maps.nth(1).evaluate(corner) != before


def test_charts_follow_the_theme(seen):
    from playwright.sync_api import expect

    tick = seen.locator("#trade .ytick text").first
    light = tick.evaluate("text => getComputedStyle(text).fill")
    seen.emulate_media(color_scheme="dark")
    expect(tick).not_to_have_css("fill", light)
    seen.emulate_media(color_scheme="light")
    expect(tick).to_have_css("fill", light)


def test_the_code_is_copied(shared, seen):
    seen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    seen.get_by_role("button", name="Copy").click()
    seen.get_by_role("button", name="Copied").wait_for()
    assert f'sparing.approximate(model, "{FAST}")' in seen.evaluate("navigator.clipboard.readText()")


def hostile():
    row = example().rows[0]
    named = type(row)(**{**vars(row), "method": HOSTILE})
    maps = tuple(type(each)(**{**vars(each), "method": HOSTILE, "layer": HOSTILE}) for each in example().maps[:2])
    return example(
        data=HOSTILE, model=HOSTILE, metric=HOSTILE, summary=HOSTILE, rows=(named, *example().rows[1:]), maps=maps
    )


def test_names_with_markup_stay_text_also_on_a_phone(browser, tmp_path):
    with visit(browser, tmp_path, page(hostile()), width=360, is_mobile=True, has_touch=True) as seen:
        assert seen.page.locator("h1").inner_text() == f"Turn on {HOSTILE}: 1.25x"
        assert seen.page.locator(".evidence").inner_text() == HOSTILE
        seen.page.focus("#trade")
        seen.page.keyboard.press("ArrowRight")
        seen.page.keyboard.press("ArrowRight")
        seen.page.locator("#trade .hoverlayer .hovertext", has_text="onerror").wait_for()
        assert seen.page.locator("#maps figcaption code").first.inner_text() == HOSTILE
        assert seen.page.locator("img").count() == 0
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360, "it scrolls in one direction only"
        assert seen.problems() == []


def test_generation_fits_a_phone_and_shows_facts_by_length_and_depth(browser, tmp_path):
    kept = [row_of("safe and faster", context, 1.9) for context in (2000, 8000)]
    found = example(
        kind="language model", rows=(), maps=(), generation=(*kept, row_of("not safe", 4000, 2.0, reason="lost"))
    )
    with visit(browser, tmp_path, page(found), width=360, is_mobile=True, has_touch=True) as seen:
        assert seen.page.locator(".depth tbody tr").count() == 3
        assert seen.page.locator(".depth td").first.inner_text() == "20/20"
        assert seen.page.locator(".generation").first.locator(".verdict").all_inner_texts()[-1].endswith("not safe")
        assert 'when="decode"' in seen.page.locator("#code").inner_text()
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360, "it scrolls in one direction only"
        assert seen.problems() == []


@pytest.mark.parametrize("rows", [(), example().rows[-1:]])
def test_a_page_with_nothing_to_draw_runs(browser, tmp_path, rows):
    with visit(browser, tmp_path, page(example(rows=rows, maps=()))) as seen:
        assert seen.page.locator("#trade").count() == 0
        assert (REASON in seen.page.locator("main").inner_text()) == bool(rows)
        assert seen.problems() == []


def test_axes_hold_few_points(seen):
    """Exact attention alone, beside an oracle, and where all changes are for the better, or nothing is."""
    point = "{change: [%s, null, null], speed: [2, 1, 3]}"
    for timed, oracles in (("EXACT", ""), ("EXACT", point % 0.5), (f"EXACT, {point % -0.5}", ""), (point % 0, "")):
        low, high, left, right = seen.evaluate(
            f"(({{x, y}}) => [...y, ...x])(tradeScales([{timed}], [{oracles}], 0.01, true))"
        )
        assert low < 0 < 0.01 < high
        assert left < right


def crowded():
    """Ten safe settings in one place, far more than names fit, and unsafe ones."""
    close = [
        measured(f"key_clusters(clusters={8 * n}, keys={9 * n}, window=16)", SLOWER, 5e-4 + 1e-5 * n, 0.8 + 0.002 * n)
        for n in range(1, 10)
    ]
    unsafe = [measured(f"window(size={n})", UNSAFE, 0.1, 1.5, crossover=None) for n in (8, 16)]
    return example(rows=(measured(FAST, FASTER, 0.002, 1.25), *close, *unsafe), maps=())


@pytest.mark.parametrize("width", [390, 1280])
def test_every_safe_point_has_a_name_and_no_two_names_collide(browser, tmp_path, width):
    with visit(browser, tmp_path, page(crowded()), width=width, is_mobile=width < 600) as seen:
        chart = seen.page.locator("#trade")
        chart.locator(".annotation-text-g").first.wait_for()
        texts = chart.locator(".annotation-text").all_text_contents()
        numbered = seen.page.locator("#trade-names li").all_inner_texts()
        named = [numbered[int(text) - 1] if text.isdecimal() else text for text in texts]
        assert len({name for name in named if name.startswith("key_clusters")}) == 9
        assert {"window size=64, sinks=1", "the model's own"} <= set(named)
        boxes = [each.bounding_box() for each in chart.locator(".annotation-text").all()]
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                apart = (
                    a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
                    or a["y"] + a["height"] <= b["y"] + 2 or b["y"] + b["height"] <= a["y"] + 2
                )  # fmt: skip
                assert apart, (a, b)
        assert seen.problems() == []


def test_lines_of_what_is_safe_are_named_and_the_others_faded(seen):
    chart = seen.locator("#crossover")
    chart.scroll_into_view_if_needed()
    names = chart.locator(".annotation-text").all_text_contents()
    assert {"window", "key_clusters"} <= set(names)
    assert not {"lsh", "random_features"} & set(names)
    faded = seen.evaluate("colour('faded')")
    lines = seen.evaluate("document.getElementById('crossover').data.map((line) => [line.text[0], line.line.color])")
    assert {text.split("(")[0]: paint == faded for text, paint in lines} == {
        "window": False, "key_clusters": False, "lsh": True, "random_features": True,
    }  # fmt: skip


def test_a_table_says_that_it_goes_on_beside_its_frame(browser, tmp_path):
    from playwright.sync_api import expect

    with visit(browser, tmp_path, page(example()), width=390, is_mobile=True, has_touch=True) as seen:
        frame = seen.page.locator(".scroll", has=seen.page.locator("#rows"))
        hint = "frame => !frame.previousElementSibling.hidden && frame.previousElementSibling.innerText"
        assert frame.evaluate(hint).startswith("scroll sideways")
        assert "more" in frame.get_attribute("class").split()
        frame.evaluate("frame => { frame.scrollLeft = frame.scrollWidth; }")
        expect(frame).not_to_have_class(re.compile("more"))
    with visit(browser, tmp_path, page(example(rows=example().rows[-1:], maps=()))) as seen:
        assert seen.page.locator(".scroll", has=seen.page.locator("#rows")).evaluate(hint) is False, "nothing is hidden"


WITHOUT_POLICY = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
LOADS = '<img src="http://127.0.0.1:9/x.png" alt="">'


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("</h1>", f"{HOSTILE}</h1>"), "a text ran as a script"),
        (lambda text: re.sub(WITHOUT_POLICY, "", text).replace("</h1>", f"{LOADS}</h1>"), "127.0.0.1:9"),
        (lambda text: text.replace("</h1>", f"{LOADS}</h1>"), "Content Security Policy"),
        (lambda text: text.replace("if (document.getElementById", "if (!document.getElementById"), "exception"),
    ],
)
def test_what_must_not_happen_is_caught(browser, tmp_path, change, problem):
    small = example(rows=(), maps=())
    with visit(browser, tmp_path, change(page(small))) as seen:
        assert problem in " ".join(seen.problems())
