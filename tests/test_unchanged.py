"What `make test` leaves out: a small project, in which one thing changes at a time"
import json, os, shutil, subprocess, sys

import pytest
from conftest import ROOT

FILES = {
    'mpcourse/__init__.py': '',
    'mpcourse/a.py': 'def one(): return 1\n',
    'mpcourse/b.py': 'from mpcourse.c import two\n',
    'mpcourse/c.py': 'def two():\n    "2"\n    return 2\n',
    'mpcourse/live/x.mjs': '',
    'tools/reader.py': "assert open('studies/rain.json').read() > '0'",
    'studies/rain.json': '1',
    'studies/snow.json': '1',
    'nbs/styles.css': 'p {}',
    'README.md': 'Two chapters\n',
    'pyproject.toml': '[tool.pytest.ini_options]\naddopts = "-v"\nmarkers = ["chapters", "sweep"]\ntimeout = 100\n',
    '_course/01_x.html': 'X',
    'tests/conftest.py': 'import os, sys\nsys.path[:0] = [os.getcwd(), "tests"]\n',
    'tests/helper.py': 'def text(name): return open(name).read()\n',
    'tests/test_imports.py': 'import mpcourse.a\ndef test_a(): assert mpcourse.a.one() == 1\n',
    'tests/test_late.py': '''
import importlib, subprocess, sys
def test_b(): assert importlib.import_module('mpcourse.' + 'b').two() == 2
def test_child():
    subprocess.run([sys.executable, 'tools/reader.py'], check=True)
''',
    'tests/test_other.py': '''
import subprocess
from test_imports import test_a as other
def test_d(): other()
def test_node(): subprocess.run(['node', '--version'])
''',
    'tests/test_unknown.py': '''
import subprocess, sys
def test_e(): subprocess.run(['true'], check=True)
def test_untraced(): subprocess.run([sys.executable, '-c', ''], check=True, env={})
''',
    'tests/test_chapters.py': '''
import pytest
from glob import glob
from helper import text
def test_all(): assert [text(name) for name in glob('nbs/*.ipynb')]
def test_readme(): text('README.md')
@pytest.mark.chapters('02_y')
def test_two(): text('nbs/02_y.ipynb')
@pytest.mark.parametrize('stem', ['01_x', '02_y'])
def test_of(stem): text(f'nbs/{stem}.ipynb')
def test_page(): text('_course/01_x.html')
@pytest.mark.sweep(2)
@pytest.mark.parametrize('n', [0, 1, 2])
def test_many(n): pass
'''}
WHOLE = {'all', 'readme', 'page', 'many[0]', 'many[2]'}
READERS = {*WHOLE, 'two', 'of[01_x]', 'of[02_y]'}
UNKNOWN = {'e', 'untraced'}     # programs that may have read anything but tests
ALL = {'a', 'b', 'child', 'd', 'node', *UNKNOWN, *READERS}


def notebook(*lines): return json.dumps(dict(cells=[dict(cell_type='markdown', source=[f'{line}\n' for line in lines])]), indent=1)


def ran(root, **env):
    "The tests that `make test` runs now, and those of them that fail"
    clean = {k: v for k, v in os.environ.items() if k.startswith('MPCOURSE_READ') or not k.startswith(('PYTEST', 'PYTHONPATH', 'MPCOURSE', 'CI', 'ALL'))}
    report = root.parent/f'{root.name}.report'
    report.unlink(missing_ok=True)
    r = subprocess.run([sys.executable, 'tests/suite.py', '-n99'], cwd=root, capture_output=True, text=True,
                       env={**clean, 'MPCOURSE_REPORT': str(report), 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1', **env})
    assert r.returncode == 0, r.stderr
    lines = [line.split(' ', 1) for line in report.read_text().splitlines()]
    now = {name.partition('::test_')[2]: outcome for outcome, name in lines if outcome in ('passed', 'failed')}
    return set(now), {name for name, outcome in now.items() if outcome == 'failed'}


@pytest.fixture(scope='module')
def tested(tmp_path_factory):
    "The small project, with the files that do the work, after its first run"
    root = tmp_path_factory.mktemp('project')
    files = {**FILES, 'nbs/01_x.ipynb': notebook('# X', 'words'), 'nbs/02_y.ipynb': notebook('# Y')}
    for name, text in files.items():
        (root/name).parent.mkdir(exist_ok=True, parents=True)
        (root/name).write_text(text)
    for name in ('suite', 'unchanged', 'reads', 'chromium'): shutil.copy(ROOT/f'tests/{name}.py', root/'tests')
    assert ran(root) == (ALL, set())
    return root


@pytest.fixture
def project(tested, tmp_path):
    "A copy of it"
    shutil.copytree(tested, tmp_path/'project')
    return tmp_path/'project'


def edit(project, name, old, new):
    text = (project/name).read_text()
    assert old in text
    (project/name).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize('name, old, new, affected', [
    ('mpcourse/a.py', 'return 1', 'return 1  # a comment', set()),
    ('mpcourse/a.py', 'return 1', 'return 1 + 0', {'a', 'd', 'node'}),
    ('mpcourse/c.py', '"2"', '"two"', {'b', 'child'}),
    ('studies/rain.json', '1', '2', {'b', 'child'}),
    ('tools/reader.py', 'assert', 'assert ""+', {'b', 'child'}),
    ('studies/snow.json', '1', '2', set()),
    ('mpcourse/live/x.mjs', '', ' ', {'d', 'node'}),
    ('nbs/styles.css', 'p', 'q', set()),
    ('tests/test_imports.py', '== 1', '== 1.', {'a', 'd', 'node'}),
    ('tests/helper.py', 'read()', 'read() + ""', WHOLE | READERS),
    ('nbs/01_x.ipynb', 'words', 'other words', WHOLE | {'of[01_x]'}),
    ('nbs/02_y.ipynb', '# Y', '# Z', READERS),
    ('_course/01_x.html', 'X', 'Y', WHOLE | {'of[01_x]'}),
    ('README.md', 'Two', 'Both', READERS)])
def test_a_change_runs_what_it_can_have_changed(project, name, old, new, affected):
    edit(project, name, old, new)
    unknown = set() if 'test_' in name else UNKNOWN
    assert ran(project) == (affected | unknown, set())
    assert ran(project) == (set(), set()), 'it passed, and nothing has changed since'


def test_a_new_file_and_another_processor_run_all(project):
    (project/'studies/new.json').write_text('1')
    assert ran(project) == (ALL, set())
    assert ran(project, OMP_NUM_THREADS='3') == (ALL, set())


def test_what_failed_runs_again_also_where_all_is_run(project):
    (project/'tests/test_new.py').write_text("import os\ndef test_new(): assert 'BROKEN' not in os.environ\n")
    assert ran(project) == ({'new'}, set())
    everything = ran(project, ALL='1', BROKEN='1')
    assert everything == ({*ALL, 'new', 'many[1]'}, {'new'}), 'all cases of a sweep, too'
    assert ran(project, BROKEN='1') == ({'new'}, {'new'})
    assert ran(project) == ({'new'}, set())
    assert ran(project) == (set(), set())


def test_a_file_that_breaks_off_fails_and_runs_again(project):
    (project/'tests/test_new.py').write_text("import os\ndef test_one(): pass\ndef test_new(): os._exit(3)\n")
    for _ in range(2): assert ran(project) == ({'one', ''}, {''})


def test_a_test_that_names_chapters_reads_no_other(project):
    edit(project, 'tests/test_chapters.py', "def test_two(): text('nbs/02_y", "def test_two(): text('nbs/01_x")
    assert ran(project) == (READERS, {'two'})
