"The runner and the README on small courses made on the spot; a cell that fails stops nothing"
import os, subprocess, sys

import pytest
from conftest import ROOT

nbformat = pytest.importorskip('nbformat')
BeautifulSoup = pytest.importorskip('bs4').BeautifulSoup
pytest.importorskip('nbclient')

from tools import course as C, readme as R

GOOD = ['# Good\n\n> All of it *works*.',
        '#| default_exp good',
        '%md 25 minutes to read.\n\n## First steps\n\nThe spacing is $2^{e-10}$, see [bad](02_bad.ipynb#After-all) and [later](03_later.ipynb).\n\n'
        '$$\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}$$',
        '#| hide\nhidden_name = 1',
        '#| export\ndef visible(): return "seen"',
        '#| fig-cap: "Half of it\n#|   *vanishes*"\n#| fig-alt: a line through the origin\n'
        'import matplotlib.pyplot as plt\nplt.plot([0, 1]);',
        '::: {.callout-note collapse="true"}\n## Solution of `3`\nIn two cells.',
        'solution = 42; solution',
        ':::\n\n## Further\n\nIt goes on.',
        'import os, sys\nprint(os.environ["OMP_NUM_THREADS"], os.environ["MPCOURSE_SEED"], os.environ["MPCOURSE_PAGES"], sys.executable == EXE)',
        '#| cuda\nneeds_a_gpu()',
        '#| eval: false\nonly_to_be_read()',
        'def check_it(x): assert x == 1',
        'import ipywidgets as W\nfrom pathlib import (\n    Path)',
        'W.VBox([W.IntSlider(3, description="scale"), W.Dropdown(options=["fp16", "bf16"], value="bf16"), W.HTML("<b>bold</b>")])',
        'class Moving:\n    def _repr_mimebundle_(self, **kw):\n'
        '        return {**W.IntSlider(3)._repr_mimebundle_(), "text/html": "<p id=frames>frames</p>"}\nMoving()',
        'Path("models").mkdir(); len(list(Path().iterdir()))']
BAD = ['# Bad\n\n> It breaks.', 'assert "visible" not in globals()',
       '#| fig-cap: none\n#| fig-alt: none\n\nx = 1\ny = {"<b>": x - 1}\nz = x/y["<b>"]\nw = 2',
       '%md ## After all', '#| hide\ndef f(x):\n    return x.missing\nf(x)', 'z',
       '#| fig-cap: A later figure\n#| fig-alt: a line\nimport matplotlib.pyplot as plt\nplt.plot([0, x]);']
LATER = ['# Later\n\n> After the failure.', '"still runs"']


def run(nbs, out, *args, **env):
    "`python -m tools.course` on a small course, from another folder"
    env = {**{k: v for k, v in os.environ.items() if not k.endswith('_NUM_THREADS')}, 'PYTHONPATH': str(ROOT), **env}
    return subprocess.run([sys.executable, '-m', 'tools.course', '--nbs', nbs, '--out', out, *args], cwd=out.parent, env=env,
                          capture_output=True, text=True, timeout=250)


def write(nbs, **stems):
    nbs.mkdir()
    for stem, cells in stems.items():
        made = [nbformat.v4.new_markdown_cell(c.removeprefix('%md ')) if c.startswith(('# ', ':::', '%md ')) else nbformat.v4.new_code_cell(c)
                for c in cells]
        nbformat.write(nbformat.v4.new_notebook(cells=made), nbs/f'{stem.lstrip("_")}.ipynb')


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "A course of three chapters and an index that was run once: the finished process, folder of pages, notebooks"
    tmp = tmp_path_factory.mktemp('course')
    good = [c.replace('EXE', repr(sys.executable)) for c in GOOD]
    index = ['# The course\n\n> A map.', '%md ## Paths\n\nBegin with [good](01_good.ipynb).', '%md ## The chapters\n\n| a | table |\n|---|---|\n| 01 | twice |']
    write(tmp/'nbs', _01_good=good, _02_bad=BAD, _03_later=LATER, index=index)
    return run(tmp/'nbs', tmp/'out', MPCOURSE_SEED='7', OMP_NUM_THREADS='3', MPCOURSE_PAGES=''), tmp/'out', tmp/'nbs'


def soup(ran, stem): return BeautifulSoup((ran[1]/f'{stem}.html').read_text(), 'html.parser')


# --- a cell that fails ---

def test_every_failed_cell_is_named_with_its_line_and_the_exit_code_is_not_0(ran):
    said = ran[0].stdout
    assert ran[0].returncode == 1, ran[0].stderr
    assert '3 of 4 chapters ran' in said and 'the other 3 chapters are fine' in said
    assert 'FAILED 02_bad.ipynb, cell [2], line 6: ZeroDivisionError: division by zero\n    z = x/y["<b>"]\n' in said
    assert "FAILED 02_bad.ipynb, cell [3], line 3: AttributeError: 'int' object has no attribute 'missing'\n    return x.missing\n" in said
    assert "FAILED 02_bad.ipynb, cell [4], line 1: NameError: name 'z' is not defined\n    z\n" in said and said.count('FAILED') == 3


def test_the_failed_cell_is_red_its_line_is_marked_and_the_rest_of_the_page_is_there(ran):
    page = soup(ran, '02_bad')
    assert [d['id'] for d in page.select('.code.broken')] == ['failed-2', 'failed-3', 'failed-4']
    assert [s.text.strip() for s in page.select('.hll')] == ['z = x/y["<b>"]', 'return x.missing', 'z']
    assert 'ZeroDivisionError' in page.select_one('.output_error').text
    assert len(page.select('figcaption')) == 1 and page.select_one('figure img')['alt'] == 'a line' and 'A later figure' in page.figcaption.text and page.find(id='after-all')
    assert {a['href'] for a in page.select('.failed a')} == {'#failed-2', '#failed-3', '#failed-4'}


def test_the_index_names_every_failed_cell(ran):
    box = soup(ran, 'index').select_one('.failed')
    assert [a['href'] for a in box.select('a')] == ['02_bad.html#failed-2', '02_bad.html#failed-3', '02_bad.html#failed-4']
    assert 'cell [2], line 6' in box.text and 'The other 2 chapters are fine.' in box.text and [p.text for p in box.select('pre')] == ['z = x/y["<b>"]', 'return x.missing', 'z']
    assert not soup(ran, '01_good').select('.failed, .broken, .hll')


@pytest.mark.sweep(0)
def test_slow_cells_and_dead_kernels_are_failures(small_course, tmp_path):
    slow = ['# S\n\n> s.', '1', 'import time\ntime.sleep(600)', 'print("goes on")',
            'try: time.sleep(600)\nexcept KeyboardInterrupt: print("swallowed")']
    nbs = small_course(_01_slow=slow, _02_dies=['# D\n\n> d.', 'import os\nos._exit(1)', 'never()'])
    r = run(nbs, tmp_path/'out', '--timeout', '6')
    assert r.returncode == 1 and 'FAILED 01_slow.ipynb, cell [2], line 2: TimeoutError: stopped after 6 s\n    time.sleep(600)\n' in r.stdout
    assert 'cell [4]: TimeoutError' in r.stdout and '02_dies.ipynb, cell [1]: DeadKernelError: Kernel died' in r.stdout and r.stdout.count('FAILED') == 3
    assert 'goes on' in (tmp_path/'out/01_slow.html').read_text() and 'not reached' in (tmp_path/'out/02_dies.html').read_text()


def test_a_claim_that_does_not_hold_says_what_it_found_and_is_no_error_of_the_course(small_course, tmp_path):
    cells = ['# C\n\n> c.', 'losses = [2.4, 2.25]\ndef last(n): return sum(losses[-n:])/n', 'assert all(x > 2 for x in losses) and last(2) < 2.28',
             'class Bound:\n    def check(self): assert sum(losses) == 5, "the sum"\nBound().check()']
    nbs = small_course(**{f'_0{i}_{i}': cells if i == 1 else cells[:2] for i in (1, 2, 3)})
    r = run(nbs, tmp_path/'out')
    assert r.returncode == 0, r.stderr
    assert 'MISSED 01_1.ipynb, cell [2], line 1: AssertionError: found last(2) = 2.325, asked < 2.28\n' in r.stdout
    assert 'cell [3], line 2: AssertionError: the sum; found sum(losses) = 4.65, asked == 5' in r.stdout
    assert '2 claim(s) did not hold' in r.stdout.splitlines()[-1] and 'the other 2 chapters are fine' in r.stdout
    assert 'found last(2) = 2.325' in (tmp_path/'out/index.html').read_text()


# --- what reaches a kernel, and what is left ---

def test_each_kernel_is_fresh_and_has_the_seed_and_threads_of_the_environment(ran):
    assert soup(ran, '01_good').select_one('.output_stdout').text.strip() == '3 7 1 True'
    assert 'AssertionError' not in soup(ran, '02_bad').text  # names of chapter 1 are not there


def test_only_notebooks_and_pages_are_left(ran):
    stems = ('01_good', '02_bad', '03_later', 'index')
    assert sorted(p.name for p in ran[1].iterdir()) == sorted(f'{s}.{e}' for s in stems for e in ('html', 'ipynb'))
    assert sorted(p.name for p in ran[2].iterdir()) == sorted(f'{s}.ipynb' for s in stems)  # `models` was made elsewhere
    assert sorted(p.name for p in ran[1].parent.iterdir()) == ['nbs', 'out']
    nbformat.validate(nbformat.read(ran[1]/'01_good.ipynb', as_version=4))


def test_cells_that_are_not_run_say_so(ran):
    notes = [n.text for n in soup(ran, '01_good').select('.not-run')]
    assert 'not run here: shown to be read' in notes and (C.has_cuda() or 'not run here: needs an NVIDIA GPU' in notes)


def test_cuda_cells_run_where_there_is_a_device(monkeypatch):
    for has in (True, False):
        monkeypatch.setattr(C, 'has_cuda', lambda: has)
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f'#| {d}\nx') for d in ('cuda', 'eval: false', 'export')])
        C.prepare(nb)
        assert ['tags' in c.metadata for c in nb.cells] == [not has, True, False]


# --- pages ---

def test_page_opens_with_title_promise_sections_and_neighbours(ran):
    page = soup(ran, '01_good')
    assert page.h1.text == 'Good' and page.select_one('.promise').decode_contents() == 'All of it <em>works</em>.'
    assert [a.text for a in page.select('aside .toc a')] == ['First steps', 'Further'] and page.find(id='first-steps').name == 'h2'
    assert {a['href'] for a in page.select('.next a')} == {'02_bad.html'}
    assert {a['href'] for a in soup(ran, '02_bad').select('.next a')} == {'01_good.html', '03_later.html'}


def test_slides(ran):
    from tools.slides import slides
    found = [(ch, C.executed(ch, ran[1])) for ch in C.chapters(ran[2]) if ch.stem == '01_good']
    page = BeautifulSoup(slides(found), 'html.parser')
    title, *figures = page.select('section')
    assert title.h2.text == 'Good' and len(figures) == 1
    assert figures[0].img['src'].startswith('data:image/png') and figures[0].p.text == 'Half of it *vanishes*'
    assert figures[0].img['alt'] == 'a line through the origin'


def test_slides_of_code(small_course):
    from tools.slides import slides
    nbs = small_course(_01_a=['# A\n\n> P.', f'%md {"far "*60} away. One. So `f` [doubles](x.ipynb) x < 9:', '#| code-fold: true\ny = 1', '#| echo: true\ndef f(x): return 2*x      # twice\nf(y)', 'f(4)'])
    nb = nbformat.read(nbs/'01_a.ipynb', as_version=4)
    for c in nb.cells[3:]: c.metadata.tags = ['slide']
    nbformat.write(nb, nbs/'01_a.ipynb')
    nb.cells[3].outputs = [nbformat.v4.new_output('stream', text='<2>\n'), nbformat.v4.new_output('stream', name='stderr', text='a warning')]
    _, first, second = BeautifulSoup(slides([(C.read_chapter(nbs/'01_a.ipynb'), nb)]), 'html.parser').select('section')
    assert [e.text for e in first.select('p, pre')] == ['One. So f doubles x < 9:', 'def f(x): return 2*x  # twice\nf(y)', '<2>'] and first.p.code.text == 'f'
    assert [e.text for e in second.select('p, pre')] == ['f(4)'] # other code stands before it


def test_checkers_and_imports_are_folded(ran):
    folds = {d.summary.text: d.select_one('.code').text for d in soup(ran, '01_good').select('details.fold')}
    assert set(folds) == {'Imports', 'Checker'} and 'def check_it' in folds['Checker'] and 'ipywidgets' in folds['Imports']


@pytest.mark.parametrize('code, title', [
    ('assert x', 'Check'), ('y = f(x)\nassert y', 'Check'), ('for x in xs: assert x', 'Check'), ('assert x\nplot(x)', 'Code'), ('%time x', 'Code')])
def test_a_fold_that_ends_with_an_assertion_is_a_check(code, title):
    from tools.pages import fold_title
    assert fold_title({'code-fold': 'true'}, code) == title


def test_formulas_are_mathml(ran):
    maths = soup(ran, '01_good').select('math')
    assert len(maths) == 2 and maths[1]['display'] == 'block' and maths[1].find('mtable') and '$' not in soup(ran, '01_good').main.text


def test_figure_has_caption_and_alt(ran):
    fig = soup(ran, '01_good').select_one('figure')
    assert fig.figcaption.decode_contents() == 'Half of it <em>vanishes</em>' and fig.img['alt'] == 'a line through the origin'
    assert fig.img['src'].startswith('data:image/svg+xml;base64,')


def test_callout_folds_over_several_cells(ran):
    box = soup(ran, '01_good').select_one('details.callout')
    assert not box.has_attr('open') and box.summary.decode_contents() == 'Solution of <code>3</code>' and '42' in box.text
    assert 'It goes on' not in box.text and ':::' not in soup(ran, '01_good').text


def test_links_lead_to_pages(ran):
    links = {a.text: a['href'] for a in soup(ran, '01_good').main.select('p a')}
    assert links['bad'] == '02_bad.html#after-all' and links['later'] == '03_later.html'


def test_widgets_show_their_frames_or_saved_controls(ran):
    page = soup(ran, '01_good')
    assert page.select_one('#frames') and len(page.select('.widget')) == 1
    w = page.select_one('.widget')
    assert w.select_one('input[type=range]')['value'] == '3' and w.b.text == 'bold' and 'bf16' in w.text and 'make lab' in w.text


def test_index_lists_promise_minutes_and_status_once(ran):
    page = soup(ran, 'index')
    rows = {li.select_one('.no').text: li for li in page.select('.chapters li')}
    assert list(rows) == ['01', '02', '03'] and 'All of it' in rows['01'].p.text and rows['01'].a['href'] == '01_good.html'
    assert 'ok, 25 minutes to read' in rows['01'].text and 'failed' in rows['02'].text and ' s' not in rows['02'].select_one('.status').text
    assert page.h1.text == 'The course' and page.find(id='paths') and 'twice' not in page.text


@pytest.mark.sweep(0)
def test_subset_runs_alone_and_links_only_to_what_is_there(small_course, tmp_path):
    nbs, out = small_course(_01_a=['# A\n\n> a.', '%md see [b](02_b.ipynb)'], _02_b=['# B\n\n> b.', '1']), tmp_path/'out'
    assert run(nbs, out, '1').returncode == 0
    assert not (out/'02_b.html').exists() and 'href="02_b.html"' not in (out/'01_a.html').read_text() and 'not run yet' in (out/'index.html').read_text()
    assert run(nbs, out, 'b').returncode == 0 and 'changed' not in (out/'02_b.html').read_text()
    assert 'href="02_b.html"' in (out/'01_a.html').read_text(), 'the older page does not know of the newer one'
    nb = nbformat.read(nbs/'02_b.ipynb', as_version=4)
    nb.cells[1].source = '2'
    nbformat.write(nb, nbs/'02_b.ipynb')
    page = out/'01_a.html'
    text, time = page.read_text(), page.stat().st_mtime_ns
    C.write_pages(C.chapters(nbs), out)
    assert page.read_text() == text and page.stat().st_mtime_ns == time, 'it was made again, and nothing of it has changed'
    assert 'since changed' in (out/'index.html').read_text() and 'changed since' in (out/'02_b.html').read_text()


def test_a_request_that_cannot_be_met_is_a_sentence(small_course, tmp_path, monkeypatch, capsys):
    nbs = small_course(_01_a=['# A\n\n> a.', '1'])
    (tmp_path/'file').write_text('')
    for args, says in [((nbs, tmp_path/'out', '07'), "There is no chapter '07': there are 01."), ((nbs, tmp_path/'file'), 'name another with --out'),
                       ((tmp_path/'nowhere', tmp_path/'out'), 'There are no numbered notebooks')]:
        monkeypatch.setattr(sys, 'argv', ['course', '--nbs', *map(str, [args[0], '--out', *args[1:]])])
        with pytest.raises(SystemExit, match=says) as e: C.main()
        assert '\n' not in e.value.code and capsys.readouterr() == ('', '')


@pytest.mark.parametrize('wanted, numbers', [('', ['index', '01', '02', '12']), ('02 01', ['01', '02']), ('2,12', ['02', '12']),
                                             ('rounding', ['02']), ('12_policies', ['12']), ('index', ['index'])])
def test_selection(small_course, wanted, numbers):
    nbs = small_course(_01_formats=['# F\n\n> f.'], _02_rounding=['# R\n\n> r.'], _12_policies=['# P\n\n> p.'], index=['# I\n\n> i.'], notes=['# N\n\n> n.'])
    assert [c.number for c in C.select(C.chapters(nbs), wanted)] == numbers


# --- README.md ---

def test_readme_follows_the_index(small_course, tmp_path, monkeypatch):
    nbs = small_course(_01_a=['# A\n\n> a.'], index=['# Top\n\n> p.\n\n[a](01_a.ipynb) ![pic](images/p.png) [c](../CONTRIBUTING.md) [top](#top) [web](https://x.y)',
                                                     '#| hide\nsecret', '#| fig-cap: C\n#| fig-alt: D\nplot()'])
    nb = nbformat.read(nbs/'index.ipynb', as_version=4)
    nb.cells[2].outputs = [nbformat.v4.new_output('display_data', {'image/png': 'QUJD', 'text/plain': '<Figure>'})]
    nbformat.write(nb, nbs/'index.ipynb')
    monkeypatch.setattr(R, 'executed', lambda path: nbformat.read(path, as_version=4))       # `plot` is not there
    assert not R.readme_current(nbs)
    text = R.write_readme(nbs)[0].read_text()
    assert R.readme_current(nbs) and (nbs/'images/index_1.png').read_bytes() == b'ABC' and 'secret' not in text
    for part in ('[a](nbs/01_a.ipynb)', '![pic](nbs/images/p.png)', '[c](CONTRIBUTING.md)', '[top](#top)', '[web](https://x.y)',
                 '![D](nbs/images/index_1.png)', '*C*', '```python\nplot()\n```'): assert part in text
    (nbs/'images/index_1.png').write_bytes(b'other')
    assert not R.readme_current(nbs), 'a changed picture goes unnoticed'


@pytest.mark.sweep(0)
def test_a_chapter_runs_again_when_its_text_or_the_code_it_calls_has_changed(small_course, tmp_path, monkeypatch):
    import shutil
    root, out = tmp_path/'root', tmp_path/'out'
    (root/'studies').mkdir(parents=True)
    (root/'mpcourse/live').mkdir(parents=True)
    for name in ('__init__.py', 'rounding.py', 'formats.py', 'toys.py', 'live/base.mjs'): shutil.copy(ROOT/'mpcourse'/name, root/'mpcourse'/name)
    monkeypatch.setattr(C, 'ROOT', root)
    nbs = small_course(**{'01_a': ['# A\n\n> a.', 'def f(): from mpcourse.rounding import quantize'], '02_b': ['# B\n\n> b.', '1/0'], '03_c': ['# C\n\n> c.', '2'],
                          '04_d': ['# D\n\n> d.', 'def f(): from mpcourse.toys import seed\ndef shown(): return Live("bits", {})']})
    def ran(): return [o.chapter.stem for o in C.run_course(out=out, nbs=nbs, changed=True)]
    assert ran() == ['01_a', '02_b', '03_c', '04_d']
    assert ran() == ['02_b']                                    # what failed runs again
    with (root/'mpcourse/formats.py').open('a') as f: f.write('A = 1\n')     # rounding imports it
    assert {'01_a', '02_b'} <= {*(again := ran())} and '03_c' not in again
    with (root/'mpcourse/live/base.mjs').open('a') as f: f.write('A = 1\n')      # drawn in its page
    assert ran() == ['02_b', '04_d']
    path = nbs/'03_c.ipynb'
    path.write_text(path.read_text().replace('"2"', '"3"'))
    assert ran() == ['02_b', '03_c']


# --- installation ---


def test_torchvision_is_installed_from_the_index_of_torch(tmp_path):
    "In one call of pip, so that the two builds fit; what `make -n` would run"
    r = subprocess.run(['make', '-n', '-B', '.venv/.installed'], cwd=ROOT, capture_output=True, text=True, env={**os.environ, 'TORCH_INDEX': 'https://index'})
    line = next(x for x in r.stdout.replace('\\\n', '').splitlines() if '--index-url' in x)
    assert ' torchvision ' in line and 'settings.ini' in line
