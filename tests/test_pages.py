"Every page that the runner made of the real course, and what a page is made of"
import copy, os, re
from functools import lru_cache
from urllib.parse import unquote

import pytest
from conftest import NBS, ROOT, each


nbformat = pytest.importorskip('nbformat')
BeautifulSoup = pytest.importorskip('bs4').BeautifulSoup
pytest.importorskip('nbclient')

from tools import course as C, pages as P

FROM_TAG = re.compile(r'''<(?:script|link|img|iframe|source|video|audio|embed|object|image|use)\b[^>]*?
                          \b(?:src|href|data|srcset)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)''', re.I | re.X)
STYLED = re.compile(r'<style[^>]*>.*?</style>|<\w[^<>]*?\bstyle\s*=\s*(?:"[^"]*"|\'[^\']*\')', re.S | re.I)
FROM_CSS = re.compile(r'(?:url\(|@import)\s*["\']?((?:https?:)?//[^"\')\s]+)')


def outside(page):
    "What a page asks for from outside; a link that a reader may click does not count"
    return FROM_TAG.findall(page) + [u for style in STYLED.findall(page) for u in FROM_CSS.findall(style)]


@lru_cache(maxsize=None)
def page(stem): return BeautifulSoup((ROOT/'_course'/f'{stem}.html').read_text(encoding='utf-8'), 'html.parser')


@lru_cache(maxsize=None)
def prose(stem):
    "What a page says outside of code and formulas"
    body = copy.copy(page(stem).main)
    for e in body.select('pre, code, math, script'): e.decompose()
    return body.text


@lru_cache(maxsize=None)
def anchors(stem): return set(re.findall(r'\bid="([^"]+)"', (ROOT/'_course'/f'{stem}.html').read_text(encoding='utf-8')))


# --- what holds on every page: each rule yields what it finds ---

def ran_without_error(stem):
    nb = nbformat.read(ROOT/'_course'/f'{stem}.ipynb', as_version=4)
    if nb.metadata.mpcourse.status != 'ok': yield nb.metadata.mpcourse.failed
    if not C.is_fresh(nb, C.read_chapter(ROOT/f'nbs/{stem}.ipynb')): yield 'the notebook has changed since it was run'
    for i, cell in enumerate(nb.cells):
        for output in cell.get('outputs', []):
            if output.get('name') == 'stderr': yield f'a warning in cell {i}: {output["text"][:80]}'


def loads_nothing_from_outside(stem):
    yield from outside((ROOT/'_course'/f'{stem}.html').read_text(encoding='utf-8'))
    policy = page(stem).select_one('meta[http-equiv="Content-Security-Policy"]')['content']
    if not policy.startswith("default-src 'none';"): yield policy


def tells_nothing_about_the_machine(stem):
    shown = page(stem).main.text
    for path in (str(ROOT), os.path.expanduser('~') + '/'):
        if path in shown: yield path


def every_figure_has_caption_and_alt(stem):
    for img in page(stem).select('.output img'):
        alt = img.get('alt', '').strip()
        if not alt or 'No description' in alt: yield f'a picture without alt text: {str(img)[:60]}'
        figure = img.find_parent('figure')
        if not (figure and figure.figcaption and figure.figcaption.text.strip()): yield f'a picture without caption: {alt}'


def figures_are_vectors(stem):
    nb = nbformat.read(ROOT/'_course'/f'{stem}.ipynb', as_version=4)
    shown = [c for c in nb.cells if c.cell_type == 'code' and not P.is_hidden(P.directives(c.source)[0])]
    drawn = [o.data for c in shown for o in c.outputs if 'image/svg+xml' in o.get('data', {})]
    light = sum(len(data['image/svg+xml']) <= P.HEAVY for data in drawn)
    found = len(page(stem).select('.output img[src^="data:image/svg+xml"]'))
    if found < light: yield f'{light - found} of {light} light figures are pixels'


def every_widget_moves_or_says_where_it_does(stem):
    for widget in page(stem).select('.widget'):
        if not widget.select_one('.w-note'): yield widget.text[:80]
    for widget in page(stem).select('.mp-explore'):
        if not (widget.select('input, select') and widget.select_one('.mp-frame').contents): yield widget.text[:80]


def formulas_are_mathml(stem):
    for error in page(stem).select('.tex-error'): yield error.text
    yield from re.findall(r'\$[^$\n]+\$|\\(?:frac|text|cdot|le|begin)\b', prose(stem))


def nothing_of_quarto_is_left(stem):
    for block in page(stem).select('.highlight'):
        if block.text.lstrip().startswith('#|'): yield block.text[:80]
    for mark in (':::', 'collapse='):
        if mark in prose(stem): yield mark


def imports_and_checkers_are_folded(stem):
    for block in page(stem).select('.code'):
        if block.select('.hll') or not re.match(r'\s*(def check_|(import|from) .*\s*\Z)', block.select_one('pre').text): continue
        if not block.find_parent('details', class_='fold'): yield block.text[:80]


def solutions_are_folded(stem):
    cells = nbformat.read(ROOT/f'nbs/{stem}.ipynb', as_version=4).cells
    solutions = sum(len(re.findall(r'^:::+ *\{[^}]*collapse', c.source, re.M)) for c in cells if c.cell_type == 'markdown')
    solutions += any(c.source.startswith('## In earnest') for c in cells)
    folded = page(stem).select('details.callout:not([open])')
    if len(folded) != solutions: yield f'{solutions} in the notebook, {len(folded)} on the page'
    for fold in folded:
        if not fold.select_one('.callout-body').text.strip(): yield f'an empty one: {fold.text[:80]}'


def local_links_resolve(stem):
    for a in page(stem).select('a[href]'):
        target, _, name = unquote(a['href']).partition('#')
        if re.match(r'[a-z]+:', target): continue
        if target and not (ROOT/'_course'/target).exists(): yield f'{a["href"]} leads nowhere'
        elif name and name not in anchors(target.removesuffix('.html') or stem): yield f'{a["href"]} has no such section'


RULES = [ran_without_error, loads_nothing_from_outside, tells_nothing_about_the_machine, every_figure_has_caption_and_alt,
         figures_are_vectors, every_widget_moves_or_says_where_it_does, formulas_are_mathml, nothing_of_quarto_is_left,
         imports_and_checkers_are_folded, solutions_are_folded, local_links_resolve]


@pytest.mark.sweep(3)
@pytest.mark.parametrize('stem', [p.stem for p in NBS])
def test_page(stem, course_pages):
    "Each chapter that has been run; under `make test` that is every one"
    if not (course_pages/f'{stem}.ipynb').exists():
        if os.environ.get('MPCOURSE_TEST'): pytest.fail(f'{stem} has no page')
        pytest.skip('this chapter has not been run: make course')
    found = [f'{rule.__name__}: {finding}' for rule in RULES for finding in rule(stem)]
    assert not found, '\n'.join(found)


def test_index_lists_every_chapter(course_pages):
    rows = {li.select_one('.no').text: li for li in page('index').select('.chapters li')}
    for ch in C.chapters():
        if ch.number == 'index': continue
        row, promise = rows[ch.number], P.markdown(ch.promise, P.Renderer(ROOT, None))
        assert ch.title in row.text and row.p.text.strip() == BeautifulSoup(promise, 'html.parser').text.strip() and row.select_one('.status')
        if os.environ.get('MPCOURSE_TEST'): assert 'ok' in row.select_one('.status').text and row.select_one(f'a[href="{ch.stem}.html"]')


# --- the parts of a page ---

@pytest.mark.parametrize('src, want', [('#| hide\nx', {'hide': True}), ('#|export\nx', {'export': True}), ('x\n#| hide', {}), ('', {}),
    ('#| default_exp a_b\n', {'default_exp': 'a_b'}), ("#| fig-cap: 'it''s: one'\nx", {'fig-cap': "it's: one"}),
    ('#| fig-cap: >-\n#|   two\n#|   lines\nx', {'fig-cap': 'two lines'}), ('\n#| eval: false\n\n#| export\nx', {'eval': False, 'export': True})])
def test_directives(src, want): assert P.directives(src)[0] == want


@each('path', NBS)
def test_directives_of_the_course_are_read_and_the_code_below_is_whole(path):
    for c in nbformat.read(path, as_version=4).cells:
        if c.cell_type != 'code': continue
        d, code = P.directives(c.source)
        assert code.strip() == '\n'.join(x for x in c.source.splitlines() if not x.startswith('#|')).strip()
        assert all(isinstance(d.get(k, ''), str) for k in ('fig-cap', 'fig-alt'))


@each('path', NBS)
def test_captions_have_exponents_and_no_carets(path):
    for c in nbformat.read(path, as_version=4).cells:
        d = P.directives(c.source)[0] if c.cell_type == 'code' else {}
        assert not re.search(r'\d\^', d.get('fig-cap', '') + d.get('fig-alt', '')), c.id


def test_questions_that_people_type_into_the_search_are_on_a_page(course_pages):
    "The site's search looks for them as they are, in the text of a section"
    if not (course_pages/'99_glossary.html').exists(): pytest.skip('this chapter has not been run: make course')
    for asked in ('how do I choose a loss scale', 'epsilon nan', 'loss is nan'): assert asked in prose('99_glossary')


@pytest.mark.parametrize('text, asked', [
    ('<img src="https://x.y/a.png">', 1), ("<script defer src='//x.y/a.js'></script>", 1), ('<style>@import "https://x.y/a.css";</style>', 1),
    ('<link rel="stylesheet" href="http://x.y/a.css">', 1), ('<p style="background:url(https://x.y/a.png)">', 1), ('<iframe src=https://x.y>', 1),
    ('<a href="https://x.y">link</a>', 0), ('<math xmlns="http://www.w3.org/1998/Math/MathML"></math>', 0)])
def test_outside_sees_what_a_page_loads(text, asked): assert len(outside(text)) == asked


def test_a_light_figure_is_vectors_of_its_size_and_a_heavy_one_pixels():
    def kept(svg):
        data = {'image/png': 'x', 'image/svg+xml': svg}
        P.sharpen(dict(data=data))
        return data
    assert kept('<svg width="72pt" height="36pt"><g width="1pt">') == {'image/svg+xml': '<svg width="110" height="55"><g width="1pt">'}
    assert kept('<svg>' + 'x'*P.HEAVY) == {'image/png': 'x'}
    P.sharpen(dict(name='stdout'))


def test_unclosed_and_stray_fences_keep_html_balanced(tmp_path):
    cells = [nbformat.v4.new_markdown_cell(t) for t in ('# A\n\n> a.', ':::', '::: {.callout-tip}\n## Open\n::: {.inner}\nx\n:::')]
    html = P.page_html(nbformat.v4.new_notebook(cells=cells), C.Chapter(tmp_path/'01_a.ipynb', '01', 'A', 'a.'))
    for tag in ('div', 'details', 'main'): assert html.count(f'<{tag}') == html.count(f'</{tag}>')
    assert ':::' not in html and BeautifulSoup(html, 'html.parser').main.find_next_sibling('aside')


def luminance(colour):
    "Of WCAG 2"
    h = colour.lstrip('#')
    h = ''.join(2*c for c in h) if len(h) == 3 else h
    parts = [int(h[i:i+2], 16)/255 for i in (0, 2, 4)]
    return sum(w*(c/12.92 if c <= .03928 else ((c + .055)/1.055)**2.4) for w, c in zip((.2126, .7152, .0722), parts))


def contrast(a, b):
    dark, light = sorted(map(luminance, (a, b)))
    return (light + .05)/(dark + .05)


def test_code_has_contrast_on_every_ground_in_light_and_dark():
    css = ''.join(f.read_text(encoding='utf-8') for f in P.STYLES)
    pair = r'light-dark\((#\w+), (#\w+)\)'
    grounds = [re.search(rf'{name}: {pair}', css).groups() for name in ('--tint', '--bad-tint', 'hll { background')]
    colours = re.findall(rf'^\.highlight .*?color: {pair}', css, re.M)
    assert len(colours) >= 7
    for fore in colours + [re.search(rf'--ink: {pair}', css).groups()]:
        for back in grounds:
            for i in (0, 1): assert contrast(fore[i], back[i]) >= 4.5, (fore[i], back[i])


def test_in_earnest_is_one_fold_and_open_where_it_failed():
    def shown(*code_outputs):
        code = nbformat.v4.new_code_cell('1', outputs=[*code_outputs])
        md = nbformat.v4.new_markdown_cell
        return [c.source for c in P.fold_earnest([md('## What we built'), md('## In earnest\n\nMore.'), md('### A'), code, md('## Questions')])]
    fold = '::::: {{.callout-note collapse="{}"}}\n\n## Open this section'
    whole = ['## What we built', '## In earnest\n\nMore.', fold.format('true'), '### A', '1', ':::::', '## Questions']
    assert shown() == whole
    error = nbformat.v4.new_output('error', ename='E', evalue='', traceback=[])
    assert shown(error) == [fold.format('false') if s.startswith(':::::') and 'collapse' in s else s for s in whole]


def test_a_fence_other_than_a_callout_keeps_its_heading():
    assert "\n## T\n" in P.callouts('::: {.x}\n## T\ntext\n:::', str, [])
