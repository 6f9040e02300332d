"What `make test` leaves out: a small project, in which one thing changes at a time"
import json, os, re, shutil, subprocess, sys

import pytest
from conftest import ROOT, unmarked

FILES = {
    'mpcourse/a.py': 'def one(): return 1\n',
    'studies/rain.json': '1',
    'README.md': 'Two chapters\n',
    'pytest.ini': '[pytest]\nmarkers = chapters',
    '_course/01_x.html': 'X',
    'tests/test_first.py': 'def test_a(): pass\n',
    'tests/test_second.py': 'from test_first import test_a as other\ndef test_b(): other()\n',
    'tests/test_third.py': '''
import pytest
def test_c(): pass
@pytest.mark.chapters
def test_all(): pass
@pytest.mark.chapters('02_y')
def test_two(): pass
@pytest.mark.parametrize('stem', ['01_x', '02_y'])
def test_of(stem): pass
'''}
READERS = {'all', 'two', 'of[01_x]', 'of[02_y]'}
ALL = {'a', 'b', 'c', *READERS}


def notebook(*lines): return json.dumps(dict(cells=[dict(cell_type='markdown', source=lines)]), indent=1)


def ran(root):
    "The tests that `make test` runs now"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(('PYTEST', 'PYTHONPATH'))}
    command = [sys.executable, '-m', 'pytest', '-v', '-p', 'no:cacheprovider', '-p', 'tests.unchanged', 'tests']
    out = subprocess.run(command, cwd=root, capture_output=True, text=True,
                         env={**clean, 'MPCOURSE_REPORT': f'{root}.report', 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}).stdout
    return set(re.findall(r'::test_(\S+) (?:PASSED|FAILED)', out))


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
    ('mpcourse/a.py', 'return 1', 'return 1 + 0', ALL),
    ('studies/rain.json', '1', '2', ALL),
    ('tests/test_first.py', 'pass', 'assert True', {'a', 'b'}),
    ('tests/test_third.py', 'pass', 'assert True', {'c', *READERS}),
    ('nbs/01_x.ipynb', 'words', 'other words', {'all', 'of[01_x]'}),
    ('_course/01_x.html', 'X', 'Y', {'all', 'of[01_x]'}),
    ('nbs/01_x.ipynb', '# X', '# Z', READERS),
    ('README.md', 'Two', 'Both', READERS)])
def test_a_change_runs_what_it_can_have_changed(project, name, old, new, affected):
    text = (project/name).read_text()
    (project/name).write_text(text.replace(old, new, 1))
    assert ran(project) == affected
    assert ran(project) == set(), 'it passed, and nothing has changed since'


def test_what_failed_runs_again(project):
    (project/'tests/test_new.py').write_text('def test_new(): assert False\n')
    assert ran(project) == ran(project) == {'new'}


def test_what_reads_a_chapter_without_a_mark_is_named(request):
    (ROOT/'settings.ini').read_text()
    assert not unmarked(request.node)
    (ROOT/'nbs/01_formats.ipynb').read_text()
    assert '01_formats' in unmarked(request.node)
    request.node.add_marker(pytest.mark.chapters('01_formats'))
    assert not unmarked(request.node)
