"Studies: each JSON beside its script, the runner, what a chapter looks up; and the helpers that only studies use"
import ast, json, math, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import pytest
from conftest import ROOT, each

from mpcourse.zoo import Study, study

FOLDER = ROOT/'studies'
CharModel = study('unit_sweep').module.CharModel
NAMES = sorted(f.stem for f in FOLDER.glob('*.json') if f.name != 'claims.json')     # tools/claims.py writes that one


def internal(path): return [n.module for n in ast.walk(ast.parse(path.read_text(encoding='utf-8'))) if isinstance(n, ast.ImportFrom)]


# --- what is stored ---

def test_every_result_lies_beside_its_script():
    scripts = {f.stem for f in FOLDER.glob('*.py')} - {'runner', 'faulty_nets', 'healthy_nets'}
    assert len(NAMES) >= 15 and set(NAMES) == scripts, 'a script without its result, or a result without its script'


@each('name', NAMES)
def test_a_result_is_whole(name):
    doc, s = json.loads((FOLDER/f'{name}.json').read_text(encoding='utf-8')), study(name)
    assert list(doc) == ['study', 'command', 'rows', 'seeds', 'machine', 'results'] and doc['study'] == name
    assert doc['command'] == f'python studies/{name}.py' and 'torch' in doc['machine']
    assert s.rows == list(s.module.ROWS) and s.seeds == list(s.module.SEEDS), 'the script asks for something else now: run it'
    assert [(r['row'], r['seed']) for r in s.results] == [(row, k) for k in s.seeds for row in s.rows]
    assert all(set(r) == {'row', 'seed', 'seconds', 'value'} and r['value'] for r in s.results)


@each('name', NAMES)
def test_a_script_says_what_it_asks(name):
    tree = ast.parse((FOLDER/f'{name}.py').read_text(encoding='utf-8'))
    assert '?' in ast.get_docstring(tree).splitlines()[0]
    run, = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == 'run']
    assert ast.get_docstring(run) and [a.arg for a in run.args.args] == ['row', 'seed']


def test_the_library_knows_no_study():
    for f in (ROOT/'mpcourse').glob('*.py'): assert not {'studies', 'runner', *NAMES} & set(internal(f)), f.name
    assert (ROOT/'setup.py').read_text().count("find_packages(include=[cfg['lib_path']") == 1 and 'studies' not in (ROOT/'MANIFEST.in').read_text()


@pytest.mark.sweep(3)
@each('name, row', [('rain_study', 'torch'), ('every_scheme', 'CNN: FP16 hold'), ('als_table', 'FP32')])
def test_a_stored_row_again(monkeypatch, name, row):
    monkeypatch.setenv('MPCOURSE_SEED', '7')        # shifts the seeds of chapters, not those of stored results
    s = study(name)
    found = s.run(row, s.seeds[0])
    assert os.environ['MPCOURSE_SEED'] == '7'
    assert set(found) == set(s.results[0]['value'])
    assert {k: v for k, v in s.misses(row, found).items() if not k.startswith('ms')} == {}


# --- what a chapter looks up ---

def write(folder, values, name='one'):
    rows = [dict(row=row, seed=k, seconds=0, value=dict(x=v)) for row, vs in values.items() for k, v in enumerate(vs)]
    n = max(map(len, values.values()))
    (folder/f'{name}.json').write_text(json.dumps(dict(rows=list(values), seeds=list(range(n)), results=rows)))
    return Study(folder/f'{name}.json')


def test_a_table_has_lowest_median_highest(tmp_path):
    s = write(tmp_path, dict(a=[3., 1., 2.], b=[math.nan, 1., 2., 3.]))
    assert s.table()['a'] == dict(x=(1, 2, 3)) and s.values('a', 'x') == [3, 1, 2]
    low, mid, high = s.table()['b']['x']
    assert (low, mid) == (1, 2) and math.isnan(high), 'NaN is the worst of a spread'


@pytest.mark.parametrize('stored, fits, misses', [
    ([1., 2.], [0., 1.5, 3.], [-.1, 3.1, math.nan, math.inf]), ([10., 10.], [9., 10., 11.], [8.9, 11.1]), ([0., 0.], [0.], [1., -1.]),
    ([1., math.nan], [1., 50., math.nan], []), ([math.nan]*2, [math.nan], [1., -math.inf]), ([-math.inf]*2, [-math.inf], [0., math.nan])])
def test_a_fresh_number_misses_the_stored_ones(tmp_path, stored, fits, misses):
    s = write(tmp_path, dict(a=stored))
    for v in fits: assert s.misses('a', dict(x=v)) == {}, v
    for v in misses: assert set(s.misses('a', dict(x=v))) == {'x'}, v


def test_the_source_is_shown_folded():
    text = study('rain_study').source().data
    assert text.startswith('<details><summary>studies/rain_study.py</summary>\n\n```python\n') and text.endswith('```\n\n</details>')
    assert (FOLDER/'rain_study.py').read_text(encoding='utf-8') in text


def test_a_name_that_is_none():
    with pytest.raises(ValueError, match="'chess'.* als_reach"): study('chess')


def test_outside_a_clone(tmp_path):
    shutil.copytree(ROOT/'mpcourse', tmp_path/'mpcourse', ignore=shutil.ignore_patterns('__pycache__'))
    code = 'import mpcourse; print(mpcourse.__file__)\nfrom mpcourse.zoo import study\nstudy("rain_study")'
    res = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(tmp_path)}, capture_output=True, text=True)
    assert str(tmp_path) in res.stdout and res.returncode == 1
    last = res.stderr.strip().splitlines()[-1]
    assert last.startswith('FileNotFoundError: ') and 'clone' in last and last.count('.') == 1


# --- the runner ---

SCRIPT = '''"Is it slow?"
import os, time
from pathlib import Path
ROWS, SEEDS = ('a', 'b'), range(4)
HERE = Path(__file__).parent

def run(row, seed):
    with (HERE/'log').open('a') as f: f.write(f'{row}{seed} ')
    (HERE/f'pid{os.getpid()}').touch()
    time.sleep({pause})
    assert (row, seed) != {bad}, 'no luck.'
    return dict(x=seed + (row == 'b')/2)

if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
'''


@pytest.fixture
def slow(tmp_path):
    "A study of eight tasks in a folder of its own; a call starts it"
    shutil.copy(FOLDER/'runner.py', tmp_path)
    def start(*args, pause=0., bad=None, workers=1, **env):
        (tmp_path/'slow.py').write_text(SCRIPT.replace('{pause}', str(pause)).replace('{bad}', repr(bad)))
        clean = {k: v for k, v in os.environ.items() if k != 'MPCOURSE_SEED'}
        return subprocess.Popen([sys.executable, tmp_path/'slow.py', '--workers', str(workers), *args], env={**clean, 'PYTHONPATH': str(ROOT), **env},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return start


def finish(proc):
    out, err = proc.communicate()
    return proc.returncode, out + err


def log(folder): return (folder/'log').read_text().split() if (folder/'log').exists() else []
def files(folder): return {f.name for f in folder.glob('slow.*')} - {'slow.py'}


def alive(pid):
    stat = Path(f'/proc/{pid}/stat')
    return stat.exists() and stat.read_text().rpartition(')')[2].split()[0] != 'Z'


def test_a_run_stores_everything(slow, tmp_path):
    assert finish(slow(workers=2))[0] == 0 and files(tmp_path) == {'slow.json'}
    doc = json.loads((tmp_path/'slow.json').read_text())
    assert [(r['row'], r['seed']) for r in doc['results']] == [(row, k) for k in range(4) for row in 'ab']
    assert all(r['value'] == {'x': r['seed'] + (r['row'] == 'b')/2} for r in doc['results'])
    assert doc['command'] == 'python studies/slow.py' and str(tmp_path) not in json.dumps(doc) and 'torch' in doc['machine']
    assert Study(tmp_path/'slow.json').table() == {'a': {'x': (0, 1, 3)}, 'b': {'x': (.5, 1.5, 3.5)}}
    assert sorted(log(tmp_path)) == sorted(f'{r}{k}' for r in 'ab' for k in range(4))


@pytest.mark.sweep(0)
def test_a_killed_run_goes_on_where_it_stopped(slow, tmp_path):
    part, proc = tmp_path/'slow.partial.json', slow(workers=2, pause=.4)
    end = time.time() + 300
    while time.time() < end and not (part.exists() and len(json.loads(part.read_text())['results']) >= 2): time.sleep(.05)
    os.kill(proc.pid, signal.SIGKILL); proc.communicate()
    kept = json.loads(part.read_text())['results']
    assert 2 <= len(kept) < 8 and files(tmp_path) == {'slow.partial.json'}
    end = time.time() + 100
    while time.time() < end and any(alive(f.name[3:]) for f in tmp_path.glob('pid*')): time.sleep(.05)
    assert not [f.name for f in tmp_path.glob('pid*') if alive(f.name[3:])], 'the workers end with their parent'
    started = len(log(tmp_path))
    assert finish(slow())[0] == 0 and files(tmp_path) == {'slow.json'}
    done = {f"{r['row']}{r['seed']}" for r in kept}
    assert sorted(log(tmp_path)[started:]) == sorted({f'{r}{k}' for r in 'ab' for k in range(4)} - done)
    results = json.loads((tmp_path/'slow.json').read_text())['results']
    assert len(results) == 8 and all(r in results for r in kept)


@pytest.mark.sweep(0)
def test_a_part_waits_for_the_rest(slow, tmp_path):
    code, said = finish(slow('--rows', 'b', '--seeds', '0', '3'))
    assert code == 0 and 'waits for the rest' in said and files(tmp_path) == {'slow.partial.json'}
    assert sorted(log(tmp_path)) == ['b0', 'b3']
    other = json.loads((tmp_path/'slow.partial.json').read_text()) | dict(machine='another one')
    (tmp_path/'slow.partial.json').write_text(json.dumps(other))
    assert finish(slow())[0] == 0 and len(log(tmp_path)) == 2 + 8, 'two machines in one file'


@pytest.mark.sweep(0)
def test_a_failing_task_is_named_and_the_rest_kept(slow, tmp_path):
    code, said = finish(slow(bad=('b', 1)))
    assert code == 1 and "Row 'b', seed 1: AssertionError: no luck." in said
    assert files(tmp_path) == {'slow.partial.json'} and len(json.loads((tmp_path/'slow.partial.json').read_text())['results']) == 3


@each('args, env, said', [((), dict(MPCOURSE_SEED='0'), 'MPCOURSE_SEED'), (('--rows', 'c'), {}, "'c'"), (('--seeds', '9'), {}, '9')])
def test_what_it_refuses(slow, tmp_path, args, env, said):
    code, text = finish(slow(*args, **env))
    assert code == 2 and said in text and not log(tmp_path) and not files(tmp_path)
