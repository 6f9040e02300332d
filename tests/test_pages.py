"Every page that the runner made of the real course"
import os
import re
from functools import lru_cache
from urllib.parse import unquote

import pytest
from conftest import NBS, ROOT

nbformat = pytest.importorskip('nbformat')
BeautifulSoup = pytest.importorskip('bs4').BeautifulSoup
pytest.importorskip('nbclient')

from mpcourse import course as C, pages as P

STEMS = [p.stem for p in NBS]


@lru_cache(maxsize=None)
def page(stem): return BeautifulSoup((ROOT/'_course'/f'{stem}.html').read_text(encoding='utf-8'), 'html.parser')


@pytest.fixture(params=STEMS)
def stem(request, course_pages):
    "Each chapter that has been run; under `make test` that is every one"
    if (course_pages/f'{request.param}.html').exists(): return request.param
    if os.environ.get('MPCOURSE_TEST'): pytest.fail(f'{request.param} has no page')
    pytest.skip('this chapter has not been run: make course')


def test_ran_without_error(stem, course_pages):
    nb = nbformat.read(course_pages/f'{stem}.ipynb', as_version=4)
    assert nb.metadata.mpcourse.status == 'ok', nb.metadata.mpcourse.error
    assert C.is_fresh(nb, P.read_chapter(ROOT/f'nbs/{stem}.ipynb')), 'the notebook has changed since it was run'
    outs = [(i, o) for i, c in enumerate(nb.cells) for o in c.get('outputs', [])]
    assert not [i for i, o in outs if o.output_type == 'error' or o.get('name') == 'stderr'], 'errors or warnings in these cells'
    assert not page(stem).select('.output pre.error, pre.stderr')


def test_loads_nothing_from_outside(stem, course_pages):
    text = (course_pages/f'{stem}.html').read_text(encoding='utf-8')
    assert P.outside(text) == []
    assert page(stem).select_one('meta[http-equiv="Content-Security-Policy"]')['content'] == P.CSP


def test_tells_nothing_about_the_machine(stem):
    shown = page(stem).main.text
    assert str(ROOT) not in shown and os.path.expanduser('~') + '/' not in shown


def test_every_figure_has_caption_and_alt(stem):
    for img in page(stem).select('.output img'):
        assert img.get('alt', '').strip(), f'a picture without alt text: {str(img)[:60]}'
        fig = img.find_parent('figure')
        assert fig and fig.figcaption and fig.figcaption.text.strip(), f'a picture without caption: {img["alt"]}'


def test_every_widget_moves_or_says_where_it_does(stem):
    for w in page(stem).select('.widget'): assert w.select_one('.w-note')
    for w in page(stem).select('.mp-explore'): assert w.select('input, select') and w.select_one('.mp-frame').contents


def test_formulas_are_mathml(stem):
    assert not page(stem).select('.tex-error'), [e.text for e in page(stem).select('.tex-error')]
    body = BeautifulSoup(str(page(stem).main), 'html.parser')
    for e in body.select('pre, code, math, script'): e.decompose()
    left = re.findall(r'\$[^$\n]+\$|\\(?:frac|text|cdot|le|begin)\b', body.text)
    assert not left, f'formulas that were left as they were: {left}'


def test_nothing_of_quarto_is_left(stem):
    body = BeautifulSoup(str(page(stem).main), 'html.parser')
    for block in body.select('.highlight'): assert not block.text.lstrip().startswith('#|')
    for e in body.select('pre, code'): e.decompose()
    assert ':::' not in body.text and 'collapse=' not in body.text


def test_local_links_resolve(stem, course_pages):
    for a in page(stem).select('a[href]'):
        target, _, name = unquote(a['href']).partition('#')
        if re.match(r'[a-z]+:', target): continue
        other = page(stem) if not target else page(target[:-5]) if target.endswith('.html') and (course_pages/target).exists() else None
        assert other is not None or (course_pages/target).exists(), f'{a["href"]} leads nowhere'
        assert not name or other.find(id=name), f'{a["href"]} has no such section'


def test_html_is_balanced(stem, course_pages):
    text = (course_pages/f'{stem}.html').read_text(encoding='utf-8')
    text = re.sub(r'<script.*?</script>', '', text, flags=re.S)
    for tag in ('details', 'figure', 'main', 'table', 'section'): assert text.count(f'<{tag}') == text.count(f'</{tag}>'), tag


def test_index_lists_every_chapter(course_pages):
    rows = {li.select_one('.no').text: li for li in page('index').select('.chapters li')}
    for ch in C.chapters(ROOT/'nbs'):
        if ch.number == 'index': continue
        row = rows[ch.number]
        promise = BeautifulSoup(P.inline_html(ch.promise, P.PageRenderer()), 'html.parser').text
        assert ch.title in row.text and row.p.text == promise and row.select_one('.status')
        if os.environ.get('MPCOURSE_TEST'): assert 'ok' in row.select_one('.status').text and row.select_one(f'a[href="{ch.stem}.html"]')
