"What `make test` leaves out: a small project of two modules, two chapters and six tests, in which one thing changes at a time"
import json, os, re, shutil, subprocess, sys

import pytest
from conftest import ROOT

FILES = {
    'mpcourse/__init__.py': '',
    'mpcourse/a.py': 'def one(): return 1\n',
    'mpcourse/b.py': 'def two():\n    from mpcourse.a import one\n    return 2*one()\n',
    'mpcourse/c.py': 'THREE = 3\n',
    'tests/helper.py': 'from mpcourse.b import two\n',
    'settings.ini': 'version = 1\n',
    'README.md': 'Two chapters\n',
    'pytest.ini': '[pytest]\nmarkers = chapters',
    'tests/test_small.py': '''
import sys
from pathlib import Path
import pytest
from mpcourse import a
from mpcourse.c import THREE
NBS = sorted((Path(__file__).parent.parent/'nbs').glob('*.ipynb'))
LIMIT = 9
def small(x): return x < LIMIT
def test_a(): assert small(a.one())
def test_b():
    import helper
    assert helper.two() > 0
def test_c(): assert THREE
class TestClass:
    def test_in_class(self): assert THREE
def test_process(): assert sys.executable
def test_chapters(): assert len(NBS) == 2
def test_text(): assert Path('README.md').exists()
@pytest.mark.chapters('02_y')
def test_second(): assert NBS[1].exists()
@pytest.mark.parametrize('path', NBS, ids=lambda p: p.stem)
def test_chapter(path): assert path.read_text()
'''}
ALL = {'a', 'b', 'c', 'in_class', 'process', 'chapters', 'text', 'second', '01_x', '02_y'}


def notebook(*lines): return json.dumps(dict(cells=[dict(cell_type='markdown', source=lines)]))


def ran(root):
    "The tests that `make test` runs now"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(('PYTEST', 'PYTHONPATH'))}
    command = [sys.executable, '-m', 'pytest', '-v', '-p', 'no:cacheprovider', '-p', 'tests.unchanged', 'tests']
    out = subprocess.run(command, cwd=root, capture_output=True, text=True,
                         env={**clean, 'MPCOURSE_REPORT': f'{root}.report', 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}).stdout
    return {name.strip('[]') for name in re.findall(r'::test_(?:chapter(?=\[))?(\S+) (?:PASSED|FAILED)', out)}


@pytest.fixture(scope='module')
def tested(tmp_path_factory):
    "The small project, with the two files that do the work, after its first run"
    root = tmp_path_factory.mktemp('project')
    files = {**FILES, 'nbs/01_x.ipynb': notebook('# X', 'words'), 'nbs/02_y.ipynb': notebook('# Y')}
    for name, text in files.items():
        (root/name).parent.mkdir(exist_ok=True)
        (root/name).write_text(text)
    (root/'tools').mkdir()
    shutil.copy(ROOT/'tools/notebooks.py', root/'tools')
    shutil.copy(ROOT/'tests/unchanged.py', root/'tests')
    assert ran(root) == ALL
    return root


@pytest.fixture
def project(tested, tmp_path):
    "A copy of it"
    shutil.copytree(tested, tmp_path/'project')
    return tmp_path/'project'


@pytest.mark.parametrize('name, old, new, affected', [
    ('mpcourse/a.py', 'return 1', 'return 1  # a comment', set()),
    ('mpcourse/a.py', 'return 1', 'return 1 + 0', {'a', 'b', 'process'}),
    ('mpcourse/c.py', '3', '4', {'c', 'in_class', 'process'}),
    ('tests/test_small.py', 'LIMIT = 9', 'LIMIT = 8', {'a'}),
    ('nbs/01_x.ipynb', 'words', 'other words', {'chapters', '01_x'}),
    ('nbs/01_x.ipynb', '# X', '# Z', {'chapters', 'second', '01_x', '02_y'}),
    ('README.md', 'Two', 'Both', {'text'}),
    ('settings.ini', '1', '2', ALL)])
def test_a_change_runs_what_it_can_have_changed(project, name, old, new, affected):
    text = (project/name).read_text()
    (project/name).write_text(text.replace(old, new, 1))
    assert ran(project) == affected
    assert ran(project) == set(), 'it passed, and nothing has changed since'


def test_what_failed_runs_again(project):
    with open(project/'tests/test_small.py', 'a') as f: f.write('def test_new(): assert False\n')
    assert ran(project) == ran(project) == {'new'}
