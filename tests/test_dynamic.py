"""The dynamic scaler against torch's, step for step; patience; hold; bounds; other people's checkpoints."""
import math, random

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st

from mpcourse.dynamic import DynamicScaler, from_megatron, from_torch
from mpcourse.formats import same_bits
from mpcourse.step import MixedStep

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan
KINDS = dict(dynamic={}, growth=dict(hysteresis=2), clean=dict(hysteresis=2, refill='clean'), total=dict(consecutive=False))
kinds = pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS)


def saw(found, finite=1.): return dict(found_inf=torch.tensor(float(found)), loss_finite=torch.tensor(finite))


def feed(scaler, found):
    "(scale, growth tracker) after each step"
    out = []
    for f in found:
        scaler.update(saw(f))
        out.append((scaler.scale.item(), scaler.growth_tracker.item()))
    return out


def octaves(scaler, trace): return [round(math.log2(s)) for s, _ in feed(scaler, map(int, trace))]


def torchs(found, **kw):
    "The same of torch.amp.GradScaler, through its front door: a gradient that overflows or not, a step, an update"
    p, sc = nn.Parameter(torch.ones(1)), torch.amp.GradScaler('cpu', **kw)
    opt, out, one = torch.optim.SGD([p], lr=0.), [], torch.ones(())
    p.grad = torch.ones(1)
    for f in found:
        p.grad.fill_(1. if f == 0 else INF if f == 1 else NAN)
        sc.scale(one)
        sc.step(opt)
        sc.update()
        out.append((sc.get_scale(), sc._get_growth_tracker()))
    return out


def random_found(n, rate, seed):
    rng = random.Random(seed)
    return [0. if rng.random() > rate else rng.choice([1., NAN]) for _ in range(n)]


@pytest.mark.parametrize('interval, rate', [(1, .4), (3, .2), (17, .05), (200, .004)])
def test_random_steps_are_torchs(interval, rate):
    found = random_found(3000, rate, interval)
    theirs = torchs(found, growth_interval=interval)
    n = next((i for i, (s, _) in enumerate(theirs) if not 2.**-126 < s < 2.**127), len(found))
    assert n > 100 and feed(DynamicScaler(growth_interval=interval, min_scale=2.**-126), found)[:n] == theirs[:n]


@settings(max_examples=60, deadline=None)
@given(k=st.integers(0, 20), up=st.integers(1, 4), down=st.integers(1, 4), interval=st.integers(1, 5), found=st.lists(st.sampled_from([0., 0., 1., NAN]), max_size=40))
def test_any_powers_of_two_give_torchs_trace(k, up, down, interval, found):
    kw = dict(init_scale=2.**k, growth_factor=2.**up, backoff_factor=2.**-down, growth_interval=interval)
    theirs = torchs(found, **kw)
    if all(2.**-126 < s < 2.**127 for s, _ in theirs): assert feed(DynamicScaler(**kw, min_scale=2.**-126), found) == theirs


def test_torchs_golden_trace():
    got = feed(DynamicScaler(2., growth_interval=3), (0, 0, 0, 0, 1, 0, 0, 0, 0, 0))
    assert got == [(2, 1), (2, 2), (4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]


def test_an_overflow_starts_the_count_anew_unless_asked_otherwise():
    assert octaves(DynamicScaler(2.**24, growth_interval=3), '1001010010')[4] == 22
    assert octaves(DynamicScaler(2.**24, growth_interval=3, consecutive=False), '1001010010') == [23, 23, 23, 22, 23, 22, 22, 22, 21, 22]


@kinds
def test_bad_losses_move_nothing(kind):
    sc = DynamicScaler(growth_interval=7, **kind)
    feed(sc, [0., 0., 1., 0.])
    before = {n: b.clone() for n, b in sc.named_buffers()}
    for _ in range(5): sc.update(saw(1., 0.))
    after = dict(sc.named_buffers())
    assert all(same_bits(before[n], after[n]) for n in before if n != 'held') and after['held'] == 5
    loose = DynamicScaler(skip_nonfinite_loss=False, **kind)
    for _ in range(3): loose.update(saw(1., 0.))
    assert loose.scale < 2.**16


def test_megatrons_golden_trace():
    sc, left = DynamicScaler(2.**32, growth_interval=5, hysteresis=2), []
    for c, k in zip('100110100000101', [32, 32, 32, 31, 30, 30, 29, 29, 29, 29, 29, 30, 30, 30, 29]):
        assert octaves(sc, c) == [k]
        left.append(sc.hysteresis_tracker.item())
    assert left == [1, 1, 1, 0, -1, -1, -2, -2, -2, -2, -2, 2, 1, 1, 0]


def test_the_two_kinds_part_on_single_overflows():
    growth, clean = (DynamicScaler(growth_interval=5, hysteresis=2, refill=r) for r in ('growth', 'clean'))
    assert octaves(growth, '1010100000') == [16, 16, 15, 15, 14, 14, 14, 14, 14, 15]
    assert octaves(clean, '1010100000') == [16]*9 + [17]


@settings(max_examples=80, deadline=None)
@given(found=st.lists(st.sampled_from([0., 0., 1., NAN]), max_size=60), interval=st.integers(1, 5), hysteresis=st.integers(1, 4),
       refill=st.sampled_from(['growth', 'clean']), down=st.sampled_from([.5, .25, .1]))
@example(found=[1.]*6, interval=5, hysteresis=1, refill='growth', down=.1)
def test_patience_is_a_slow_references(found, interval, hysteresis, refill, down):
    scale, clean, left, want = 2.**40, 0, hysteresis, []
    for f in found:
        if f != 0:
            clean, left = 0, left - 1
            if left <= 0: scale = torch.tensor(scale*down).item()     # in FP64, and rounded once
        else:
            clean += 1
            if refill == 'clean': left = hysteresis
            if clean == interval: scale, clean, left = scale*2, 0, hysteresis
        want.append((scale, clean))
    kw = dict(growth_interval=interval, hysteresis=hysteresis, refill=refill, backoff_factor=down)
    assert feed(DynamicScaler(2.**40, min_scale=2.**-100, **kw), found) == want


@pytest.mark.parametrize('kw', [dict(growth_factor=1.), dict(backoff_factor=1.), dict(backoff_factor=-1.), dict(growth_interval=0), dict(growth_interval=2.5),
                                dict(hysteresis=0), dict(refill='hope'), dict(init_scale=0.), dict(min_scale=0.), dict(growth_factor=NAN)], ids=str)
def test_what_cannot_work_is_refused_with_its_value(kw):
    with pytest.raises(ValueError, match=str(next(iter(kw.values())))): DynamicScaler(**kw)


def test_a_counter_beyond_the_interval_does_what_torchs_does():
    sc, theirs = DynamicScaler(2., growth_interval=3), torch.amp.GradScaler('cpu', init_scale=2., growth_interval=3)
    sc.growth_tracker.fill_(5)
    theirs.scale(torch.ones(()))
    theirs._growth_tracker.fill_(5)
    p, want, found = torch.nn.Parameter(torch.ones(1)), [], [0., 0., 0., 0., 1., 0., 0., 0., 0.]
    opt = torch.optim.SGD([p], lr=0.)
    for f in found:
        p.grad = torch.tensor([torch.inf if f else 1.])
        theirs.step(opt)
        theirs.update()
        want.append(theirs.get_scale())
    assert [s for s, _ in feed(sc, found)] == want and 2. in want and len(set(want)) > 1
    patient = DynamicScaler(2., growth_interval=3, hysteresis=2)
    patient.growth_tracker.fill_(5)
    assert {s for s, _ in feed(patient, [0.]*4)} == {2.}


def test_torchs_checkpoint_goes_on():
    old, found = torch.amp.GradScaler('cpu', init_scale=2.**20, growth_interval=7), random_found(60, .1, 1)
    old.scale(torch.ones(()))
    ours = from_torch(old.state_dict() | dict(_growth_tracker=5), min_scale=2.)
    twin = DynamicScaler(2.**20, growth_interval=7)
    twin.growth_tracker.fill_(5)
    assert feed(ours, found) == feed(twin, found) and ours.min_scale == 2 and len(set(feed(ours, found))) > 3
    assert [from_torch(old.state_dict() | dict(scale=s)).min_scale for s in (2.**-3, 2.**20)] == [2.**-3, 1]
    for key in old.state_dict():
        with pytest.raises(ValueError, match=key): from_torch({k: v for k, v in old.state_dict().items() if k != key})


def test_megatrons_checkpoint_goes_on():
    state = dict(scale=torch.tensor([2.**20]), growth_tracker=3, hysteresis_tracker=-1)
    ours = from_megatron(state, growth_interval=5)
    assert not ours.skip_nonfinite_loss and octaves(ours, '1') == [19] and octaves(from_megatron(state, growth_interval=5), '00') == [20, 21]
    for key in state:
        with pytest.raises(ValueError, match=key): from_megatron({k: v for k, v in state.items() if k != key})


@kinds
def test_a_net_trains_from_a_scale_far_too_high(kind):
    torch.manual_seed(0)
    net, step = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), MixedStep(DynamicScaler(2.**40, **kind))
    opt = torch.optim.SGD(net.parameters(), lr=.5)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    runs = [step(net, x, y, opt, F.cross_entropy) for _ in range(110)]
    assert runs[-1]['loss'] < .85*runs[0]['loss'] and runs[0]['skipped'] and not runs[-1]['skipped']
