"""Running means and their bounds, gradients of micro-batches, weights without a master copy, resuming."""
import math

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Adam, Callback, Learner, SGD
from fastai.callback.training import GradientAccumulation, GradientClip
from hypothesis import given, settings, strategies as st

from mpcourse.learner import RunningMeanCB
from mpcourse.accumulate import (MEANS, STORAGE_ROUNDINGS, NoMasterStep, NoMasterWeights, RunningMean, mean_backward,
                                 running_mean)
from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.dynamic import DynamicScaler
from mpcourse.formats import same_bits
from mpcourse.scaler import StaticScaler
from mpcourse.toys import batches, cross_entropy, digits, relu_mlp, train_toy

pytestmark = pytest.mark.library
H, B = torch.float16, torch.bfloat16
DEVICES = ['cpu', 'cuda'][:1 + torch.cuda.is_available()]
CODES = st.lists(st.integers(0, 0xffff).filter(lambda c: c & 0x7c00 != 0x7c00), min_size=1, max_size=80)    # finite halves
OPTS = dict(sgd=lambda ps: torch.optim.SGD(ps, lr=1e-3), momentum=lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=.9),
            adam=lambda ps: torch.optim.Adam(ps, lr=1e-4))


def halves(codes): return torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(H)
def gen(k=0): return torch.Generator().manual_seed(k)


# --- means ---

@settings(max_examples=400, deadline=None)
@given(CODES)
def test_lerp_is_bounded_and_as_near_as_derived(codes):
    gs = halves(codes)
    mean, largest = running_mean(gs[:, None]).double(), gs.abs().max().double()
    assert mean.abs() <= largest, 'a mean is no larger than the largest'
    assert (mean - gs.double().mean()).abs() <= (len(gs) + 1)/2*(2.**-11*largest + 2.**-25)


@settings(max_examples=200, deadline=None)
@given(CODES)
def test_the_published_formula_is_bounded_with_an_octave_to_spare(codes):
    gs = (halves(codes).float()/2).half()
    assert running_mean(gs[:, None], 'graphcore').abs() <= gs.abs().max().float()*(1 + 2**-8) + 2**-20


def test_a_sum_overflows_where_no_mean_does():
    gs = torch.full((64, 5), 3000.).half()
    assert sum(gs).isinf().all()
    for rule in MEANS: assert (running_mean(gs, rule) == 3000).all(), rule


def test_where_two_of_the_formulas_overflow_and_lerp_does_not():
    same, apart = torch.full((3, 1), 65504.).half(), torch.tensor([[-60000.], [60000.]]).half()
    assert [running_mean(same, r).item() for r in MEANS] == [math.inf, 65504, 65504]
    assert [running_mean(apart, r).item() for r in MEANS] == [0, math.inf, 0]


@pytest.mark.parametrize('k', range(3))
def test_the_published_formula_is_the_least_accurate(k):
    gs = (1 + torch.randn(256, 2000, generator=gen(k))).half()
    exact = gs.double().mean(0)
    off = {r: (running_mean(gs, r).double() - exact).norm().item() for r in MEANS}
    assert max(off, key=off.get) == 'graphcore' and off['graphcore'] > 1.3*off['lerp']


@pytest.mark.parametrize('device', DEVICES)
def test_lerp_rounds_once(device):
    m, g = (torch.randn(20000, generator=gen(k)).half().to(device) for k in (1, 2))
    for k in (1, 2, 64, 1024):
        once = m.float().lerp(g.float(), 1/k).half()
        assert same_bits(MEANS['lerp'](m, g, k).cpu(), once.cpu())
        assert same_bits(torch._foreach_lerp([m], [g], 1/k)[0].cpu(), once.cpu())


def test_what_is_no_mean():
    with pytest.raises(ValueError, match="'median'"): running_mean([torch.ones(1)], 'median')
    with pytest.raises(ValueError, match=r'\[\]'): running_mean([])


# --- the gradients of a step ---

def set_grads(ps, *gs):
    for p, g in zip(ps, gs): p.grad = None if g is None else torch.full_like(p, g)


def test_unequal_parts_and_missing_gradients():
    ps = [nn.Parameter(torch.zeros(2).half()) for _ in range(3)]
    mean = RunningMean(ps)
    for n, gs in ((1, (8., None, None)), (3, (4., 16., None))):
        set_grads(ps, *gs)
        mean.add(n)
        assert all(p.grad is None for p in ps), 'the next backward pass would add to it'
    set_grads(ps, None, None, None)
    mean.add(4)
    mean.put()
    assert [p.grad if p.grad is None else p.grad.tolist() for p in ps] == [[2.5]*2, [6.]*2, None]
    assert mean.seen == 0 and not mean.means


def test_an_infinite_part_stays_visible():
    p = nn.Parameter(torch.zeros(1).half())
    mean = RunningMean([p])
    for g in (1., math.inf, *[2.]*20):
        set_grads([p], g)
        mean.add()
    mean.put()
    assert not p.grad.isfinite()


@pytest.mark.parametrize('sizes', [[15]*4, [20, 30, 10], [1]*60])
def test_the_mean_over_parts_is_the_whole_batch(sizes):
    (x, y), a, b = next(iter(batches(digits(), 60, 1))), relu_mlp(), relu_mlp()
    loss = mean_backward(a, zip(x.split(sizes), y.split(sizes)), cross_entropy, StaticScaler(2.**4))
    whole = cross_entropy(b(x), y)
    (whole*2**4).backward()
    assert torch.allclose(loss, whole, rtol=1e-5)
    for p, q in zip(a.parameters(), b.parameters()): assert torch.allclose(p.grad, q.grad, atol=1e-6*2**4)


def test_half_gradients_within_the_derived_bound():
    (x, y), model = next(iter(batches(digits(), 64, 1))), relu_mlp()
    rows = []
    for xb, yb in zip(x.split(1), y.split(1)):
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(model(xb), yb), list(model.parameters()))]))
    rows = torch.stack(rows)*2**14
    exact, n = rows.double().mean(0), len(rows)
    bound = (n + 3)/2*(2**-11*rows.abs().amax(0) + 2**-25)
    assert ((running_mean(rows.half()).double() - exact).abs() <= bound).all()


# --- in a Learner ---

class StepCount(Callback):
    def before_fit(self): self.steps = 0
    def after_step(self): self.steps += self.training


def learner(*cbs, mixed=None, opt=SGD, bs=16, model=None):
    dls = tensor_dls(digits().train, digits().valid, bs=bs)
    dls.train.rng.seed(0)
    learn = Learner(dls, model or relu_mlp(), cross_entropy, opt_func=opt, lr=.1 if opt is SGD else 1e-3, cbs=[*cbs, StepCount()])
    return learn.to_mixed(mixed) if mixed else learn


def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])


@pytest.mark.parametrize('opt', [SGD, Adam])
def test_the_callback_is_fastais_in_fp32(opt):
    a, b = (quiet_fit(learner(cb(64), GradientClip(.3), opt=opt), 1) for cb in (RunningMeanCB, GradientAccumulation))
    assert a.step_count.steps == b.step_count.steps == 22
    moved = (weights(a) - weights(learner())).norm()
    assert (weights(a) - weights(b)).norm() < 1e-3*moved


@pytest.mark.parametrize('scale, skipped', [(2.**8, 0), (2.**60, 22)])
def test_beside_mixed_precision_there_is_one_decision_a_step(scale, skipped):
    learn = quiet_fit(learner(RunningMeanCB(64), mixed=StaticScaler(scale)), 1)
    history = learn.mixed_precision_cb.history
    assert len(history) == 22 and int(history.skipped.sum()) == skipped
    assert torch.equal(weights(learn), weights(learner())) == (skipped == 22)


def test_an_unfinished_mean_does_not_outlive_the_fit():
    cb = RunningMeanCB(100)                     # 89 batches of 16: some are left over
    learn = quiet_fit(learner(cb), 1)
    assert cb.mean.seen and all(p.grad is None for p in learn.model.parameters())
    learn.dls.train.rng.seed(0)
    first = weights(learn)
    quiet_fit(learn, 1)
    assert learn.step_count.steps == 12 and not torch.equal(first, weights(learn))


# --- storage ---

def moved(dtype, rounding, opt, steps=600, device='cpu'):
    "How far weights of 1 go by small updates, on average"
    w = nn.Parameter(torch.ones(400, dtype=dtype, device=device))
    o, storage = OPTS[opt]([w]), NoMasterWeights([w], rounding, torch.Generator(device).manual_seed(0))
    for _ in range(steps):
        w.grad = torch.full_like(w, .125)
        with storage.wide(): o.step()
    return 1 - w.detach().double().mean().item()


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('dtype', [H, B])
@pytest.mark.parametrize('opt', OPTS)
def test_small_updates_arrive_stochastically_and_with_kahan(opt, dtype, device):
    ref = nn.Parameter(torch.ones(1))
    o = OPTS[opt]([ref])
    for _ in range(600):
        ref.grad = torch.full_like(ref, .125)
        o.step()
    want = 1 - ref.item()
    assert .04 < want and moved(dtype, 'nearest', opt, device=device) == 0
    for r in STORAGE_ROUNDINGS[1:]: assert abs(moved(dtype, r, opt, device=device) - want) < .06*want, r


def test_within_it_everything_is_fp32_and_the_state_stays_so():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model[0].half()
    model[0].bias.requires_grad_(False)
    opt, before = torch.optim.Adam([p for p in model.parameters() if p.requires_grad]), model[0].weight.data
    storage = NoMasterWeights(model.parameters(), 'nearest')
    for p in model.parameters(): p.grad = torch.ones_like(p)
    with storage.wide():
        assert {p.dtype for p in opt.param_groups[0]['params']} == {p.grad.dtype for p in opt.param_groups[0]['params']} == {torch.float32}
        opt.step()
    assert model[0].weight.data_ptr() == before.data_ptr() and model[0].weight.dtype == H and model[0].weight.grad is None
    assert model[1].weight.dtype == torch.float32 and model[1].weight.grad is not None
    assert {opt.state[p]['exp_avg'].dtype for p in opt.state} == {torch.float32}


@pytest.mark.parametrize('rounding', STORAGE_ROUNDINGS)
def test_after_an_exception_every_bit_is_as_it_was(rounding):
    w = nn.Parameter(torch.linspace(1, 2, 50).half())
    storage, start = NoMasterWeights([w], rounding, gen()), w.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        with storage.wide():
            w.data.add_(1)
            raise KeyboardInterrupt
    assert same_bits(w.detach(), start)
    with storage.wide(): pass
    assert same_bits(w.detach(), start)


def training(rounding, opt, seed=0):
    w = nn.Parameter(torch.linspace(.5, 2, 100).bfloat16())
    return w, OPTS[opt]([w]), NoMasterWeights([w], rounding, gen(seed) if rounding == 'stochastic' else None)


def go_on(w, opt, storage, steps):
    for i in steps:
        w.grad = torch.linspace(-1, 1, 100).to(w)*(i + 1)
        with storage.wide(): opt.step()


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('rounding', STORAGE_ROUNDINGS)
def test_resumed_bit_for_bit(rounding, opt, tmp_path):
    a = training(rounding, opt)
    go_on(*a, range(7))
    torch.save(dict(w=a[0].detach(), storage=a[2].state_dict(a[1])), tmp_path/'x.pt')
    go_on(*a, range(7, 20))
    saved, b = torch.load(tmp_path/'x.pt', weights_only=True), training(rounding, opt, seed=9)
    b[0].data.copy_(saved['w'])
    b[2].load_state_dict(saved['storage'], b[1])
    go_on(*b, range(7, 20))
    assert same_bits(a[0].detach(), b[0].detach())
    for n, t in a[1].state[a[0]].items(): assert t is None or same_bits(t, b[1].state[b[0]][n]), n


def test_torch_alone_rounds_the_state_of_half_weights():
    a, b = training('nearest', 'adam'), training('nearest', 'adam')
    go_on(*a, range(3))
    b[1].load_state_dict(a[1].state_dict())
    assert b[1].state[b[0]]['exp_avg'].dtype == B, 'torch has changed: the chapter says otherwise'


def test_a_state_of_another_kind_is_refused():
    a, b = training('kahan', 'sgd'), training('stochastic', 'sgd')
    with pytest.raises(ValueError, match='stochastic'): b[2].load_state_dict(a[2].state_dict(a[1]), b[1])


@pytest.mark.parametrize('make, value', [
    (lambda: NoMasterWeights([nn.Parameter(torch.ones(1).half())], 'down'), "'down'"),
    (lambda: NoMasterWeights([nn.Parameter(torch.ones(1))]), '16 bits'),
    (lambda: NoMasterStep(1024.), '1024'), (lambda: NoMasterStep(StaticScaler(2.), parts=0), '0')])
def test_wrong_arguments(make, value):
    with pytest.raises(ValueError, match=value): make()


# --- a step ---

def run(scaler, steps=40, **kw): return train_toy('relu_mlp', NoMasterStep(scaler, generator=gen(), **kw), steps=steps, dtype=H)
def flat(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_parts_are_one_batch_and_it_learns():
    one, four = run(StaticScaler(2.**8), 100), run(StaticScaler(2.**8), 100, parts=4)
    assert one.acc > .6 and abs(one.loss - four.loss) < .2
    assert {p.dtype for p in four.model.parameters()} == {H}


@pytest.mark.parametrize('rounding', STORAGE_ROUNDINGS)
def test_a_skipped_step_leaves_every_bit(rounding):
    lost = run(StaticScaler(2.**40), 3, rounding=rounding, parts=2)
    assert sum(lost.history['skipped']) == 3 and same_bits(flat(lost.model), flat(relu_mlp().half()))


def test_the_scale_moves_once_a_step_and_backs_off():
    ran = run(DynamicScaler(init_scale=2.**24, growth_interval=1000), 12, parts=4)
    scales, skipped = ran.history['scale'], ran.history['skipped']
    assert skipped[0] and not skipped[-1]
    assert all(b == (a/2 if s else a) for a, b, s in zip(scales, scales[1:], skipped))


def test_clipping_sees_unscaled_gradients():
    model, step = relu_mlp().half(), NoMasterStep(StaticScaler(2.**8), 'kahan', clip=.01)
    before = flat(model).double()
    x, y = next(iter(batches(digits(), 64, 1, dtype=H)))
    step(model, x, y, torch.optim.SGD(model.parameters(), lr=1.), F.cross_entropy)
    lost = torch.cat([t.flatten() for t in step.storage.compensation])
    assert ((flat(model).double() + lost.double() - before).norm() - .01).abs() < 1e-4
