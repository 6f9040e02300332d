"The Quarto site: its definition, the notebooks that go into it, and a small site in a real Chromium"
import configparser, http.server, importlib.util, os, re, shutil, threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import NBS, ROOT, barriers, each


nbformat = pytest.importorskip('nbformat')
pytest.importorskip('nbclient')

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output


def load_site():
    spec = importlib.util.spec_from_file_location('site_builder', ROOT/'tools/site.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = load_site()
CHAPTER = SimpleNamespace(number='07', stem='07_toy')


# --- the definition ---


def test_link_and_output_folder():
    link = ROOT/'nbs/_quarto.yml'
    assert link.is_symlink() and os.readlink(link) == '../_quarto.yml' and link.resolve() == ROOT/'_quarto.yml'
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    yml = (ROOT/'_quarto.yml').read_text()
    assert re.search(r'^  output-dir: (\S+)$', yml, re.M)[1] == cfg['DEFAULT']['doc_path']
    assert 'commonmark' not in yml and 'custom_quarto_yml' not in cfg['DEFAULT']


def test_what_the_definition_names_is_beside_the_notebooks():
    "nbdev copies no subfolder, so a picture in one would be missing on the site"
    named = set(re.findall(r'[\w/-]+\.(?:svg|png|css|scss)\b', (ROOT/'_quarto.yml').read_text()))
    assert {'emblem.svg', 'card.png', 'styles.css', 'light.scss', 'dark.scss'} <= named
    assert [n for n in named if not (ROOT/'nbs'/n).exists() or '/' in n] == []


def test_sidebar_lists_every_notebook_once_in_order():
    listed = re.findall(r'^ +- (\S+\.ipynb)$', (ROOT/'_quarto.yml').read_text(), re.M)
    assert listed == ['index.ipynb'] + [p.name for p in NBS if p.stem != 'index']


# --- a cell's source ---

@pytest.mark.parametrize('src, new', [
    ('#| export\nx = 1', '#| exports\n#| classes: exported\nx = 1'),
    ('#| exports\nx = 1', '#| exports\n#| classes: exported\nx = 1'),
    ('#| exporti\nx = 1', '#| exports\n#| classes: exported\nx = 1'),
    ('#| export\n#| code-fold: true\n#| code-summary: "more"\nx = 1', '#| exports\n#| classes: exported\nx = 1'),
    ('#| export\nimport os\nfrom sys import path', '#| code-fold: true\n#| code-summary: "Imports"\nimport os\nfrom sys import path'),
    ('import os', '#| code-fold: true\n#| code-summary: "Imports"\nimport os'),
    ('#| export\n#| code-fold: true\nimport os', '#| code-fold: true\n#| code-summary: "Imports"\nimport os'),
    ('#| export\ndef check_it(f): pass', '#| code-fold: true\n#| code-summary: "The checker"\ndef check_it(f): pass'),
    ('def check_it(f): pass', '#| code-fold: true\n#| code-summary: "The checker"\ndef check_it(f): pass'),
    ('import os\nx = 1', 'import os\nx = 1'), ('%time x', '%time x'), ('', ''), ('# only words', '# only words'),
    ('#| hide\nimport os', '#| hide\nimport os'), ('#| default_exp a', '#| default_exp a'),
    ('#| fig-cap: "we export"\nplot()', '#| fig-cap: "we export"\nplot()'),
    ('#| code-fold: true\nassert x', '#| code-fold: true\n#| code-summary: "Check"\nassert x'),
    ('#| code-fold: true\nx = 1', '#| code-fold: true\nx = 1')])
def test_source(src, new): assert SITE.site_source(src) == new


def test_no_name_of_the_library_is_hidden_and_no_key_is_doubled():
    "Of every notebook as it is: nothing exported is dropped by nbdev, and Quarto stops on no key"
    for path in NBS:
        for c in nbformat.read(path, as_version=4).cells:
            if c.cell_type != 'code': continue
            src = SITE.site_source(c.source)
            keys = re.findall(r'^#\| *([\w-]+):', src, re.M) + ['code-fold', 'code-summary']*SITE.has(src, 'exports')
            assert not SITE.has(src, 'export') and len(keys) == len(set(keys)), c.source


@each('path', NBS)
def test_every_callout_is_closed(path):
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == 'markdown']
    marks = [m for src in cells for m in re.findall(r'^:{3,} *(\{|$)', src, re.M)]
    assert marks == ['{', '']*(len(marks)//2)


# --- a notebook ---

def notebook(*cells, status='ok', **metadata):
    cells = [new_markdown_cell('# Toy\n\n> A promise'), *cells]
    return new_notebook(cells=cells, metadata={'mpcourse': {'status': status}, **metadata})


def test_an_output_s_links_lead_to_pages_without_numbers():
    linked = '<a href="01_formats.html#x">chapter 01</a> <a href="https://a.org/02_b.html">b</a>'
    cell = new_code_cell('w', outputs=[new_output('display_data', {'text/html': linked})])
    out = SITE.for_site(notebook(cell), CHAPTER).cells[2].outputs[0]
    assert out.data['text/html'] == linked.replace('"01_', '"')


def test_widgets_become_html():
    view = {SITE.VIEW: {'model_id': 'a'}, 'text/plain': 'IntSlider()'}
    cell = new_code_cell('w', outputs=[new_output('display_data', view), new_output('stream', text='said'),
                                       new_output('display_data', {**view, 'text/html': '<i>frames</i>'})])
    skipped = new_code_cell('x', metadata={'mpcourse': {'skipped': 'not run here'}})
    model = {'model_name': 'IntSliderModel', 'state': {'description': 'k', 'value': 3, 'min': 0, 'max': 9}}
    nb = SITE.for_site(notebook(cell, skipped, widgets={SITE.STATE: {'state': {'a': model}}}), CHAPTER)
    first, second, third = nb.cells[2].outputs
    assert 'type="range"' in first.data['text/html'] and second.text == 'said'
    assert third.data == {'text/html': '<i>frames</i>'} and SITE.VIEW not in str(nb)
    assert 'not run here' in nb.cells[3].outputs[0].data['text/html'] and not nb.metadata.get('widgets')


def test_a_runtime_without_a_gpu_runs_every_cell(tmp_path):
    "In the notebooks for Colab what needs a GPU stands behind a question, and is still Python"
    from tools import runtime
    runtime.write(tmp_path)
    cells = [c.source for p in tmp_path.glob('*.ipynb') for c in nbformat.read(p, as_version=4).cells if c.cell_type == 'code']
    guarded = [s for s in cells if re.search(r'^ *#\| *cuda', s, re.M)]
    assert len(guarded) > 5
    for s in guarded: compile(s, 'cell', 'exec'); assert s.startswith('import torch\nif torch.cuda.is_available():\n')


def test_a_good_chapter_has_its_number_and_no_banner():
    nb = SITE.for_site(notebook(new_code_cell('x')), CHAPTER)
    assert nb.cells[0].source == '# 07 · Toy\n\n> A promise\n\n- image: card.png' and len(nb.cells) == 3
    assert 'runtime/07_toy.ipynb)' in nb.cells[1].source and 'nbs/07_toy.ipynb)' in nb.cells[1].source
    index = SITE.for_site(notebook(), SimpleNamespace(number='index', stem='index'))
    assert index.cells[0].source.startswith('# Toy\n')


def test_each_name_of_the_library_has_a_heading_of_its_own_before_its_code():
    code = '#| export\n_x = 1\ndef a(): pass\nclass B: pass\n@patch(as_prop=True)\ndef c(self:B): pass\ndef _d(): pass'
    nb = SITE.for_site(notebook(new_code_cell(code), new_code_cell('def e(): pass'), new_code_cell('#| export\nx = 1')), CHAPTER)
    title, links, heads, *rest = nb.cells
    assert heads.source == '### a {.name}\n\n### B {.name}\n\n### B.c {.name}' and [c.cell_type for c in rest] == ['code']*3


def test_a_failed_chapter_names_and_shows_its_failed_cells():
    bad = new_output('error', ename='ValueError', evalue='2 < 1', traceback=['\x1b[31mline\x1b[0m 1', '2 < 1'])
    nb = SITE.for_site(notebook(new_code_cell('x'), new_code_cell('#| hide\ny', outputs=[bad]), status='failed'), CHAPTER)
    title, banner, links, good, failed = nb.cells
    assert title.source.startswith('# 07 · Toy (failed)\n')
    assert 'href="#failed-3"' in banner.source and 'ValueError: 2 &lt; 1' in banner.source
    assert failed.source == 'y' and 'mpcourse' not in nb.metadata and good.outputs == []
    assert failed.outputs[0].data['text/html'] == '<pre class="error" id="failed-3">line 1\n2 &lt; 1</pre>'


# --- the pages that Quarto wrote ---

def test_links_to_names_are_local_or_plain_text(small_course, tmp_path, monkeypatch):
    "Local if the page's notebook imports the name: nbdev takes any `three` for the library's"
    small_course(_01_a=['from mpcourse.b import one, two'])
    monkeypatch.setattr(SITE, 'ROOT', tmp_path)
    monkeypatch.setattr(SITE, 'for_the_keyboard', lambda text: text)
    monkeypatch.setattr(SITE, 'host', lambda: 'https://me.io/')
    def to(name, text): return f'<a href="https://me.io/b.html#{name}">{text}</a>'
    (tmp_path/'a.html').write_text(f'{to("one", "one")} {to("two", "<code>two</code>")} {to("three", "<code>three</code>")}'
                                   '<a href="https://x.org/f.py#LNone" class="s">source</a> <a href="b.html#two">mine</a>')
    (tmp_path/'b.html').write_text('<h2 id="one">One</h2><h2 id="three">Three</h2>')
    SITE.finish(tmp_path)
    assert (tmp_path/'a.html').read_text() == ('<a href="b.html#one">one</a> <code>two</code> <code>three</code>'
        '<a href="https://x.org/f.py" class="s">source</a> <a href="b.html#two">mine</a>')
    assert SITE.dead_links(tmp_path) == ['a.html: b.html#two']


def test_scripts_from_outside_are_taken_out(tmp_path):
    page = tmp_path/'a.html'
    page.write_text('''<script src="https://cdn.org/require.min.js" crossorigin="anonymous"></script>
<script type="application/javascript">define('jquery', [],function() {return window.jQuery;})</script>
<script src="site_libs/x.js"></script><script>go()</script>''')
    SITE.finish(tmp_path)
    assert page.read_text() == '<script src="site_libs/x.js"></script><script>go()</script>'


@pytest.mark.parametrize('href, alive', [('#here', True), ('#there', False), ('', True), ('a.html', True), ('./a.html?q=1#here', True),
    ('b.html', False), ('.', True), ('f%20g.css', True), ('https://x.org/#y', True), ('mailto:a@b', True), ('//x.org', True)])
def test_links_that_lead_somewhere(tmp_path, href, alive):
    for name in ('a.html', 'index.html', 'f g.css'): (tmp_path/name).write_text('<p id="here">')
    SITE.anchors.cache_clear()
    assert SITE.is_alive(href, tmp_path/'a.html') == alive


# --- a small site, in a browser ---

BUILT = ['index', '01_formats', '90_plots', '93_all']


def broken(nb):
    "An executed chapter as if one of its cells had failed"
    cell = next(c for c in nb.cells if c.cell_type == 'code' and 'default_exp' not in c.source)
    cell.outputs = [new_output('error', ename='ZeroDivisionError', evalue='by zero', traceback=['by zero'])]
    nb.metadata['mpcourse']['status'] = 'failed'
    return nb


@pytest.fixture(scope='session')
def small_site(course_pages, tmp_path_factory):
    "A site of the front page and three chapters, the last of them failed"
    if not shutil.which('quarto'): pytest.skip('there is no Quarto here')
    missing = [n for n in BUILT if not (course_pages/f'{n}.ipynb').exists()]
    if missing: pytest.skip(f'not run yet: {", ".join(missing)}; make course')
    runs = [(ch, SITE.executed(ch, course_pages)) for ch in SITE.chapters(ROOT/'nbs') if ch.stem in BUILT]
    runs[-1] = runs[-1][0], broken(runs[-1][1])
    docs = tmp_path_factory.mktemp('site')/'docs'
    assert SITE.build(runs, docs) == ''
    return docs


pages_of_site = each('name', ['index', 'formats', 'plots', 'all'])
slow = [pytest.mark.browser, pytest.mark.timeout(1800)]


def open_page(browser, path):
    "Open a page of the site with every request refused but for files beside it; returns the page and what went wrong"
    page, problems = browser.new_page(), []
    def gate(route):
        if route.request.url.startswith(path.parent.as_uri()): return route.continue_()
        problems.append(route.request.url)
        route.abort()
    page.route(lambda url: not url.startswith(('data:', 'blob:')), gate)
    page.on('pageerror', lambda e: problems.append(str(e)))
    page.goto(path.as_uri())
    return page, problems


@contextmanager
def served(folder):
    "A server for a folder, on this machine alone"
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try: yield f'http://127.0.0.1:{server.server_port}'
        finally: server.shutdown()


@pytest.mark.chapters(*BUILT)
class TestSmallSite:
    pytestmark = slow

    @pages_of_site
    def test_no_page_is_wider_than_a_phone_or_asks_for_anything(self, browser, small_site, name):
        page, problems = open_page(browser, small_site/f'{name}.html')
        try:
            for width in (1280, 390):
                page.set_viewport_size({'width': width, 'height': 900})
                assert page.evaluate('document.documentElement.scrollWidth') <= width
            assert page.evaluate('[...document.images].filter(i => i.complete && !i.naturalWidth).length') == 0
            assert problems == []
        finally: page.close()

    @pages_of_site
    @pytest.mark.parametrize('scheme', ['light', 'dark'])
    def test_no_barrier(self, browser, small_site, name, scheme):
        "Served, since a browser loads no module from a file, and Quarto's search is one"
        with served(small_site) as address:
            page = browser.new_page()
            try:
                page.emulate_media(color_scheme=scheme)
                page.goto(f'{address}/{name}.html')
                page.wait_for_timeout(500)
                assert barriers(page) == []
            finally: page.close()

    def test_solutions_open_by_enter(self, browser, small_site):
        with served(small_site) as address:
            page = browser.new_page()
            try:
                page.goto(f'{address}/formats.html')
                head = page.locator('.callout-header[role=button]').first
                head.focus()
                assert head.get_attribute('aria-expanded') != 'true'
                page.keyboard.press('Enter')
                page.wait_for_timeout(600)
                assert head.get_attribute('aria-expanded') == 'true'
            finally: page.close()

    def test_live_figures_are_drawn(self, browser, small_site):
        page, problems = open_page(browser, small_site/'formats.html')
        try:
            assert page.locator('.mp-live.mpx').count() == page.locator('.mp-live').count() > 0 and problems == []
        finally: page.close()

    def test_widgets_move(self, browser, small_site):
        from test_browser import moves_the_frame
        page, problems = open_page(browser, small_site/'plots.html')
        try:
            boxes = page.locator('.mp-explore')
            assert boxes.count() > 0
            for box in boxes.all():
                controls = box.locator('[data-k]').all()
                assert controls and all(moves_the_frame(box, c) for c in controls)
            assert problems == []
        finally: page.close()

    def test_the_code_of_the_library_is_on_its_page(self, browser, small_site):
        page, _ = open_page(browser, small_site/'formats.html')
        try:
            shown = page.locator('.exported pre').filter(has_text='class FloatFormat:')
            assert shown.count() == 1 and 'def __post_init__' in shown.text_content()
            checker = page.locator('details').filter(has_text='def check_')
            assert checker.count() > 0 and checker.first.get_attribute('open') is None
            assert page.locator('[id^=check_]').count() == 0
        finally: page.close()

    def test_a_failed_chapter_is_marked_and_leads_to_its_cell(self, browser, small_site):
        page, _ = open_page(browser, small_site/'all.html')
        try:
            assert '(failed)' in page.title() and 'ZeroDivisionError: by zero' in page.locator('.failed').inner_text()
            target = page.locator('.failed a').first.get_attribute('href')
            assert page.locator(target).is_visible() and page.locator(target).inner_text() == 'by zero'
        finally: page.close()

    def test_numbers_links_and_cards(self, small_site):
        html = (small_site/'formats.html').read_text()
        assert re.search(r'class="sidebar-[^>]*>\s*<span class="menu-text">90 · Plots', html)
        assert '/issues/new' in html and 'property="og:title"' in html and 'name="twitter:card"' in html
        assert html.count(' id="floatformat"') == 1 and '>source<' not in html
        assert 'rel="icon"' in html and (small_site/'emblem.svg').exists()

    def test_every_link_leads_somewhere(self, small_site):
        "Links to chapters that the small site leaves out do not count"
        html = ''.join(p.read_text() for p in small_site.glob('*.html'))
        assert '#LNone' not in html and f'href="{SITE.host()}' not in html
        left_out = [f'{p.stem}.ipynb' for p in NBS if p.stem not in BUILT]
        assert [d for d in SITE.dead_links(small_site) if not d.partition(': ')[2].startswith(tuple(left_out))] == []
