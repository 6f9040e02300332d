"""One contract for every scaler class; golden traces of the originals; slow references on random traces; states; the table."""
import copy, math, pickle, random, warnings

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from conftest import LOOKING
from hypothesis import given, settings, strategies as st

from mpcourse.dynamic import DynamicScaler, HysteresisScaler
from mpcourse.formats import same_bits
from mpcourse.policies import (OWN_POLICIES, POLICIES, ApexAmpScaler, ApexHysteresisScaler, ApexLegacyScaler, BackoffScaler, DeepSpeedScaler,
                               ExactScaler, FairseqScaler, FastaiScaler, LogMaxScaler, MegatronScaler, MetaseqScaler, TorchScaler,
                               check_own_policy, get_policy, megatron_scaler, policy_table)
from mpcourse.scaler1 import CEILING, FLOOR, LossScaler, Observation, StaticScaler, reduce
from mpcourse.step1 import MixedStep, judge, named_gradients, take_step, unscale_

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan
ALL = {**POLICIES, **OWN_POLICIES}
QUIET = dict(deepspeed=dict(on_floor='clamp'), fairseq=dict(on_floor='clamp'))
MAKES = {n: (lambda n=n, **kw: get_policy(n, **{**QUIET.get(n, {}), **kw})) for n in ALL}
every = pytest.mark.parametrize('name', ALL)


def saw(found, amax=None):
    "An observation for any scaler: what it does not want it does not look at"
    amax = float(found)*INF if amax is None and found else 2.**10 if amax is None else amax
    return Observation(('found_inf', 'found_after', 'amax'), torch.tensor([float(found), 0., amax]))


def octaves(scaler, trace):
    out = []
    for c in trace:
        scaler.update(saw(float(c)))
        out.append(math.log2(scaler.scale))
    return out


def state_of(scaler): return {n: getattr(scaler, n) for n in scaler.state_names}


def random_found(n, rate, seed):
    rng = np.random.default_rng(seed)
    return [0. if x > rate else float(rng.choice([1., NAN, 3.])) for x in rng.random(n)]


# --- the contract ---

def test_no_class_escapes_the_contract():
    def below(cls): return {c for s in cls.__subclasses__() for c in (s, *below(s))}
    ours = {c for c in below(LossScaler) if c.__module__ in ('mpcourse.scaler1', 'mpcourse.dynamic', 'mpcourse.policies')}
    assert ours - {ExactScaler} == set(ALL.values())


@every
def test_the_scale_is_a_0_dim_float32_within_its_bounds(name):
    for rate in (.02, .9):
        sc = MAKES[name]()
        for f in random_found(400, rate, 1):
            sc.update(saw(f))
            assert sc.scale.shape == () and sc.scale.dtype == torch.float32 and not sc.scale.requires_grad
            assert max(FLOOR, sc.bounds[0]) <= sc.scale <= min(CEILING, sc.bounds[1]) and sc.lowest <= sc.scale
            assert sc.inv_scale().isfinite() and sc.inv_scale() > 0


@every
def test_a_storm_and_a_calm_leave_nothing_broken(name):
    sc = MAKES[name]()
    for _ in range(10**4): sc.update(saw(NAN))
    assert all(t.isfinite() for t in state_of(sc).values()) and FLOOR <= sc.scale <= CEILING
    sc = get_policy(name, **({'growth_interval': 1} if hasattr(sc, 'growth_interval') else {}))
    for _ in range(400): sc.update(saw(0))
    assert all(t.isfinite() for t in state_of(sc).values()) and FLOOR <= sc.scale <= CEILING




@every
@pytest.mark.parametrize('strict', [False, True])
def test_update_is_tensors_only_unless_it_says_otherwise(name, strict, monkeypatch):
    sc = MAKES[name](**({'strict': strict} if name != 'static' else {}))
    before, old = sc.scale, sc.scale.clone()
    seen = []
    for n in LOOKING: monkeypatch.setattr(torch.Tensor, n, lambda *a, n=n, **k: seen.append(n) or 1/0)
    for f in (1., 0., NAN): sc.update(saw(f))
    monkeypatch.undo()
    assert not seen and not sc.needs_sync and same_bits(before, old)    # and the scale of the step that was is still there
    if name in QUIET or name == 'dynamic': assert get_policy(name, on_floor='raise').needs_sync


@every
@pytest.mark.parametrize('strict', [False, True])
def test_a_state_goes_round_mid_trace_bit_for_bit(name, strict, tmp_path):
    kw = {'strict': strict} if name != 'static' else {}
    if 'growth_interval' in vars(MAKES[name]()): kw |= dict(growth_interval=3)
    a, b = MAKES[name](**kw), MAKES[name]()
    found = random_found(240, .15, 5)
    for f in found[:120]: a.update(saw(f))
    torch.save(a.state_dict(), tmp_path/'s.pt')
    b.load_state_dict(torch.load(tmp_path/'s.pt', weights_only=True))
    c = copy.deepcopy(a); d = pickle.loads(pickle.dumps(a))
    for f in found[120:]:
        for sc in (a, b, c, d): sc.update(saw(f))
        for sc in (b, c, d): assert all(same_bits(x, y) for x,y in zip(state_of(a).values(), state_of(sc).values()))
    for n in a.hyper_names: assert str(getattr(a, n)) == str(getattr(b, n))
    assert a.wants == b.wants and a.needs_sync == b.needs_sync and a.bounds == b.bounds


@every
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name):
    sc = MAKES[name]()
    octaves(sc, '0101')
    good, was = sc.state_dict(), str(sc.state_dict())
    bad = [{k: v for k,v in good.items() if k != key} for key in good]
    bad += [good | dict(version=99), good | dict(policy='Nobody'), good | dict(scale=torch.tensor(NAN)), good | dict(scale=torch.tensor([1.])), {}]
    bad += [good | {n: 3.} for n in sc.state_names] + [good | {n: good[n].double() if good[n].dtype != torch.float64 else good[n].half()}
                                                       for n in sc.state_names]
    bad += [StaticScaler().state_dict() if name != 'static' else DynamicScaler().state_dict()]
    for state in bad:
        with pytest.raises(ValueError): sc.load_state_dict(state)
        assert str(sc.state_dict()) == was
    for key in sc.state_names: assert good[key] is not getattr(sc, key)


@every
def test_it_moves_with_all_its_state(name):
    sc = MAKES[name]()
    octaves(sc, '01')
    assert sc.to('cpu') is sc
    if not sc.to('meta').scale.is_meta: raise AssertionError
    assert all(t.is_meta for t in state_of(sc).values())


@every
@pytest.mark.parametrize('strict', [False, True])
def test_no_weight_becomes_nan_after_200_bad_steps(name, strict):
    sc = MAKES[name](**({'strict': strict} if name != 'static' else {}))
    w = nn.Parameter(torch.ones(3))
    opt = torch.optim.AdamW([w], lr=.1)
    def step(g):
        w.grad = torch.full((3,), float(g))*sc.scale
        out = judge(named_gradients(opt), sc)
        take_step(opt, out)
        assert w.isfinite().all() and out.stepped == bool(w.grad.isfinite().all()), (name, g)
        return out
    for _ in range(200): assert not step(NAN).stepped
    assert w.tolist() == [1.]*3 and not opt.state
    for g in (1., 0., -1e-30, 3e38, INF, 1.): step(g)
    last = [step(1.).stepped for _ in range(3)][-1]
    assert last or strict                                               # strict may stay at 0, and refuses


@every
def test_it_trains_in_a_mixed_step(name):
    torch.manual_seed(0)
    net, sc = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), MAKES[name]()
    opt, step = torch.optim.SGD(net.parameters(), lr=.5), MixedStep(sc)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    runs = [step(net, x, y, opt, F.cross_entropy) for _ in range(80)]
    assert runs[-1]['loss'] < .85*runs[0]['loss'] and not runs[-1]['skipped'] and all(p.isfinite().all() for p in net.parameters())


@every
def test_it_trains_a_learner(name):
    from fastai.basics import Learner, SGD
    from mpcourse.callback import quiet_fit, tensor_dls
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    learn = Learner(tensor_dls((x, y), (x, y), 16), net, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, lr=.3).to_mixed(MAKES[name]())
    before = learn.loss_func(net(x), y).item()
    quiet_fit(learn, 12)
    assert learn.loss_func(learn.model(x), y).item() < .95*before and {p.dtype for p in learn.model.parameters()} == {torch.float32}


@every
def test_another_scale_can_be_set(name):
    sc = MAKES[name]()
    target = 2.**5 if name != 'logmax' else 2.**3
    sc.set_scale(target)
    octaves(sc, '0')
    assert sc.scale == target or name == 'logmax'
    for s in (0., NAN, INF, 2.**-30):
        with pytest.raises(ValueError, match='loss scale of'): sc.set_scale(s)


@pytest.mark.parametrize('name', [n for n in ALL if 'exact' in ALL[n].state_names])
@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize('to', [2.**8, 2.**3, 100.])
def test_a_scale_that_somebody_else_writes_is_the_peers_number_too(name, strict, to):
    "In place as GradScaler.update(new_scale) does, a new tensor, or in a state: it goes on as after set_scale"
    from mpcourse.gradscaler import GradScaler
    a, b, c, d, e = (MAKES[name](init_scale=2.**12, growth_interval=3, strict=strict) for _ in range(5))
    for sc in (a, b, c, d, e): octaves(sc, '0010')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        a.set_scale(to)
        b.scale.fill_(to)
        c.scale = torch.tensor(to)
        d.load_state_dict(d.state_dict() | dict(scale=torch.tensor(to)))
        front = GradScaler(policy=e, device='cpu')
        front.scale(torch.ones(())); front.update(to)
        assert e.scale == to
    for i,f in enumerate(random_found(60, .2, 3)):
        for sc in (a, b, c, d, e): sc.update(saw(f))
        for sc in (b, c, d, e): assert all(same_bits(x, y) for x,y in zip(state_of(a).values(), state_of(sc).values())), i
    assert a.exact.float() == a.scale


@pytest.mark.parametrize('name', [n for n in ALL if 'exact' in ALL[n].state_names])
def test_only_another_scale_moves_the_peers_number(name):
    "Below FP32 and beyond it the scale is 0 or infinite, and no rounded scale takes digits from the peer's number"
    sc = MAKES[name](factor=3., growth_interval=4, strict=True)
    for f in random_found(300, .3, 4):
        sc.update(saw(f))
        was = sc.exact
        sc.catch_up()
        assert same_bits(sc.exact, was)
    if name in ('fastai', 'apex_amp'):
        for x in (2.**-184, 2.**-140, 2.**200):
            sc.exact = torch.tensor(x, dtype=torch.float64); sc.move(sc.exact.float())
            sc.catch_up()
            assert sc.exact == x


@every
def test_every_class_says_where_it_comes_from_and_what_its_defaults_are(name):
    doc = ALL[name].__doc__
    assert name in OWN_POLICIES or ('Source:' in doc and ('Defaults' in doc or 'no defaults' in doc))


# --- golden traces, of the originals' own code ---

def test_golden_megatron():
    for strict in (False, True):
        sc, left = MegatronScaler(growth_interval=5, strict=strict), []
        want = [32, 32, 32, 31, 30, 30, 29, 29, 29, 29, 29, 30, 30, 30, 29]
        for c,k in zip('100110100000101', want):
            assert octaves(sc, c) == [k]
            left.append(sc.hysteresis_tracker.item())
        assert left == [1, 1, 1, 0, -1, -1, -2, -2, -2, -2, -2, 2, 1, 1, 0]


def test_golden_deepspeed():
    for strict in (False, True):
        sc = DeepSpeedScaler(growth_interval=5, strict=strict)
        assert octaves(sc, '1001101000000101') == [16, 16, 16, 15, 14, 14, 13, 13, 13, 13, 13, 13, 14, 14, 14, 13]


def test_golden_fairseq():
    for strict in (False, True):
        sc = FairseqScaler(growth_interval=4, strict=strict)
        assert octaves(sc, '100000000100000') == [14, 14, 14, 14, 15, 15, 15, 15, 16, 15, 15, 15, 15, 16, 16]
        sc = FairseqScaler(1., floor=.25, strict=strict)
        sc.update(saw(NAN))
        was = str(sc.state_dict())
        with pytest.raises(FloatingPointError, match='probably exploding'): sc.update(saw(NAN))
        assert sc.scale == .5 and str(sc.state_dict()) == was


def test_golden_torch():
    for strict in (False, True):
        sc, got = TorchScaler(2., growth_interval=3, strict=strict), []
        for f in (0, 0, 0, 0, 1, 0, 0, 0, 0, 0):
            sc.update(saw(f))
            got.append((sc.scale.item(), sc.growth_tracker.item()))
        assert got == [(2, 1), (2, 2), (4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]


def test_golden_fastai():
    for strict in (False, True):
        assert octaves(FastaiScaler(growth_interval=3, strict=strict), '1001010010') == [23, 23, 23, 22, 23, 22, 22, 22, 21, 22]


def test_golden_story_of_ten_bad_batches():
    want = dict(torch=6, megatron=7, apex_hysteresis=7, fastai=7, fairseq=6, metaseq=16)
    for name,k in want.items():
        assert octaves(MAKES[name](init_scale=2.**16, strict=True), [0]*300 + [1]*10 + [0]*300)[-1] == k, name
    assert octaves(MAKES['metaseq'](init_scale=2.**16, strict=True), [1]*10 + [0]*300)[-1] == 15
    assert octaves(MAKES['fastai'](init_scale=2.**16, strict=True), [1]*10 + [0]*300)[-1] == 6


def test_golden_logmax_recovery():
    def steps(mistake):
        sc, noise, before = LogMaxScaler(published_mistake=mistake), random.Random(0), None
        def step(): sc.update(saw(0, 2.**noise.gauss(-1, 1)*sc.scale.item()))
        for _ in range(3000): step()
        before, n = sc.scale.item(), 0
        sc.update(saw(1))
        low = sc.scale.item()
        while sc.scale < .9*before and n < 20000: step(); n += 1
        return low, n
    low, n = steps(True)
    assert low == 1 and abs(n - 16507) <= 5
    low, n = steps(False)
    assert low > 2**13 and abs(n - 467) <= 5


# --- slow references, one step at a time, in numbers of Python's ---

class Ref:
    "scale and counters of a peer, as plain numbers; each kind is a rule for `bad` and one for `good`"
    def __init__(self, kind, scale, window, floor=0., ceiling=INF, hysteresis=2, tolerance=0.):
        self.kind, self.s, self.w, self.floor, self.ceiling, self.h, self.tol = kind, scale, window, floor, ceiling, hysteresis, tolerance
        self.good, self.left, self.i, self.last_bad, self.last_move, self.bads = 0, hysteresis, 0, -1, -1, 0

    def down(self): self.s = max(self.s/2, self.floor)
    def up(self): self.s = min(self.s*2, self.ceiling)

    def fastai(self, bad):
        if bad: return self.down()
        self.good += 1
        if self.good == self.w: self.good = 0; self.up()

    def streak(self, bad):                                              # apex.amp
        if bad: self.good = 0; return self.down()
        self.good += 1
        if self.good == self.w: self.good = 0; self.up()

    def modulo(self, bad):                                              # apex.fp16_utils, OpenSeq2Seq Backoff
        if bad: self.down(); self.last_bad = self.i
        elif (self.i - self.last_bad) % self.w == 0: self.up()
        self.i += 1

    def deepspeed(self, bad):
        if bad:
            if self.left == 1: self.down()
            else: self.left -= 1
            self.last_bad = self.i
        else:
            calm = self.i - self.last_bad - 1
            if calm > 0 and calm % self.w == 0: self.left = self.h; self.up()
        self.i += 1

    def deepspeed_consecutive(self, bad):
        if not bad: self.left = self.h
        self.deepspeed(bad)

    def share(self, bad, moving=False):                                 # fairseq; with a moving window metaseq
        if bad:
            self.last_bad, self.bads = self.i, self.bads + 1
            if self.bads/(self.i - self.last_move) >= self.tol:
                old, self.s = self.s, self.s/2
                if moving: self.w = max(int(self.w/2), 1)
                self.last_move, self.bads = self.i, 0
                if (self.s < self.floor) if moving else (self.s <= self.floor): self.s = old
        elif (self.i - self.last_bad) % self.w == 0:
            self.s, self.last_move = self.s*2, self.i
            if moving: self.w *= 2
        self.i += 1

    def metaseq(self, bad): self.share(bad, moving=True)

    def step(self, f):
        getattr(self, self.kind)(f != 0)
        return self.s


REFS = dict(
    fastai=(FastaiScaler, 'fastai', dict(init_scale=2.**16), {}),
    apex_amp=(ApexAmpScaler, 'streak', dict(init_scale=2.**16), dict(ceiling=2.**24)),
    apex_legacy=(ApexLegacyScaler, 'modulo', dict(init_scale=2.**16), dict(floor=1.)),
    backoff=(BackoffScaler, 'modulo', dict(init_scale=2.**14), dict(floor=1., ceiling=2.**14)),
    deepspeed=(DeepSpeedScaler, 'deepspeed', dict(init_scale=2.**16, on_floor='clamp'), dict(floor=1.)),
    deepspeed3=(DeepSpeedScaler, 'deepspeed', dict(init_scale=2.**16, on_floor='clamp', hysteresis=3), dict(floor=1., hysteresis=3)),
    deepspeed1=(DeepSpeedScaler, 'deepspeed', dict(init_scale=2.**16, on_floor='clamp', hysteresis=1), dict(floor=1., hysteresis=1)),
    consecutive=(DeepSpeedScaler, 'deepspeed_consecutive', dict(init_scale=2.**16, on_floor='clamp', consecutive=True), dict(floor=1.)),
    fairseq=(FairseqScaler, 'share', dict(init_scale=2.**16, on_floor='clamp'), dict(floor=1e-4)),
    tolerant=(FairseqScaler, 'share', dict(init_scale=2.**16, on_floor='clamp', tolerance=.3), dict(floor=1e-4, tolerance=.3)),
    metaseq=(MetaseqScaler, 'metaseq', dict(init_scale=2.**16), dict(floor=2.**-5)))


def f32(x):
    with np.errstate(over='ignore'): return float(np.float32(x))


@pytest.mark.parametrize('name', REFS)
@pytest.mark.parametrize('window, rate', [(1, .3), (3, .2), (5, .6), (20, .05), (200, .01)])
def test_random_traces_are_the_slow_references_in_strict(name, window, rate):
    cls, kind, ours, theirs = REFS[name]
    sc, ref = cls(**ours, growth_interval=window, strict=True), Ref(kind, ours['init_scale'], window, **theirs)
    for i,f in enumerate(random_found(2000, rate, window)):
        sc.update(saw(f))
        want = ref.step(f)
        if not want < 2.**1000: break                                   # a Python float ends there too
        assert sc.exact.item() == want and sc.scale.item() == f32(want), (i, f)
    assert i > 100


@pytest.mark.parametrize('name', REFS)
@settings(max_examples=25, deadline=None)
@given(found=st.lists(st.sampled_from([0., 0., 0., 1., NAN]), max_size=60), window=st.integers(1, 6), k=st.integers(0, 14))
def test_without_strict_it_is_the_same_within_our_bounds(name, found, window, k):
    cls, kind, ours, theirs = REFS[name]
    ours = ours | dict(init_scale=2.**k)
    a, b = cls(**ours, growth_interval=window), cls(**ours, growth_interval=window, strict=True)
    for f in found:
        for sc in (a, b): sc.update(saw(f))
        if not FLOOR < b.exact < CEILING: break
        assert a.exact == b.exact


@pytest.mark.parametrize('hysteresis, interval', [(1, 3), (2, 5), (4, 7)])
def test_megatron_and_the_apex_kernel_on_random_traces(hysteresis, interval):
    kw = dict(init_scale=2.**20, growth_interval=interval, hysteresis=hysteresis, strict=True)
    for cls in (MegatronScaler, ApexHysteresisScaler):
        sc, s, good, left = cls(**kw), np.float32(2.**20), 0, hysteresis
        for f in random_found(1200, .12, hysteresis):
            sc.update(saw(f))
            if cls is MegatronScaler:
                if f != 0:
                    good, left = 0, left - 1
                    if left <= 0: s = max(np.float32(s*np.float32(.5)), np.float32(1.))
                else:
                    good += 1
                    if good == interval: good, left, s = 0, hysteresis, np.float32(min(float(s)*2, INF))
            else:
                patient = False
                if f > 0: left -= 1; patient = left > 0                 # NaN is not above 0
                if patient: good = 0
                elif f != 0: s, good = np.float32(s*.5), 0
                else:
                    good += 1
                    if good == interval: s, good = (np.float32(s*2) if s < 2.**127 else s), 0
                if f <= 0: left = hysteresis
            assert (sc.scale.item(), sc.growth_tracker.item(), sc.hysteresis_tracker.item()) == (float(s), good, left)


def test_megatrons_scale_may_become_infinite_in_strict_and_not_outside():
    a, b = MegatronScaler(2.**126, growth_interval=1, strict=True), MegatronScaler(2.**126, growth_interval=1)
    octaves(a, '0000'), octaves(b, '0000')
    assert a.scale == INF and b.scale == 2.**127
    w = nn.Parameter(torch.ones(1)); w.grad = a.scale*torch.ones(1)
    opt = torch.optim.SGD([w], lr=.1)
    out = judge(named_gradients(opt), a)
    take_step(opt, out)
    assert not out.stepped and w == 1


@pytest.mark.parametrize('factor', [1.5, 3., 10/3])
def test_factors_that_are_no_powers_of_two_keep_the_peers_digits(factor):
    a, s = FastaiScaler(100., factor=factor, growth_interval=2, strict=True), 100.
    good = 0
    for f in random_found(60, .5, 3):
        a.update(saw(f))
        if f != 0: s /= factor
        else:
            good += 1
            if good == 2: good, s = 0, s*factor
        assert a.exact.item() == s and a.scale.item() == f32(s)
    m, s = MegatronScaler(100., growth_factor=factor, backoff_factor=1/factor, growth_interval=10**6, strict=True, hysteresis=1), np.float32(100.)
    for _ in range(3):
        m.update(saw(1))
        s = max(np.float32(s*np.float32(1/factor)), np.float32(1.))
        assert m.scale.item() == float(s)


# --- LogMax ---

def logmax(xs, mistake, low=1., high=2.**14):
    "In FP64, from the formulas: means and variance with bias correction"
    f1 = f2 = q2 = 0.; out = []
    for t,x in enumerate(xs, 1):
        x = (2.**16 if mistake else 16.) if not math.isfinite(x) else x
        f1, f2, q2 = .99*f1 + .01*x, .999*f2 + .001*x, .999*q2 + .001*x*x
        mu, m, q = f1/(1 - .99**t), f2/(1 - .999**t), q2/(1 - .999**t)
        cut = mu + 3.09*math.sqrt(max(q - m*m, 0))
        out.append(min(max(2.**max(16 - cut, -200.), low), high))
    return out


@pytest.mark.parametrize('mistake', [False, True])
def test_logmax_is_its_formulas(mistake):
    rng = np.random.default_rng(0)
    xs = [float(rng.normal(3, 2)) if rng.random() > .01 else INF for _ in range(1500)]
    sc, got = LogMaxScaler(published_mistake=mistake), []
    for x in xs:
        sc.update(saw(not math.isfinite(x), 2.**x*sc.scale.item() if math.isfinite(x) else INF))
        got.append(sc.scale.item())
    np.testing.assert_allclose(got, logmax(xs, mistake), rtol=.02)


def test_gradients_that_are_all_zero_say_nothing_and_in_strict_make_nan_without_harm():
    sc, strict = LogMaxScaler(), LogMaxScaler(strict=True)
    for s in (sc, strict): octaves(s, '000')
    was = str(state_of(sc))
    for s in (sc, strict): s.update(saw(0, 0.))
    assert str(state_of(sc)) == was and strict.scale.isnan()
    w = nn.Parameter(torch.ones(1)); opt = torch.optim.SGD([w], lr=.1)
    w.grad = torch.ones(1)*strict.scale
    take_step(opt, judge(named_gradients(opt), strict))
    assert w == 1


def test_amax_is_observed_exactly_of_scaled_gradients_and_adds_as_a_maximum():
    gs = [torch.tensor([1., -8.]).half(), torch.tensor([3.]).half(), torch.tensor([[.5]])]
    def look(xs): return unscale_([('p', g, torch.empty_like(g, dtype=torch.float32)) for g in xs], LogMaxScaler(4.))
    a, b = look(gs[:1]), look(gs[1:])
    assert a['amax'] == 8 and b['amax'] == 3 and (a + b)['amax'] == (b + a)['amax'] == 8 and (a + b)['found_inf'] == 0
    assert look([torch.tensor([NAN, 1.])])['amax'].isnan() and look([torch.tensor([-INF])])['amax'] == INF
    assert (a + look([torch.tensor([NAN])]))['amax'].isnan()


def test_amax_goes_over_ranks_in_one_sum(monkeypatch):
    import torch.distributed as dist
    own = [torch.tensor([0., 5., 7.]), torch.tensor([1., 9., 2.])]
    calls, world = [], 2
    def all_reduce(t, op, group):
        assert op == dist.ReduceOp.SUM
        calls.append(t.clone())
        if len(calls) == 2: t.copy_(calls[0] + calls[1])
    rank = [0]
    monkeypatch.setattr(dist, 'get_world_size', lambda g: world)
    monkeypatch.setattr(dist, 'get_rank', lambda g: rank[0])
    monkeypatch.setattr(dist, 'all_reduce', all_reduce)
    names = ('found_inf', 'amax', 'total')
    reduce(Observation(names, own[0]), 'group')
    rank[0] = 1
    got = reduce(Observation(names, own[1]), 'group')
    assert len(calls) == 2 and got.values.tolist() == [1., 9., 9.] and own[1].tolist() == [1., 9., 2.]


# --- names, rules, the table, foreign states ---

@pytest.mark.parametrize('kw, kind', [
    (dict(), None), (dict(bf16=True), None), (dict(loss_scale=8.), None), (dict(fp16=True), MegatronScaler),
    (dict(fp16=True, loss_scale=8.), StaticScaler), (dict(bf16=True, loss_scale=8.), StaticScaler)])
def test_megatrons_rule_of_selection(kw, kind):
    got = megatron_scaler(**kw)
    assert got is None if kind is None else type(got) is kind
    if kind is StaticScaler: assert got.scale == 8


def test_megatrons_argument_names_and_defaults():
    sc = megatron_scaler(fp16=True)
    assert (sc.init_scale, sc.floor, sc.growth_interval, sc.hysteresis, sc.growth_factor, sc.backoff_factor) == (2.**32, 1., 1000, 2, 2., .5)
    sc = megatron_scaler(fp16=True, initial_loss_scale=2.**20, min_loss_scale=4., loss_scale_window=7, hysteresis=3)
    assert (sc.init_scale, sc.floor, sc.growth_interval, sc.hysteresis) == (2.**20, 4., 7, 3)
    with pytest.raises(ValueError, match='fp16 and bf16'): megatron_scaler(fp16=True, bf16=True)


@pytest.mark.parametrize('name, kw, says', [
    ('sgd', {}, "no policy 'sgd': take one of torch, fastai"), (None, {}, 'no policy None'), ({}, {}, r'no policy \{\}: take one of torch'), ([1], {}, r'no policy \[1\]'),
    (int, {}, 'no policy <class'), ('logmax', dict(hysteresis=1), 'LogMaxScaler has no hysteresis'),
    ('fastai', dict(factor=1.), 'factor=1.0'), ('fastai', dict(factor=0), 'factor=0'), ('fairseq', dict(tolerance=2.), 'tolerance=2.0'),
    ('fairseq', dict(threshold=-1.), 'threshold'), ('deepspeed', dict(hysteresis=0), 'hysteresis=0'), ('logmax', dict(beta1=1.), 'beta1=1.0'),
    ('logmax', dict(floor=0.), 'floor=0.0'), ('logmax', dict(ceiling=.5), 'ceiling=0.5'), ('logmax', dict(log_max=NAN), 'log_max=nan'),
    ('logmax', dict(overflow_std_dev=-1.), 'overflow_std_dev'), ('backoff', dict(growth_interval=0), 'growth_interval=0')])
def test_what_there_is_not_or_cannot_work_is_a_sentence(name, kw, says):
    with pytest.raises(ValueError, match=says): get_policy(name, **kw)


def test_a_policy_by_name_by_class_and_as_it_is():
    sc = get_policy('metaseq', init_scale=8.)
    assert get_policy(sc) is sc and type(get_policy(MetaseqScaler)) is MetaseqScaler and sc.scale == 8
    with pytest.raises(ValueError, match='made already'): get_policy(sc, init_scale=4.)


def test_the_table_is_read_off_the_classes():
    t = policy_table()
    assert list(t.index) == list(POLICIES) and t.notna().all().all()
    assert t['start'].to_dict() == dict(torch='2^16', fastai='2^24', apex_amp='2^16', apex_legacy='2^32', apex_hysteresis='2^16', megatron='2^32',
                                        deepspeed='2^16', fairseq='2^15', metaseq='4', backoff='2^14', logmax='1')
    assert t['floor'].to_dict() == dict(torch='none', fastai='none', apex_amp='none', apex_legacy='1', apex_hysteresis='none', megatron='1',
                                        deepspeed='1', fairseq='0.0001', metaseq='2^-5', backoff='1', logmax='1')
    assert t['ceiling'][['apex_amp', 'backoff', 'logmax', 'torch']].tolist() == ['2^24', '2^14', '2^14', 'none']
    assert t['patience returns'].to_dict() == {n: dict(megatron='when the scale grows', deepspeed='when the scale grows',
                                                       apex_hysteresis='after a clean step').get(n, '') for n in POLICIES}
    counted = dict(fastai='since the last growth', deepspeed='in a row, + 1 the first time', metaseq='in a row, window follows the scale', logmax='')
    assert t['counted'].to_dict() == {n: counted.get(n, 'in a row') for n in POLICIES}
    assert set(t.index[t['host looks'] == 'each step']) == {'deepspeed', 'fairseq'} and t['observes']['logmax'] == 'amax, found_inf'


def test_foreign_states_load_or_say_what_is_missing():
    theirs = torch.amp.GradScaler('cpu', init_scale=8., growth_interval=5)
    theirs.scale(torch.ones(()))
    sc = TorchScaler()
    sc.load_state_dict(theirs.state_dict())
    assert sc.scale == 8 and sc.growth_interval == 5
    meg = MegatronScaler()
    meg.load_state_dict(dict(scale=torch.tensor([2.**20]), growth_tracker=7, hysteresis_tracker=1))
    assert (meg.scale, meg.growth_tracker, meg.hysteresis_tracker, meg.growth_interval) == (2.**20, 7, 1, 1000)
    with pytest.raises(ValueError, match='growth_tracker, hysteresis_tracker'): meg.load_state_dict(dict(scale=torch.tensor([8.])))
    with pytest.raises(ValueError, match='loss scale of 128 alone and no counters'): FairseqScaler().load_state_dict({'loss_scale': 128.})
    apex = ApexAmpScaler()
    apex.load_state_dict({'loss_scale': 2.**10, 'unskipped': 1999})
    assert octaves(apex, '0') == [11] and apex.growth_tracker == 0
    with pytest.raises(ValueError, match="'MegatronScaler', not of 'TorchScaler'"): TorchScaler().load_state_dict(meg.state_dict())


@pytest.mark.parametrize('name', [n for n in POLICIES if n not in ('torch', 'logmax')])
@pytest.mark.parametrize('as_tensor', [False, True])
def test_a_relatives_state_is_refused_with_a_way_on(name, as_tensor):
    theirs = torch.amp.GradScaler('cpu', init_scale=8.)
    theirs.scale(torch.ones(()))
    state, sc = theirs.state_dict(), MAKES[name]()
    if as_tensor: state['scale'] = torch.tensor([8.])
    with pytest.raises(ValueError, match=r'state of torch.amp.GradScaler.* start with init_scale=8\.0\.') as e: sc.load_state_dict(state)
    assert isinstance(sc, HysteresisScaler) or 'load it into a TorchScaler, or' in str(e.value)
    if not isinstance(sc, HysteresisScaler):
        with pytest.raises(ValueError, match=r'state of Megatron-LM: load it into a MegatronScaler, or start with init_scale=4\.0\.'):
            sc.load_state_dict(dict(scale=torch.tensor([4.]), growth_tracker=7, hysteresis_tracker=1))


def test_logmax_refuses_a_relatives_state_too():
    with pytest.raises(ValueError, match='load it into a TorchScaler'): LogMaxScaler().load_state_dict(dict(scale=8., _growth_tracker=3))


@pytest.mark.parametrize('name', [n for n in POLICIES if n not in ('logmax', 'fairseq', 'metaseq')])
def test_a_floor_of_any_size_is_reached_before_it_stops_a_training(name):
    kw = dict(hysteresis=1) if issubclass(POLICIES[name], HysteresisScaler) or name == 'deepspeed' else {}
    sc = get_policy(name, init_scale=1024., floor=1000., on_floor='raise', **kw)
    sc.update(saw(1))
    assert sc.scale == 1000
    with pytest.raises(FloatingPointError): sc.update(saw(1))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        low = get_policy(name, init_scale=1.5e-4, floor=1e-4, **kw | dict(on_floor='clamp'))      # 1e-4 lies above its FP32
    for _ in range(3): low.update(saw(1))
    assert low.scale == np.float32(1e-4) and getattr(low, 'exact', low.scale).item() == (1e-4 if hasattr(low, 'exact') and name != 'backoff'
                                                                                       else np.float32(1e-4))
    again = get_policy(name)
    again.load_state_dict(low.state_dict())
    assert again.scale == low.scale


def test_in_strict_only_a_peer_with_a_floor_can_raise_at_it():
    for name,cls in POLICIES.items():
        if name == 'logmax': continue
        if cls(strict=True).floor: assert cls(strict=True, on_floor='raise').needs_sync, name
        else:
            with pytest.raises(ValueError, match="on_floor='raise' needs a floor"): cls(strict=True, on_floor='raise')


def test_own_policy_has_to_say_how_far_one_update_can_fall():
    class Twice(DynamicScaler):
        state_names = (*DynamicScaler.state_names, 'last')
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.last = torch.tensor(False)
        def moved(self, found, tracker):
            bad, scale = found != 0, super().moved(found, tracker)
            scale = torch.where(bad & self.last, scale/2, scale).clamp(*self.bounds)
            self.last = bad
            return scale
    with pytest.raises(AssertionError, match=r'drop is 0\.5, but one update can shrink the scale by 0\.25'):
        check_own_policy(lambda: Twice(growth_interval=4))
    Twice.drop = .25
    check_own_policy(lambda: Twice(growth_interval=4))


def test_deepspeed_stops_only_at_its_minimum_and_fairseq_before_it():
    sc = DeepSpeedScaler(4., floor=3., hysteresis=1)
    sc.update(saw(1))
    assert sc.scale == 3                                                # clamped: there was some room
    with pytest.raises(FloatingPointError): sc.update(saw(1))
    sc = FairseqScaler(4., floor=2.)
    with pytest.raises(FloatingPointError): sc.update(saw(1))           # 2 would be the floor itself
    assert sc.scale == 4
    sc = FairseqScaler(4., floor=1., threshold=3.)
    for _ in range(3): sc.update(saw(1))
    assert sc.scale == 3


def test_fairseq_and_deepspeed_name_whose_gradient_it_was_and_leave_all_as_it_is():
    for sc in (DeepSpeedScaler(1., hysteresis=1), FairseqScaler(1., floor=.5)):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        opt = torch.optim.AdamW(net.parameters(), lr=.1)
        for p in net.parameters(): p.grad = torch.ones_like(p)
        net[1].bias.grad[0] = INF
        was, state = copy.deepcopy(net.state_dict()), str(sc.state_dict())
        with pytest.raises(FloatingPointError, match=r'Not finite: 1\.bias\.'): judge(named_gradients(opt, net), sc)
        assert str(sc.state_dict()) == state and not opt.state and all(same_bits(v, was[n]) for n,v in net.state_dict().items())
