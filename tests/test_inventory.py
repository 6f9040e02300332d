"The thirty questions of appendix 87, as a reader without a kernel answers them"
import pytest
from conftest import barriers, NBS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


def test_a_choice_is_answered_and_counted_by_keyboard(browser, course_pages):
    file = course_pages/'87_inventory.html'
    if not file.exists(): pytest.skip('this chapter has not been run: make course')
    page = browser.new_page()
    page.set_viewport_size(dict(width=390, height=800))
    try:
        page.goto(file.as_uri())
        boxes = page.locator('.quiz fieldset')
        assert boxes.count() == 30
        for box in boxes.all():
            assert box.locator('.right').count() == 1 and box.locator('.wrong').count() >= 1
            assert not box.locator('.why').is_visible()
        first = boxes.first
        first.locator('.wrong').first.focus()
        page.keyboard.press('Space')
        assert first.locator('.no').is_visible() and not first.locator('.yes').is_visible()
        first.locator('.right').check()
        assert first.locator('.yes').is_visible() and not first.locator('.no').is_visible()
        boxes.nth(1).locator('.wrong').first.check()
        assert page.locator('.quiz script').count() == 0
        stems = {p.stem for p in NBS}
        for link in page.locator('.quiz a').all(): assert link.get_attribute('href').removesuffix('.html') in stems
        assert page.evaluate('document.documentElement.scrollWidth') == 390 and not barriers(page)
    finally: page.close()
