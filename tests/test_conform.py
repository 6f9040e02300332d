"conform finds the rule that a cast follows, and the inputs where it follows none (chapter 40)"
import json

import numpy as np, pytest, torch

from mpcourse.cli import main
from mpcourse.conform import CAST_TO, LIBRARIES, conform, examine_library, hard_inputs, rules, write_vectors
from mpcourse.formats import get_format
from mpcourse.rounding import quantize


@pytest.mark.parametrize('fmt', CAST_TO)
def test_each_rule_is_found(fmt):
    x = hard_inputs(fmt)
    for rule in rules(fmt):
        found = conform(rule(x, fmt), fmt)
        assert not found.differ
        # two rules may do the same, such as rounding toward zero, which never reaches infinity
        want, got = rule(x, fmt), found.rule(x, fmt)
        assert torch.equal(want.nan_to_num(-1.), got.nan_to_num(-1.))


@pytest.mark.parametrize('fmt', [f for f in CAST_TO if get_format(f).bits <= 8])
def test_every_midpoint_and_its_neighbours_are_tried(fmt):
    f, x = get_format(fmt), hard_inputs(fmt).double().tolist()
    values = sorted({v for v in f.decode(torch.arange(2**f.bits)).tolist() if v == v and abs(v) < torch.inf})
    there = set(x)
    for a, b in zip(values, values[1:]):
        m = np.float32((a + b)/2)
        for v in (m, np.nextafter(m, np.float32(np.inf)), np.nextafter(m, np.float32(-np.inf))): assert float(v) in there
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert set(every[every.isfinite()].tolist()) <= there and torch.inf in there


@pytest.mark.parametrize('name', LIBRARIES)
def test_every_cast_of_a_library_follows_a_rule(name):
    pytest.importorskip(name.partition('-')[0])
    found = examine_library(name)
    assert found and not any(c.differ for c in found.values())
    assert all(c.rule.rounding == 'nearest' and c.rule.subnormals and c.rule.infinity == c.rule.overflow for c in found.values())


def test_the_two_camps():
    fate = {name: examine_library(name)['e4m3'].rule.overflow for name in ('torch', 'torchao', 'ml_dtypes', 'gfloat')}
    new = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 13)
    assert fate == dict(torch='saturate' if new else 'nan', torchao='saturate', ml_dtypes='nan', gfloat='nan')


@pytest.mark.parametrize('spoil, at_least', [
    (lambda x: x.half().float(), 1), (lambda x: x.bfloat16().float(), 100), (lambda x: x.nan_to_num(0.), 1),
    (lambda x: torch.nextafter(x, torch.inf*x.sign()), 100), (lambda x: x.abs(), 30_000)])
def test_a_wrong_cast_follows_none(spoil, at_least):
    found = conform(lambda x: quantize(spoil(x), 'e4m3'), 'e4m3')
    assert len(found.differ) >= at_least and 'no rule' in str(found)
    assert all(got != want or np.signbit(got) != np.signbit(want) for _, got, want in found.differ)


def test_results_of_another_number_of_inputs_are_refused():
    with pytest.raises(ValueError, match='5 results were given'): conform(torch.zeros(5), 'e4m3')
    with pytest.raises(ValueError, match='There is no library'): examine_library('jax')


def test_the_command_reads_files_and_says_3_where_no_rule_fits(tmp_path, capsys):
    inputs, mine = str(tmp_path/'inputs.npy'), str(tmp_path/'mine.npy')
    assert main(['conform', inputs, '--write']) == 0
    values = quantize(torch.tensor(np.load(inputs)), 'e4m3', overflow='nan').numpy()
    np.save(mine, values)
    assert main(['conform', mine]) == 0 and 'NaN' in capsys.readouterr().out
    values[0] = 3
    np.save(mine, values)
    assert main(['conform', mine, '--json']) == 3
    assert len(json.loads(capsys.readouterr().out)[0]['differ']) == 1
    assert main(['conform', str(tmp_path/'none.npy')]) == 2
    assert main(['conform', 'torch']) == 0 and 'fp16' in capsys.readouterr().out


def test_the_vectors_are_codes_of_what_the_rules_give(tmp_path):
    write_vectors(tmp_path/'v.npz')
    v = np.load(tmp_path/'v.npz')
    for name in v:
        fmt, kind = name.split('/')
        if kind == 'inputs': continue
        overflow, infinity = kind.split('-')
        values = get_format(fmt).decode(torch.tensor(v[name].astype(np.int64))).float()
        found = conform(values, fmt)
        assert not found.differ and (found.rule.overflow, found.rule.infinity) == (overflow, infinity)
