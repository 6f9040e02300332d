"CONTRIBUTING's recipes, followed to the letter in a copy of the tree: a new format, a new loss scaler"
import json, re, shutil, subprocess, sys
from pathlib import Path

import pytest
from conftest import ROOT


CONTRIBUTING = (ROOT/'CONTRIBUTING.md').read_text(encoding='utf-8')
SCALER = '''

class TwoStrikes(LossScaler):
    "Halves at the second overflow, and doubles never"
    def __init__(self, init_scale=2.**10, strikes=2, **config):
        super().__init__(init_scale, strikes=strikes, **config)
        self.register_buffer('seen', torch.tensor(0))

    def next_scale(self, stats):
        self.seen += (stats['found_inf'] > 0).long()
        out = self.seen >= self.strikes
        self.seen *= (~out).long()
        return torch.where(out, self.scale/2, self.scale)


'''


@pytest.fixture
def tree(tmp_path):
    "What the recipes touch"
    for name in ('settings.ini', 'setup.py', 'pyproject.toml', '_quarto.yml', 'README.md', 'CONTRIBUTING.md'): shutil.copy(ROOT/name, tmp_path)
    for name in ('nbs', 'mpcourse', 'tests', 'tools'):
        shutil.copytree(ROOT/name, tmp_path/name, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints', '_*proc*'))
    return tmp_path


def edit(path, old, new):
    "One place of a file"
    text = path.read_text(encoding='utf-8')
    assert text.count(old) == 1, f'{path.name} has {text.count(old)} times: {old}'
    path.write_text(text.replace(old, new), encoding='utf-8')


def run(tree, *command):
    "Run a command in the copy, which imports its own package"
    code = f'import sys; sys.path[:0] = [{str(tree)!r}]; import runpy; sys.argv = {list(command)!r}; runpy.run_module(sys.argv[0], run_name="__main__")'
    r = subprocess.run([sys.executable, '-c', code], cwd=tree, capture_output=True, text=True, timeout=250)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]


@pytest.mark.sweep(0)
def test_a_format_is_one_line_its_name_and_its_peer(tree):
    pytest.importorskip('nbdev')
    assert 'its name to `FORMATS`' in CONTRIBUTING and '`tests/test_formats.py`' in CONTRIBUTING
    path = tree/'nbs/01_formats.ipynb'
    nb = json.loads(path.read_text(encoding='utf-8'))
    cell = next(c for c in nb['cells'] if any(l.startswith('FORMATS = {') for l in c['source']))
    text = ''.join(cell['source'])
    text = text.replace('FORMATS = {', "e3m4 = FloatFormat(3, 4, 'e3m4')\nFORMATS = {").replace('e2m1, e8m0)', 'e2m1, e8m0, e3m4)')
    cell['source'] = text.splitlines(True)
    path.write_text(json.dumps(nb), encoding='utf-8')
    r = subprocess.run([Path(sys.executable).parent/'nbdev_export'], cwd=tree, capture_output=True, text=True)
    assert r.returncode == 0 and 'e3m4 =' in (tree/'mpcourse/formats.py').read_text(), r.stderr
    edit(tree/'tests/test_formats.py', 'ML = dict(', "ML = dict(e3m4='float8_e3m4', ")
    run(tree, 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', 'tests/test_formats.py')


def test_a_scaler_passes_the_contract_once_it_is_named(tree):
    assert 'Add it to `CONTRACT` in `tests/test_scaler.py`' in CONTRIBUTING
    test = tree/'tests/test_scaler.py'
    edit(test, '\n\nCONTRACT = dict(', SCALER + 'CONTRACT = dict(two_strikes=TwoStrikes, ')
    run(tree, 'pytest', '-q', '-p', 'no:cacheprovider', '-k', 'two_strikes', 'tests/test_scaler.py')


def test_where_is_names_files_that_are_there():
    "And the whole is short enough for a first day"
    paths = [p.split(' ')[0] for p in re.findall(r'`((?:nbs|tests|tools|studies|mpcourse|bench|\.github)/[^`]*)`', CONTRIBUTING)]
    paths += [f'nbs/{stem}.ipynb' for stem in re.findall(r'`(\d\d_\w+)`', CONTRIBUTING)]
    assert len(paths) > 40 and not [p for p in paths if '*' not in p and p != 'studies/name.py' and not (ROOT/p).exists()]
    assert len(CONTRIBUTING.encode()) <= 8*1024
