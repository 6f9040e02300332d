"The factor, scales where gradients meet, the policy: true gradients, less underflow, resumed and refused"
import copy, math, pickle
from statistics import NormalDist

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils.checkpoint import checkpoint

import mpcourse.zoo  # noqa: F401
from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.checkpoint import load_training_state, save_training_state
from mpcourse.failures import flushed, gradients
from mpcourse.formats import same_bits
from mpcourse.gradscaler import GradScaler
from mpcourse.layerwise import LayerwiseScaler, common_scale, fan_out_terms, layer_factor
from mpcourse.scaler import StaticScaler
from mpcourse.step import StepController, MixedStep, named_gradients, take_step
from mpcourse.toys import batches, deep_sigmoid, digits, get_toy

octave = st.integers(-60, 20)


def buffers(s): return {n: b.clone() for n, b in s.named_buffers()}
def same(a, b): return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
def stats(found=0., loss_finite=1.): return dict(found_inf=torch.tensor(found), loss_finite=torch.tensor(loss_finite))


# --- the factor ---

def authors(sigma, top, share, cap):
    "The formula, with another erfinv and in Python's floats"
    z = NormalDist().inv_cdf((1 + share)/2)                 # √2 erfinv(share)
    return 2.**math.floor(math.log2(min(max(6e-8/(z*sigma), 1), cap, 65504/top)))


@settings(max_examples=300, deadline=None)
@given(octave, octave, st.sampled_from([1e-5, 1e-3, .05, .5]), st.sampled_from([1., 2.**10, 2.**100]), st.floats(1.01, 1.99))
def test_the_factor_is_the_formula(a, b, share, cap, m):
    sigma, top = m*2.**a, m*2.**b
    got = layer_factor(torch.tensor(sigma), torch.tensor(top), share, cap).item()
    assert got == authors(sigma, top, share, cap)


@pytest.mark.parametrize('layer, x', [(nn.Linear(5, 7), (2, 5)), (nn.Conv1d(2, 3, 5), (1, 2, 20)), (nn.Conv2d(4, 6, 3), (1, 4, 12, 12)),
                                      (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 12, 12)), (nn.Conv3d(2, 4, 3), (1, 2, 9, 9, 9))], ids=lambda x: str(x)[:20])
def test_contraction_counts_the_terms_of_a_sum(layer, x):
    "With ones everywhere an entry of the input's gradient is the number of its terms"
    nn.init.ones_(layer.weight)
    x = torch.zeros(x, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.max() == fan_out_terms(layer)


@settings(max_examples=30, deadline=None)
@given(st.integers(-40, -14), st.integers(0, 99))
def test_no_more_underflows_than_allowed(k, seed):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))*2.**k
    f = layer_factor(x.std(), x.abs().max(), 1e-2, 2.**100)
    assert ((x*f).half() == 0).float().mean() < 1.2e-2 and (x*f).abs().max() <= 65504


# --- where gradients meet ---

@pytest.mark.parametrize('scales, bound, want', [([4.], math.inf, 4), ([4., 16.], math.inf, 16), ([4., 16., 8.], 8., 8), ([4., 16.], 5., 4), ([4., 16.], 1., 4)])
def test_the_largest_that_overflows_nothing(scales, bound, want): assert common_scale(scales, bound) == want


class Net(nn.Module):
    "Layers a and b of one size, and a forward pass of the test's choice"
    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.norm, self.free, self.run = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Parameter(torch.ones(6)), run
    def forward(self, x): return self.run(self, x)


def tied(m, x): return m.b(m.a(x).relu()) + F.linear(x*2, m.a.weight)
def halves(m, x):
    u, v = m.a(x).chunk(2, -1)
    return m.b(torch.cat([v, u], -1))
GRAPHS = dict(chain=lambda m, x: m.b(m.a(x).relu()), residual=lambda m, x: x + m.b(m.norm(x + m.a(x))), inside=lambda m, x: m.a(x) + m.b(m.a(x).sigmoid()),
              twice=lambda m, x: m.a(m.a(m.a(x))), parallel=lambda m, x: m.a(x)*m.b(x) + m.free, product=lambda m, x: m.a(x)@m.b(x).mT@x,
              tied=tied, halves=halves, in_place=lambda m, x: m.b(F.relu(m.a(x), inplace=True)) + x,
              one_is_unused=lambda m, x: m.a(x), frozen=lambda m, x: m.b(m.a(x).detach()) + m.free,
              kept=lambda m, x: checkpoint(m.b, checkpoint(m.a, x, use_reentrant=False) + x, use_reentrant=False))


def own_gradients(model, x, factors=None, loss=lambda out: out.square().mean()):
    "In FP32: with factors through the policy, and unscaled by name"
    model.zero_grad()
    if factors is None: loss(model(x)).backward()
    else:
        scaler = LayerwiseScaler(model, 2.**6)
        scaler.factors.copy_(torch.tensor(factors))
        scaler.phase += 1
        watch = scaler.watch(model)
        scaler.scale_loss(loss(model(x))).backward()
        for n, p in model.named_parameters():
            if p.grad is not None: p.grad.mul_(scaler.inv_scale(n))
        watch.remove()
        assert not any(m._forward_hooks for m in model.modules())
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('factors', [[1., 1.], [2.**9, 1.], [1., 2.**9], [2.**5, 2.**-3], [0., 2.**9], [0., 0.]], ids=str)
@pytest.mark.parametrize('run', GRAPHS.values(), ids=GRAPHS)
def test_factors_come_out_again_bit_for_bit(run, factors):
    torch.manual_seed(0)
    model, x = Net(run), torch.randn(5, 6, requires_grad=True)
    want, got = own_gradients(model, x), own_gradients(model, x, factors)
    assert want and same(want, got)


@pytest.mark.parametrize('name', ['cnn', 'char_lm', 'two_towers', 'relu_mlp'])
def test_gradients_of_the_toys_are_true(name):
    toy = get_toy(name)
    xb, yb = next(batches(toy.data(), 16, 1))
    grads = {}
    for factored in (False, True):
        model = toy.model()
        step = MixedStep(LayerwiseScaler(model, 2.**8)) if factored else MixedStep(StaticScaler(2.**8))
        if factored: step.scaler.factors.copy_(2.**(torch.arange(len(step.scaler.layers)) % 4))
        step.begin(model)
        step.backward(model, xb, yb, toy.loss_func)
        step.controller.unscale_(named_gradients(toy.opt(model.parameters()), model))
        grads[factored] = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads[False].items(): assert (g - grads[True][n]).norm() <= .02*g.norm(), n


def test_the_bound_of_a_layer_holds_where_its_gradient_meets_another():
    "Without the bound the sum carries the 2^9 of the layer's branch, with it the 1 of the other"
    torch.manual_seed(0)
    model, x, seen = Net(lambda m, x: x + m.a(x)), torch.randn(5, 6, requires_grad=True), []
    plain = torch.autograd.grad(model(x).sum(), x)[0]
    scaler = LayerwiseScaler(['a'])
    watch = scaler.watch(model)
    for bound in (math.inf, 2.**8):
        scaler.factors.fill_(2.**9), scaler.bounds.fill_(bound), scaler.phase.fill_(1)
        h, x.grad = 1*x, None
        h.register_hook(seen.append)
        scaler.scale_loss(model(h).sum()).backward()
        assert x.grad.equal(plain)
    watch.remove()
    assert seen[0].equal(plain*2**9) and seen[1].equal(plain)


# --- the rule ---

def trained(model, scaler, steps=1, toy=get_toy('deep_sigmoid'), lr=0., seed=0):
    step, opt = MixedStep(scaler), torch.optim.SGD(model.parameters(), lr=lr)
    return [step(model, x, y, opt, toy.loss_func) for x, y in batches(toy.data(), 64, steps, seed)], step


def deep(depth=24): return deep_sigmoid(depth=depth)
def first_batch(): return next(batches(digits(), 128, 1))


def test_the_accumulated_factor_is_the_product_of_the_authors():
    "In a chain whose gradients shrink; they choose one factor after the other, from the gradient as it arrives"
    torch.manual_seed(0)
    weights = [torch.randn(32, 32)*2.**-k for k in (6, 9, 8, 11)]
    net, x = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in weights]), torch.randn(64, 32)
    for m, w in zip(net, weights[::-1]): m.weight.data = w
    scaler = LayerwiseScaler.measured(net, (x, torch.zeros(64, 32)), lambda p, y: (p*2.**-4).sum(), init_scale=1., cap=2.**100)
    g, product, want = torch.full((64, 32), 2.**-4), 1., []
    for w in weights:
        sigma = (g.square().mean()*w.square().mean()*16).sqrt().item()
        factor = authors(sigma, g.abs().max().item()*w.abs().max().item()*32, 1e-3, 2.**100)
        g, product = g*factor, product*factor
        want.append(product)
        g = g@w
    assert scaler.factors.tolist() == want[::-1] and want[-1] >= 2**8 and want == sorted(want)


def test_each_layer_keeps_the_promise_and_no_single_scale_does():
    model = deep()
    toy = get_toy('deep_sigmoid')
    scaler, exact = LayerwiseScaler.measured(model, first_batch(), F.cross_entropy, cap=2.**100), gradients(toy, model=model)
    def lost(scaler):
        step = MixedStep(scaler)
        step.begin(model)
        model.zero_grad()
        step.backward(model, *first_batch(), F.cross_entropy)
        step.controller.unscale_(named_gradients(torch.optim.SGD(model.parameters()), model))
        return [flushed(exact[n], p.grad) if p.grad.isfinite().all() else 1. for n, p in model.named_parameters() if 'weight' in n]
    assert max(lost(scaler)) < 2e-3
    assert all(sum(s > .01 for s in lost(StaticScaler(2.**k))) >= 8 for k in range(0, 30, 5))
    assert sum(s > .01 for s in lost(LayerwiseScaler.measured(model, first_batch(), F.cross_entropy))) >= 6, "the authors' cap is too low for this net"


def test_measuring_changes_nothing():
    for name in ('cnn', 'char_lm'):
        toy = get_toy(name)
        model = toy.model()
        before = copy.deepcopy(model.state_dict())
        scaler = LayerwiseScaler.measured(model, next(batches(toy.data(), 8, 1)), toy.loss_func)
        assert same(before, model.state_dict()) and all(p.grad is None for p in model.parameters())
        assert not any(m._forward_hooks for m in model.modules()) and scaler.watched is None
        assert (scaler.factors >= 1).all() and scaler.scale == max(1, StaticScaler.measured(model, next(batches(toy.data(), 8, 1)), toy.loss_func).scale)


def test_layers_come_to_light_one_after_the_other():
    scaler, model = LayerwiseScaler(deep(), cap=2.**100, every=50), deep()
    counts = [0]
    step, opt = MixedStep(scaler), torch.optim.SGD(model.parameters(), lr=0.)
    for x, y in batches(digits(), 128, 7):
        step(model, x, y, opt, F.cross_entropy)
        counts.append(int((scaler.factors > 0).sum()))
    assert counts == sorted(counts) and 3 < counts[1] < 12 and counts[-1] >= 22, 'looked at in every step, although every=50'


def test_between_two_choices_nothing_is_counted():
    model = get_toy('relu_mlp').model()
    scaler = LayerwiseScaler.measured(model, first_batch(), F.cross_entropy, every=4)
    seen, step = [], MixedStep(scaler)
    step.begin(model)
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    for x, y in batches(digits(), 64, 12):
        step.controller.reset()
        opt.zero_grad()
        step.backward(model, x, y, F.cross_entropy)
        step.controller.unscale_(named_gradients(opt, model))
        before, counted = scaler.factors.clone(), bool(step.controller.watched.read())
        take_step(opt, step.controller.decide())
        seen.append(counted)
        assert counted or same_bits(before, scaler.factors)
    assert seen == [False, False, False, True]*3


def test_zeros_and_infinities_say_nothing():
    model = get_toy('relu_mlp').model()
    scaler = LayerwiseScaler(model)
    def stat(squares, peak=1.): return {(*k, n): torch.tensor(v) for n in scaler.layers for k, v in ((('squares',), squares), (('numel',), 10.), (('amax', 'peak'), peak), (('amax', 'carried'), 1.))}
    for squares, peak in ((0., 0.), (math.inf, 1.), (math.nan, 1.), (1., math.inf)):
        scaler.factors.fill_(4.)
        scaler.update(stats() | stat(squares, peak))
        assert not scaler.factors.any() and scaler.bounds.isinf().all(), (squares, peak)
    scaler.update(stats() | stat(10*1e-14, 1e-6))
    assert (scaler.factors == 2**8).all() and torch.allclose(scaler.bounds, torch.tensor(65504e6))


@pytest.mark.parametrize('parts', [[0, 1, 0], [0, 0, 0]])
def test_an_expert_without_tokens_has_no_factor_and_stops_nobody(parts):
    class Experts(nn.Module):
        def __init__(self): super().__init__(); self.e, self.none = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(0, 8)
        def forward(self, x): return torch.cat([e(x[:8*n]) for e, n in zip(self.e, parts)] + [self.none(x[:, :0])])
    model = Experts()
    scaler, opt = LayerwiseScaler(model), torch.optim.SGD(model.parameters(), .1)
    for _ in range(2): r = MixedStep(scaler)(model, torch.randn(8, 8), torch.randn(8*(sum(parts) + 1), 8), opt, F.mse_loss)
    assert not r['skipped'] and [f > 0 for f in scaler.by_layer().values()] == [n > 0 for n in (*parts, 0)]


# --- overflow, hold, resume ---

def test_an_overflow_skips_and_lowers_scale_and_ceiling_until_it_is_gone():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    step, opt = MixedStep(LayerwiseScaler(model, 2.**4)), torch.optim.SGD(model.parameters(), lr=1e-3)
    step.scaler.factors.copy_(torch.tensor([2.**30, 2.**4, 1.])), step.scaler.ceiling.fill_(2.**40)
    step.scaler.every, before, skipped = 10**6, copy.deepcopy(model.state_dict()), []
    step.scaler.phase += 1
    for i in range(20):
        ceiling, scale = step.scaler.ceiling.item(), step.scaler.scale.item()
        skipped.append(bool(step(model, x, y, opt, F.mse_loss)['skipped']))
        if i == 0: assert skipped[0] and same(before, model.state_dict())
        if skipped[-1]: assert step.scaler.ceiling <= min(ceiling, 2.**28) and step.scaler.scale == max(1, scale/2)
    assert 2 < sum(skipped) < 15 and not any(skipped[-4:]), skipped


def test_an_overflow_without_factors_leaves_the_ceiling():
    scaler = LayerwiseScaler(['0'], 2.**8)
    scaler.update(stats(1.))
    assert scaler.ceiling == 2**10 and scaler.scale == 2**7


def test_a_loss_that_is_not_finite_leaves_everything():
    model = get_toy('deep_sigmoid').model()
    scaler = LayerwiseScaler(model, 2.**8)
    _, step = trained(model, scaler, 3, lr=.1)
    before, weights, (x, y) = buffers(scaler), copy.deepcopy(model.state_dict()), first_batch()
    r = step(model, x*torch.nan, y, torch.optim.SGD(model.parameters(), lr=.1), F.cross_entropy)
    assert r['skipped'] and scaler.held == 1 and same(weights, model.state_dict())
    assert same({n: b for n, b in before.items() if n != 'held'}, {n: b for n, b in buffers(scaler).items() if n != 'held'})


@pytest.mark.library
@pytest.mark.parametrize('every', [1, 3])
def test_resumed_bit_for_bit(tmp_path, every):
    toy = get_toy('two_towers')
    def start(seed=0):
        model = toy.model(seed=seed)
        return model, toy.opt(model.parameters()), LayerwiseScaler(model, 2.**4, every=every)
    model, opt, scaler = start()
    data = list(batches(toy.data(), 32, 12))
    step, ends = MixedStep(scaler), []
    for i, (x, y) in enumerate(data):
        if i == 5: save_training_state(tmp_path/'s.pt', model, opt, scaler)
        step(model, x, y, opt, toy.loss_func)
    ends.append((copy.deepcopy(model.state_dict()), buffers(scaler)))
    model, opt, scaler = start(1)
    load_training_state(tmp_path/'s.pt', model, opt, scaler)
    step = MixedStep(scaler)
    for x, y in data[5:]: step(model, x, y, opt, toy.loss_func)
    assert same(ends[0][0], model.state_dict()) and same(ends[0][1], buffers(scaler)) and scaler.factors.any()


def test_a_state_of_another_net_is_refused():
    a, b = LayerwiseScaler(deep(4)), LayerwiseScaler(deep(5))
    with pytest.raises(ValueError) as e: b.load_state_dict(a.state_dict())
    assert 'factors' in str(e.value) and not b.factors.any()


@pytest.mark.parametrize('way', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=['copy', 'pickle'])
def test_a_copy_in_the_middle_is_free(way):
    model = get_toy('relu_mlp').model()
    scaler = LayerwiseScaler(model, 2.**8)
    _, step = trained(model, scaler, 2)
    twin, net = way(scaler), way(model)
    assert twin.watched is None and same(buffers(twin), buffers(scaler)) and twin.config == scaler.config
    net(torch.randn(2, 64)).sum().backward()
    assert step.controller.watched is scaler.watched and not scaler.watched.carried
    trained(net, twin, 2)


# --- micro-batches, ranks, fastai ---

def test_micro_batches_of_one_step_carry_the_same_scales():
    toy, parts = get_toy('deep_sigmoid'), list(batches(digits(), 32, 4))
    model = toy.model()
    scaler = LayerwiseScaler.measured(model, first_batch(), F.cross_entropy)
    step, opt = MixedStep(scaler), toy.opt(model.parameters())
    step.begin(model)
    opt.zero_grad()
    for x, y in parts: step.backward(model, x, y, lambda p, t: F.cross_entropy(p, t)/4)
    step.controller.unscale_(named_gradients(opt, model))
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert step.controller.decide().stepped
    x, y = (torch.cat(t) for t in zip(*parts))
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for n, p in model.named_parameters(): assert (got[n] - p.grad).norm() < .02*p.grad.norm(), n


def test_two_ranks_choose_the_same_factors(ranks):
    a, b = ranks('''
from torch.nn.parallel import DistributedDataParallel as DDP
from mpcourse.layerwise import LayerwiseScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, digits, get_toy
toy, rows = get_toy('deep_sigmoid'), []
model = DDP(toy.model())
scaler, opt = LayerwiseScaler(model, 2.**6), toy.opt(model.parameters())
step = MixedStep(scaler)
for i, (x, y) in enumerate(batches(toy.data(), 32, 6, seed=rank)):
    r = step(model, x*torch.nan if (i, rank) == (3, 1) else x, y, opt, toy.loss_func)
    rows.append((bool(r['skipped']), scaler.factors.clone(), scaler.bounds.clone()))
torch.save((rows, [p.detach() for p in model.parameters()]), f'{folder}/{rank}.pt')
''')
    for (skip, f, g), (other, h, k) in zip(a[0], b[0]): assert skip == other and same_bits(f, h) and same_bits(g, k)
    assert [r[0] for r in a[0]] == [False]*3 + [True] + [False]*2 and len(set(a[0][-1][1].tolist())) > 2
    assert all(same_bits(p, q) for p, q in zip(a[1], b[1]))


@pytest.mark.library
def test_in_a_learner(monkeypatch):
    from fastai.basics import Adam, Learner
    d, model = digits(), get_toy('deep_sigmoid').model()
    learn = Learner(tensor_dls(d.train, d.valid, bs=128), model, opt_func=Adam, lr=6e-3, loss_func=F.cross_entropy)
    scaler = LayerwiseScaler.measured(model, first_batch(), F.cross_entropy, every=5)
    quiet_fit(learn.to_mixed(scaler), 4)
    assert learn.mixed_precision_cb.history.skipped.sum() <= 2 and (scaler.factors >= 1).all()
    assert not any(m._forward_hooks for m in model.modules()) and all(p.dtype is torch.float32 for p in model.parameters())
    monkeypatch.setattr(learn, 'loss_func', lambda *a: 1/0)
    with pytest.raises(ZeroDivisionError): quiet_fit(learn, 1)
    assert not any(m._forward_hooks for m in model.modules())


# --- what it refuses ---

@pytest.mark.parametrize('kw', [dict(share=0.), dict(share=1.), dict(share=math.nan), dict(cap=.5), dict(cap=2.**101), dict(cap=math.inf), dict(every=0),
                                dict(every=1.5), dict(init_scale=0.), dict(min_scale=2.**-200), dict(patience=3)], ids=str)
def test_arguments_that_cannot_work(kw):
    with pytest.raises((ValueError, TypeError)) as e: LayerwiseScaler(['0'], **kw)
    assert any(str(x) in str(e.value) for x in (*kw, *kw.values(), 2.**-200))


def test_models_that_cannot_work():
    with pytest.raises(ValueError): LayerwiseScaler(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(ValueError): LayerwiseScaler([])
    for names in (['1'], ['7'], ['']):
        with pytest.raises(ValueError) as e: LayerwiseScaler(names).watch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        assert names[0] in str(e.value)
    with pytest.raises(ValueError): StepController(LayerwiseScaler(['0']))


def test_the_drop_in_refuses_it_and_says_what_to_take():
    with pytest.raises(ValueError, match='MixedStep'): GradScaler(LayerwiseScaler(['0']))
    with pytest.raises(ValueError, match='MixedStep'): GradScaler(policy=LayerwiseScaler(['0']), model=nn.Sequential(nn.Linear(4, 4)))


def test_a_gradient_of_unknown_scale_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    opt, scaler = torch.optim.SGD(model.parameters()), LayerwiseScaler(['0'])
    group = StepController(scaler, model)
    scaler.scale_loss(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(ValueError, match='group 0, parameter 0'): group.unscale_(named_gradients(opt))
    group.unscale_(named_gradients(opt, model))
    with pytest.raises(ValueError, match='None'): scaler.inv_scale()


def test_a_graph_is_scaled_once():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    scaler = LayerwiseScaler(model)
    watch, out = scaler.watch(model), model(x)
    scaler.scale_loss(out.sum())
    with pytest.raises(ValueError): scaler.scale_loss(out.mean())
    watch.remove()


def test_two_losses_go_together():
    torch.manual_seed(0)
    model, x = Net(GRAPHS['residual']), torch.randn(5, 6)
    want = own_gradients(model, x, loss=lambda out: out.square().mean() + out.abs().mean())
    scaler = LayerwiseScaler(model, 2.**6)
    scaler.factors.copy_(torch.tensor([2.**9, 2.**4]))
    watch, out = scaler.watch(model), model(x)
    model.zero_grad()
    losses = scaler.scale_loss(dict(a=out.square().mean(), b=(out.abs().mean(),)))
    (losses['a'] + losses['b'][0]).backward()
    ps = dict(model.named_parameters())
    for n, g in want.items(): assert torch.allclose(ps[n].grad*scaler.inv_scale(n), g, rtol=1e-5, atol=1e-9), n
    watch.remove()


def test_reentrant_checkpoints_hide_layers_and_are_refused():
    model, x = Net(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True))), torch.randn(5, 6, requires_grad=True)
    scaler = LayerwiseScaler(model)
    watch = scaler.watch(model)
    scaler.scale_loss(model(x).sum()).backward()
    assert scaler.inv_scale('b.weight') == 1
    with pytest.raises(ValueError, match='use_reentrant=False'): scaler.inv_scale('a.weight')
    watch.remove()


def test_watching_a_layer_with_spectral_norm_changes_nothing():
    "To read its weight is to take a step of the power iteration"
    def run(scaler):
        torch.manual_seed(0)
        norm = nn.utils.parametrizations.spectral_norm
        model = nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), norm(nn.Linear(8, 3)))
        opt, x, y = torch.optim.SGD(model.parameters(), lr=.1), torch.randn(16, 4), torch.randint(0, 3, (16,))
        step = MixedStep(scaler or LayerwiseScaler(['0', '2'], cap=1.))
        for _ in range(5): step(model, x, y, opt, nn.functional.cross_entropy)
        return [*model.parameters(), *model.buffers()]
    assert all(map(torch.equal, run(None), run(StaticScaler(1.))))
