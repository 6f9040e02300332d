"""ALS: the rule, PopART's own tests, hooks, states, the two originals, the view; every guard with the harm it prevents."""
import copy, math, pickle

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import mpcourse.als as als_module
from mpcourse.als import (BLIND, EDGE, SEEN, ALSScaler, ALSView, ALSViewCB, KerasALSScaler, PopartScaler, sudden_dips)
from mpcourse.callback import MixedPrecisionCB, tensor_dls
from mpcourse.tensorcore import fast_half
from mpcourse.formats import same_bits
from mpcourse.gradscaler import GradScaler
from mpcourse.hooks import TensorHooks
from mpcourse.simulator import hard_batches, replay
from mpcourse.scaler1 import CEILING, FLOOR, Observation, StaticScaler
from mpcourse.step1 import MixedStep, judge, named_gradients, take_step, unscale_
from mpcourse.toys import batches, fit, get_toy, train_toy

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan
MAKES = dict(als=ALSScaler, counts=lambda **kw: ALSScaler(statistic='count', **kw), amax=lambda **kw: ALSScaler(statistic='amax', **kw),
             deadband=lambda **kw: ALSScaler(deadband=True, **kw), smooth=lambda **kw: ALSScaler(smooth=.5, threshold=.01, **kw),
             period=lambda **kw: ALSScaler(period=3, **kw), saturate=lambda **kw: ALSScaler(saturate=True, **kw), popart=PopartScaler,
             popart_strict=lambda **kw: PopartScaler(period=2, strict=True, **kw), keras=KerasALSScaler,
             keras_strict=lambda **kw: KerasALSScaler(period=3, strict=True, smooth=.25, **kw))
every = pytest.mark.parametrize('name', MAKES)


def saw(amax=100., found=0., above=None, near=None, total=1e5, edge=EDGE):
    "An observation for any of them; counts follow the largest magnitude unless they are given"
    above = float(amax >= edge) if above is None else above
    near = float(amax >= edge/2) if near is None else near
    values = dict(found_inf=found, found_after=0., amax=amax, total=total) | {('above', edge/2): near, ('above', edge): above, SEEN: total/2}
    return Observation(tuple(values), torch.tensor(list(values.values())))


def octaves(scaler, observations):
    out = []
    for o in observations:
        scaler.update(o)
        out.append(math.log2(scaler.scale))
    return out


def weather(n, seed, bad=.1):
    "Observations as a training makes them: largest magnitudes on a bell curve of octaves, some not finite, some zero"
    rng = np.random.default_rng(seed)
    for x,k in zip(rng.random(n), rng.normal(12., 3., n)):
        yield saw(NAN, 1., 0.) if x < bad/2 else saw(INF, 2., 1.) if x < bad else saw(0.) if x < 2*bad else saw(float(2.**k))


def state_of(scaler): return {n: getattr(scaler, n) for n in scaler.state_names}


def toy_run(scaler, steps=30, toy='deep_sigmoid', **kw): return train_toy(toy, MixedStep(scaler, **kw), steps=steps)


# --- the contract of every scaler ---

def test_no_class_escapes_the_contract():
    def below(cls): return {c for s in cls.__subclasses__() for c in (s, *below(s))}
    assert {c for c in below(ALSScaler) if c.__module__ == 'mpcourse.als'} == {PopartScaler, KerasALSScaler}


@every
def test_the_scale_is_a_0_dim_float32_within_its_bounds(name):
    sc = MAKES[name]()
    for o in weather(500, 1, .2):
        before, old = sc.scale, sc.scale.clone()
        sc.update(o)
        assert same_bits(before, old) and sc.scale.shape == () and sc.scale.dtype == torch.float32      # a new tensor each time
        assert sc.bounds[0] <= sc.scale <= sc.bounds[1] and sc.lowest <= sc.scale
        assert sc.scale >= before*sc.drop and sc.inv_scale().isfinite()


@every
def test_a_storm_and_a_calm_stay_within_the_bounds(name):
    sc = MAKES[name]()
    if sc.strict: return
    for o in [saw(NAN, 1.)]*300: sc.update(o)
    assert sc.scale == max(FLOOR, sc.lowest) and all(t.isfinite().all() for t in state_of(sc).values())
    for o in [saw(1.)]*1600: sc.update(o)
    assert sc.scale == min(sc.ceiling, CEILING) and sc.scale.isfinite()


@every
def test_updates_and_hooks_read_nothing(name, looks):
    sc = MAKES[name]()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).half(); sc.attach(net)
    for k in range(5):
        if k == 1: looks.clear()                       # formats are worked out once in a process
        with fast_half(): net(torch.ones(3, 4).half()).sum().backward()
        sc.gathered(); sc.update(saw(2.**k)); sc.forget(); sc.wants; sc.dipped
    assert not looks and not sc.needs_sync


@every
def test_a_state_goes_round_mid_trace_bit_for_bit(name, tmp_path):
    a, b, obs = MAKES[name](init_scale=4.), MAKES[name](), list(weather(260, 5))
    for o in obs[:131]: a.update(o)
    torch.save(a.state_dict(), tmp_path/'s.pt')
    b.load_state_dict(torch.load(tmp_path/'s.pt', weights_only=True))
    c, d = copy.deepcopy(a), pickle.loads(pickle.dumps(a))
    for o in obs[131:]:
        for sc in (a, b, c, d): sc.update(o)
        for sc in (b, c, d): assert all(same_bits(x, y) for x,y in zip(state_of(a).values(), state_of(sc).values()))
    assert all(str(getattr(a, n)) == str(getattr(b, n)) for n in a.hyper_names) and a.bounds == b.bounds


@every
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name):
    sc = MAKES[name]()
    octaves(sc, weather(20, 0))
    good, was = sc.state_dict(), str(sc.state_dict())
    bad = [{k: v for k,v in good.items() if k != key} for key in good] + [{}, good | dict(policy='Nobody'), good | dict(version=9)]
    bad += [good | {n: torch.ones(5)} for n in sc.state_names] + [good | dict(threshold=2.), StaticScaler().state_dict()]
    for state in bad:
        with pytest.raises(ValueError): sc.load_state_dict(state)
        assert str(sc.state_dict()) == was


@every
def test_it_moves_with_all_its_state(name):
    sc = MAKES[name]()
    assert sc.to('meta') is sc and all(t.is_meta for t in state_of(sc).values())


@every
def test_no_weight_becomes_nan_in_two_hundred_bad_steps(name):
    sc = MAKES[name](activations=False)
    w = nn.Parameter(torch.ones(3)); opt = torch.optim.AdamW([w], lr=.1)
    def step(g):
        w.grad = torch.full((3,), float(g))*sc.scale
        out = judge(named_gradients(opt), sc)
        take_step(opt, out)
        assert w.isfinite().all() and out.stepped == bool(w.grad.isfinite().all()), g
        return out
    for g in (NAN, INF):
        for _ in range(100): assert not step(g).stepped
    assert w.tolist() == [1.]*3 and not opt.state
    for g in (1., 0., -1e-30, 3e38, INF, 1.): step(g)
    assert [step(1.).stepped for _ in range(40)][-1] or sc.strict


BAD = [(dict(threshold=1.5), 'threshold=1.5'), (dict(threshold=-.1), 'take 0 to 1'), (dict(threshold=NAN), 'threshold=nan'), (dict(edge=0.), 'edge=0.0'),
       (dict(edge=1e5), 'edge=1'), (dict(edge=8189.), 'take an FP16 number'), (dict(factor=1.), 'factor=1.0'), (dict(period=0), 'period=0'),
       (dict(period=1.5), 'period=1.5'), (dict(smooth=1.), 'smooth=1.0'), (dict(statistic='median'), "'median' is unknown"),
       (dict(statistic='amax', smooth=.5), 'smooths counts'), (dict(weights=False, activations=False), 'nothing left'),
       (dict(floor=4., init_scale=2.), 'floor=4.0'), (dict(ceiling=.5), 'ceiling=0.5'), (dict(init_scale=0.), '0.0 cannot work'),
       (dict(floor=0.), 'floor=0.0'), (dict(ceiling=INF), 'ceiling=inf')]
@pytest.mark.parametrize('kw,says', BAD)
def test_what_cannot_work_is_refused_with_a_sentence(kw, says):
    with pytest.raises(ValueError, match=says): ALSScaler(**kw)
def test_presets_refuse_too():
    for kw in (dict(bin_edge=1.), dict(bin_edge=-.1), dict(threshold=2.), dict(period=0)):
        with pytest.raises(ValueError): PopartScaler(**kw)
    with pytest.raises(ValueError, match='ceiling'): KerasALSScaler(2.**16)


# --- the rule ---

def test_more_than_the_threshold_halves_and_as_many_does_not():
    for t,n,u,down in ((.25, 4., 1., False), (.25, 4., 2., True), (0., 4., 0., False), (0., 4., 1., True), (1., 4., 4., False),
                       (1e-7, 1e7, 1., False), (1e-7, 1e7, 2., True), (1e-7, 9e6, 1., True)):
        for sc in (ALSScaler(2.**8, threshold=t), PopartScaler(2.**8, threshold=t), PopartScaler(2.**8, threshold=t, strict=True)):
            assert octaves(sc, [saw(9000., above=u, total=n)]) == [7. if down else 9.], (t, n, u, sc)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.floats(-4, 4))
def test_the_largest_magnitude_decides_as_counts_do_below_one_over_the_threshold(seed, n, shift):
    g = torch.Generator().manual_seed(seed)
    gs = [(torch.randn(n, generator=g)*2.**(10 + shift)).half() for _ in range(3)]
    moves = []
    for kind in ('count', 'amax'):
        sc = ALSScaler(2.**4, activations=False, statistic=kind, threshold=1/(3*n + 1), deadband=True)
        sc.update(unscale_([(None, x, x.float()) for x in gs], sc))
        moves.append(sc.scale.item())
    assert moves[0] == moves[1]


def test_auto_counts_until_it_knows_that_it_need_not_and_again_when_it_must():
    net = nn.Linear(8, 8).half(); sc = ALSScaler(threshold=1/100); sc.attach(net)
    def one(n):
        with fast_half(): net(torch.ones(n, 8).half()).sum().backward()
        mode = sc.mode
        sc.update(saw()); sc.forget()
        return mode, sc.elements
    assert one(3) == ('count', 72 + 24) and one(3) == ('amax', 96) and one(2) == ('amax', 96)
    assert one(4) == ('amax', 104) and one(1)[0] == 'count'                                       # 104/100 is not below one
    assert ALSScaler(activations=False).mode == 'count'                                           # nobody knows how many there are


def test_with_several_processes_it_always_counts(monkeypatch):
    sc = ALSScaler(); sc.elements = 10
    assert sc.mode == 'amax'
    for n,v in dict(is_available=True, is_initialized=True, get_world_size=2).items():
        monkeypatch.setattr(als_module.dist, n, lambda v=v: v)
    assert sc.mode == 'count' and ALSScaler(statistic='amax').mode == 'amax'


def test_what_is_not_finite_halves_at_once_whatever_the_period():
    for found,amax in ((1., NAN), (1., INF), (3., 5.)):
        assert octaves(ALSScaler(2.**8, period=4), [saw(), saw(amax, found), saw(), saw()]) == [9, 8, 8, 8]
        assert octaves(KerasALSScaler(2.**8), [saw(amax, found, above=0.)]) == [7] == octaves(ALSScaler(2.**8), [saw(amax, found)])


def test_a_nan_of_an_activation_lies_above_the_edge():
    for stat in ('count', 'amax'):
        sc = ALSScaler(2.**4, statistic=stat); net = nn.Linear(2, 2).half(); sc.attach(net)
        net(torch.ones(1, 2).half()).backward(torch.tensor([[NAN, 1.]]).half())
        got = sc.gathered()
        if stat == 'amax': assert got['amax'].isnan()
        else: assert got['above', EDGE] == 1
        sc.update(Observation(('found_inf', 'total', 'amax', ('above', EDGE)), torch.tensor([0., 2., NAN, 1.])) if stat == 'count' else
                  Observation(('found_inf', 'amax'), torch.tensor([0., NAN])))
        assert sc.scale == 8
    strict = PopartScaler(strict=True); strict.attach(net)                     # and in strict it does not: nan > edge is false
    net(torch.ones(1, 2).half()).backward(torch.tensor([[NAN, INF]]).half())
    assert strict.gathered()['above', EDGE] == 1


def test_zeros_double_up_to_where_gradients_were_seen_and_for_ever_in_strict():
    live, dead = saw(1.), saw(0.)
    assert octaves(ALSScaler(), [dead]*40)[-1] == math.log2(BLIND)
    assert octaves(ALSScaler(2.**30), [dead]*5) == [30]*5
    sc = ALSScaler(2.**23)
    assert octaves(sc, [live]*4 + [dead]*5) == [24, 25, 26, 27, 27, 27, 27, 27, 27][:4] + [27]*5
    assert octaves(PopartScaler(strict=True), [dead]*140)[-1] == INF


def test_bounds():
    assert octaves(ALSScaler(4., floor=2., ceiling=16.), [saw()]*4 + [saw(1e4)]*5) == [3, 4, 4, 4, 3, 2, 1, 1, 1]
    assert ALSScaler(4., floor=2.).lowest == 2


def test_the_deadband_stays_where_a_doubling_would_be_taken_back():
    def magnitudes(sc, base, n):
        for _ in range(n): sc.update(saw(base*sc.scale.item()))
        return sc.scale.item()
    for base in (.7, 1., 1.3, 3.):
        wild, calm = ALSScaler(), ALSScaler(deadband=True)
        magnitudes(wild, base, 40), magnitudes(calm, base, 40)
        rest = calm.scale.item()
        assert all(magnitudes(calm, base, 1) == rest for _ in range(20)) and EDGE/4 <= rest*base < EDGE
        assert len({magnitudes(wild, base, 1) for _ in range(4)}) == 2
    counts = ALSScaler(deadband=True, statistic='count')
    assert octaves(counts, [saw(100.), saw(5000.), saw(9000.), saw(4095.), saw(4096.)]) == [1, 1, 0, 1, 1]


def test_smoothing_is_keras_filter_and_forgets_when_the_scale_falls():
    sc = ALSScaler(2.**8, smooth=.5, threshold=.1)
    octaves(sc, [saw(above=0., total=100.)])
    assert sc.bins.tolist() == [0, 0, 50]
    assert octaves(sc, [saw(9e3, above=12., total=100.)]) == [10]              # 6 of 75 are not more than a tenth; unsmoothed 12 of 100 are
    assert sc.bins.tolist() == [6, 6, 75] and octaves(ALSScaler(2.**8, threshold=.1), [saw(9e3, above=12., total=100.)]) == [7]
    assert octaves(sc, [saw(9e3, above=90., total=100.)]) == [9] and sc.bins.tolist() == [0, 0, 0]


def test_dips_are_flagged_and_journeys_are_not():
    calm = [2.**(17 + i % 2) for i in range(40)]
    assert not sudden_dips(calm).any() and not sudden_dips([2.**-k for k in range(50)]).any() and not sudden_dips([1.]*5).any()
    fallen = sudden_dips(calm + [2.**k for k in (16, 15, 14, 13, 14, 15)])
    assert fallen.nonzero().flatten().tolist() == [41, 42, 43, 44]
    sc = ALSScaler(2.**17)
    for i in range(30): sc.update(saw(9e3 if i % 2 else 1.)); assert not sc.dipped
    hit = []
    for _ in range(4): sc.update(saw(NAN, 1.)); hit.append(bool(sc.dipped))
    assert hit == [False, True, True, True]
    far = ALSScaler(2.**30); octaves(far, [saw(NAN, 1.)]*25)
    assert not far.dipped


# --- PopART's own tests ---

def test_from_two_eps_it_doubles_every_step():
    start = 2*torch.finfo(torch.float32).eps
    for sc in (ALSScaler(start), ALSScaler(start, statistic='count'), PopartScaler(start, strict=True)):
        scales = toy_run(sc, 20).history['scale']
        assert scales == [start*2**i for i in range(20)], sc


def test_from_1e20_with_the_smallest_edge_it_halves_every_step():
    for sc in (ALSScaler(2.**66, edge=2.**-24), PopartScaler(2.**66, bin_edge=1e-20)):
        run = toy_run(sc, 8)
        assert run.history['scale'] == [2.**(66 - i) for i in range(8)] and sum(run.history['skipped']) == 8


@pytest.mark.parametrize('period,want', [(1, [10, 20, 40, 80, 160, 320, 640, 1280]), (2, [10, 20, 20, 40, 40, 80, 80, 160])])
@pytest.mark.filterwarnings('ignore:A loss scale of 10')
def test_exact_traces_for_periods(period, want):
    for make in (lambda: ALSScaler(10., period=period), lambda: PopartScaler(10., period=period, strict=True)):
        assert toy_run(make(), 8).history['scale'] == want


def test_the_counter_is_checkpointed():
    def observations(): return [saw(1.) if i % 5 else saw(9000.) for i in range(24)]
    whole, parts = ALSScaler(period=4), ALSScaler(period=4)
    path, state = octaves(whole, observations()), parts.state_dict()
    again = []
    for o in observations():
        parts = ALSScaler(period=4); parts.load_state_dict(state)
        again += octaves(parts, [o]); state = parts.state_dict()
    assert again == path and len(set(path)) > 3


def small_training(scaler, opt, micro=1, steps=8):
    "A net whose gradients are ordinary FP16 numbers at every scale that occurs; its weights"
    lin = nn.Linear(4, 3); x = torch.linspace(.5, 1, 32).view(8, 4)
    with torch.no_grad(): lin.weight.copy_(torch.linspace(-.5, .4, 12).view(3, 4)); lin.bias.zero_()
    o, step = opt(lin.parameters()), MixedStep(scaler)
    for _ in range(steps):
        o.zero_grad(); scaler.forget()
        for _ in range(micro): step.backward(lin, x, torch.full((8, 3), 2.), lambda p,y: F.mse_loss(p, y)/micro)
        take_step(o, judge(named_gradients(o, lin), scaler))
    return lin.weight.detach(), lin.bias.detach()


OPTS = [lambda p: torch.optim.SGD(p, lr=.125, momentum=.5, weight_decay=.01), lambda p: torch.optim.Adam(p, lr=.125), lambda p: torch.optim.RMSprop(p, lr=.01)]
@pytest.mark.parametrize('opt', OPTS, ids=['sgd', 'adam', 'rmsprop'])
@pytest.mark.parametrize('micro', [1, 5])
@pytest.mark.parametrize('name', ['als', 'counts', 'period', 'popart_strict'])
def test_weight_updates_are_the_same_with_and_without(name, opt, micro):
    sc = MAKES[name](init_scale=2.**8)
    with_, without = small_training(sc, opt, micro), small_training(StaticScaler(2.**8), opt, micro)
    assert all(same_bits(a, b) for a,b in zip(with_, without)) and sc.scale != 2**8


def test_counts_are_numpys(monkeypatch):
    seen = []
    sc = ALSScaler(2.**18, statistic='count', deadband=True); toy = get_toy('cnn'); net = toy.model()
    step = MixedStep(sc); opt = torch.optim.SGD(net.parameters(), lr=0.)
    sc.attach(net)
    spy = TensorHooks(net, lambda n,k,t: seen.append(t.clone()), ('activation_grad',))
    xb, yb = next(batches(toy.data(), 64, 1)); opt.zero_grad()
    step.backward(net, xb, yb, toy.loss_func); spy.remove()
    weights = [p.grad.clone() for n,p in net.named_parameters() if sc.tracks(n)]
    obs = {}
    monkeypatch.setattr(sc, 'update', lambda o: obs.update(zip(o.names, o.values.tolist())))
    judge(named_gradients(opt, net), sc)
    g = np.concatenate([t.float().abs().numpy().ravel() for t in (*[s for s in seen if s.dtype == torch.float16], *weights)])
    low, mid, high = np.histogram(g, [0, EDGE/2, EDGE, np.inf])[0]
    assert obs['above', EDGE] == high > 0 and obs['above', EDGE/2] == high + mid and obs['total'] == len(g)
    assert obs[SEEN] == sum(s.numel() for s in seen if s.dtype == torch.float16) > 0


# --- what counts, and the hooks ---

def hooked(model): return sum(len(m._forward_hooks) for m in model.modules()) + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_norms_and_frozen_names_are_left_out_and_patterns_choose():
    net = get_toy('cnn').model(); names = [n for n,_ in net.named_parameters()]
    norms = {f'{n}.{p}' for n,m in net.named_modules() if isinstance(m, nn.BatchNorm2d) for p in ('weight', 'bias')}
    sc = ALSScaler(); sc.attach(net)
    assert norms and {n for n in names if not sc.tracks(n)} == norms and sc.tracks(None) and sc.tracks('group 0, parameter 3')
    conv = ALSScaler(types=nn.Conv2d); h = conv.attach(net)
    assert {n.rpartition('.')[0] for n in names if conv.tracks(n)} == {n for n,m in net.named_modules() if isinstance(m, nn.Conv2d)}
    assert len(h.hooks._handles) == sum(isinstance(m, nn.Conv2d) for m in net.modules())
    last = names[-1].rpartition('.')[0]
    one = ALSScaler(names=last); one.attach(net)
    assert [n for n in names if one.tracks(n)] == [n for n in names if n.startswith(last + '.')]
    bias = ALSScaler(names='*.bias'); bias.attach(net)
    assert all(n.endswith('bias') for n in names if bias.tracks(n)) and any(bias.tracks(n) for n in names) and not bias._attached[0].hooks
    assert not any(ALSScaler(weights=False).tracks(n) for n in names)
    for kw in (dict(names='encoder.*'), dict(names=[]), dict(types=nn.LSTM)):
        with pytest.raises(ValueError, match='there are|No module'): ALSScaler(**kw).attach(net)


def test_only_half_gradients_count():
    sc = ALSScaler(statistic='count'); net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)); sc.attach(net)
    net(torch.ones(2, 4)).sum().backward()
    assert sc.gathered()[SEEN] == 0
    with fast_half(), torch.autocast('cpu', torch.float16): net(torch.ones(2, 4)).sum().backward()
    assert sc.gathered()[SEEN] == 12
    sc.forget()
    assert sc.gathered()[SEEN] == 0


def test_micro_batches_add_up_until_the_step():
    for stat in ('count', 'amax'):
        sc = ALSScaler(2.**13, statistic=stat, threshold=0. if stat == 'amax' else 1e-7); net = nn.Linear(2, 1).half(); sc.attach(net)
        for x in (1., 3., 0.): net(torch.ones(1, 2).half()).backward(torch.tensor([[x*2.**13]]).half())
        got = sc.gathered()
        assert got[SEEN] == 3 and (got['amax'] == 3*2**13 if stat == 'amax' else (got['above', EDGE], got['total']) == (2, 3))


def test_without_being_attached_it_says_so():
    w = nn.Parameter(torch.ones(2)); w.grad = torch.ones(2); opt = torch.optim.SGD([w], lr=.1)
    with pytest.raises(RuntimeError, match='attach it to the model before the first step'): judge(named_gradients(opt), ALSScaler())
    with pytest.raises(RuntimeError, match='attach'): GradScaler(ALSScaler()).scale(torch.ones(()))
    judge(named_gradients(opt), ALSScaler(activations=False))


def test_hooks_sleep_in_the_steps_that_do_not_decide_and_unscale_counts_nothing():
    sc = ALSScaler(period=3); net = nn.Linear(2, 2).half(); h = sc.attach(net)
    state = []
    for _ in range(7):
        state.append((h.hooks.active, sc.wants == {'found_inf'}))
        sc.update(saw())
    assert state == [(i % 3 == 0, i % 3 != 0) for i in range(7)]
    sc.load_state_dict(ALSScaler(period=3).state_dict())
    assert h.hooks.active and sc.wants is sc.wants and SEEN in sc.wants


def test_hooks_go_with_the_handle_and_copies_have_none():
    net = get_toy('cnn').model(); sc = ALSScaler(saturate=True)
    h = sc.attach(net)
    assert hooked(net) > 0
    twin, model = copy.deepcopy(sc), copy.deepcopy(net)
    assert not twin._attached and pickle.loads(pickle.dumps(sc))._attached == []
    with fast_half(): model.half()(torch.ones(2, 1, 8, 8).half()).sum().backward()                # the copy's hooks do nothing
    assert sc._seen == 0
    sc.attach(net); n = hooked(net)
    sc.attach(net)
    assert hooked(net) == n and len(sc._attached) == 1                                            # anew, and not twice
    sc._attached[0].remove(); h.remove()
    assert hooked(net) == 0 and sc._attached == []


def learner(scaler, **kw):
    from fastai.basics import Learner, SGD
    toy = get_toy('deep_sigmoid'); d = toy.data()
    return Learner(tensor_dls((d.train[0][:256], d.train[1][:256]), d.valid, bs=64), toy.model(), loss_func=toy.loss_func, opt_func=SGD, lr=.1, **kw).to_mixed(scaler)


def quiet(learn, n=1, **kw):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, **kw)
    return learn


def test_in_a_learner_with_accumulation_and_after_an_exception():
    from fastai.callback.training import GradientAccumulation
    seen, sc = [], ALSScaler(statistic='count')
    update = sc.update
    sc.update = lambda o: (seen.append(o[SEEN].item()), update(o))
    learn = quiet(learner(sc, cbs=GradientAccumulation(128)), 1)
    assert seen == [2*64*(7*64*2 + 10)]*2 and learn.mixed_precision_cb.history.scales.tolist() == [1, 2]
    model = learn.model
    learn.remove_cb(MixedPrecisionCB)
    assert hooked(model) == 0 and not sc._attached


def test_in_the_drop_in_as_in_a_plain_step():
    toy = get_toy('deep_sigmoid')
    def loop(fused):
        net = toy.model(); opt = torch.optim.Adam(net.parameters(), lr=6e-3, fused=fused); scaler = GradScaler(ALSScaler(period=2)); scaler.attach(net)
        scales = []
        for xb,yb in batches(toy.data(), 64, 44):
            opt.zero_grad()
            with fast_half():
                with torch.autocast('cpu', torch.float16): loss = toy.loss_func(net(xb), yb)
                scaler.scale(loss).backward()
            scales.append(scaler.get_scale()); scaler.step(opt); scaler.update()
        return scales
    for fused in (False, True):
        scales = loop(fused)
        assert scales[:9] == [1, 2, 2, 4, 4, 8, 8, 16, 16] and max(scales) >= 2**16 and min(scales[38:]) >= 2**13


def test_ranks_decide_together(ranks):
    got = ranks('''
import torch.nn as nn
from mpcourse.als import ALSScaler
from mpcourse.step1 import judge, named_gradients
w = nn.Parameter(torch.ones(2)); opt = torch.optim.SGD([w], lr=.1); sc = ALSScaler(2.**10); lin = nn.Linear(2, 2).half(); sc.attach(lin)
path = []
for step in range(6):
    big = step == (2 if rank == 0 else 4)
    lin(torch.ones(1, 2).half()).backward(torch.full((1, 2), 9000. if big else 1.).half())
    w.grad = torch.ones(2)
    judge(named_gradients(opt), sc, dist.group.WORLD); path.append(sc.scale.item())
torch.save((path, sc.mode), f'{folder}/{rank}.pt')''')
    assert got[0] == got[1] == ([2.**k for k in (11, 12, 11, 12, 11, 12)], 'count')


# --- saturation ---

def test_saturation_clips_infinities_and_leaves_nan():
    for sat in (False, True):
        sc = ALSScaler(saturate=sat, statistic='count'); net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).half(); sc.attach(net)
        with torch.no_grad(): net[1].weight.fill_(1.)
        x = torch.ones(1, 2).half().requires_grad_()
        net(x).backward(torch.tensor([[INF, 1.]]).half())
        got = net[0].weight.grad
        assert got.isfinite().all() == sat and net[1].weight.grad.isfinite().all() == sat
        if sat: assert got.abs().max() == 65504
        assert sc.gathered()['above', EDGE] >= 1
        net.zero_grad(); net(100*x.detach()).backward(torch.tensor([[3000., 1.]]).half())        # finite until it meets the input
        assert (net[0].weight.grad.abs().max() == 65504) if sat else net[0].weight.grad.isinf().any()
        net.zero_grad(); net(x).backward(torch.tensor([[NAN, 1.]]).half())
        assert net[1].weight.grad.isnan().any()


def test_saturating_from_far_above_takes_steps_that_the_default_skips():
    skips = {s: sum(toy_run(ALSScaler(2.**26, saturate=s), 12).history['skipped']) for s in (False, True)}
    exact = toy_run(ALSScaler(2.**26), 12, compute=lambda: fast_half('saturate'))
    assert skips[True] <= skips[False] and skips[False] > 0 == sum(exact.history['skipped'])


def test_a_nan_of_the_forward_pass_is_skipped_and_halves():
    toy = get_toy('deep_sigmoid')
    for name in MAKES:
        sc = MAKES[name](init_scale=2.**10); net = toy.model(); opt = torch.optim.Adam(net.parameters(), lr=1e-3); step = MixedStep(sc)
        before = [p.detach().clone() for p in net.parameters()]
        for i,(xb,yb) in enumerate(batches(toy.data(), 32, 7)):
            if i == 1: before = [p.detach().clone() for p in net.parameters()]
            step(net, xb.index_fill(0, torch.tensor(0), 1e6) if i else xb, yb, opt, toy.loss_func)
        assert all(same_bits(p.detach(), q) for p,q in zip(net.parameters(), before)), name
        if not sc.strict: assert sc.scale < 2**10, name


# --- the originals ---

def test_popart_counts_what_is_larger_than_8188():
    p = PopartScaler()
    assert p.edge == 8192 and PopartScaler(bin_edge=.5).edge == 32768 and PopartScaler(bin_edge=0.).edge == 2.**-24
    half = torch.arange(0x7c00, dtype=torch.int16).view(torch.float16).float()
    assert same_bits(half > 8188, half >= p.edge)
    w = nn.Parameter(torch.zeros(3)); opt = torch.optim.SGD([w], lr=0.)
    for g,down in (([8188., 1, 1], False), ([8192., 1, 1], True)):
        sc = PopartScaler(2.**4, activations=False, strict=True); w.grad = torch.tensor(g)
        judge(named_gradients(opt), sc)
        assert sc.scale == (8 if down else 32)


def test_keras_trace():
    k = octaves(KerasALSScaler(strict=True), [saw()]*200)
    assert [i for i,(a,b) in enumerate(zip([0., *k], k)) if a != b][:4] == [8, 17, 26, 35] and max(k) == 14
    ours = octaves(KerasALSScaler(), [saw()]*200)
    assert [i for i,(a,b) in enumerate(zip([0., *ours], ours)) if a != b][:3] == [7, 15, 23] and max(ours) == 15
    low = KerasALSScaler(1., strict=True, period=1)
    assert octaves(low, [saw(9e3, above=1e5)]*4) == [0]*4                                         # a candidate below 1 is dropped
    k = KerasALSScaler(2.**4, period=3, threshold=.1)
    assert octaves(k, [saw(9e3, above=40., total=100.), saw(above=0., total=100.), saw(above=0., total=100.)]) == [4, 4, 3]     # 40 of 300
    lone = KerasALSScaler(2.**4, period=3, threshold=.1, accumulate=False)
    assert octaves(lone, [saw(9e3, above=40., total=100.), saw(above=0., total=100.), saw(above=0., total=100.)]) == [4, 4, 5]  # the last alone


def test_strict_refuses_the_step_that_its_peer_would_take():
    for sc in (PopartScaler(strict=True, activations=False), KerasALSScaler(strict=True, activations=False)):
        w = nn.Parameter(torch.ones(2)); opt = torch.optim.SGD([w], lr=.1)
        for _ in range(160):
            w.grad = torch.tensor([0., 0.])*sc.scale if sc.scale < INF else torch.tensor([NAN, 0.])
            take_step(opt, judge(named_gradients(opt), sc))
        assert w.tolist() == [1., 1.]


def test_a_trace_of_the_simulator_can_be_replayed():
    res = replay({'als': ALSScaler(activations=False)}, hard_batches(5, 60, 60))
    assert res['als'].isfinite().all() and res['als'][0] == 1
    with pytest.raises(ValueError, match='fly'): replay({'als': ALSScaler()}, hard_batches(5, 6, 6))


# --- the view ---

def test_the_view_counts_what_the_scaler_counts():
    toy = get_toy('deep_sigmoid'); net = toy.model(); sc = ALSScaler(2.**15, statistic='count'); step = MixedStep(sc); sc.attach(net)
    view, seen = ALSView(net, sc, every=2), []
    update = sc.update; sc.update = lambda o: (seen.append((o['above', EDGE].item(), o['total'].item())), update(o))
    h = fit(net, batches(toy.data(), 64, 12), toy.opt(net.parameters()), toy.loss_func, step, on_step=view.step)
    assert [(f.above, f.hist.total) for f in view.frames] == seen[::2] and [f.step for f in view.frames] == [0, 2, 4, 6, 8, 10]
    assert [f.scale for f in view.frames] == h['scale'][::2] and {f.verdict for f in view.frames} == {'double', 'halve'}
    import matplotlib.pyplot as plt
    fig = view.plot(3)
    assert len(fig.axes) == 2 and 'step 6' in fig.axes[0].get_title(); plt.close('all')
    view.close()
    sc._attached[0].remove()
    assert hooked(net) == 0
    with pytest.raises(ValueError, match='every=0'): ALSView(net, sc, every=0)


def test_the_view_of_a_learner_and_its_widget():
    cb = ALSViewCB(every=2); out = cb.show()
    learn = learner(ALSScaler(), cbs=cb)
    quiet(learn)
    assert len(cb.view.frames) == 2 and '<img' in out.value and not cb.view.hooks.active
    learn.validate()
    assert len(cb.view.frames) == 2
    with pytest.raises(ValueError, match='no ALSScaler to look at'): quiet(learner(StaticScaler(), cbs=ALSViewCB()))


# --- in the drop-in: checkpoints, dropped gradients; models that change; mistakes ---

@every
def test_the_drop_ins_checkpoint_goes_round(name):
    old, new = GradScaler(MAKES[name](init_scale=8.)), GradScaler(MAKES[name]())
    new.load_state_dict(old.state_dict())
    assert new.get_scale() == 8
    for key,v in dict(growth_factor=4., backoff_factor=.25, growth_interval=7).items():
        with pytest.raises(ValueError, match=f'no {key} to be set'): new.load_state_dict(old.state_dict() | {key: v})


def drop_in(**kw):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)); opt = torch.optim.SGD(net.parameters(), lr=.1); scaler = GradScaler(ALSScaler(2.**10, **kw)); scaler.attach(net)
    def loss(x=1.):
        with fast_half(), torch.autocast('cpu', torch.float16): return net(torch.full((2, 4), x)).float().mean()
    def backward(l):
        with fast_half(): l.backward()
    return net, opt, scaler, loss, backward


@pytest.mark.parametrize('stat', ['count', 'amax'])
@pytest.mark.parametrize('bad', [NAN, 1e9])
def test_gradients_that_were_dropped_do_not_count_in_the_drop_in(stat, bad):
    net, opt, scaler, loss, backward = drop_in(statistic=stat)
    for _ in range(3): backward(loss()*bad)                              # before the first scale, and never scaled
    opt.zero_grad()
    for k in range(3):
        backward(scaler.scale(loss()*bad))                               # given up: neither step nor update
        opt.zero_grad(); backward(scaler.scale(loss()))
        scaler.step(opt); scaler.update()
        assert scaler.last_outcome.stepped and scaler.get_scale() == 2.**(11 + k)
        for _ in range(2): backward(loss()*bad)                          # between steps, and never scaled
        opt.zero_grad()


def test_micro_batches_and_a_second_loss_count_in_the_drop_in():
    net, opt, scaler, loss, backward = drop_in(statistic='count')
    for _ in range(3): backward(scaler.scale(loss()))
    assert scaler.policy.gathered()[SEEN] == 3*12
    scaler.step(opt); opt.zero_grad()                                    # another optimizer's loss, in the same iteration
    backward(scaler.scale(loss()))
    assert scaler.policy.gathered()[SEEN] == 4*12


def plain_training(net, sc, steps):
    opt, step = torch.optim.SGD(net.parameters(), lr=.1), MixedStep(sc)
    for _ in range(steps): step(net, torch.ones(2, 4), torch.ones(2, 2), opt, F.mse_loss)
    return step


def test_a_replaced_layer_is_followed_and_told():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)); sc = ALSScaler(statistic='count')
    step = plain_training(net, sc, 2)
    net[0] = nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    def one(): step.lent = step.lent.__class__(net); step(net, torch.ones(2, 4), torch.ones(2, 2), opt, F.mse_loss)
    with pytest.warns(UserWarning, match="'0'.*attached again"): one()
    seen = []
    update = sc.update; sc.update = lambda o: (seen.append(o[SEEN].item()), update(o))
    one()
    assert seen == [12] and len(sc._attached) == 1 and hooked(net) == 2
    step.hooks.remove()
    assert hooked(net) == 0                                              # the old handle is good for the new hooks


def test_hooks_that_see_nothing_say_so_once(recwarn):
    net, sc = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ALSScaler()
    sc.attach(copy.deepcopy(net))
    w = [p.requires_grad_() for p in net.parameters()]; opt = torch.optim.SGD(w, lr=.1)
    for _ in range(3):
        opt.zero_grad(); net(torch.ones(2, 4)).sum().backward()
        judge(named_gradients(opt, net), sc)
    told = [str(r.message) for r in recwarn if 'no gradient of an activation' in str(r.message)]
    assert len(told) == 1 and 'attach' in told[0]
    recwarn.clear()
    plain_training(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), ALSScaler(period=2), 5)
    assert not recwarn.list


def test_a_layer_that_is_not_used_in_a_step_is_no_replaced_one(recwarn):
    class Twoway(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b, self.n = nn.Linear(4, 2), nn.Linear(4, 2), 0
        def forward(self, x): self.n += 1; return (self.a if self.n % 2 else self.b)(x)
    plain_training(Twoway(), ALSScaler(), 6)
    assert not recwarn.list


@pytest.mark.parametrize('cls', [PopartScaler, KerasALSScaler])
@pytest.mark.parametrize('kw', [dict(deadband=True), dict(statistic='amax'), dict(floor=1.), dict(nonsense=1)])
def test_the_originals_take_no_more_than_they_say(cls, kw):
    with pytest.raises(TypeError, match=f'{cls.__name__} takes no {next(iter(kw))}'): cls(**kw)


def test_mistakes_have_sentences():
    net = nn.Sequential(nn.Linear(4, 4))
    for kw in (dict(edge='x'), dict(edge=None), dict(threshold='x'), dict(factor='x'), dict(smooth='x'), dict(period='x')):
        with pytest.raises(ValueError, match='cannot work'): ALSScaler(**kw)
    with pytest.raises(ValueError, match='no ALSScaler'): ALSView(net, StaticScaler())
    with pytest.raises(ValueError, match='Nothing of Sequential counts'):
        ALSView(nn.Sequential(nn.LayerNorm(4)), ALSScaler(activations=False))
    with pytest.raises(ValueError, match='no picture yet'): ALSView(net, ALSScaler()).plot()
    with pytest.raises(RuntimeError, match='wants the gradients of activations'): GradScaler(ALSScaler()).scale(torch.ones(()))
    w = nn.Parameter(torch.ones(2)); w.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match='wants the gradients of activations'): judge(named_gradients(torch.optim.SGD([w], lr=.1)), ALSScaler())
