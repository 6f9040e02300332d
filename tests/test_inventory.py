"The thirty questions of appendix 87, as a reader without a kernel answers them"
import pytest
from conftest import barriers, NBS

pytestmark = pytest.mark.timeout(240)
RIGHT = 'BBCBACBACB CCBACAACBA CBBBBCBBAA'  # by hand, from the questions as the page shows them


def test_the_page_holds_for_right_what_a_person_holds_for_right():
    from tools.exercises import read
    names, path = {}, next(p for p in NBS if p.stem == '87_inventory')
    for c in read(path):
        if c.cell_type == 'code': exec(c.source, names)
        if len(names.get('QUESTIONS', ())) == 30: break
    given = ''.join('ABC'[options.index(right)] for _, options, right, _, _ in names['QUESTIONS'])
    assert given == RIGHT.replace(' ', ''), [i + 1 for i, (a, b) in enumerate(zip(given, RIGHT.replace(' ', ''))) if a != b]


@pytest.mark.browser
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
