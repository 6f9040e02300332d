"The runner, its pages, the console command and the doctor, on small courses made on the spot"
import asyncio, os, subprocess, sys

import pytest

nbformat = pytest.importorskip('nbformat')
BeautifulSoup = pytest.importorskip('bs4').BeautifulSoup
pytest.importorskip('nbclient')

from mpcourse import course as C, doctor as M, pages as P
from mpcourse.cli import main

GOOD = ['# Good\n\n> All of it *works*.',
        '#| default_exp good',
        '%md ## First steps\n\nThe spacing is $2^{e-10}$, see [bad](02_bad.ipynb#Second-Steps) and [later](03_later.ipynb).\n\n'
        '$$\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}$$',
        '#| hide\nhidden_name = 1',
        '#| export\ndef visible(): return "seen"',
        '#| fig-cap: "Half of it\n#|   *vanishes*"\n#| fig-alt: a line through the origin\n'
        'import matplotlib.pyplot as plt\nplt.plot([0, 1]);',
        '::: {.callout-note collapse="true"}\n## Solution of 3\nIn two cells.',
        'solution = 42; solution',
        ':::',
        'import os, sys\nprint(os.environ["OMP_NUM_THREADS"], os.environ["MPCOURSE_PAGES"], sys.executable == EXE)',
        '#| cuda\nneeds_a_gpu()',
        '#| eval: false\nonly_to_be_read()',
        'import ipywidgets as W\nout = W.Output()\nwith out: print("printed inside")\n'
        'W.VBox([W.FloatLogSlider(8, base=2, min=-4, max=10, description="scale"), W.Dropdown(options=["fp16", "bf16"], value="bf16"),\n'
        '        W.HTML("<b>bold</b>"), out, W.Image(value=b"abc", format="png"), W.Text("typed", description="name")])',
        'class Moving:\n    def _repr_mimebundle_(self, **kw):\n'
        '        view = W.IntSlider(3)._repr_mimebundle_()\n        return {**view, "text/html": "<p id=frames>frames</p>"}\nMoving()']
BAD = ['# Bad\n\n> It breaks.', 'assert "visible" not in globals()', '1/0', 'never_reached()']
LATER = ['# Later\n\n> After the failure.', '"still runs"']


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "A course of three chapters and an index that was run once: outcomes, folder of pages, notebooks"
    tmp = tmp_path_factory.mktemp('course')
    nbs = tmp/'nbs'
    nbs.mkdir()
    good = [c.replace('EXE', repr(sys.executable)) for c in GOOD]
    index = ['# The course\n\n> A map.', '%md ## Paths\n\nBegin with [good](01_good.ipynb).']
    for stem, cells in {'01_good': good, '02_bad': BAD, '03_later': LATER, 'index': index}.items():
        md = lambda c: c.startswith(('# ', ':::', '%md '))
        made = [nbformat.v4.new_markdown_cell(c.removeprefix('%md ')) if md(c) else nbformat.v4.new_code_cell(c) for c in cells]
        nbformat.write(nbformat.v4.new_notebook(cells=made), nbs/f'{stem}.ipynb')
    with pytest.MonkeyPatch.context() as mp:
        for var, value in {'OMP_NUM_THREADS': '3', 'MPCOURSE_PAGES': ''}.items(): mp.setenv(var, value)  # must not leak in
        outcomes = C.run_course(out=tmp/'out', nbs=nbs, show=False)
    return outcomes, tmp/'out', nbs


def soup(ran, stem): return BeautifulSoup((ran[1]/f'{stem}.html').read_text(), 'html.parser')


def test_every_chapter_runs_though_one_fails(ran):
    assert [(o.chapter.stem, o.status) for o in ran[0]] == [('index', 'ok'), ('01_good', 'ok'), ('02_bad', 'failed'), ('03_later', 'ok')]
    assert sorted(p.name for p in ran[1].iterdir()) == sorted(
        [f'{s}.{e}' for s in ('01_good', '02_bad', '03_later') for e in ('html', 'ipynb')] + ['index.html', 'index.ipynb'])


def test_failure_names_notebook_cell_and_exception(ran):
    bad = ran[0][2]
    assert bad.error.startswith('02_bad.ipynb, cell 3: ZeroDivisionError: division by zero') and '1/0' in bad.error
    page = soup(ran, '02_bad')
    assert 'ZeroDivisionError' in page.select_one('pre.error').text and 'not reached' in page.text
    assert 'FAILED 02_bad.ipynb, cell 3' in C.summary(ran[0], 1, ran[1])


def test_each_kernel_is_fresh_has_one_thread_and_is_this_interpreter(ran):
    assert soup(ran, '01_good').select_one('pre.stdout').text.strip() == '1 1 True'
    assert 'AssertionError' not in soup(ran, '02_bad').text  # names of chapter 1 are not there


def test_executed_notebook_is_clean(ran):
    nb = nbformat.read(ran[1]/'01_good.ipynb', as_version=4)
    nbformat.validate(nb)
    assert all('execution' not in c.metadata for c in nb.cells)
    assert nb.metadata.widgets and nb.metadata.mpcourse.status == 'ok'
    assert not list(ran[1].glob('.*')), 'a temporary file was left'


def test_cells_that_are_not_run_say_so(ran):
    notes = [n.text for n in soup(ran, '01_good').select('.not-run')]
    assert 'not run here: shown to be read' in notes
    assert M.has_cuda() or 'not run here: needs an NVIDIA GPU' in notes


def test_cuda_cells_run_where_there_is_a_device():
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('#| cuda\nx'), nbformat.v4.new_code_cell('#| eval: false\nx')])
    with_gpu, without = C.prepare(nb, True), C.prepare(nb, False)
    assert ['tags' in c.metadata for c in with_gpu.cells] == [False, True] and ['tags' in c.metadata for c in without.cells] == [True, True]
    assert 'tags' not in nb.cells[1].metadata


def test_page_opens_with_title_and_promise(ran):
    page = soup(ran, '01_good')
    assert page.h1.text == 'Good' and page.select_one('.promise').decode_contents() == 'All of it <em>works</em>.'
    assert [a.text for a in page.select('aside .toc a')] == ['First steps'] and page.select_one('#first-steps')
    assert {a['href'] for a in page.select('.next a')} == {'02_bad.html'}
    assert {a['href'] for a in soup(ran, '02_bad').select('.next a')} == {'01_good.html', '03_later.html'}


def test_directives_and_hidden_cells_are_gone(ran):
    text = soup(ran, '01_good').text
    assert '#|' not in text and 'hidden_name' not in text and 'default_exp' not in text and 'def visible' in text


def test_formulas_are_mathml(ran):
    maths = soup(ran, '01_good').select('math')
    assert len(maths) == 2 and maths[1]['display'] == 'block' and maths[1].find('mtable') and '$' not in soup(ran, '01_good').main.text


def test_figure_has_caption_and_alt(ran):
    fig = soup(ran, '01_good').select_one('figure')
    assert fig.figcaption.decode_contents() == 'Half of it <em>vanishes</em>' and fig.img['alt'] == 'a line through the origin'
    assert fig.img['src'].startswith('data:image/png;base64,')


def test_callout_folds_over_several_cells(ran):
    box = soup(ran, '01_good').select_one('details.callout')
    assert not box.has_attr('open') and box.summary.text == 'Solution of 3' and '42' in box.text and ':::' not in soup(ran, '01_good').text
    assert 'OMP_NUM_THREADS' not in box.text


def test_links_lead_to_pages(ran):
    links = {a.text: a['href'] for a in soup(ran, '01_good').main.select('p a')}
    assert links['bad'] == '02_bad.html#second-steps' and links['later'] == '03_later.html'


def test_saved_widget_becomes_native_controls(ran):
    w = soup(ran, '01_good').select_one('.widget')
    assert w.select_one('input[type=range]')['value'] == '3' and w.select_one('option[selected]').text == 'bf16'
    assert w.b.text == 'bold' and 'printed inside' in w.text and 'make lab' in w.text
    assert w.img['src'] == 'data:image/png;base64,YWJj' and w.select_one('input[type=text]')['value'] == 'typed'
    assert all(c.has_attr('disabled') for c in w.select('input, select'))


def test_widget_with_its_own_html_shows_that(ran):
    assert soup(ran, '01_good').select_one('#frames') and len(soup(ran, '01_good').select('.widget')) == 1


def test_pages_load_nothing(ran):
    for f in ran[1].glob('*.html'):
        assert P.outside(f.read_text()) == [] and P.CSP in f.read_text(), f.name


def test_index_lists_promise_time_and_status(ran):
    page = soup(ran, 'index')
    rows = {li.select_one('.no').text: li for li in page.select('.chapters li')}
    assert list(rows) == ['01', '02', '03'] and 'All of it' in rows['01'].p.text and rows['01'].select_one('a')['href'] == '01_good.html'
    assert ' s' in rows['01'].select_one('.status').text and 'ok' in rows['01'].select_one('.status').text
    assert 'failed' in rows['02'].text and 'ZeroDivisionError' in rows['02'].text
    assert page.h1.text == 'The course' and page.select_one('a[href="01_good.html"]') and page.select_one('#paths')


def test_changed_notebook_is_marked(ran, tmp_path):
    ch = P.read_chapter(ran[2]/'03_later.ipynb')
    nb = C.executed(ch, ran[1])
    assert 'changed' not in C.status_html(nb, ch)
    nb.metadata.mpcourse.source = 'older'
    assert 'since changed' in C.status_html(nb, ch) and 'changed since' in C.run_note(nb, ch)


def test_subset_runs_alone_and_links_only_to_what_is_there(small_course, tmp_path):
    nbs = small_course(_01_a=['# A\n\n> a.', '%md see [b](02_b.ipynb)'], _02_b=['# B\n\n> b.', '1'])
    out = tmp_path/'out'
    assert [o.chapter.number for o in C.run_course('01', out, nbs, show=False)] == ['01']
    assert not (out/'02_b.html').exists() and 'href="02_b.html"' not in (out/'01_a.html').read_text()
    assert 'not run yet' in (out/'index.html').read_text()
    C.run_course('2', out, nbs, show=False)
    assert 'href="02_b.html"' in (out/'01_a.html').read_text(), 'the older page does not know of the newer one'


def test_slow_cell_and_dead_kernel_are_failures(small_course, tmp_path):
    nbs = small_course(_01_slow=['# S\n\n> s.', 'import time; time.sleep(60)'], _02_dies=['# D\n\n> d.', 'import os; os._exit(1)'])
    slow, dead = C.run_course(out=tmp_path/'out', nbs=nbs, timeout=2, show=False)
    assert slow.status == dead.status == 'failed' and 'Timeout' in slow.error and 'cell 2' in slow.error and 'DeadKernel' in dead.error
    assert (tmp_path/'out/01_slow.html').exists() and (tmp_path/'out/02_dies.html').exists()


@pytest.mark.parametrize('workers', [1, 2])
def test_so_many_at_a_time(monkeypatch, small_course, tmp_path, workers):
    active, most = [0], [0]
    async def fake(ch, out, timeout, tick):
        active[0] += 1
        most[0] = max(most[0], active[0])
        await asyncio.sleep(.02)
        active[0] -= 1
        return C.Outcome(ch)
    monkeypatch.setattr(C, 'run_chapter', fake)
    nbs = small_course(**{f'_0{i}_x': ['# X\n\n> x.'] for i in range(1, 6)})
    assert len(C.run_course(out=tmp_path/'out', nbs=nbs, workers=workers, show=False)) == 5 and most[0] == workers


def test_progress_and_summary(small_course, tmp_path, capfd):
    nbs = small_course(_01_a=['# Title A\n\n> a.', '1'])
    C.run_course(out=tmp_path/'out', nbs=nbs)
    out, err = capfd.readouterr()
    assert '1/1 chapters' in err and 'Title A' in out and '1 of 1 chapters ran' in out and 'index.html' in out


def test_cli_exit_codes(small_course, tmp_path, capfd):
    nbs = small_course(_01_a=['# A\n\n> a.', '1'], _02_b=['# B\n\n> b.', '1/0'])
    common = ['--nbs', str(nbs), '--out', str(tmp_path/'out')]
    assert main(['run', '01', *common]) == 0
    assert main(['run', *common]) == 1
    capfd.readouterr()
    assert main(['run', '07', *common]) == 2
    assert capfd.readouterr().err == "There is no chapter '07': there are 01, 02.\n"
    (tmp_path/'file').write_text('')
    assert main(['run', '--nbs', str(nbs), '--out', str(tmp_path/'file')]) == 2
    err = capfd.readouterr().err
    assert err.count('\n') == 1 and 'cannot be written' in err and '--out' in err
    assert main(['run', '--nbs', str(tmp_path/'nowhere'), '--out', str(tmp_path/'out')]) == 2
    assert 'no numbered notebooks' in capfd.readouterr().err
    with pytest.raises(SystemExit) as e: main(['run', '--workers', '0'])
    assert e.value.code == 2


@pytest.mark.skipif(os.name != 'posix' or os.geteuid() == 0, reason='root may write anywhere')
def test_read_only_folder(tmp_path):
    (tmp_path/'out').mkdir(mode=0o500)
    with pytest.raises(C.CourseError, match='cannot be written'): C.open_folder(tmp_path/'out')


@pytest.mark.parametrize('wanted, numbers', [('', ['index', '01', '02', '12']), ('02 01', ['01', '02']), ('2,12', ['02', '12']),
                                             ('rounding', ['02']), ('12_policies', ['12']), ('index', ['index'])])
def test_selection(small_course, wanted, numbers):
    nbs = small_course(_01_formats=['# F\n\n> f.'], _02_rounding=['# R\n\n> r.'], _12_policies=['# P\n\n> p.'], index=['# I\n\n> i.'], notes=['# N\n\n> n.'])
    assert [c.number for c in C.select(C.chapters(nbs), wanted)] == numbers


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    f = tmp_path/'page.html'
    C.write_text(f, 'old')
    monkeypatch.setattr(os, 'replace', lambda *a: (_ for _ in ()).throw(OSError('disk full')))
    with pytest.raises(OSError): C.write_text(f, 'new')
    assert f.read_text() == 'old'


@pytest.mark.parametrize('src, want', [('#| hide\nx', {'hide': ''}), ('#|export\nx', {'export': ''}), ('x\n#| hide', {}), ('', {}),
    ("#| fig-cap: 'it''s: one'\nx", {'fig-cap': "it's: one"}), ('#| fig-cap: >-\n#|   two\n#|   lines\nx', {'fig-cap': 'two lines'}),
    ('\n#| eval: false\n\n#| export\nx', {'eval': 'false', 'export': ''})])
def test_directives(src, want): assert P.directives(src) == want


@pytest.mark.parametrize('page, asked', [
    ('<img src="https://x.y/a.png">', 1), ("<script defer src='//x.y/a.js'></script>", 1), ('<style>@import "https://x.y/a.css";</style>', 1),
    ('<link rel="stylesheet" href="http://x.y/a.css">', 1), ('<p style="background:url(https://x.y/a.png)">', 1), ('<iframe src=https://x.y>', 1),
    ('<a href="https://x.y">link</a>', 0), ('<math xmlns="http://www.w3.org/1998/Math/MathML"></math>', 0)])
def test_outside_sees_what_a_page_loads(page, asked): assert len(P.outside(page)) == asked


def test_unclosed_and_stray_fences_keep_html_balanced(small_course, tmp_path):
    nbs = small_course(_01_a=['# A\n\n> a.', ':::', '::: {.callout-tip}\n## Open\n::: {.inner}\nx\n:::'])
    C.run_course(out=tmp_path/'out', nbs=nbs, show=False)
    page = (tmp_path/'out/01_a.html').read_text()
    assert page.count('<details') == page.count('</details>') and page.count('<div') == page.count('</div>') and ':::' not in page


def test_readme_follows_the_index(small_course, tmp_path):
    nbs = small_course(_01_a=['# A\n\n> a.'], index=['# Top\n\n> p.\n\n[a](01_a.ipynb) ![pic](images/p.png) [c](../CONTRIBUTING.md) [top](#top)', '#| fig-cap: C\n#| fig-alt: D\nplot()'])
    nb = nbformat.read(nbs/'index.ipynb', as_version=4)
    nb.cells[1].outputs = [nbformat.v4.new_output('display_data', {'image/png': 'QUJD', 'text/plain': '<Figure>'})]
    nbformat.write(nb, nbs/'index.ipynb')
    assert not C.readme_current(nbs)
    text = C.write_readme(nbs).read_text()
    assert C.readme_current(nbs) and (nbs/'images/index_1.png').read_bytes() == b'ABC'
    for part in ('[a](nbs/01_a.ipynb)', '![pic](nbs/images/p.png)', '[c](CONTRIBUTING.md)', '[top](#top)', '![D](nbs/images/index_1.png)', '*C*'): assert part in text
    (nbs/'images/index_1.png').write_bytes(b'other')
    assert not C.readme_current(nbs), 'a changed picture goes unnoticed'


def python(code, **kw): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, **kw)


def test_help_needs_no_torch():
    r = python("import sys; from mpcourse.cli import make_parser; make_parser(); assert not {'torch', 'nbclient'} & set(sys.modules)")
    assert r.returncode == 0, r.stderr


def test_missing_extra_is_a_sentence():
    r = python("import sys; sys.modules['nbclient'] = None; from mpcourse.cli import main; sys.exit(main(['run']))")
    assert r.returncode == 2 and "pip install 'mpcourse[course]'" in r.stderr and r.stderr.count('\n') == 1
