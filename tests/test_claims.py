"`make claims`: what it finds, what it runs again, and two chapters under other seeds"
import importlib.util, json, sys

import pytest
from conftest import ROOT

from tools.fingerprints import code_cells, imported

pytest.importorskip('nbclient')
spec = importlib.util.spec_from_file_location('claims', ROOT/'tools'/'claims.py')
claims = importlib.util.module_from_spec(spec)
sys.modules['claims'] = claims          # dataclasses look their module up
spec.loader.exec_module(claims)


def seeds(*ns): return [v for v in claims.variations(range(10)) if v.name in {f'seed {n}' for n in ns}]


def run(path, n): return claims.run_async(claims.run(path, *seeds(n)))


@pytest.fixture
def command(tmp_path, monkeypatch):
    "`main` with runs that are only counted; a cell of a notebook that contains `red` fails, on seed 3 alone"
    ran = []
    async def fake(path, v, key='', prepare=None):
        if 'stop' in ran: raise KeyboardInterrupt
        ran.append((path.stem, v.name))
        bad = [c for c in code_cells(path) if 'red' in c[2] and v.name == 'seed 3']
        failed = [dict(cell=i, id=name, line='assert red', error='AssertionError') for i, name, _ in bad]
        return dict(chapter=path.stem, variation=v.name, key=key, on='Python 3.11', seconds=1, first=[1.], failed=failed)
    monkeypatch.setattr(claims, 'run', fake)
    store = tmp_path/'claims.json'
    def call(nbs, *more, stop_after=None, run=fake):
        ran.clear()
        if stop_after is not None: monkeypatch.setattr(claims, 'run', stopping(fake, stop_after))
        else: monkeypatch.setattr(claims, 'run', run)
        code = claims.main(['--nbs', str(nbs), '--store', str(store), '--only', 'seeds', '--seeds', '2-4', '--workers', '1', *more])
        return code, list(ran)
    call.store = store
    return call


def stopping(run, n):
    "Runs n chapters, then it is interrupted"
    left = [n]
    async def one(*a, **k):
        left[0] -= 1
        if left[0] < 0: raise KeyboardInterrupt
        return await run(*a, **k)
    return one


# --- one run ---

def test_a_claim_that_holds_on_seed_0_only_is_found(small_course):
    nbs = small_course(_01_a=['# A\n\n> b', 'import torch\nfrom mpcourse.toys import seed', 'x = torch.ones(2).requires_grad_()',
                              '(x.sum()*seed(1)).backward()\nassert seed(0) == 0', 'y = 1', 'assert y == 1\nassert seed(2) < 5'])
    assert run(nbs/'01_a.ipynb', 0)['failed'] == []
    row = run(nbs/'01_a.ipynb', 3)
    first, last = row['failed']
    assert (first['cell'], first['line'], first['error']) == (4, 'assert seed(0) == 0', 'AssertionError: found seed(0) = 3000, asked == 0')
    assert (last['cell'], last['line'], last['error']) == (6, 'assert seed(2) < 5', 'AssertionError: found seed(2) = 3002, asked < 5')
    assert row['first'] == [2.*3001] and row['variation'] == 'seed 3'
    assert [*row['compared'].values()] == [{'seed(2) < 5': [3002., '<', 5.]}]


def test_a_run_leaves_nothing_behind_and_skips_what_it_cannot_run(small_course):
    nbs = small_course(_01_a=['# A', 'open("left", "w").write("x"); assert not __import__("pathlib").Path("01_a.ipynb").exists()',
                              '#| eval: false\n1/0', '#| cuda\n1/0', 'raise ValueError("seen")'])
    assert [f['error'] for f in run(nbs/'01_a.ipynb', 0)['failed']] == ['ValueError: seen']
    assert [p.name for p in nbs.iterdir()] == ['01_a.ipynb']


@pytest.mark.sweep(0)
def test_a_kernel_that_dies_and_a_cell_that_hangs_are_red(small_course):
    nbs = small_course(_01_a=['# A', 'import os; os._exit(1)'], _02_b=['# B', 'import time; time.sleep(60)', 'assert False, "ran all the same"'])
    assert 'DeadKernelError' in run(nbs/'01_a.ipynb', 0)['failed'][0]['error']
    hung = claims.run_async(claims.run(nbs/'02_b.ipynb', *seeds(0), limit=5))['failed']
    assert [(f['cell'], f['error']) for f in hung] == [(2, 'Timeout: more than 5 s'), (3, 'AssertionError: ran all the same')]


def test_nothing_varied_is_inherited(monkeypatch):
    for name in ('MPCOURSE_SEED', 'MKL_CBWR', 'ATEN_CPU_CAPABILITY'): monkeypatch.setenv(name, '7')
    monkeypatch.setenv('OMP_NUM_THREADS', '7')
    for v in claims.variations():
        env = claims.environment(v, '/tmp')
        assert {n: env[n] for n, _ in v.env} == dict(v.env)
        assert env['OMP_NUM_THREADS'] == ('2' if v.name == '2 threads' else '1')
        assert env.get('MKL_CBWR') == ('COMPATIBLE' if v.name == 'mkl compatible' else None)
    names = {v.name for v in claims.variations()}
    assert {'seed 9', 'neighbour 3', '2 threads', 'mkl avx2'} <= names and ('mkl avx512' in names) == claims.has_avx512()


@pytest.mark.sweep(0)
def test_neighbours_start_beside_seed_0_and_equal_weights_stay_equal(small_course):
    nbs = small_course(_01_a=['# A', 'import torch\ndef net(): torch.manual_seed(1); return torch.nn.Linear(40, 40)\na, b = net(), net()',
                              'assert torch.equal(a.weight, b.weight)\nassert a.weight[0, 0].item()*2**40 % 9999 < 9999'])
    found = []
    for n in range(3):
        v = claims.Variation(f'neighbour {n}', 'neighbours', (('MPCOURSE_NEIGHBOUR', str(n)),))
        row = claims.run_async(claims.run(nbs/'01_a.ipynb', v))
        assert not row['failed']
        found.append([*row['compared'].values()])
    assert found[0] != found[1] != found[2] != found[0]


# --- margins ---

@pytest.mark.parametrize('lefts, thin', [
    ([1.8, 1.7, 1.6, 1.7, 1.8, 1.6, 1.7, 1.65, 1.75, 1.7], False),       # four spreads
    ([1.97, 1.8, 1.7, 1.9, 1.95, 1.6, 1.98, 1.75, 1.85, 1.9], True),    # two spreads
    ([1.999, *[1.7]*5, *[1.71]*5], True),                                # the worst is at the bound
    ([1.5]*9 + [1.99], True)])                                          # one that differs
def test_what_is_thin(lefts, thin):
    middle, worst = claims.margin([[x, '<', 2.] for x in lefts])
    assert claims.is_thin(middle, worst) == thin
    assert claims.is_thin(*claims.margin([[2., '>', x] for x in lefts])) == thin


def test_what_has_no_margin():
    assert claims.margin([[1., '<', 2.]]*10) is None, 'the same in all runs'
    assert claims.margin([[1., '<', 2.], [1.1, '<', 2.]]) is None, 'two runs have no spread'
    factors = [[2.**k, '>', 2.] for k in range(20, 30)]                 # sizes that differ by factors
    assert not claims.is_thin(*claims.margin(factors))


def test_a_thin_claim_ends_the_command_with_1(small_course, command, monkeypatch, capsys):
    nbs = small_course(_01_a=['# A', '1'])
    async def fake(path, v, key='', prepare=None):
        pair = [2 + int(v.name[-1])/8, '<', 3.]
        return dict(chapter=path.stem, variation=v.name, key=key, on='', seconds=1, first=[], failed=[], compared={'c1': {'loss < 3': pair}})
    assert command(nbs, '--seeds', '0-5', run=fake)[0] == 1
    said = capsys.readouterr().out
    assert 'thin: 01_a, cell c1: loss < 3\n' in said and '(seed 5: 2.625 < 3.0)' in said and '1 claims with a margin, 1 of them thin' in said


# --- what runs again ---

def test_only_what_changed_runs_again(small_course, command, capsys):
    nbs = small_course(_01_a=['# A', '1'], _02_b=['# B', '2'], _91_c=['# C', '3'])
    assert command(nbs) == (0, [(c, f'seed {n}') for n in (2, 3, 4) for c in ('01_a', '02_b')])
    assert command(nbs) == (0, [])
    small_course(_01_a=['# A, said in other words', '1'], _02_b=['# B', '2 + 0'])
    assert command(nbs)[1] == [('02_b', f'seed {n}') for n in (2, 3, 4)]
    rows = json.loads(command.store.read_text())['rows']
    assert len(rows) == 6 and command.store.read_text().count('\n') == 8      # a line a row
    assert 'not run: torch 2.6' in capsys.readouterr().out


def test_a_public_name_counts_as_its_module():
    assert imported('from mpcourse import GradScaler, MixedStep') == {'gradscaler', 'step'}


def behind(path, root): return claims.claims_hash(path, root)


def test_a_module_behind_a_module_counts(small_course, tmp_path):
    pkg = tmp_path/'mpcourse'
    pkg.mkdir()
    for name, text in dict(one='from .two import x\nimport_module("mpcourse.five")', two='def f():\n    from mpcourse.three import y', three='y = 1', four='z = 1',
                           five='a = 1').items():
        (pkg/f'{name}.py').write_text(text)
    path = small_course(_01_a=['# A', '%matplotlib inline\nfrom mpcourse.one import x'])/'01_a.ipynb'
    old = behind(path, tmp_path)
    (pkg/'four.py').write_text('z = 2')
    assert behind(path, tmp_path) == old
    (pkg/'three.py').write_text('"What y is"\ny = 1      # one')          # a docstring, a comment: nothing else runs
    assert behind(path, tmp_path) == old
    for name, text in dict(three='y = 2', five='a = 2').items():
        (pkg/f'{name}.py').write_text(text)
        assert behind(path, tmp_path) != old
        old = behind(path, tmp_path)


def test_a_checker_and_a_figure_that_moves_run_no_training_again(small_course, tmp_path):
    live = tmp_path/'mpcourse'/'live'
    live.mkdir(parents=True)
    def written(text, cell='x = 1'):
        (live/'train.mjs').write_text(text)
        return behind(small_course(_01_a=['# A', f"{cell}\nLive('train', {{}}, ax, '')", f"def check_x(f):\n    assert f() == 1, '{text}'"])/'01_a.ipynb', tmp_path)
    assert written('one') == written('two') != written('two', 'x = 2')


def test_an_interrupted_run_goes_on(small_course, command):
    nbs = small_course(_01_a=['# A', '1'], _02_b=['# B', '2'])
    with pytest.raises(KeyboardInterrupt): command(nbs, stop_after=3)
    assert not command.store.exists()
    with command.store.with_suffix('.partial.jsonl').open('a') as f: f.write('\n{"chapter": "02_b", "vari')     # and then it was killed
    assert command(nbs) == (0, [('02_b', 'seed 3'), ('01_a', 'seed 4'), ('02_b', 'seed 4')])
    assert len(json.loads(command.store.read_text())['rows']) == 6 and not command.store.with_suffix('.partial.jsonl').exists()


def test_red_cells_may_only_fall(small_course, command, capsys):
    nbs = small_course(_01_a=['# A', '1'])
    assert command(nbs)[0] == 0
    green = command.store.read_text()
    small_course(_01_a=['# A', 'red'])
    assert command(nbs)[0] == 1 and command.store.read_text() == green
    assert '01_a, cell 2: assert red\n    seed 3: AssertionError' in capsys.readouterr().out
    assert command(nbs) == (1, []), 'it is red until it is mended, and not run again to say so'
    assert command(nbs, '--accept')[0] == 0 and command(nbs)[0] == 0
    stored = command.store.read_text()
    assert stored != green
    small_course(_01_a=['# A', '2'])
    assert command(nbs, '--check')[0] == 0 and command.store.read_text() == stored, '--check stores nothing'
    assert command(nbs)[0] == 0 and not claims.red(json.loads(command.store.read_text())['rows'])


def test_a_chapter_that_does_not_exist(small_course, command):
    with pytest.raises(SystemExit, match="'7'"): command(small_course(_01_a=['# A', '1']), '--chapters', '7')


# --- the stored table, and the course ---

def test_ten_seeds_give_ten_different_first_losses():
    rows = json.loads(claims.STORE.read_text(encoding='utf-8'))['rows']
    by_chapter = {}
    for r in rows:
        if r['variation'].startswith('seed') and r['first']: by_chapter.setdefault(r['chapter'], []).append(tuple(r['first']))
    assert len(by_chapter) > 10 and max(map(len, by_chapter.values())) > 1
    for chapter, found in by_chapter.items(): assert len(set(found)) == len(found), f'{chapter}: the same losses under two seeds'


def test_no_stored_claim_is_thin_and_none_is_red():
    rows = json.loads(claims.STORE.read_text(encoding='utf-8'))['rows']
    assert not claims.red(rows) and not claims.thin_lines(rows), claims.table(rows)


@pytest.mark.sweep(0)
@pytest.mark.parametrize('stem, n', [('31_near_ties', 11), ('20_layerwise', 12)])
def test_two_chapters_hold_under_other_seeds(stem, n):
    v = claims.Variation(f'seed {n}', 'seeds', (('MPCOURSE_SEED', str(n)),))
    row = claims.run_async(claims.run(ROOT/'nbs'/f'{stem}.ipynb', v))
    assert not row['failed'] and row['first'], claims.table([row])
