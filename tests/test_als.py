"""ALS: the rule, PopART's own tests, hooks, states, the two originals with their traces, the view."""
import copy, math, warnings

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import mpcourse.zoo  # noqa: F401
from mpcourse.als import EDGE, ALSScaler
from mpcourse.callback import MixedPrecisionCB, tensor_dls
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.formats import fp16, same_bits
from mpcourse.gradscaler import GradScaler
from mpcourse.monitor import TensorHooks
from mpcourse.learner import ALSViewCB
from mpcourse.scaler import StaticScaler
from mpcourse.step import StepController, MixedStep, named_gradients, take_step
from mpcourse.toys import batches, get_toy, train_toy

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan


# --- the two originals, as they were shipped ---

def popart_scaler(init_scale=1., bin_edge=.125, **kw):
    """PopART's (transforms/automaticlossscaling, op/lossscaleupdate): above 8188, `bin_edge` of 65504, which on the grid
    is from 8192; no floor"""
    edge = fp16.neighbours(bin_edge*fp16.max)[1]
    return ALSScaler(init_scale, edge, **dict(skip_nonfinite_loss=False, min_scale=2.**-126) | kw)


class Keras(ALSScaler):
    """IPU-Keras' ALSOptimizer (keras/ipu/optimizers/als_optimizer.py, r2.6/sdk-release-3.4): counts over `update_frequency`
    steps and one more (1 is a case of its own), then decides and forgets; its candidate has to be smaller than the maximum"""
    def __init__(self, init_scale=1., update_frequency=8, max_scale=2.**15, threshold=1e-5, **kw):
        period = 1 if update_frequency == 1 else update_frequency + 1
        super().__init__(init_scale, threshold=threshold, period=period, max_scale=max_scale/2, **dict(skip_nonfinite_loss=False) | kw)
        self.step_in_period.fill_(int(period > 1))
        self.register_buffer('sums', torch.zeros(2))

    def next_scale(self, stats):
        sums = self.sums + torch.stack([stats['above', self.edge], stats['numel']])
        self.sums = torch.where(self.step_in_period == 0, 0, sums)
        return super().next_scale(stats | {('above', self.edge): sums[0], 'numel': sums[1]})


MAKES = dict(als=ALSScaler, free=lambda **kw: ALSScaler(skip_nonfinite_loss=False, min_scale=2.**-24, **kw), maximum=lambda **kw: ALSScaler(threshold=0., **kw),
             deadband=lambda **kw: ALSScaler(deadband=True, **kw),
             period=lambda **kw: ALSScaler(period=3, **kw), saturate=lambda **kw: ALSScaler(saturate=True, **kw), popart=popart_scaler,
             popart_period=lambda **kw: popart_scaler(period=2, **kw), keras=Keras,
             keras_often=lambda **kw: Keras(update_frequency=1, **kw))
every = pytest.mark.parametrize('name', MAKES)


def saw(amax=100., found=0., above=None, near=None, numel=1e5, edge=EDGE, loss_finite=1., loss=1.):
    "Statistics for any of them; counts follow the largest magnitude unless they are given"
    above = float(not amax < edge) if above is None else above
    near = float(not amax < edge/2) if near is None else near
    stats = dict(found_inf=found, loss_finite=loss_finite, amax=amax, numel=numel) | {('above', edge/2): near, ('above', edge): above, ('amax', 'loss'): loss}
    return {n: torch.tensor(v) for n, v in stats.items()}


def octaves(scaler, steps):
    out = []
    for stats in steps:
        scaler.update(stats)
        out.append(math.log2(scaler.scale))
    return out


def buffers(scaler): return {n: b.clone() for n, b in scaler.named_buffers()}


def toy_run(scaler, steps=30, toy='deep_sigmoid', **kw): return train_toy(toy, MixedStep(scaler, **kw), steps=steps)


def decide(scaler, opt, model=None):
    "One step of an optimizer on the gradients that are there"
    stats = StepController(scaler, model or nn.Module())
    stats.unscale_(named_gradients(opt, model))
    outcome = stats.decide()
    take_step(opt, outcome)
    return outcome


@pytest.fixture
def quietly():
    "Scales that are no powers of two, or at the floor, are meant"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


# --- arguments, hold (test_scaler.py has the contract of every scaler) ---

@pytest.mark.parametrize('name', ['als', 'keras', 'popart'])
def test_a_loss_that_is_not_finite_holds_in_ours_and_not_in_the_originals(name):
    sc = MAKES[name](init_scale=4.)
    before = buffers(sc)
    sc.update(saw(NAN, 1., loss_finite=0.))
    kept = all(same_bits(before[n], b) for n, b in buffers(sc).items() if n != 'held')
    assert kept == (name == 'als') and sc.held == (name == 'als')


BAD = [(dict(threshold=1.5), 'threshold=1.5'), (dict(threshold=-.1), 'take one from 0 to 1'), (dict(threshold=NAN), 'threshold=nan'), (dict(edge=0.), 'edge=0.0'),
       (dict(edge=1e5), 'edge=1'), (dict(edge=8189.), 'a positive FP16 number'), (dict(factor=1.), 'factor=1.0'), (dict(period=0), 'period=0'),
       (dict(period=1.5), 'period=1.5'), (dict(weights=False, activations=False), 'no gradients to count'),
       (dict(min_scale=4., init_scale=2.), '2.0 cannot work'), (dict(max_scale=.5), '0.5'), (dict(init_scale=0.), '0.0 cannot work'),
       (dict(min_scale=0.), '0.0'), (dict(max_scale=INF), 'inf'), *[({k: v}, 'cannot work') for k in ('edge', 'threshold', 'factor', 'period') for v in ('x', None)]]
@pytest.mark.parametrize('kw,says', BAD)
def test_what_cannot_work_is_refused_with_a_sentence(kw, says):
    with pytest.raises(ValueError, match=says): ALSScaler(**kw)


# --- the rule ---

def test_more_than_the_threshold_halves_and_as_many_does_not():
    for t, n, u, down in ((.25, 4., 1., False), (.25, 4., 2., True), (0., 4., 0., False), (0., 4., 1., True), (1., 4., 4., False),
                          (1e-7, 1e7, 1., False), (1e-7, 1e7, 2., True), (1e-7, 9e6, 1., True)):
        for make in (ALSScaler, popart_scaler):
            assert octaves(make(2.**8, threshold=t), [saw(9000., above=u, numel=n)]) == [7. if down else 9.], (t, n, u, make)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.floats(-4, 4))
def test_the_largest_magnitude_decides_as_counts_do_below_one_over_the_threshold(seed, n, shift):
    g = torch.Generator().manual_seed(seed)
    gs = [(torch.randn(n, generator=g)*2.**(10 + shift)).half() for _ in range(3)]
    top = max(x.abs().max().item() for x in gs)
    sc = ALSScaler(2.**4, activations=False, threshold=1/(3*n + 1), deadband=True)
    stats = StepController(sc, nn.Module())
    stats.unscale_([(None, x, x.float()) for x in gs])
    stats.decide()
    assert sc.scale == (8 if top >= EDGE else 16 if top >= EDGE/2 else 32)


def test_what_is_not_finite_halves_at_once_whatever_the_period():
    for found, amax in ((1., NAN), (1., INF), (3., 5.)):
        assert octaves(ALSScaler(2.**8, period=4), [saw(), saw(amax, found), saw(), saw()]) == [9, 8, 8, 8]
        assert octaves(Keras(2.**8), [saw(amax, found, above=0.)]) == [7] == octaves(ALSScaler(2.**8), [saw(amax, found)])


def test_a_nan_of_an_activation_lies_above_the_edge():
    sc = ALSScaler(2.**4); net = nn.Linear(2, 2).half(); watch = sc.watch(net)
    net(torch.ones(1, 2).half()).backward(torch.tensor([[NAN, 1.]]).half())
    got = watch.read()
    assert got['above', EDGE] == 1
    sc.update(got | {'found_inf': torch.tensor(0.), 'loss_finite': torch.tensor(1.), ('amax', 'loss'): torch.tensor(1.)})
    assert sc.scale == 8


def test_zeros_double_unless_the_loss_is_zero():
    "A loss that is not zero has gradients, so they were flushed; one that is zero has none at any scale"
    flushed, nothing = saw(0.), saw(0., loss=0.)
    assert octaves(ALSScaler(), [flushed]*140)[-1] == 127
    assert octaves(ALSScaler(2.**8), [nothing]*40 + [flushed]) == [8]*40 + [9]


@pytest.mark.parametrize('k', [40, 46, 50])
def test_it_reaches_a_loss_of_any_size(k):
    "Gradients of a loss times 2^-k arrive; meanwhile a loss that is exactly zero for a while moves nothing"
    net, step = nn.Linear(4, 1), MixedStep(ALSScaler())
    opt, (x, y) = torch.optim.SGD(net.parameters(), lr=0.), (torch.ones(8, 4), torch.zeros(8, 1))
    scales = []
    for i in range(90):
        out = step(net, x, y, opt, lambda p, y: (p - y).square().mean()*(0. if 10 <= i < 30 else 2.**-k))
        scales.append(out['scale'].item())
    assert scales[30] == scales[11] == 2.**10 and scales[-1] > 2.**k and net.weight.grad.all()


def test_bounds():
    assert octaves(ALSScaler(4., min_scale=2., max_scale=16.), [saw()]*4 + [saw(1e4)]*5) == [3, 4, 4, 4, 3, 2, 1, 1, 1]


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
    assert octaves(ALSScaler(deadband=True), [saw(100.), saw(5000.), saw(9000.), saw(4095.), saw(4096.)]) == [1, 1, 0, 1, 1]


# --- PopART's own tests ---

def test_from_two_eps_it_doubles_every_step():
    start = 2*torch.finfo(torch.float32).eps
    for sc in (ALSScaler(start, min_scale=start), popart_scaler(start)):
        scales = toy_run(sc, 20).history['scale']
        assert scales == [start*2**i for i in range(20)], sc


def test_from_1e20_with_the_smallest_edge_it_halves_every_step():
    for sc in (ALSScaler(2.**66, edge=2.**-24), popart_scaler(2.**66, bin_edge=1e-20)):
        run = toy_run(sc, 8)
        assert run.history['scale'] == [2.**(66 - i) for i in range(8)] and sum(run.history['skipped']) == 8


@pytest.mark.parametrize('period,want', [(1, [10, 20, 40, 80, 160, 320, 640, 1280]), (2, [10, 20, 20, 40, 40, 80, 80, 160])])
def test_exact_traces_for_periods(period, want, quietly):
    for make in (ALSScaler, popart_scaler):
        assert toy_run(make(10., period=period), 8).history['scale'] == want


def test_the_counter_is_checkpointed():
    def steps(): return [saw(1.) if i % 5 else saw(9000.) for i in range(24)]
    whole, parts = ALSScaler(period=4), ALSScaler(period=4)
    path, state = octaves(whole, steps()), parts.state_dict()
    again = []
    for o in steps():
        parts = ALSScaler(period=4); parts.load_state_dict(state)
        again += octaves(parts, [o]); state = parts.state_dict()
    assert again == path and len(set(path)) > 3


def small_training(scaler, opt, micro=1, steps=8):
    "A net whose gradients are ordinary FP16 numbers at every scale that occurs; its weights"
    lin = nn.Linear(4, 3); x = torch.linspace(.5, 1, 32).view(8, 4)
    with torch.no_grad(): lin.weight.copy_(torch.linspace(-.5, .4, 12).view(3, 4)); lin.bias.zero_()
    o, step = opt(lin.parameters()), MixedStep(scaler)
    step.begin(lin)
    for _ in range(steps):
        o.zero_grad(); step.controller.reset()
        for _ in range(micro): step.backward(lin, x, torch.full((8, 3), 2.), lambda p, y: F.mse_loss(p, y)/micro)
        step.controller.unscale_(named_gradients(o, lin)); take_step(o, step.controller.decide())
    return lin.weight.detach(), lin.bias.detach()


OPTS = [lambda p: torch.optim.SGD(p, lr=.125, momentum=.5, weight_decay=.01), lambda p: torch.optim.Adam(p, lr=.125), lambda p: torch.optim.RMSprop(p, lr=.01)]
@pytest.mark.parametrize('opt', OPTS, ids=['sgd', 'adam', 'rmsprop'])
@pytest.mark.parametrize('micro', [1, 5])
@pytest.mark.parametrize('name', ['als', 'maximum', 'period', 'popart_period'])
def test_weight_updates_are_the_same_with_and_without(name, opt, micro):
    sc = MAKES[name](init_scale=2.**8)
    with_, without = small_training(sc, opt, micro), small_training(StaticScaler(2.**8), opt, micro)
    assert all(same_bits(a, b) for a, b in zip(with_, without)) and sc.scale != 2**8


def spy_on_update(monkeypatch, scaler):
    "The statistics of each decision, as they come"
    seen, update = [], scaler.update
    monkeypatch.setattr(scaler, 'update', lambda stats: (seen.append({n: v.item() for n, v in stats.items()}), update(stats))[1])
    return seen


def test_counts_are_numpys(monkeypatch):
    seen, sc, toy = [], ALSScaler(2.**18, deadband=True), get_toy('cnn')
    net, step, told = toy.model(), MixedStep(sc), spy_on_update(monkeypatch, sc)
    opt = torch.optim.SGD(net.parameters(), lr=0.)
    step.begin(net)
    spy = TensorHooks(net, lambda n, k, t: seen.append(t.clone()), ('activation_grad',))
    xb, yb = next(batches(toy.data(), 64, 1)); opt.zero_grad()
    step.backward(net, xb, yb, toy.loss_func); spy.remove()
    weights = [p.grad.clone() for p in net.parameters()]
    step.controller.unscale_(named_gradients(opt, net)); step.controller.decide()
    halves = [s for s in seen if s.dtype == torch.float16]
    g = np.concatenate([t.float().abs().numpy().ravel() for t in (*halves, *weights)])
    low, mid, high = np.histogram(g, [0, EDGE/2, EDGE, np.inf])[0]
    assert told[0]['above', EDGE] == high > 0 and told[0]['above', EDGE/2] == high + mid
    assert told[0]['numel'] == len(g) > sum(p.numel() for p in net.parameters())


# --- what counts, and the hooks ---

def hooked(model): return sum(len(m._forward_hooks) for m in model.modules()) + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_patterns_and_classes_choose_layers():
    net = get_toy('cnn').model()
    convs = sum(isinstance(m, nn.Conv2d) for m in net.modules())
    for kw, n in ((dict(types=nn.Conv2d), convs), (dict(names='0'), 1), (dict(activations=False), 0)):
        watch = ALSScaler(**kw).watch(net)
        assert hooked(net) == n > -1, kw
        if watch: watch.remove()
    for kw in (dict(names='encoder.*'), dict(names=[]), dict(types=nn.LSTM)):
        with pytest.raises(ValueError, match='there are|No module|chooses no'): ALSScaler(**kw).watch(net)
    assert hooked(net) == 0


def test_what_is_not_chosen_does_not_count(monkeypatch):
    numels = {}
    for kind, kw in dict(both={}, weights=dict(activations=False), activations=dict(weights=False)).items():
        sc = ALSScaler(**kw); told = spy_on_update(monkeypatch, sc)
        plain_training(nn.Linear(4, 2), sc, 1)
        numels[kind] = told[0]['numel']
    assert numels == dict(both=14, weights=10, activations=4)


def test_only_half_gradients_of_activations_count():
    sc, net = ALSScaler(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)); watch = sc.watch(net)
    net(torch.ones(2, 4)).sum().backward()
    assert watch.read()['numel'] == 0
    with fp32_accumulate(), torch.autocast('cpu', torch.float16): net(torch.ones(2, 4)).sum().backward()
    assert watch.read()['numel'] == 12
    watch.reset()
    assert watch.read()['numel'] == 0


def test_micro_batches_add_up_until_the_step():
    sc, net = ALSScaler(2.**13), nn.Linear(2, 1).half(); watch = sc.watch(net)
    for x in (1., 3., 0.): net(torch.ones(1, 2).half()).backward(torch.tensor([[x*2.**13]]).half())
    got = watch.read()
    assert (got['above', EDGE], got['numel']) == (2, 3)


def test_without_a_model_it_says_so():
    with pytest.raises(ValueError, match='watches the model'): StepController(ALSScaler())
    with pytest.raises(ValueError, match='model'): GradScaler(ALSScaler())


def test_hooks_go_with_the_watch_and_copies_have_none():
    net = get_toy('cnn').model(); sc = ALSScaler(saturate=True)
    watch = sc.watch(net)
    assert hooked(net) > 0
    model = copy.deepcopy(net)
    with fp32_accumulate(): model.half()(torch.ones(2, 1, 8, 8).half()).sum().backward()                # the copy's hooks do nothing
    assert watch.read()['numel'] == 0
    watch.remove()
    assert hooked(net) == 0


def learner(scaler, **kw):
    from fastai.basics import Learner, SGD
    toy = get_toy('deep_sigmoid'); d = toy.data()
    return Learner(tensor_dls((d.train[0][:256], d.train[1][:256]), d.valid, bs=64), toy.model(), loss_func=toy.loss_func, opt_func=SGD, lr=.1, **kw).to_mixed(scaler)


def quiet(learn, n=1, **kw):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, **kw)
    return learn


def test_in_a_learner_with_accumulation(monkeypatch):
    from fastai.callback.training import GradientAccumulation
    sc = ALSScaler(); told = spy_on_update(monkeypatch, sc)
    learn = quiet(learner(sc, cbs=GradientAccumulation(128)), 1)
    weights = sum(p.numel() for p in learn.model.parameters())
    assert [t['numel'] for t in told] == [2*64*(7*64*2 + 10) + weights]*2 and learn.mixed_precision_cb.history.scales.tolist() == [1, 2]
    assert hooked(learn.model) == 0
    learn.remove_cb(MixedPrecisionCB)


def test_in_the_drop_in_as_in_a_plain_step():
    toy = get_toy('deep_sigmoid')
    def loop(fused):
        net = toy.model(); opt = torch.optim.Adam(net.parameters(), lr=6e-3, fused=fused); scaler = GradScaler(ALSScaler(period=2), model=net)
        scales = []
        for xb, yb in batches(toy.data(), 64, 44):
            opt.zero_grad()
            with fp32_accumulate():
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
from mpcourse.step import StepController, named_gradients
w = nn.Parameter(torch.ones(2)); opt = torch.optim.SGD([w], lr=.1); sc = ALSScaler(2.**10); lin = nn.Linear(2, 2).half(); stats = StepController(sc, lin)
path = []
for step in range(6):
    big = step == (2 if rank == 0 else 4)
    lin(torch.ones(1, 2).half()).backward(torch.full((1, 2), 9000. if big else 1.).half())
    w.grad = torch.ones(2)
    stats.unscale_(named_gradients(opt)); stats.decide(); path.append(sc.scale.item())
torch.save(path, f'{folder}/{rank}.pt')''')
    assert got[0] == got[1] == [2.**k for k in (11, 12, 11, 12, 11, 12)]


# --- saturation ---

def test_saturation_clips_infinities_and_leaves_nan():
    for sat in (False, True):
        sc = ALSScaler(saturate=sat); net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).half(); watch = sc.watch(net)
        with torch.no_grad(): net[1].weight.fill_(1.)
        x = torch.ones(1, 2).half().requires_grad_()
        net(x).backward(torch.tensor([[INF, 1.]]).half())
        got = net[0].weight.grad
        assert got.isfinite().all() == sat and net[1].weight.grad.isfinite().all() == sat
        if sat: assert got.abs().max() == 65504
        assert watch.read()['above', EDGE] >= 1
        net.zero_grad(); net(100*x.detach()).backward(torch.tensor([[3000., 1.]]).half())        # finite until it meets the input
        assert (net[0].weight.grad.abs().max() == 65504) if sat else net[0].weight.grad.isinf().any()
        net.zero_grad(); net(x).backward(torch.tensor([[NAN, 1.]]).half())
        assert net[1].weight.grad.isnan().any()


def test_saturating_from_far_above_takes_steps_that_the_default_skips():
    skips = {s: sum(toy_run(ALSScaler(2.**26, saturate=s), 12).history['skipped']) for s in (False, True)}
    exact = toy_run(ALSScaler(2.**26), 12, compute=lambda: fp32_accumulate('saturate'))
    assert skips[True] <= skips[False] and skips[False] > 0 == sum(exact.history['skipped'])


@every
def test_a_nan_of_the_forward_pass_is_skipped(name):
    toy = get_toy('deep_sigmoid')
    sc = MAKES[name](init_scale=2.**10); net = toy.model(); opt = torch.optim.Adam(net.parameters(), lr=1e-3); step = MixedStep(sc)
    for i, (xb, yb) in enumerate(batches(toy.data(), 32, 7)):
        if i == 1: before, scale = [p.detach().clone() for p in net.parameters()], sc.scale.item()
        step(net, xb.index_fill(0, torch.tensor(0), 1e6) if i else xb, yb, opt, toy.loss_func)
    assert all(same_bits(p.detach(), q) for p, q in zip(net.parameters(), before))
    assert sc.scale == (scale if sc.skip_nonfinite_loss else scale/2**6)


# --- the originals ---

def test_popart_counts_what_is_larger_than_8188():
    p = popart_scaler()
    assert p.edge == 8192 and popart_scaler(bin_edge=.5).edge == 32768 and popart_scaler(bin_edge=0.).edge == 2.**-24
    half = torch.arange(0x7c00, dtype=torch.int16).view(torch.float16).float()
    assert same_bits(half > 8188, half >= p.edge)
    w = nn.Parameter(torch.zeros(3)); opt = torch.optim.SGD([w], lr=0.)
    for g, down in (([8188., 1, 1], False), ([8192., 1, 1], True)):
        sc = popart_scaler(2.**4, activations=False); w.grad = torch.tensor(g)
        decide(sc, opt)
        assert sc.scale == (8 if down else 32)


def moves(path, first=0.): return [i for i, (a, b) in enumerate(zip([first, *path], path)) if a != b]


def test_keras_trace():
    k = octaves(Keras(), [saw()]*200)
    assert moves(k)[:4] == [8, 17, 26, 35] and max(k) == 14                                      # every ninth step; never at 2^15
    assert moves(octaves(Keras(update_frequency=2), [saw()]*9)) == [2, 5, 8]
    assert octaves(Keras(update_frequency=1), [saw()]*4) == [1, 2, 3, 4]                    # a case of its own in the source
    assert octaves(Keras(update_frequency=1), [saw(9e3, above=1e5)]*4) == [0]*4             # never below 1
    crowd, none = saw(9e3, above=40., numel=100.), saw(above=0., numel=100.)
    for others, last in (([none]*3, 3), ([none]*4, 5)):                                            # 40 of 400 against 40 of 500
        sc = Keras(2.**4, update_frequency=len(others), threshold=.09)
        assert octaves(sc, [crowd, *others])[-1] == last and sc.sums.tolist() == [0]*2


# --- the view ---

def test_the_view_counts_what_the_scaler_counts(monkeypatch):
    torch.manual_seed(0)
    sc, cb = ALSScaler(2.**15), ALSViewCB(every=2)
    told = spy_on_update(monkeypatch, sc)
    out, learn = cb.show(), learner(sc, cbs=cb)
    quiet(learn, 3)
    assert [(f.above, f.hist.total) for f in cb.frames] == [(t['above', EDGE], t['numel']) for t in told[::2]]
    assert [f.step for f in cb.frames] == [0, 2, 4, 6, 8, 10] and {f.verdict for f in cb.frames} == {'double', 'halve'}
    assert [f.scale for f in cb.frames] == learn.mixed_precision_cb.history.scales.tolist()[::2]
    import matplotlib.pyplot as plt
    fig = cb.plot(3)
    assert len(fig.axes) == 2 and 'step 6' in fig.axes[0].get_title() and '<img' in out.value; plt.close('all')
    assert hooked(learn.model) == 0 and not cb.hooks
    learn.validate()
    assert len(cb.frames) == 6


def test_a_view_needs_an_als_scaler_and_a_picture():
    with pytest.raises(ValueError, match='no ALSScaler to look at'): quiet(learner(StaticScaler(), cbs=ALSViewCB()))
    with pytest.raises(ValueError, match='no picture yet'): ALSViewCB().plot()
    with pytest.raises(ValueError, match='every=0'): ALSViewCB(0)


def plain_training(net, sc, steps):
    opt, step = torch.optim.SGD(net.parameters(), lr=.1), MixedStep(sc)
    for _ in range(steps): step(net, torch.ones(2, 4), torch.ones(2, 2), opt, F.mse_loss)
    return step
