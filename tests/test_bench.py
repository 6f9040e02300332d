"""The bench harness: rows, retries, exit codes, stored results. Timings themselves are judged by `make bench` alone."""
import importlib.util, json, sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1]/'bench'


@pytest.fixture
def bench(tmp_path, monkeypatch):
    "bench/run.py with a folder of its own benchmarks"
    for n in ('harness', 'bench_toy', 'bench_other'): monkeypatch.delitem(sys.modules, n, raising=False)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), str(BENCH), *sys.path])
    spec = importlib.util.spec_from_file_location('bench_run', BENCH/'run.py')
    run = importlib.util.module_from_spec(spec); spec.loader.exec_module(run)
    monkeypatch.setattr(run, 'HERE', tmp_path)
    sys.path.insert(0, str(tmp_path))
    yield run
    for n in ('bench_toy', 'bench_other'): sys.modules.pop(n, None)


def write(folder, name, *values, bound=2.):
    "A benchmark that gives one value after the other"
    (folder/f'bench_{name}.py').write_text(f'''from harness import Row
values = iter({list(values)})
def bench_it(): return [Row('thing', next(values), at_most={bound})]
''')


def result(folder):
    file, = (folder/'out').glob('*.json')
    return json.loads(file.read_text(encoding='utf-8'))


def test_a_kept_bound_is_stored_and_exits_well(bench, tmp_path, capsys):
    write(tmp_path, 'toy', 1.5)
    assert bench.main(['toy', '--out', str(tmp_path/'out')]) == 0
    doc = result(tmp_path)
    row, = doc['results']['toy']
    assert row['value'] == 1.5 and row['ok'] and row['bound'] == '≤ 2' and doc['threads'] == 1
    assert 'torch' in doc['machine']
    assert str(tmp_path) not in json.dumps(doc) and 'every bound kept' in capsys.readouterr().out


def test_a_broken_bound_is_measured_again_and_then_fails(bench, tmp_path, capsys):
    write(tmp_path, 'toy', 3., 2.5, 4., 1.)
    assert bench.main(['toy', '--out', str(tmp_path/'out')]) == 1          # three times broken
    assert 'BROKEN' in (out := capsys.readouterr().out) and 'toy: thing' in out
    write(tmp_path, 'other', 3., 1.)
    assert bench.main(['other', '--out', str(tmp_path/'out')]) == 0        # disturbed once
    assert set(result(tmp_path)['results']) == {'toy', 'other'}            # the others' results stay


def test_an_unknown_benchmark_is_named(bench, tmp_path, capsys):
    write(tmp_path, 'toy', 1.)
    with pytest.raises(SystemExit) as e: bench.main(['speed'])
    assert e.value.code and "no benchmark 'speed': there are toy" in capsys.readouterr().err


def test_medians_take_turns(bench):
    from harness import Row, medians, ratio
    calls = []
    t = medians({'a': lambda: calls.append('a'), 'b': lambda: calls.append('b')}, repeats=3, few={'b': 1})
    assert ''.join(calls) == 'ab' + 'ab' + 'a' + 'a' and set(t) == {'a', 'b'}
    r = ratio('a / b', dict(a=.003, b=.001), 'a', 'b', at_least=2, at_most=4)
    assert r.value == pytest.approx(3) and r.ok and r.bound == '≤ 4 ≥ 2' and r.ms == dict(a=3., b=1.)
    assert not Row('x', 1., at_least=2).ok and not Row('x', float('nan'), at_most=2).ok and Row('x', 9.).ok


def test_every_stored_result_is_free_of_paths():
    for f in (BENCH/'results').glob('*.json'):
        text = f.read_text(encoding='utf-8')
        assert str(BENCH.parent) not in text and '/home' not in text and json.loads(text)['results']
