"""One contract for every policy; golden traces of the originals; each scaler is its rule; LogMax' formulas; names."""
import math, random
from types import SimpleNamespace

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from mpcourse.dynamic import DynamicScaler
from mpcourse.formats import same_bits
from mpcourse.policies import PEERS, POLICIES, RULES, LogMaxScaler, follow_rule, get_policy, logmax_rule, megatron_scaler
from mpcourse.scaler import LossScaler, StaticScaler
from mpcourse.step import MixedStep, StepOutcome

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan
every = pytest.mark.parametrize('name', POLICIES)
ruled = pytest.mark.parametrize('name', [n for n in RULES if n != 'logmax'])


def saw(found, amax=None, finite=1.):
    "Statistics for any scaler: what it does not want it does not look at"
    amax = INF if amax is None and found else 2.**10 if amax is None else amax
    return dict(found_inf=torch.tensor(float(found)), amax=torch.tensor(float(amax)), loss_finite=torch.tensor(finite))


def scales(scaler, trace):
    out = []
    for c in trace:
        scaler.update(saw(float(c)))
        out.append(scaler.scale.item())
    return out


def octaves(scaler, trace): return [round(math.log2(s)) for s in scales(scaler, trace)]


def random_found(n, rate, seed):
    rng = random.Random(seed)
    return [0. if rng.random() > rate else rng.choice([1., NAN]) for _ in range(n)]


def buffers(s): return dict(s.named_buffers())


# --- the contract ---

def test_no_class_escapes_the_contract():
    def below(cls): return {c for s in cls.__subclasses__() for c in (s, *below(s))}
    ours = {c for c in below(LossScaler) if c.__module__ in ('mpcourse.scaler', 'mpcourse.dynamic', 'mpcourse.policies')}
    assert ours == {type(get_policy(n)) for n in POLICIES} and {*RULES, 'static', 'dynamic'} == {*POLICIES}


def test_a_state_carries_its_numbers():
    "Peers that differ in numbers only are one class: who loads the state of the Apex kernel goes on as it"
    a, b, found = get_policy('apex_hysteresis', growth_interval=5), get_policy('megatron'), random_found(300, .2, 2)
    b.load_state_dict(a.state_dict())
    assert scales(a, found) == scales(b, found) != scales(get_policy('megatron', init_scale=2.**16), found)


@every
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name):
    sc = get_policy(name)
    scales(sc, '0101')
    good, was = sc.state_dict(), str(sc.state_dict())
    bad = [{k: v for k, v in good.items() if k != key} for key in good]
    bad += [good | dict(scale=torch.tensor(NAN)), good | dict(scale=torch.tensor([1.])), good | dict(more=torch.tensor(1.)), {}]
    bad += [(DynamicScaler if name == 'static' else StaticScaler)().state_dict()]
    for state in bad:
        with pytest.raises(ValueError): sc.load_state_dict(state)
        assert str(sc.state_dict()) == was


@every
def test_held_steps_move_a_policy_of_ours_and_no_published_one_stays(name):
    sc = get_policy(name, init_scale=2.**10)
    for _ in range(20): sc.update(saw(1., finite=0.))
    assert sc.skip_nonfinite_loss == (name in ('static', 'dynamic')) and (sc.scale == 2.**10) == sc.skip_nonfinite_loss
    held = get_policy(name, init_scale=2.**10, skip_nonfinite_loss=True)
    before = {n: b.clone() for n, b in buffers(held).items()}
    for _ in range(20): held.update(saw(1., finite=0.))
    assert held.held == 20 and all(same_bits(v, before[n]) for n, v in buffers(held).items() if n != 'held')


@every
def test_it_trains_in_a_mixed_step(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    opt, step = torch.optim.SGD(net.parameters(), lr=.5), MixedStep(get_policy(name))
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    runs = [step(net, x, y, opt, F.cross_entropy) for _ in range(80)]
    assert runs[-1]['loss'] < .85*runs[0]['loss'] and not runs[-1]['skipped'] and all(p.isfinite().all() for p in net.parameters())


def test_at_the_floor_a_scale_stays_and_a_warning_says_it():
    sc = get_policy('deepspeed', init_scale=2., hysteresis=1)
    assert octaves(sc, '1111') == [0]*4
    with pytest.warns(UserWarning, match='floor of 1'):
        StepOutcome(torch.tensor(1.), sc.scale, sc.scale, sc.held, torch.tensor(0), 49, sc.min_scale).warn()


# --- golden traces, of the originals' own code ---

def both(name, trace, want, **numbers):
    start = dict(scale=2.**want.pop('start'))
    assert [math.log2(s) for s in follow_rule(name, trace, start, **numbers)] == want['log2']
    numbers = {dict(interval='growth_interval').get(k, k): v for k, v in numbers.items()}
    assert octaves(get_policy(name, init_scale=start['scale'], **numbers), trace) == want['log2']


def test_golden_megatron():
    both('megatron', '100110100000101', dict(start=32, log2=[32, 32, 32, 31, 30, 30, 29, 29, 29, 29, 29, 30, 30, 30, 29]), interval=5)


def test_golden_deepspeed():
    both('deepspeed', '1001101000000101', dict(start=16, log2=[16, 16, 16, 15, 14, 14, 13, 13, 13, 13, 13, 13, 14, 14, 14, 13]), interval=5)


def test_golden_fairseq():
    both('fairseq', '100000000100000', dict(start=15, log2=[14, 14, 14, 14, 15, 15, 15, 15, 16, 15, 15, 15, 15, 16, 16]), interval=4)
    s = SimpleNamespace(**RULES['fairseq'][1] | dict(scale=1.))
    RULES['fairseq'][0](s, True, smallest=.25)
    with pytest.raises(FloatingPointError): RULES['fairseq'][0](s, True, smallest=.25)
    assert s.scale == .5 and scales(get_policy('fairseq', init_scale=1., min_scale=.25), '111') == [.5]*3


def test_golden_metaseq_reaches_its_minimum():
    both('metaseq', '1'*9, dict(start=2, log2=[1, 0, -1, -2, -3, -4, -5, -5, -5]))


def test_golden_torch(): both('torch', '0000100000', dict(start=1, log2=[1, 1, 2, 2, 1, 1, 1, 2, 2, 2]), interval=3)
def test_golden_fastai(): both('fastai', '1001010010', dict(start=24, log2=[23, 23, 23, 22, 23, 22, 22, 22, 21, 22]), interval=3)


def test_golden_story_of_ten_bad_batches():
    day = [0]*300 + [1]*10 + [0]*300
    for name, k in dict(torch=6, megatron=7, apex_hysteresis=7, fastai=7, fairseq=6, metaseq=16).items():
        assert follow_rule(name, day, dict(scale=2.**16))[-1] == 2.**k == scales(get_policy(name, init_scale=2.**16), day)[-1], name
    assert follow_rule('metaseq', day[300:], dict(scale=2.**16))[-1] == 2.**15 and follow_rule('fastai', day[300:], dict(scale=2.**16))[-1] == 2.**6


def test_golden_two_hundred_random_overflows():
    "A Python float knows a scale that FP32 has long lost"
    assert follow_rule('fastai', '1'*200 + '0'*500, dict(scale=2.**16), interval=5)[199] == 2.**-184


@pytest.mark.parametrize('overflow_as, low, steps', [(2.**16, 1, 16507), (16., 2.**13, 467)])
def test_golden_logmax_recovery(overflow_as, low, steps):
    s, noise = SimpleNamespace(**RULES['logmax'][1]), random.Random(0)
    def step(): return logmax_rule(s, False, 2.**noise.gauss(-1, 1)*s.scale, overflow_as)
    for _ in range(3000): before = step()
    after, n = logmax_rule(s, True, overflow_as=overflow_as), 0
    while step() < .9*before: n += 1
    assert (after == 1 if low == 1 else after > low) and abs(n + 1 - steps) <= 5


# --- a scaler is its rule ---

@ruled
@settings(max_examples=40, deadline=None)
@given(found=st.lists(st.sampled_from([0., 0., 0., 1., NAN]), max_size=80), window=st.integers(1, 6), k=st.integers(0, 14))
def test_a_scaler_is_its_rule(name, found, window, k):
    own = {} if name == 'metaseq' else dict(interval=window)
    sc = get_policy(name, init_scale=2.**k, **{f'growth_{n}': w for n, w in own.items()})
    rule, start = RULES[name]
    s = SimpleNamespace(**start | dict(scale=2.**k))
    for f, ours in zip(found, scales(sc, found)):
        try: theirs = rule(s, f != 0, **own)
        except FloatingPointError: return
        if not 2.**-126 <= theirs <= 2.**127: return
        assert theirs == ours


@pytest.mark.parametrize('name, mine, theirs', [('deepspeed', dict(consecutive=True), dict(consecutive=True)), ('deepspeed', dict(hysteresis=1), dict(hysteresis=1)),
                                                ('fairseq', dict(tolerance=.3), dict(tolerance=.3)), ('megatron', dict(hysteresis=4), dict(hysteresis=4)),
                                                ('apex_hysteresis', dict(hysteresis=4), dict(hysteresis=4))])
def test_other_numbers_too(name, mine, theirs):
    found, rule, s = random_found(1500, .12, 3), RULES[name][0], SimpleNamespace(**RULES[name][1] | dict(scale=2.**30))
    if 'hysteresis' in mine: s.patience = mine['hysteresis']
    got = scales(get_policy(name, init_scale=2.**30, growth_interval=5, **mine), found)
    want = []
    for f in found:
        try: want.append(rule(s, f != 0, interval=5, **theirs))
        except FloatingPointError: break
        if not 2.**-126 <= want[-1] <= 2.**127: break
    assert len(want) > 50 and got[:len(want) - 1] == want[:-1] and len(set(want)) > 3


# --- LogMax ---

@pytest.mark.parametrize('overflow_as', [16., 2.**16])
def test_logmax_is_its_formulas(overflow_as):
    rng = np.random.default_rng(0)
    xs = [float(rng.normal(3, 2)) if rng.random() > .01 else INF for _ in range(1500)]
    sc, s = LogMaxScaler(overflow_as=overflow_as), SimpleNamespace(**RULES['logmax'][1])
    for x in xs:
        bad = not math.isfinite(x)
        sc.update(saw(bad, INF if bad else 2.**x*sc.scale.item()))
        want = logmax_rule(s, bad, None if bad else 2.**x*s.scale, overflow_as)
        assert sc.scale.item() == pytest.approx(want, rel=.02)
    assert len({round(math.log2(want)), round(sc.scale.log2().item())}) == 1


def test_gradients_that_are_all_zero_say_nothing():
    sc = LogMaxScaler()
    scales(sc, '000')
    was = {n: b.clone() for n, b in buffers(sc).items()}
    sc.update(saw(0, 0.))
    assert all(same_bits(b, was[n]) for n, b in buffers(sc).items())
    first = LogMaxScaler()
    first.update(saw(0, 0.))
    assert first.scale == 1


# --- names and choice ---

@pytest.mark.parametrize('kw, scale', [(dict(), None), (dict(bf16=True), None), (dict(loss_scale=8.), None), (dict(fp16=True), 2.**32),
                                       (dict(fp16=True, loss_scale=8.), 8), (dict(bf16=True, loss_scale=8.), 8)])
def test_megatrons_rule_of_selection(kw, scale):
    got = megatron_scaler(**kw)
    assert got is None if scale is None else got.scale == scale and isinstance(got, StaticScaler) == ('loss_scale' in kw)


def test_megatrons_argument_names_and_defaults():
    sc = megatron_scaler(fp16=True)
    assert (sc.init_scale, sc.min_scale, sc.growth_interval, sc.hysteresis, sc.growth_factor, sc.backoff_factor) == (2.**32, 1., 1000, 2, 2., .5)
    sc = megatron_scaler(fp16=True, initial_loss_scale=2.**20, min_loss_scale=4., loss_scale_window=7, hysteresis=3)
    assert (sc.init_scale, sc.min_scale, sc.growth_interval, sc.hysteresis) == (2.**20, 4., 7, 3)
    with pytest.raises(ValueError): megatron_scaler(fp16=True, bf16=True)


@pytest.mark.parametrize('name, kw, value', [('sgd', {}, "'sgd'"), (None, {}, 'None'), ([1], {}, r'\[1\]'), ('logmax', dict(hysteresis=1), 'hysteresis'),
                                             ('fairseq', dict(tolerance=2.), '2.0'), ('deepspeed', dict(hysteresis=0), '0'), ('logmax', dict(beta1=1.), '1.0'),
                                             ('backoff', dict(growth_interval=0), '0'), ('static', dict(init_scale=0.), '0')])
def test_what_there_is_not_or_cannot_work_is_refused_with_its_value(name, kw, value):
    with pytest.raises(ValueError, match=value): get_policy(name, **kw)


def test_a_policy_by_name_and_as_it_is():
    sc = get_policy('metaseq', init_scale=8.)
    assert get_policy(sc) is sc and sc.scale == 8
    with pytest.raises(ValueError): get_policy(sc, init_scale=4.)


def test_peers_are_rows_of_data_with_the_published_defaults():
    starts = {n: math.log2(get_policy(n).init_scale) for n in RULES}
    assert starts == dict(torch=16, fastai=24, apex_amp=16, apex_legacy=32, apex_hysteresis=16, megatron=32, backoff=14,
                          deepspeed=16, fairseq=15, metaseq=2, logmax=0)
    assert starts == {n: math.log2(start['scale']) for n, (_, start) in RULES.items()}
    assert all(type(get_policy(n)) is DynamicScaler for n in PEERS)


def test_a_scaler_that_exists_already_takes_no_arguments():
    scaler = get_policy('dynamic')
    assert get_policy(scaler) is scaler
    with pytest.raises(ValueError, match='exists already.*growth_interval'): get_policy(scaler, growth_interval=5)
    assert scaler.growth_interval == 2000
