"""Dynamic scalers against torch's, step for step; the traps at the bottom; patience; states, also foreign ones; no look from the host."""
import copy, math, pickle, warnings

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from mpcourse.dynamic import LOOKS, DynamicScaler, HysteresisScaler, has_overflow
from mpcourse.formats import same_bits
from mpcourse.scaler1 import CEILING, FLOOR, HostBound, Observation, StaticScaler
from mpcourse.step1 import MixedStep, judge, named_gradients, take_step, unscale_

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan
KINDS = {'dynamic': DynamicScaler, 'growth': HysteresisScaler, 'clean': lambda **kw: HysteresisScaler(refill='clean', **kw)}


def saw(found): return Observation(('found_inf',), torch.tensor([float(found)]))


def feed(scaler, found):
    "(scale, growth tracker) after each step"
    out = []
    for f in found:
        scaler.update(saw(f))
        out.append((scaler.scale.item(), scaler.growth_tracker.item()))
    return out


def octaves(scaler, trace): return [round(math.log2(s)) for s,_ in feed(scaler, map(int, trace))]


def torchs(found, **kw):
    "The same of torch.amp.GradScaler, through its front door: a gradient that overflows or not, a step, an update"
    p, sc = nn.Parameter(torch.ones(1)), torch.amp.GradScaler('cpu', **kw)
    opt, out, one = torch.optim.SGD([p], lr=0.), [], torch.ones(())
    p.grad = torch.ones(1)
    for f in found:
        p.grad.fill_(1. if f == 0 else INF if f == 1 else NAN)
        sc.scale(one); sc.step(opt); sc.update()
        out.append((sc.get_scale(), sc._get_growth_tracker()))
    return out


def random_found(n, rate, seed):
    rng = np.random.default_rng(seed)
    return [0. if x > rate else float(rng.choice([1., NAN, 3.])) for x in rng.random(n)]


# --- the look ---

@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), max_size=5), max_size=4), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_each_look_sees_every_infinity_and_only_the_sum_raises_false_alarms(values, dtype):
    gs = [torch.tensor(v).to(dtype) for v in values]
    bad = any(not g.isfinite().all() for g in gs)
    was = [g.clone() for g in gs]
    assert has_overflow(gs, 'isfinite') == has_overflow(gs, 'fused') == bad
    assert has_overflow(gs, 'sum') or not bad
    assert all(map(same_bits, gs, was))


def test_looks_take_mixed_kinds_and_say_what_there_is():
    gs = [torch.ones(2), torch.ones(2).half(), torch.tensor(NAN).bfloat16()]
    assert all(has_overflow(gs, how) for how in LOOKS) and not any(has_overflow(gs[:2], how) for how in LOOKS)
    with pytest.raises(ValueError, match="how='median' is unknown: take one of sum, isfinite, fused"): has_overflow(gs, 'median')


# --- torch, step for step ---

@pytest.mark.parametrize('interval, rate', [(1, .001), (1, .5), (3, .2), (10, .05), (50, .01), (2000, .0003), (7, .9)])
def test_ten_thousand_random_steps_are_torchs_in_strict(interval, rate):
    found = random_found(10**4, rate, interval)
    assert feed(DynamicScaler(growth_interval=interval, strict=True), found) == torchs(found, growth_interval=interval)


@settings(max_examples=40, deadline=None)
@given(st.floats(2.**-24, 2.**127, width=32), st.floats(1, 1e3, exclude_min=True), st.floats(0, 1, exclude_min=True, exclude_max=True),
       st.integers(1, 9), st.lists(st.sampled_from([0., 0., 1., NAN]), max_size=40))
def test_any_parameters_give_torchs_trace_in_strict(init, growth, backoff, interval, found):
    kw = dict(init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ours = feed(DynamicScaler(**kw, strict=True), found)
    assert str(ours) == str(torchs(found, **kw))


@settings(max_examples=40, deadline=None)
@given(st.integers(-20, 40), st.integers(1, 5), st.lists(st.sampled_from([0., 0., 1., NAN]), max_size=60), st.integers(0, 20))
def test_within_its_bounds_it_is_torchs_without_strict_too(k, interval, found, tracker):
    a, b = (DynamicScaler(2.**k, growth_interval=interval, strict=s) for s in (False, True))
    for sc in (a, b): sc.growth_tracker = torch.tensor(min(tracker, interval - 1), dtype=torch.int32)
    for (sa,ta),(sb,tb) in zip(feed(a, found), feed(b, found)):
        if not FLOOR <= sb <= CEILING: break
        assert sa == sb and ta == tb


def test_torchs_golden_trace():
    want = [(2, 1), (2, 2), (4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]
    for strict in (False, True): assert feed(DynamicScaler(2., growth_interval=3, strict=strict), [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]) == want


def test_growth_stops_where_fp32_does_and_the_count_goes_on():
    assert feed(DynamicScaler(2.**126, growth_interval=2), [0]*6) == feed(DynamicScaler(2.**126, growth_interval=2, strict=True), [0]*6) == [
        (2.**126, 1), (2.**127, 0), (2.**127, 1), (2.**127, 0), (2.**127, 1), (2.**127, 0)]


# --- the ancestors' mistakes, and torch's ---

def test_mistake_5_an_overflow_starts_the_count_anew():
    for kind in KINDS.values():
        sc = kind(init_scale=2.**8, growth_interval=3)
        assert [t for _,t in feed(sc, [0, 0, 1, 0, 0])] == [1, 2, 0, 1, 2]


def test_mistake_6_the_start_is_no_bound_and_there_are_two():
    sc = DynamicScaler(4., growth_interval=1, floor=1., ceiling=64.)
    assert octaves(sc, '0'*9) == [3, 4, 5, 6, 6, 6, 6, 6, 6] and octaves(sc, '1'*9) == [5, 4, 3, 2, 1, 0, 0, 0, 0]


def test_mistake_7_no_argument_is_ignored():
    "There is one scale to begin with, whatever else is said; a static scaler is another class"
    assert DynamicScaler(512.).scale == 512 and HysteresisScaler(512., strict=True).scale == 512


@pytest.mark.parametrize('kind', KINDS)
def test_a_storm_of_ten_thousand_nans_leaves_nothing_broken(kind):
    sc, w = KINDS[kind](), nn.Parameter(torch.ones(3))
    opt = torch.optim.AdamW([w], lr=.1)
    for _ in range(10**4): sc.update(saw(NAN))
    assert sc.scale == FLOOR and sc.inv_scale() == 2.**24 and all(getattr(sc, n).isfinite() for n in sc.state_names)
    for g in (1., 0., 3e38, 1e-30):
        w.grad = torch.full((3,), g)*sc.scale
        out = judge(named_gradients(opt), sc)
        take_step(opt, out)
        assert out.stepped and w.isfinite().all()
    w.grad = torch.full((3,), 3e38)
    was = w.detach().clone()
    out = judge(named_gradients(opt), sc)                               # finite, but not after the multiplication
    take_step(opt, out)
    assert not out.stepped and same_bits(w.detach(), was) and sc.scale == FLOOR and sc.growth_tracker == 0


def test_a_long_calm_stays_below_infinity_for_every_kind():
    for kind in KINDS.values():
        sc = kind(growth_interval=1)
        feed(sc, [0]*300)
        assert sc.scale == 2.**127 and sc.inv_scale() > 0


@pytest.mark.parametrize('steps', [130, 140, 149, 150, 165, 166, 200])
@pytest.mark.parametrize('masters', [False, True])
def test_where_torch_writes_nan_strict_refuses_the_step_with_torchs_trace(steps, masters):
    w, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opts = [torch.optim.SGD([p], lr=.1, momentum=.9, weight_decay=.1) for p in (w, v)]
    ours, theirs = DynamicScaler(strict=True), torch.amp.GradScaler('cpu')
    for i in range(steps + 3):
        theirs.scale(torch.ones(()))
        g = torch.full((2,), INF) if i < steps else torch.ones(2)*theirs._scale
        v.grad = g.clone()
        w.grad = torch.empty(2) if masters else g.clone()
        judge_on = [('w', g.half().clone() if g.abs().max() > 1e30 else g.clone(), w.grad)] if masters else named_gradients(opts[0])
        out = judge(judge_on, ours)
        take_step(opts[0], out)
        theirs.step(opts[1]); theirs.update()
        assert ours.scale.item() == theirs.get_scale() and ours.growth_tracker.item() == theirs._get_growth_tracker()
        assert w.isfinite().all()
    harm = theirs.get_scale() < 2.**-128
    assert v.isfinite().all() != harm and out.stepped != harm
    if harm: assert w.tolist() == [1., 1.] and not opts[0].state and out.offenders


def test_in_strict_what_overflows_later_is_counted_apart_and_elsewhere_together():
    def look(**kw): return unscale_([('w', g := torch.tensor([1e37]), g)], DynamicScaler(2.**-10, floor=2.**-10, **kw))
    a, b = look(strict=True), look()
    assert (a['found_inf'], a['found_after']) == (0., 1.) and b.names == ('found_inf',) and b['found_inf'] == 1
    sc = DynamicScaler(2.**-10, strict=True)
    g = torch.tensor([1e37])
    out = judge([('w', g, g)], sc)
    assert not out.stepped and sc.scale == 2.**-10 and sc.growth_tracker == 1 and 'gradient of w was not finite' in out.why


def test_a_counter_beyond_the_interval_grows_and_in_strict_never():
    for strict, want in ((False, 8.), (True, 2.)):
        sc = DynamicScaler(2., growth_interval=3, strict=strict)
        sc.growth_tracker = torch.tensor(5, dtype=torch.int32)
        feed(sc, [0]*4)
        assert sc.scale == want
    frozen = torchs([0]*9, init_scale=2., growth_interval=1000)[-1]
    sc = DynamicScaler(2., growth_interval=1000)
    feed(sc, [0]*9)
    assert frozen == (2., 9) and sc.growth_tracker == 9
    sc.growth_interval = 4                                              # shortened in the middle of a training
    assert feed(sc, [0]) == [(4., 0)]


# --- arguments ---

@pytest.mark.parametrize('kw, says', [
    (dict(growth_interval=0), 'growth_interval=0 cannot work.*whole number'), (dict(growth_interval=-3), 'growth_interval=-3'),
    (dict(growth_interval=2.5), 'growth_interval=2.5'), (dict(growth_interval=NAN), 'growth_interval=nan'),
    (dict(growth_interval=True), 'growth_interval=True'), (dict(growth_interval='9'), "growth_interval='9'"),
    (dict(growth_interval=None), 'growth_interval=None'), (dict(growth_interval=2**31), 'growth_interval=2147483648'),
    (dict(growth_factor=1.), r'growth_factor=1\.0.*take 2\.0'), (dict(growth_factor=.5), r'growth_factor=0\.5'),
    (dict(growth_factor=INF), 'growth_factor=inf'), (dict(growth_factor=NAN), 'growth_factor=nan'),
    (dict(backoff_factor=1.), r'backoff_factor=1\.0.*take 0\.5'), (dict(backoff_factor=2.), r'backoff_factor=2\.0'),
    (dict(backoff_factor=0.), r'backoff_factor=0\.0'), (dict(backoff_factor=-.5), r'backoff_factor=-0\.5'),
    (dict(init_scale=0.), 'loss scale of 0'), (dict(init_scale=-1.), 'loss scale of -1'), (dict(init_scale=NAN), 'loss scale of nan'),
    (dict(init_scale=4., floor=8.), r'floor=8\.0.*init_scale, which is 4'), (dict(floor=0.), r'floor=0\.0'), (dict(floor=NAN), 'floor=nan'),
    (dict(floor='1'), "floor='1'"), (dict(init_scale=4., ceiling=2.), r'ceiling=2\.0.*init_scale, which is 4'), (dict(ceiling=NAN), 'ceiling=nan'),
    (dict(ceiling=INF), 'ceiling=inf'), (dict(on_floor='hope'), "on_floor='hope' is unknown: take one of clamp, raise, warn")])
@pytest.mark.parametrize('make', [DynamicScaler, HysteresisScaler])
def test_what_cannot_work_is_refused_with_its_value_and_a_remedy(make, kw, says):
    with pytest.raises(ValueError, match=says): make(**kw)


@pytest.mark.parametrize('kw, says', [(dict(hysteresis=0), 'hysteresis=0'), (dict(hysteresis=1.5), r'hysteresis=1\.5'),
                                      (dict(refill='daily'), "refill='daily' is unknown: take 'growth' or 'clean'")])
def test_patience_that_cannot_work_is_refused(kw, says):
    with pytest.raises(ValueError, match=says): HysteresisScaler(**kw)


@pytest.mark.parametrize('make', [DynamicScaler, HysteresisScaler])
def test_at_the_floor_it_holds_warns_or_raises(make):
    def at_floor(how): return make(2., floor=2., on_floor=how, **({'hysteresis': 1} if make is HysteresisScaler else {}))
    sc = at_floor('clamp')
    assert not sc.needs_sync and feed(sc, [1]) == [(2., 0)]
    sc = at_floor('warn')
    feed(sc, [0])
    with pytest.warns(UserWarning, match='overflow at a loss scale of 2, which may not fall below 2'): assert feed(sc, [NAN]) == [(2., 0)]
    sc = at_floor('raise')
    feed(sc, [0])
    was = sc.state_dict()
    with pytest.raises(FloatingPointError, match='probably exploding'): sc.update(saw(1))
    assert str(sc.state_dict()) == str(was) and sc.needs_sync


@pytest.mark.parametrize('make', [DynamicScaler, lambda *a, **kw: HysteresisScaler(*a, hysteresis=1, **kw)])
@pytest.mark.parametrize('start, floor', [(1024., 1000.), (4., 3.), (.125, .1), (1.5e-4, 1e-4), (2.**-10, 2.**-10)])
@pytest.mark.parametrize('strict', [False, True])
def test_a_floor_is_reached_before_it_is_minded(make, start, floor, strict):
    "As 'clamp' goes to the floor first, so do the others; also to one that FP32 does not hold"
    sc, quiet = (make(start, floor=floor, on_floor=how, strict=strict) for how in ('raise', 'clamp'))
    if start > floor: assert feed(sc, [1]) == feed(quiet, [1]) == [(np.float32(floor), 0)]
    feed(sc, [0])
    for f in (1, NAN):
        with pytest.raises(FloatingPointError, match='may not fall below'): sc.update(saw(f))
    assert sc.scale == np.float32(floor) and sc.growth_tracker == 1
    again = make(strict=strict)
    again.load_state_dict(sc.state_dict())                              # the floor in FP32 may lie below the number given
    assert again.scale == sc.scale and again.floor == floor


@pytest.mark.parametrize('make', [DynamicScaler, HysteresisScaler])
@pytest.mark.parametrize('how', ['raise', 'warn'])
def test_to_mind_a_floor_there_has_to_be_one(make, how):
    with pytest.raises(ValueError, match=f"on_floor='{how}' needs a floor: give floor=…, or leave strict"): make(strict=True, on_floor=how)
    with pytest.raises(ValueError, match='needs a floor'): make(strict=True, on_floor=how, floor=0.)
    assert make(strict=True, on_floor=how, floor=1.).needs_sync and make(on_floor=how).needs_sync and not make(strict=True).needs_sync


def test_a_warning_at_the_floor_is_shown_once_by_pythons_own_filter():
    for rule, n in (('default', 1), ('always', 3)):
        sc = DynamicScaler(2., floor=2., on_floor='warn')
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter(rule)
            feed(sc, [1, 1, 0, 1])
        assert len(seen) == n


def test_patience_lasts_before_the_floor_is_minded():
    sc = HysteresisScaler(2., floor=2., on_floor='raise')
    assert feed(sc, [1, 0]) == [(2., 0), (2., 1)]
    with pytest.raises(FloatingPointError): sc.update(saw(1))


def test_judge_names_the_parameters_and_nothing_has_moved():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=.1)
    for p in net.parameters(): p.grad = torch.ones_like(p)
    net[0].bias.grad[0], net[1].weight.grad[0] = NAN, INF
    was, sc = copy.deepcopy(net.state_dict()), DynamicScaler(1., floor=1., on_floor='raise')
    with pytest.raises(FloatingPointError, match='Not finite: 0.bias, 1.weight.'): judge(named_gradients(opt, net), sc)
    assert all(same_bits(was[n], p) for n,p in net.state_dict().items()) and not opt.state and sc.scale == 1


# --- patience ---

def test_megatrons_golden_trace():
    for strict in (False, True):
        sc = HysteresisScaler(2.**32, growth_interval=5, floor=1., strict=strict)
        left, scales = [], []
        for c in '100110100000101':
            sc.update(saw(c))
            left.append(sc.hysteresis_tracker.item()); scales.append(int(sc.scale.log2()))
        assert scales == [32, 32, 32, 31, 30, 30, 29, 29, 29, 29, 29, 30, 30, 30, 29]
        assert left == [1, 1, 1, 0, -1, -1, -2, -2, -2, -2, -2, 2, 1, 1, 0]


def patient(found, k, interval, hysteresis, refill):
    "Both kinds, slowly: (log2 scale, tracker, patience left)"
    count, left, out = 0, hysteresis, []
    for f in found:
        bad = f != 0
        if bad:
            count, left = 0, left - 1
            if left <= 0: k -= 1
        else:
            count += 1
            if refill == 'clean': left = hysteresis
            if count == interval:
                k, count = k + 1, 0
                if refill == 'growth': left = hysteresis
        out.append((k, count, left))
    return out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0., 0., 1., NAN]), max_size=80), st.integers(1, 6), st.integers(1, 4), st.sampled_from(['growth', 'clean']),
       st.booleans())
def test_patience_is_a_slow_references(found, interval, hysteresis, refill, strict):
    sc, got = HysteresisScaler(2.**20, growth_interval=interval, hysteresis=hysteresis, refill=refill, strict=strict), []
    want = patient(found, 20, interval, hysteresis, refill)
    for f in found:
        sc.update(saw(f))
        got.append((round(math.log2(sc.scale)), sc.growth_tracker.item(), sc.hysteresis_tracker.item()))
    n = next((i for i,(k,_,_) in enumerate(want) if k < -24), len(want))
    assert got[:n] == want[:n]


def test_without_patience_it_is_the_dynamic_one():
    found = random_found(500, .2, 0)
    for refill in ('growth', 'clean'):
        assert feed(HysteresisScaler(growth_interval=5, hysteresis=1, refill=refill), found) == feed(DynamicScaler(growth_interval=5), found)


def test_the_two_kinds_part_on_single_overflows():
    assert octaves(HysteresisScaler(), '1010101010')[-1] == 12 and octaves(HysteresisScaler(refill='clean'), '1010101010')[-1] == 16


# --- no look from the host ---

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('strict', [False, True])
def test_a_step_is_decided_without_a_look(kind, strict, looks):
    sc, w = KINDS[kind](strict=strict), nn.Parameter(torch.ones(3))
    opt = torch.optim.AdamW([w], fused=True)
    for bad in (False, True, False):
        w.grad = torch.full((3,), NAN if bad else 1.)
        looks.clear()
        take_step(opt, judge(named_gradients(opt), sc))
        assert not looks


@pytest.mark.parametrize('kind', KINDS)
def test_update_makes_a_new_scale(kind):
    sc = KINDS[kind]()
    before = sc.scale
    sc.update(saw(1.))
    assert sc.scale is not before and before == 2.**16                  # the outcome of a step holds the old one


class Slow(HostBound):
    "A device that delivers a copy `lag` looks after it was asked for"
    lag = 3
    def copy(self, scale):
        host, left = scale.clone(), [self.lag]
        def query():
            left[0] -= 1
            return left[0] < 0
        return query, host


@pytest.mark.parametrize('lag', [0, 1, 3, 9])
@pytest.mark.parametrize('strict', [False, True])
def test_what_the_host_knows_is_never_above_the_scale(lag, strict):
    sc = DynamicScaler(growth_interval=3, strict=strict)
    sc._bound = Slow(sc.scale.item())
    sc._bound.lag = lag
    for i,f in enumerate(random_found(500, .4, lag)):
        assert sc.below_one() or sc.scale >= 1, i
        assert sc._bound.value <= sc.scale
        sc.update(saw(f))
        if i == 250: sc.to('cpu')
    if not lag: assert sc.below_one() == (sc.scale.item() < 1)


def test_a_scale_that_somebody_else_changes_is_looked_at_again():
    sc = DynamicScaler()
    assert not sc.below_one()
    sc.scale.fill_(2.**-5)
    assert sc.below_one()
    sc.scale = torch.tensor(4.)
    assert not sc.below_one()
    sc.load_state_dict(sc.state_dict() | dict(scale=torch.tensor(2.**-3)))
    assert sc.below_one()
    assert not copy.deepcopy(StaticScaler()).below_one() and pickle.loads(pickle.dumps(sc)).below_one()


# --- states ---

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('strict', [False, True])
def test_a_state_goes_round_in_the_middle_of_a_trace(kind, strict, tmp_path):
    found = random_found(400, .3, 7)
    a, b = KINDS[kind](growth_interval=3, strict=strict), KINDS[kind](init_scale=8.)
    feed(a, found[:200])
    torch.save(a.state_dict(), tmp_path/'s.pt')
    b.load_state_dict(torch.load(tmp_path/'s.pt', weights_only=True))
    assert feed(a, found[200:]) == feed(b, found[200:]) and all(same_bits(getattr(a, n), getattr(b, n)) for n in a.state_names)
    assert {n: getattr(a, n) for n in a.hyper_names} == {n: getattr(b, n) for n in b.hyper_names} and a.wants == b.wants


@pytest.mark.parametrize('change, says', [
    (dict(version=2), 'version 2, known up to 1'), (dict(growth_interval=0), 'growth_interval=0'), (dict(backoff_factor=-1.), 'backoff_factor'),
    (dict(scale=torch.tensor(NAN)), 'loss scale of nan'), (dict(scale=torch.tensor(0.)), 'loss scale of 0'),
    (dict(scale=torch.tensor([1.])), 'scale is'), (dict(growth_tracker=torch.tensor(1.)), 'growth_tracker is'), (dict(growth_tracker=3), 'growth_tracker is 3'),
    (dict(floor=2.**20), 'floor'), (dict(policy='StaticScaler'), "'StaticScaler', not of 'DynamicScaler'")])
def test_a_state_that_cannot_work_is_refused_and_nothing_changes(change, says):
    sc = DynamicScaler(8., growth_interval=7)
    was = sc.state_dict()
    with pytest.raises(ValueError, match=says): sc.load_state_dict(DynamicScaler().state_dict() | change)
    assert str(sc.state_dict()) == str(was)
    for key in was:
        with pytest.raises(ValueError, match=key if key != 'policy' else 'no policy|lacks'):
            sc.load_state_dict({k: v for k,v in was.items() if k != key})


def test_torchs_state_is_understood_and_an_incomplete_one_named():
    theirs = torch.amp.GradScaler('cpu', init_scale=2.**10, growth_factor=4., backoff_factor=.25, growth_interval=9)
    theirs.scale(torch.ones(())); theirs._growth_tracker.fill_(5)
    for strict in (False, True):
        sc = DynamicScaler(strict=strict)
        sc.load_state_dict(theirs.state_dict())
        assert (sc.scale, sc.growth_tracker, sc.growth_factor, sc.backoff_factor, sc.growth_interval, sc.strict) == (2.**10, 5, 4., .25, 9, strict)
    state = theirs.state_dict()
    for key in state:
        with pytest.raises(ValueError, match=f'lacks {key}'): sc.load_state_dict({k: v for k,v in state.items() if k != key})
    with pytest.raises(ValueError, match='no policy of ours'): sc.load_state_dict(torch.amp.GradScaler('cpu', enabled=False).state_dict())
    with pytest.raises(ValueError, match='scale of 0 cannot work'): DynamicScaler().load_state_dict(state | dict(scale=0.))
    sc.load_state_dict(state | dict(scale=0.))                          # strict follows torch there
    assert sc.scale == 0
    sc = DynamicScaler()
    sc.load_state_dict(state | dict(_growth_tracker=50))
    assert feed(sc, [0]) == [(2.**12, 0)]
    with pytest.raises(ValueError, match='growth_tracker, hysteresis_tracker too.*torch.amp.GradScaler lacks: start with init_scale=1024.0'):
        HysteresisScaler().load_state_dict(state)
    with pytest.raises(ValueError, match='lacks: start with an init_scale'): HysteresisScaler().load_state_dict(state | dict(scale=0.))


def test_megatrons_state_is_understood_and_an_incomplete_one_named():
    state, sc = dict(scale=torch.tensor([2.**20]), growth_tracker=3, hysteresis_tracker=-1), HysteresisScaler(2.**32, growth_interval=4, floor=1.)
    sc.load_state_dict(state)
    assert (sc.scale, sc.growth_tracker, sc.hysteresis_tracker, sc.growth_interval, sc.floor) == (2.**20, 3, -1, 4, 1.) and sc.scale.shape == ()
    assert feed(sc, [1, 0]) == [(2.**19, 0), (2.**19, 1)]               # no patience left
    with pytest.raises(ValueError, match='hysteresis_tracker too.*another library lacks: start with init_scale=4.0'): sc.load_state_dict(dict(scale=torch.tensor([4.])))
    with pytest.raises(ValueError, match='with patience: load it into a HysteresisScaler'): DynamicScaler().load_state_dict(state)


# --- a training ---

@pytest.mark.parametrize('kind', KINDS)
def test_a_net_trains_from_a_scale_far_too_high(kind):
    torch.manual_seed(0)
    net, sc = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), KINDS[kind](init_scale=2.**40)
    opt, step = torch.optim.SGD(net.parameters(), lr=.5), MixedStep(sc)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    runs = [step(net, x, y, opt, F.cross_entropy) for _ in range(120)]
    skipped = [bool(r['skipped']) for r in runs]
    assert 15 < sum(skipped) < 40 and not any(skipped[60:]) and runs[-1]['loss'] < .8*runs[0]['loss'] and sc.scale < 2.**25


def test_a_state_that_changes_what_was_asked_for_says_so():
    "Somebody resumes with a floor; the file, written without one, brings its own, as torch's does, and is heard"
    new = DynamicScaler(floor=2.**10)
    with pytest.warns(UserWarning, match=r'DynamicScaler goes on with what the state says: floor=.* \(here: 1024'):
        new.load_state_dict(DynamicScaler().state_dict())
    assert new.floor == 2.**-24
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        DynamicScaler().load_state_dict(DynamicScaler(2.**10).state_dict())
