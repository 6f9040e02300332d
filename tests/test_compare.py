"""Schemes, what is measured of a training, and comparisons that go on where they stopped."""
import math

import pytest, torch

import mpcourse.compare as B
from mpcourse.compare import MEASURES, CONTENDERS, compare, comparison_table, get_scheme, flushed_weight_gradients, measure_scheme, zero_weight_gradients
from mpcourse.policies import RULES, get_policy
from mpcourse.toys import get_toy, train_toy

pytestmark = pytest.mark.library
QUICK = dict(steps=4, workers=1, progress=False)


def test_every_policy_is_a_scheme():
    assert list(CONTENDERS)[:4] == ['fp32', 'bf16', 'fp16', 'static 2^10'] and set(RULES) < set(CONTENDERS)
    for name in RULES: assert get_scheme(name).scaler.config == get_policy(name).config
    assert get_scheme('torch') is not get_scheme('torch') and get_scheme('bf16').dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no scheme 'magic': there are fp32, bf16"): get_scheme('magic')


@pytest.mark.parametrize('name', CONTENDERS)
def test_every_scheme_trains(name):
    v = measure_scheme(name, 0, 'relu_mlp', 3)
    assert tuple(v) == MEASURES and math.isfinite(v['loss']) and 0 <= v['zeros'] <= 1 and v['ms_per_step'] > 0


def test_zeros_beside_those_of_fp32():
    toy, model = get_toy('deep_sigmoid'), get_toy('deep_sigmoid').model()
    before = [p.clone() for p in model.parameters()]
    exact, low, scaled = (zero_weight_gradients(toy, model, *a) for a in ((), (torch.float16,), (torch.float16, 2.**14)))
    assert low > .2 > scaled >= exact > 0
    assert all(torch.equal(p, q) for p,q in zip(model.parameters(), before))
    share = flushed_weight_gradients(toy, model, torch.float16)
    assert flushed_weight_gradients(toy, model) == 0 and abs(share - (low - exact)/(1 - exact)) < 1e-6


def test_compare(tmp_path):
    got = compare(['fp32', 'fp16'], 2, 'relu_mlp', store=tmp_path, **QUICK)
    assert list(zip(got['scheme'], got['seed'])) == [('fp32', 0), ('fp16', 0), ('fp32', 1), ('fp16', 1)]
    assert got['loss'][0] == train_toy('relu_mlp', steps=4).loss and set(got) == {'scheme', 'seed', *MEASURES}
    t = comparison_table(got)
    assert list(t.index) == ['fp32', 'fp16'] and t['converged'].tolist() == ['0/2', '0/2'] and 'in FP32' in t


def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch):
    calls, inner = [], B.train_toy
    def once(*args, **kw):
        if len(calls) == 2: raise KeyboardInterrupt
        calls.append(args); return inner(*args, **kw)
    monkeypatch.setattr(B, 'train_toy', once)
    with pytest.raises(KeyboardInterrupt): compare(['fp32', 'torch', 'metaseq'], 1, 'relu_mlp', store=tmp_path, **QUICK)
    monkeypatch.setattr(B, 'train_toy', lambda *a, **k: calls.append(a) or inner(*a, **k))
    got = compare(['fp32', 'torch', 'metaseq'], 1, 'relu_mlp', store=tmp_path, **QUICK)
    assert len(calls) == 3 and len(got) == 3
    assert compare(['fp32', 'torch', 'metaseq'], 1, 'relu_mlp', store=tmp_path, **QUICK).equals(got) and len(calls) == 3


def test_more_seeds_run_only_what_is_missing(tmp_path, monkeypatch):
    calls, inner = [], B.train_toy
    monkeypatch.setattr(B, 'train_toy', lambda *a, **k: calls.append(a) or inner(*a, **k))
    few = compare(['fp32', 'fp16'], 1, 'relu_mlp', store=tmp_path, **QUICK)
    more = compare(['fp32'], 2, 'relu_mlp', store=tmp_path, **QUICK)
    assert len(calls) == 3 and more.loc[0].equals(few.loc[0]) and list(more['seed']) == [0, 1]
    monkeypatch.setenv('MPCOURSE_SEED', '2')
    other = compare(['fp32'], 1, 'relu_mlp', store=tmp_path, **QUICK)
    assert len(calls) == 4 and other['loss'][0] != few['loss'][0], 'another draw is another training'


def test_another_request_is_another_file(tmp_path):
    a = compare('fp32', 1, 'relu_mlp', store=tmp_path, **QUICK)
    b = compare('fp32', 1, 'relu_mlp', store=tmp_path, **QUICK | dict(steps=3))
    assert a['loss'][0] != b['loss'][0] and len(list(tmp_path.iterdir())) == 2
    for wrong in (dict(toy='chess'), dict(schemes=['fp32', 'magic'])):
        with pytest.raises(ValueError, match='There is no'): compare(**dict(toy='relu_mlp', store=tmp_path) | wrong, **QUICK)
    assert len(list(tmp_path.iterdir())) == 2, 'nothing is trained for a wrong request'


def test_workers_in_other_processes(tmp_path):
    got = compare(['fp32', 'torch'], 1, 'relu_mlp', store=tmp_path, steps=3, workers=2, progress=False)
    assert len(got) == 2 and got['loss'].notna().all()


def test_what_is_told_of_a_training():
    v = measure_scheme('fp16', steps=20)
    assert v['zeros'] > v['zeros_fp32'] + .1 and v['log2_scale'] == 0 and not v['converged'] and v['skipped'] == 0
    v = measure_scheme('fp32', toy='relu_mlp')
    assert v['converged'] and v['zeros'] == v['zeros_fp32'] and v['acc'] > .9
    assert measure_scheme('megatron', 0, 'relu_mlp', 5)['skipped'] > 2                # from 2^32 it has to come down first
