"The thirty questions of appendix 87, as a reader without a kernel answers them"
import pytest
from conftest import barriers, NBS

pytestmark = [pytest.mark.chapters('87_inventory', '96_teaching'), pytest.mark.timeout(240)]
RIGHT = 'BBCBACBACB CCBACAACBA CBBBBCBBAA'  # by hand, from the questions as the page shows them


def test_the_page_holds_for_right_what_a_person_holds_for_right():
    from tools.exercises import read
    names, path = {}, next(p for p in NBS if p.stem == '87_inventory')
    for c in read(path):
        if c.cell_type == 'code': exec(c.source, names)
        if len(names.get('QUESTIONS', ())) == 30: break
    given = ''.join('ABC'[options.index(right)] for _, options, right, _, _ in names['QUESTIONS'])
    assert RIGHT in next(p for p in NBS if p.stem == '96_teaching').read_text(), 'the key that teachers have'
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
        boxes.nth(2).get_by_label('I do not know').check()
        assert boxes.nth(2).locator('.no').is_visible()
        assert page.locator('.quiz script').count() == 0
        stems = {p.stem for p in NBS}
        for link in page.locator('.quiz a').all(): assert link.get_attribute('href').removesuffix('.html') in stems
        assert page.evaluate('document.documentElement.scrollWidth') == 390 and not barriers(page)
    finally: page.close()


def test_the_numbers_of_the_first_session():
    "What appendix 96 tells the teacher about 0.1 halved, 1 + 2**-11, a hundred updates, and 1.0625 + 2**-20"
    from mpcourse.formats import bf16, e4m3, fp16
    from mpcourse.rounding import quantize
    def off(f, x): return abs(f.decode(f.encode(x))/x - 1)
    def nearer(k): return off(fp16, .1*2.**-k) - off(bf16, .1*2.**-k)
    assert round(100*off(fp16, .1), 3) == .024 and round(100*off(bf16, .1), 3) == .098 and off(bf16, .1) == 4*off(fp16, .1)
    assert all(nearer(k) == nearer(0) < 0 for k in range(12)) and nearer(12) == nearer(13) == 0 and all(nearer(k) > 0 for k in range(14, 30))
    assert fp16.encode(.1*2.**-21) == 1 and fp16.encode(.1*2.**-22) == 0
    assert [fp16.decode(fp16.encode(x)) for x in (1 + 2.**-11, 1.0005, 2.**-24)] == [1, 1 + 2**-10, 2**-24]
    def pushed(u, w=1., n=100):
        for _ in range(n): w = quantize(w + u, 'fp16')
        return w
    assert pushed(2.**-13) == pushed(2.**-11) == 1 < pushed(2.**-10) and pushed(2.**-11, 1 + 2.**-10, 1) == 1 + 2*2.**-10
    x = 1.0625 + 2.**-20
    assert quantize(x, e4m3) == 1.125 and quantize(x, fp16) == 1.0625 and quantize(1.0625, e4m3) == 1
    assert fp16.decode(fp16.encode(1.0625 + 2.**-10)) == 1.0625 + 2**-10
