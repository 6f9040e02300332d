"The one hook mechanism, the statistics, the collector, its writers and the callback"
import copy, gc, io, json, math, pickle, random, subprocess, sys, warnings, weakref

import pytest
import torch
from fastai.basics import Callback, Learner
from torch import nn
from torch.amp import GradScaler as TorchScaler

import fastai.callback.all  # noqa: F401, progress bar and no_bar
from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.checkpoint import CheckpointCB
from mpcourse.dynamic import DynamicScaler
from mpcourse.emulate import emulate_format
from mpcourse.gradscaler import GradScaler
from mpcourse.layerwise import LayerwiseScaler
from mpcourse.learner import MonitorCB
from mpcourse.monitor import (TENSOR_KINDS, STATISTICS, JsonlWriter, TensorBoardWriter, TensorCollector, TensorHooks,
                              counts_to_hist, match_names, octave_counts, open_writer, read_jsonl, tensor_stats)
from mpcourse.plots import log2_hist
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate

pytestmark = pytest.mark.library


def small(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def hooked(model, **kw):
    seen = []
    hooks = TensorHooks(model, lambda n, k, t: seen.append((n, k, t.detach().clone())), **kw)
    return hooks, seen


def n_hooks(model):
    "Everything that hangs on a model"
    n = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    return n + sum(len(p._backward_hooks or ()) + len(getattr(p, '_post_accumulate_grad_hooks', None) or ()) for p in model.parameters())


# --- names ---

def test_match_names():
    names = ['a.0', 'a.1', 'b']
    assert match_names(None, names) == names
    assert match_names('a.*', names) == ['a.0', 'a.1']
    assert match_names(['b', 'a.0'], names) == ['a.0', 'b']
    assert match_names({'b', 'a.0'}, names) == ['a.0', 'b']


@pytest.mark.parametrize('patterns', ['c*', ['a.*', 'c']])
def test_a_pattern_that_matches_nothing_says_what_there_is(patterns):
    with pytest.raises(ValueError, match=r'matches no layer: there are a\.0, a\.1, b'): match_names(patterns, ['a.0', 'a.1', 'b'], 'layer')


def test_no_pattern_is_no_choice():
    with pytest.raises(ValueError, match=r'\[\] chooses no layer'): match_names([], ['a.0'], 'layer')


def test_hooks_refuse_what_matches_nothing():
    with pytest.raises(ValueError, match=r'conv.*matches no module or parameter: there are 0, 1, 2'): TensorHooks(small(), print, names='conv*')
    with pytest.raises(ValueError, match='No module of Sequential is a .*Conv2d'): TensorHooks(small(), print, types=nn.Conv2d)
    with pytest.raises(ValueError, match="no kind for a hook 'weight': take some of activation"): TensorHooks(small(), print, kinds='weight')


# --- hooks ---

def test_what_hooks_show():
    model, x = small(), torch.randn(3, 4)
    hooks, seen = hooked(model, kinds=('activation', 'activation_grad', 'weight_grad'))
    with hooks:
        out = model(x); out.retain_grad(); out.square().sum().backward()
    names = [(n, k) for n, k, _ in seen]
    assert names[:3] == [('0', 'activation'), ('1', 'activation'), ('2', 'activation')]
    assert set(names[3:]) == {(n, 'activation_grad') for n in '012'} | {(n, 'weight_grad') for n, _ in model.named_parameters()}
    got = {(n, k): t for n, k, t in seen}
    assert torch.equal(got['2', 'activation'], out)
    assert torch.equal(got['2', 'activation_grad'], out.grad)
    for n, p in model.named_parameters(): assert torch.equal(got[n, 'weight_grad'], p.grad)
    assert n_hooks(model) == 0 and not hooks.active


def test_hooks_change_nothing():
    model, x = small(), torch.randn(3, 4)
    model(x).square().sum().backward(); want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with hooked(model, kinds=('activation', 'activation_grad', 'weight_grad'))[0]: model(x).square().sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want))


def test_a_returned_tensor_replaces_a_gradient_and_no_activation():
    model, x = small(), torch.randn(3, 4)
    out = model(x)
    def see(name, kind, t): return t*0 if kind == 'activation' or name == '2.weight' else None
    with TensorHooks(model, see, kinds=('activation', 'activation_grad', 'weight_grad')):
        got = model(x); got.sum().backward()
    assert torch.equal(got, out) and not model[2].weight.grad.any() and model[2].bias.grad.any()
    model.zero_grad()
    with TensorHooks(model, lambda n, k, g: g*2): model(x).sum().backward()
    twice = model[2].bias.grad.clone(); model.zero_grad(); model(x).sum().backward()
    assert torch.equal(twice, 2*model[2].bias.grad)


def test_inactive_hooks_are_silent():
    model = small()
    hooks, seen = hooked(model, kinds=('activation', 'activation_grad', 'weight_grad'))
    hooks.active = False
    model(torch.randn(2, 4)).sum().backward()
    assert seen == []
    hooks.active = True
    out = model(torch.randn(2, 4)); hooks.active = False; out.sum().backward()
    assert {k for _, k, _ in seen} == {'activation'}


class Nest(nn.Module):
    "Returns tensors in every kind of nest, takes some by keyword"
    def __init__(self): super().__init__(); self.a, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)
    def forward(self, x, *, scale=None, ids=None):
        y, state = self.rnn(self.a(x)*scale)
        return {'y': y, 'rest': [state, ids], 'none': None}


def test_nests_and_keywords():
    model = Nest()
    with TensorCollector(model, every=1, kinds=('input', 'activation', 'activation_grad'), types=(nn.Linear, nn.LSTM, Nest)) as c:
        model(torch.randn(2, 5, 4), scale=torch.ones(()), ids=torch.arange(3))['y'].sum().backward()
        c.step()
    names = [r['name'] for r in c.records if r['kind'] != 'activation_grad']
    assert names == ['input.0', 'input.scale', 'a', 'rnn.0', 'rnn.1.0', 'rnn.1.1', 'Nest.y', 'Nest.rest.0.0', 'Nest.rest.0.1']
    assert {r['name'] for r in c.records if r['kind'] == 'activation_grad'} == {'a', 'rnn.0', 'Nest.y'}


def test_which_modules_by_default():
    class Own(nn.Module):
        def __init__(self): super().__init__(); self.w, self.inner = nn.Parameter(torch.ones(())), nn.Identity()
        def forward(self, x): return self.inner(x)*self.w
    model = nn.Sequential(Own(), nn.Sequential(nn.ReLU()))
    hooks, seen = hooked(model, kinds='activation')
    with hooks: model(torch.ones(2))
    assert [n for n, _, _ in seen] == ['0.inner', '0', '1.0']
    lone = nn.Linear(2, 2)
    hooks, seen = hooked(lone, kinds='activation')
    lone(torch.ones(2))
    assert [n for n, _, _ in seen] == ['Linear']


def test_frozen_and_tied_parameters():
    model = small(); model[0].weight.requires_grad_(False); model[2].bias = model[0].bias = nn.Parameter(torch.zeros(2))
    model[0] = nn.Linear(4, 2); model[2] = nn.Linear(2, 2); model[2].weight.requires_grad_(False); model[2].bias = model[0].bias
    hooks, seen = hooked(model, kinds='weight_grad')
    with hooks: model(torch.randn(3, 4)).sum().backward()
    assert sorted(n for n, _, _ in seen) == ['0.bias', '0.weight']
    assert torch.equal(dict((n, t) for n, _, t in seen)['0.bias'], model[0].bias.grad)


def test_hooks_show_each_micro_batch_and_a_collector_what_has_gathered():
    model, x = small(), torch.randn(3, 4)
    each, parts = hooked(model, kinds='weight_grad', names='2.bias')
    with TensorCollector(model, every=1, kinds='weight_grad', names='2.bias', stats='max') as c:
        for _ in range(2): model(x).sum().backward()
        c.step()
    assert [t.tolist() for _, _, t in parts] == [[3., 3.]]*2 and [r['max'] for r in c.records] == [6.]


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointed_blocks_are_seen_once(reentrant):
    from torch.utils.checkpoint import checkpoint
    model, x = small(), torch.randn(3, 4, requires_grad=True)
    hooks, seen = hooked(model)
    with hooks: checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    for kind in ('activation', 'activation_grad'): assert sorted(n for n, k, _ in seen if k == kind) == ['0', '1', '2']


def test_copies_of_a_hooked_model_are_silent():
    model = small()
    hooks, seen = hooked(model, kinds=('activation', 'activation_grad', 'weight_grad'))
    file = io.BytesIO(); torch.save(model, file); file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        twin(torch.randn(2, 4)).sum().backward()
        assert seen == [] and all(p.grad is not None for p in twin.parameters())
    model(torch.randn(2, 4)).sum().backward()
    assert seen and hooks.active


def test_hooks_do_not_outlive_their_owner():
    model = small()
    hooks, seen = hooked(model, kinds=('activation', 'activation_grad', 'weight_grad'))
    assert n_hooks(model) > 0
    hooks.remove(); hooks.remove()
    assert n_hooks(model) == 0
    hooks, seen = hooked(model, kinds=('activation', 'activation_grad', 'weight_grad'))
    del hooks; gc.collect()
    assert n_hooks(model) == 0
    with pytest.raises(RuntimeError), hooked(model)[0]: raise RuntimeError
    assert n_hooks(model) == 0


@pytest.mark.parametrize('mode', [fp32_accumulate, lambda: emulate_format('e4m3')])
def test_nothing_is_rounded_within_a_hook(mode):
    model, sums = small(), []
    with TensorHooks(model, lambda n, k, t: sums.append((torch.ones(300).sum()*1.01).item()), kinds=('activation', 'activation_grad', 'weight_grad')):
        with mode(): model(torch.randn(2, 4)).sum().backward()
    assert len(sums) == 10 and set(sums) == {303.}


# --- statistics ---

def by_hand(x):
    x = x.double().flatten(); a = x.abs(); live = a[(a > 0) & a.isfinite()]
    return dict(norm=x.square().sum().sqrt(), min=x.min(), max=x.max(), mean_abs=a.mean(), mean=x.mean(), std=x.std(correction=0),
                zeros=(x == 0).double().mean(), overflow=(~x.isfinite()).double().mean(),
                dynamic_range=(live.max()/live.min()).log2() if len(live) else torch.tensor(math.nan))


NAMES, ALL = list(STATISTICS), (*STATISTICS, 'hist')
TENSORS = {'normal': torch.randn(300, 7), 'one': torch.tensor(3.), 'odd': torch.randn(1025), 'half': torch.randn(999).half()*1e-6,
           'big half': torch.randn(5000).half()*1e4, 'bf16': torch.randn(64, 3).bfloat16(), 'tiny': torch.randn(2000)*1e-30, 'strided': torch.randn(40, 30).T[::2],
           'ones': torch.ones(4096), 'zeros': torch.zeros(70), 'shifted': torch.randn(3000) + 1000., 'relu': torch.randn(77, 77).relu(), 'double': torch.randn(9).double()}


@pytest.mark.parametrize('name', TENSORS)
def test_statistics_by_hand(name):
    x = TENSORS[name]
    got = tensor_stats([TENSORS['odd'], x, TENSORS['one']], NAMES)
    assert got.shape == (3, len(NAMES)) and got.dtype == torch.float32
    for n, v in zip(NAMES, got[1].tolist()):
        want = by_hand(x)[n].item()
        if math.isnan(want): assert not math.isfinite(v), n
        else: assert v == pytest.approx(want, rel=1e-4 if n == 'std' else 2e-5, abs=1e-4 if n == 'std' and name == 'shifted' else 1e-6*by_hand(x)['mean_abs'].item()), n


def test_unknown_statistics():
    for bad in (['norm', 'median'], 'hist'):
        with pytest.raises(ValueError, match='no statistic'): tensor_stats([torch.ones(2)], bad)


def test_statistics_of_what_is_not_finite():
    x = torch.ones(1000); x[3] = math.inf; y = torch.zeros(600); y[5], y[7] = math.nan, 2.
    a, b = (dict(zip(NAMES, r.tolist())) for r in tensor_stats([x, y], NAMES))
    assert a['overflow'] == pytest.approx(.001) and a['norm'] == a['max'] == a['mean'] == math.inf and a['min'] == 1
    assert b['overflow'] == pytest.approx(1/600) and b['zeros'] == pytest.approx(598/600) and math.isnan(b['norm']) and math.isnan(b['max'])
    many = tensor_stats([torch.full((512*512*2 + 3,), math.inf), torch.empty(0), torch.ones(3)], NAMES)
    assert many[0, NAMES.index('overflow')] == 1 and many[1].isnan().all() and many[2, 0] == pytest.approx(3**.5)


@pytest.mark.parametrize('name', [*TENSORS, 'subnormal', 'bad'])
def test_histograms_are_those_of_plots(name):
    bad = torch.cat([torch.tensor([math.inf, math.nan, 0.]), torch.randn(512*600)])
    x = {'subnormal': torch.randn(2000)*1e-42, 'bad': bad}.get(name, TENSORS.get(name))
    got, want = counts_to_hist(octave_counts(x)), log2_hist(x.float())
    def live(h): return {e: n for e, n in zip(h.exponents.tolist(), h.counts.tolist()) if n}
    assert live(got) == live(want) and (got.n_zero, got.n_nonfinite, got.total) == (want.n_zero, want.n_nonfinite, x.numel())


# --- the collector ---

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


def train(model, c, steps=4, scaler=None, opt=None, micro=1):
    "A plain loop; the scaler is torch's, or one with its methods"
    opt = opt or torch.optim.Adam(model.parameters(), lr=.01)
    model.train()
    for _ in range(steps):
        opt.zero_grad()
        for x, y in zip(X.chunk(micro), Y.chunk(micro)):
            loss = (model(x) - y).square().mean()/micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None: scaler.update()
        c.step(loss)
    return opt


def at(c, name, kind, step=0): return next(r for r in c.records if (r['name'], r['kind'], r['step']) == (name, kind, step))


def test_what_is_collected_and_when():
    model = small(); opt = torch.optim.Adam(model.parameters())
    with TensorCollector(model, every=2, opt=opt) as c: train(model, c, 5, opt=opt)
    assert sorted({r['step'] for r in c.records}) == [0, 2, 4] and len(c.entries) == 3
    got = [(r['name'], r['kind']) for r in c.records if r['step'] == 0]
    params, modules = [n for n, _ in model.named_parameters()], ['0', '1', '2', 'Sequential']
    want = [('input', 'input'), ('loss', 'loss')] + [(n, k) for n in modules for k in ('activation', 'activation_grad')]
    want += [(n, k) for n in params for k in ('weight', 'weight_grad')] + [(f'{n}.{m}', 'moment') for n in params for m in ('exp_avg', 'exp_avg_sq')]
    assert sorted(got) == sorted(want) and {k for _, k in got} == set(TENSOR_KINDS)
    assert list(c.frame().columns) == ['step', 'name', 'kind', 'scale', *STATISTICS]
    assert len(c.frame()) == len(c.records)


def test_values_are_right():
    model = small(); model.train()
    loss = (model(X) - Y).square().mean(); loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}; out = model(X).detach(); old = {n: p.detach().clone() for n, p in model.named_parameters()}
    with TensorCollector(model, stats=('norm', 'mean', 'max', 'hist')) as c: train(model, c, 1, opt=torch.optim.SGD(model.parameters(), lr=.5))
    for n, g in want.items():
        assert at(c, n, 'weight_grad')['norm'] == pytest.approx(g.norm().item(), rel=1e-5)
        assert at(c, n, 'weight')['max'] == pytest.approx((old[n] - .5*g).max().item(), rel=1e-5)   # as it stands after the step
    assert at(c, '2', 'activation')['mean'] == pytest.approx(out.mean().item(), rel=1e-4)
    assert at(c, 'loss', 'loss')['mean'] == pytest.approx(loss.item(), rel=1e-5) and at(c, 'input', 'input')['norm'] == pytest.approx(X.norm().item(), rel=1e-5)
    h, want = at(c, '0.weight', 'weight_grad')['hist'], log2_hist(want['0.weight'])
    assert torch.equal(h.exponents, want.exponents) and torch.equal(h.counts, want.counts)


def test_schedules_and_patterns():
    model = small()
    for every in ({1, 3}.__contains__, range(1, 4, 2).__contains__, lambda n: n % 2 == 1):
        with TensorCollector(model, every, names='0.*', kinds=('weight', 'weight_grad', 'activation', 'loss')) as c: train(model, c, 5)
        assert [(r['step'], r['name']) for r in c.records if r['kind'] == 'weight'] == [(s, n) for s in (1, 3) for n in ('0.weight', '0.bias')]
        assert {r['name'] for r in c.records} == {'0.weight', '0.bias'}
    with TensorCollector(model, names=['2*', 'loss'], types=nn.Linear) as c: train(model, c, 1)
    assert {r['name'] for r in c.records} == {'2', '2.weight', '2.bias', 'loss'}


def test_training_is_the_same_with_a_collector():
    runs = []
    for watch in (False, True):
        torch.manual_seed(0); model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
        c = TensorCollector(model, every=1, stats=ALL)
        if not watch: c.close()
        train(model, c, 4); c.close()
        assert len(c.entries) == 4*watch
        runs.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


class Mixed:
    "A `MixedStep` in the place of a GradScaler's three calls"
    def __init__(self, model, scaler): self.model, self.step_ = model, MixedStep(scaler)
    def run(self, c, opt, steps=2):
        self.model.train()
        for _ in range(steps): c.step(self.step_(self.model, X, Y, opt, nn.functional.mse_loss)['loss'])


@pytest.mark.parametrize('kind', ['number', 'static', 'dynamic', 'torch', 'torch clips', 'torch disabled', 'torch falls', 'ours', 'ours with policy', 'none'])
def test_gradients_are_reported_unscaled(kind):
    torch.manual_seed(1); model = small(); twin = copy.deepcopy(model)
    with TensorCollector(twin, every=1) as plain: train(twin, plain, 1, opt=torch.optim.SGD(twin.parameters(), lr=0.))
    opt, s = torch.optim.SGD(model.parameters(), lr=0.), 2.**10
    make = {'torch': lambda: TorchScaler('cpu', init_scale=s), 'torch clips': lambda: TorchScaler('cpu', init_scale=s), 'torch disabled': lambda: TorchScaler('cpu', enabled=False),
            'torch falls': lambda: TorchScaler('cpu', init_scale=s, growth_interval=1), 'ours': lambda: GradScaler(init_scale=s), 'ours with policy': lambda: GradScaler(StaticScaler(s)),
            'static': lambda: StaticScaler(s), 'dynamic': lambda: DynamicScaler(s, growth_interval=1), 'number': lambda: s, 'none': lambda: None}
    scaler = make[kind]()
    c = TensorCollector(model, every=1, scaler=scaler)
    if kind in ('static', 'dynamic'): Mixed(model, scaler).run(c, opt)
    elif kind == 'number': train(model, c, 2, type('S', (), dict(scale=lambda self, l: l*s, step=lambda self, o: None, update=lambda self: None))(), opt)
    else:
        if kind == 'torch clips': opt.register_step_pre_hook(lambda *a: None); step = scaler.step; scaler.step = lambda o: (scaler.unscale_(o), step(o))
        train(model, c, 2, scaler, opt)
    c.close()
    rel, scales = 1e-2 if kind in ('static', 'dynamic') else 1e-5, []
    for step in (0, 1):
        for r in plain.records:
            if r['kind'] not in ('weight_grad', 'activation_grad', 'loss', 'activation'): continue
            got = at(c, r['name'], r['kind'], step)
            for n in ('norm', 'min', 'max', 'mean_abs', 'std'): assert got[n] == pytest.approx(r[n], rel=rel, abs=rel*r['mean_abs']), (r['name'], r['kind'], n)
            assert got['zeros'] == pytest.approx(r['zeros'], abs=.01) and got['overflow'] == 0
        scales.append(at(c, 'loss', 'loss', step)['scale'])
    one = 1. if kind in ('torch disabled', 'none') else s
    assert scales == [one, 2*one if kind in ('dynamic', 'torch falls') else one]


def test_shares_and_histograms_are_in_the_scaled_domain():
    model = small()
    with TensorCollector(model, every=1, scaler=2.**100, kinds='weight_grad', stats=('max', 'overflow', 'hist')) as c:
        model.train(); (model(X).sum()*2.**127).backward(); c.step()
    r = at(c, '2.bias', 'weight_grad')
    assert r['overflow'] == 1 and r['max'] == math.inf and r['hist'].n_nonfinite == 2
    model = small()
    with TensorCollector(model, every=1, scaler=2.**10, kinds='weight_grad', stats=('max', 'hist')) as c:
        model.train(); (model(X).sum()*2.**10).backward(); c.step()
    r = at(c, '2.bias', 'weight_grad')
    assert r['max'] == 16 and r['hist'].exponents.tolist() == [14] and r['scale'] == 1024


def test_a_skipped_step_is_a_step():
    class Loud(nn.Module):
        def __init__(self): super().__init__(); self.net = small()
        def forward(self, x): return self.net(x)*100
    model, s = Loud(), TorchScaler('cpu', init_scale=2.**127)
    with TensorCollector(model, every=1, scaler=s) as c: train(model, c, 3, s)
    assert at(c, 'net.2.bias', 'weight_grad')['overflow'] == 1 and [at(c, 'loss', 'loss', i)['scale'] for i in range(3)] == [2.**127, 2.**126, 2.**125]


def test_micro_batches_add_up():
    model = small(); twin = copy.deepcopy(model)
    with TensorCollector(model, every=1) as whole: train(model, whole, 1)
    with TensorCollector(twin, every=1) as parts: train(twin, parts, 1, micro=4)
    assert len(whole.records) == len(parts.records)
    for r in whole.records:
        if r['kind'] in ('weight_grad', 'activation', 'input'):
            for n in ('norm', 'min', 'max', 'mean', 'std', 'zeros', 'dynamic_range'): assert at(parts, r['name'], r['kind'])[n] == pytest.approx(r[n], rel=1e-4, abs=1e-6), (r['name'], n)


def test_a_layer_called_twice_is_one_record():
    layer = nn.Linear(4, 4); model = nn.Sequential(layer, nn.ReLU(), layer)
    with TensorCollector(model, every=1, kinds='activation') as c: model.train(); out = model(X); c.step()
    first = layer(X).detach()
    assert at(c, '0', 'activation')['norm'] == pytest.approx(torch.cat([first, out.detach()]).norm().item(), rel=1e-5)


class Derives(nn.Module):
    "Asks for a derivative of itself: by its input, or by a weight, as in a physics-informed net or MAML"
    def __init__(self, by): super().__init__(); self.f, self.by = small(), by
    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.f(x)
        if self.by: torch.autograd.grad(u.sum(), x if self.by == 'input' else self.f[0].weight, create_graph=True)
        return u


@pytest.mark.parametrize('by', ['input', 'weight', 'loss'])
def test_a_derivative_that_the_model_asks_for_is_no_backward_pass(by):
    def seen(by):
        torch.manual_seed(0)
        model = Derives(by if by != 'loss' else None).train()
        x = X.clone().requires_grad_()
        with TensorCollector(model, every=1) as c:
            out = model(x)
            if by == 'loss': torch.autograd.grad(out.square().sum(), model.f[0].weight, create_graph=True)
            out.square().sum().backward()
            c.step()
        return {(r['name'], r['kind']): r['norm'] for r in c.records}
    assert seen(by) == pytest.approx(seen(None), rel=1e-6)


def test_one_transfer_for_a_collection(monkeypatch):
    model, n, cpu = small(), [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, 'cpu', lambda t: (n.append(1), cpu(t))[1])
    with TensorCollector(model, every=2, scaler=StaticScaler(2.), opt=torch.optim.SGD(model.parameters())) as c: train(model, c, 4)
    assert len(n) == 2 == len(c.entries)


def test_nothing_is_kept_alive():
    model, alive = small(), []
    model[1].register_forward_hook(lambda m, i, o: alive.append(weakref.ref(o)))
    model[1].register_forward_hook(lambda m, i, o: o.register_hook(lambda g: alive.append(weakref.ref(g)) and None) and None)
    with TensorCollector(model, every=1) as c:
        gc.disable()
        try: train(model, c, 2)
        finally: gc.enable()
        assert len(alive) == 4 and not any(r() is not None for r in alive)
        held = [t for e in c.entries for t in gc.get_referents(e) if isinstance(t, torch.Tensor)]
    assert held == []


def test_a_collector_that_an_exception_leaves_takes_its_hooks_along():
    model = small()
    def f():
        c = TensorCollector(model, every=1)
        assert n_hooks(model) > 0 and c.n == 0
        raise RuntimeError
    gc.disable()
    try:
        with pytest.raises(RuntimeError): f()
        assert n_hooks(model) == 0
    finally: gc.enable()


def test_what_is_not_asked_for_is_not_touched():
    "A loss that is a dict, and weights of which no ratio is shown"
    model = small()
    with TensorCollector(model, every=1, kinds='weight_grad', stats=('norm', 'update_ratio')) as c:
        model(torch.ones(2, 4)).sum().backward()
        c.step({'a': torch.ones(())})
        assert len(c.records) == 4 and not c.before


def test_a_sparse_gradient_is_measured_by_its_values():
    model = nn.Embedding(5, 2, sparse=True)
    with TensorCollector(model, every=1, kinds='weight_grad', stats=('norm', 'max')) as c:
        (3*model(torch.tensor([1, 1, 4]))).sum().backward()
        c.step()
    assert [(r['name'], r['max']) for r in c.records] == [('weight', 6.)] and c.records[0]['norm'] == pytest.approx(math.sqrt(2*36 + 2*9))


def test_memory_is_bounded():
    model = small()
    with TensorCollector(model, every=1, keep=3) as c:
        train(model, c, 3)
        def tensors(): gc.collect(); return sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)
        opt = train(model, c, 3); before = tensors()
        train(model, c, 30, opt=opt)
        assert len(c.entries) == 3 and tensors() <= before


def test_evaluation_is_not_collected():
    model = small()
    with TensorCollector(model, every=1) as c:
        model.eval(); model(X); model.train()
        with torch.no_grad(): model(X)
        train(model, c, 1)
        assert len([r for r in c.records if r['name'] == '0' and r['kind'] == 'activation']) == 1


# --- bad input ---

@pytest.mark.parametrize('every', [0, -1, True, 1.5, None])
def test_intervals_that_cannot_be(every):
    with pytest.raises(ValueError, match=f'{every} steps'): TensorCollector(small(), every=every)


@pytest.mark.parametrize('kw, value', [(dict(kinds='gradient'), 'gradient'), (dict(kinds=()), 'kinds'), (dict(stats=()), 'stats'), (dict(names={'typo'}), 'typo'), (dict(stats='median'), 'median'), (dict(names='blocks.*'), 'blocks'),
    (dict(scaler='dynamic'), 'dynamic'), (dict(scaler=0), '0'), (dict(scaler=math.nan), 'nan'), (dict(opt='adam'), 'adam'),
    (dict(types=nn.Conv2d), 'Conv2d'), (dict(writers='log.json'), 'log.json')], ids=str)
def test_a_wrong_argument_is_told_with_its_value(kw, value):
    model = small()
    with pytest.raises(ValueError, match=value): TensorCollector(model, **kw)
    assert n_hooks(model) == 0


def test_types_that_no_layer_has():
    "The root, which is always measured, is no layer of these types"
    with pytest.raises(ValueError, match='No module of Sequential is a .*Conv2d'): TensorCollector(small(), types=nn.Conv2d)
    with TensorCollector(model := small(), every=1, types=nn.Sequential, kinds='activation') as c: train(model, c, 1)
    assert {r['name'] for r in c.records} == {'Sequential'}


def test_histograms_alone(tmp_path):
    model = small()
    with TensorCollector(model, every=1, stats='hist', writers=tmp_path/'x.jsonl') as c: train(model, c, 2)
    assert len(c.entries) == 2 and all(r['hist'].total > 0 for r in c.records) and list(c.frame().columns) == ['step', 'name', 'kind', 'scale']
    assert [r['hist'].counts.tolist() for r in read_jsonl(tmp_path/'x.jsonl')] == [r['hist'].counts.tolist() for r in c.records]


# --- loops that give up a batch ---

def one_pass(model, x=X): (model(x) - Y[:len(x)]).square().mean().backward()


class Breaks(nn.Module):
    "Fails in a forward or a backward pass, when told to"
    where = None
    def forward(self, x):
        if self.where == 'forward': raise RuntimeError('out of memory')
        y = x*1
        if self.where == 'backward': y.register_hook(self.fail)
        return y
    def fail(self, g): raise RuntimeError('out of memory')


@pytest.mark.parametrize('where', ['forward', 'backward', 'loss', 'cleared'])
@pytest.mark.parametrize('kinds', ['activation', ('activation', 'weight_grad'), TENSOR_KINDS], ids=len)
def test_a_batch_that_was_dropped_is_not_collected(where, kinds):
    "It failed, or its loss was not finite, or its gradients were not; the loop goes on without a step"
    if where in ('backward', 'cleared') and kinds == 'activation': pytest.skip('nobody looks at gradients')
    model = nn.Sequential(nn.Linear(4, 8), Breaks(), nn.Linear(8, 2)).train(); opt = torch.optim.SGD(model.parameters(), lr=0.)
    def run(c, inputs):
        for i, x in enumerate(inputs):
            drop, model[1].where = i < len(inputs) - 1, None
            if drop: model[1].where = where
            opt.zero_grad()
            try: loss = (model(x) - Y[:len(x)]).square().mean(); drop and where == 'loss' or loss.backward()
            except RuntimeError: continue
            if drop: continue
            opt.step(); c.step()
        return [{k: v for k, v in r.items() if k != 'step'} for r in c.records]
    with TensorCollector(model, every=1, kinds=kinds) as clean: want = run(clean, [X])
    with TensorCollector(model, every=1, kinds=kinds) as c: got = run(c, [X*100, X*10, X])
    def by_key(rows): return sorted(map(str, rows))
    assert len(c.entries) == 1 and by_key(got) == by_key(want)


def test_two_forward_passes_of_one_loss_count_both():
    model = small().train()
    with TensorCollector(model, every=1, kinds='activation') as c:
        (model(X) - model(2*X)).square().mean().backward()
        c.step()
    with torch.no_grad(): assert at(c, '2', 'activation')['norm'] == pytest.approx(torch.cat([model(X), model(2*X)]).norm().item(), rel=1e-5)


def test_many_micro_batches_are_one_step():
    model = small().train()
    with TensorCollector(model, every=1) as c:
        for _ in range(40): one_pass(model, X[:2])
        c.step()
    assert len(c.entries) == 1


def test_hooks_are_there_only_in_steps_that_are_due():
    model = small().train()
    with TensorCollector(model, every=3) as c:
        n = []
        for _ in range(6):
            n.append(n_hooks(model) > 0)
            one_pass(model)
            c.step()
    assert n == [True, False, False]*2 and n_hooks(model) == 0


@pytest.mark.parametrize('reentrant', [False, True])
def test_a_checkpointed_model_gives_nothing_up(reentrant):
    "Its second forward pass, within the backward pass, ends early"
    from torch.utils.checkpoint import checkpoint
    model = small().train(); x = X.clone().requires_grad_()
    with warnings.catch_warnings(), TensorCollector(model, every=1, kinds='activation') as c:
        warnings.simplefilter('error')
        for part in x.chunk(4): checkpoint(model, part, use_reentrant=reentrant).square().mean().backward()
        c.step()
    if not reentrant: assert len(c.entries) == 1 and at(c, '0', 'activation')['norm'] == pytest.approx(model[0](X).norm().item(), rel=1e-5)


# --- models that come and go ---

def test_hooks_are_gone_afterwards():
    model = small()
    with TensorCollector(model) as c: assert n_hooks(model) > 0
    assert n_hooks(model) == 0
    c.close()
    with pytest.raises(RuntimeError, match='stop'), TensorCollector(model, every=1) as c:
        model.train(); model(X); raise RuntimeError('stop')
    assert n_hooks(model) == 0 and c.entries.maxlen and not c.entries
    c = TensorCollector(model); del c; gc.collect()
    assert n_hooks(model) == 0


def test_copies_of_a_watched_model():
    model = small()
    with TensorCollector(model, every=1) as c:
        model.train(); loss = model(X).sum()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.train(); twin(X).sum().backward()
        loss.backward(); c.step(loss)
    assert len([r for r in c.records if r['kind'] == 'weight_grad']) == 4
    assert at(c, '2', 'activation')['norm'] == pytest.approx(model(X).norm().item(), rel=1e-5)


# --- writers ---

def test_jsonl(tmp_path):
    model, path = small(), tmp_path/'deep'/'log.jsonl'
    with TensorCollector(model, every=1, stats=ALL, writers=path) as c:
        train(model, c, 1); assert len(read_jsonl(path)) == len(c.records)      # it is all there before it is closed
        (model(X).sum()*math.inf).backward(); c.step(math.nan)
    for a, b in zip(read_jsonl(path), c.records):
        ha, hb = a.pop('hist'), b.pop('hist')
        assert a.keys() == b.keys() and all(u == v or u != u and v != v for u, v in zip(a.values(), b.values()))
        assert torch.equal(ha.exponents, hb.exponents) and torch.equal(ha.counts, hb.counts) and (ha.n_zero, ha.n_nonfinite) == (hb.n_zero, hb.n_nonfinite)
    assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())   # JSON, without NaN


def test_jsonl_survives_a_crash(tmp_path):
    path = tmp_path/'log.jsonl'; code = f"""
import os, torch
from mpcourse.monitor import TensorCollector
model = torch.nn.Linear(2, 2); model.train()
c = TensorCollector(model, every=1, writers={str(path)!r})
for _ in range(3): model(torch.ones(1, 2)).sum().backward(); c.step()
os._exit(1)"""
    assert subprocess.run([sys.executable, '-c', code], timeout=120).returncode == 1
    n = len(read_jsonl(path)); assert n == 3*len([r for r in read_jsonl(path) if r['step'] == 0]) > 0
    path.write_bytes(path.read_bytes()[:-20])                                      # torn
    assert len(read_jsonl(path)) == n - 1
    model = small()
    with TensorCollector(model, every=1, writers=path) as c: train(model, c, 1)
    assert len(read_jsonl(path)) == n - 1 + len(c.records)


def test_tensorboard(tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    model = small()
    with TensorCollector(model, every=2, stats=ALL, writers=tmp_path/'tb', scaler=4.) as c: train(model, c, 3)
    log = EventAccumulator(str(tmp_path/'tb'), size_guidance=dict(histograms=0)); log.Reload()
    for r in c.records:
        for n in STATISTICS:
            if math.isnan(r[n]): continue
            events = {e.step: e.value for e in log.Scalars(f"{r['kind']}.{n}/{r['name']}")}
            assert events[r['step']] == pytest.approx(r[n])
        h = {e.step: e.histogram_value for e in log.Histograms(f"{r['kind']}.log2/{r['name']}")}[r['step']]
        assert h.num == r['hist'].counts.sum() and sum(h.bucket) == h.num
        if h.num: assert h.min == r['hist'].exponents[0] and h.bucket_limit[-1] == r['hist'].exponents[-1] + 1
    assert [e.value for e in log.Scalars('scale')] == [4., 4.]


def test_paths_of_folders(tmp_path):
    pytest.importorskip('tensorboard')
    (tmp_path/'there.old').mkdir()
    for folder in ('board', 'lr0.1', 'there.old', 'v1.2/board'): assert isinstance(open_writer(tmp_path/folder), TensorBoardWriter)
    assert isinstance(open_writer(tmp_path/'a.jsonl'), JsonlWriter)


def broken(tmp_path, kind):
    if kind == 'tensorboard': pytest.importorskip('tensorboard')
    (tmp_path/'file').write_text('')
    return {'jsonl': JsonlWriter, 'tensorboard': TensorBoardWriter}[kind](tmp_path/'file'/'log')


@pytest.mark.parametrize('kind', ['jsonl', 'tensorboard'])
def test_a_folder_that_cannot_be_written(kind, tmp_path):
    model, good = small(), JsonlWriter(tmp_path/'good.jsonl')
    with TensorCollector(model, every=1, writers=[broken(tmp_path, kind), good]) as c:
        with pytest.warns(UserWarning, match='and is dropped; the training goes on') as told: train(model, c, 4)
        assert len([w for w in told if 'dropped' in str(w.message)]) == 1 and c.writers == [good]
    assert len(c.entries) == 4 and len(read_jsonl(tmp_path/'good.jsonl')) == len(c.records)


# --- a Learner ---

def learner(cbs=(), **kw):
    torch.manual_seed(0)
    return Learner(tensor_dls((X.repeat(4, 1), Y.repeat(4, 1)), (X, Y), 16), small(), loss_func=nn.functional.mse_loss, lr=.01, cbs=list(cbs), **kw)


def test_monitor_in_a_learner():
    learn = learner([cb := MonitorCB(every=2)])
    quiet_fit(learn, 2)
    assert [s for s in sorted({r['step'] for r in cb.records})] == [0, 2, 4, 6] and n_hooks(learn.model) == 0
    assert {r['kind'] for r in cb.records} == set(TENSOR_KINDS) and len(cb.frame()) == len(cb.records)
    quiet_fit(learn, 1)
    assert max(r['step'] for r in cb.records) == 10 and n_hooks(learn.model) == 0
    learn.validate(); learn.get_preds()
    assert max(r['step'] for r in cb.records) == 10


@pytest.mark.parametrize('at, micro', [(3, 1), (5, 1), (6, 2)])
def test_a_fit_that_goes_on_counts_on(tmp_path, at, micro):
    from fastai.callback.training import GradientAccumulation
    class Stops(Callback):
        order = 90
        def after_batch(self):
            if self.learn.training and self.learn.epoch*4 + self.learn.iter == at: raise KeyboardInterrupt
    def run(folder, *cbs):
        cb = MonitorCB(every=1, kinds='weight', stats='norm', writers=tmp_path/f'{folder}.jsonl')
        learn = learner([cb, CheckpointCB(tmp_path/f'{folder}.pt', every=1), GradientAccumulation(16*micro), *cbs])
        quiet_fit(learn, 2)
    run('whole')
    with pytest.raises(KeyboardInterrupt): run('parts', Stops())
    n = len(read_jsonl(tmp_path/'parts.jsonl')); assert 0 < n
    run('parts')
    whole, parts = read_jsonl(tmp_path/'whole.jsonl'), read_jsonl(tmp_path/'parts.jsonl')
    steps = list(dict.fromkeys(r['step'] for r in parts[n:]))
    assert steps == list(range(steps[0], 8//micro)) and steps[0] == parts[n-1]['step'] + 1 > 1
    assert [(r['step'], r['name']) for r in parts] == [(r['step'], r['name']) for r in whole]


def test_a_mixed_learner_is_reported_unscaled():
    got = []
    for scheme in (None, StaticScaler(2.**8), DynamicScaler(2.**8)):
        random.seed(0); learn = learner([cb := MonitorCB(every=1)])
        if scheme is not None: learn.to_mixed(scheme)
        learn.dls.train.rng.seed(0); quiet_fit(learn, 1)
        got.append({(r['name'], r['kind']): r['norm'] for r in cb.records if r['step'] == 0})
        if scheme is not None: assert cb.records[0]['scale'] == 2**8
    for n in got[0]: assert got[1][n] == pytest.approx(got[0][n], rel=.02) and got[2][n] == pytest.approx(got[0][n], rel=.02), n


def test_gradient_accumulation_in_a_learner():
    from fastai.callback.training import GradientAccumulation
    learn = learner([cb := MonitorCB(every=1), GradientAccumulation(32)]); quiet_fit(learn, 1)
    assert sorted({r['step'] for r in cb.records}) == [0, 1] and len([r for r in cb.records if (r['name'], r['kind'], r['step']) == ('0', 'activation', 0)]) == 1


class Fails(Callback):
    order = 99
    def __init__(self, event): self.event = event
    def __call__(self, name):
        if name == self.event: raise RuntimeError('stop')


@pytest.mark.parametrize('event', ['before_fit', 'before_epoch', 'after_pred', 'after_backward', 'after_step', 'after_epoch', 'after_fit'])
def test_hooks_are_gone_after_an_exception(event):
    learn = learner([cb := MonitorCB(every=1), bad := Fails(event)])
    with pytest.raises(RuntimeError, match='stop'): quiet_fit(learn, 1)
    assert n_hooks(learn.model) == 0
    learn.remove_cb(bad); quiet_fit(learn, 1)
    assert n_hooks(learn.model) == 0 and cb.records


def test_cancelled_fits():
    from fastai.basics import CancelFitException
    class Stops(Callback):
        def after_batch(self): raise CancelFitException
    learn = learner([cb := MonitorCB(every=1), Stops()]); quiet_fit(learn, 1)
    assert n_hooks(learn.model) == 0 and len(cb.collector.entries) == 1


def test_lr_find_is_not_collected():
    learn = learner([cb := MonitorCB(every=1)])
    with learn.no_bar(): learn.lr_find(num_it=20, show_plot=False)
    assert cb.records == [] and n_hooks(learn.model) == 0


def test_a_learner_that_is_exported_or_copied(tmp_path):
    learn = learner([cb := MonitorCB(every=1, writers=tmp_path/'log.jsonl')]); learn.path = tmp_path
    quiet_fit(learn, 1); learn.export('learn.pkl')
    from fastai.basics import load_learner
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); twin = load_learner(tmp_path/'learn.pkl')
    assert twin.cbs and [c for c in twin.cbs if isinstance(c, MonitorCB)][0].records == [] and cb.records
    assert n_hooks(copy.deepcopy(learn.model)) == 0


def test_a_learner_with_another_model():
    learn = learner([cb := MonitorCB(every=1)]); quiet_fit(learn, 1)
    first, learn.model = learn.model, nn.Sequential(nn.Linear(4, 2)); learn.create_opt(); quiet_fit(learn, 1)
    assert n_hooks(first) == n_hooks(learn.model) == 0 and {r['name'] for r in cb.records if r['step'] == 4 and r['kind'] == 'weight'} == {'0.weight', '0.bias'}


def test_patterns_of_a_learner_are_checked_when_it_is_there():
    learn = learner([MonitorCB(names='nothing*')])
    with pytest.raises(ValueError, match='matches no module or parameter'): quiet_fit(learn, 1)


def test_a_layerwise_scaler():
    torch.manual_seed(0); model = small(); seen = []
    for scaler in (LayerwiseScaler(model, 2.**4), StaticScaler(1.)):
        with TensorCollector(model, every=1, scaler=scaler, kinds=('weight_grad', 'activation_grad')) as c:
            opt = torch.optim.SGD(model.parameters(), lr=0.); step = MixedStep(scaler)
            for _ in range(3): step(model, X, Y, opt, nn.functional.mse_loss); c.step()
        seen.append(c)
    for n, _ in model.named_parameters(): assert at(seen[0], n, 'weight_grad', 2)['norm'] == pytest.approx(at(seen[1], n, 'weight_grad', 2)['norm'], rel=.02)
    assert math.isnan(at(seen[0], '0', 'activation_grad', 2)['norm']) and at(seen[0], '0', 'activation_grad', 2)['zeros'] < 1    # of which layer?


# --- torch.compile ---

def compiled(watch, due=True, compile=True):
    "Three steps of a two-block GPT; its watch, the reasons for which its graph was cut, and how often it was compiled"
    import torch._dynamo as dynamo
    from mpcourse.toys import CharTransformer, cross_entropy, seeded
    with seeded(0): model = CharTransformer(d=16, layers=2, heads=2)
    dynamo.reset(); dynamo.utils.counters.clear()
    net, opt = torch.compile(model, backend='aot_eager') if compile else model, torch.optim.SGD(model.parameters(), lr=.1)
    c, x = watch(model), torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        opt.zero_grad()
        cross_entropy(net(x), x).backward()
        c.step()
    return c, dict(dynamo.utils.counters['graph_break']), dynamo.utils.counters['stats']['unique_graphs']


def test_hooks_stay_outside_of_a_compiled_graph():
    "One cut for each kind of module that a hook looks at, and nothing of ours is traced; a step that is not due is one graph"
    _, cuts, graphs = compiled(lambda m: TensorCollector(m, lambda n: False))
    assert not cuts and graphs == 1
    _, cuts, graphs = compiled(lambda m: TensorCollector(m, 2))
    assert len(cuts) == 1 and 0 < sum(cuts.values()) <= 14 and graphs <= 17


def test_a_compiled_model_shows_the_same_numbers():
    (plain, *_), (c, *_) = compiled(lambda m: TensorCollector(m, 2), compile=False), compiled(lambda m: TensorCollector(m, 2))
    def norms(c): return {(r['step'], r['name'], r['kind']): r['norm'] for r in c.records}
    assert norms(c) == pytest.approx(norms(plain), rel=1e-3) and len(norms(c)) > 100


def test_the_update_ratio_is_what_a_step_adds():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    opt = torch.optim.SGD([dict(params=net[0].parameters(), lr=.1), dict(params=net[1].parameters(), lr=0.)])
    with TensorCollector(net, 2, ('weight', 'weight_grad'), stats=('norm', 'update_ratio')) as c:
        for i in range(4):
            was = net[0].weight.detach().clone()
            opt.zero_grad(); net(torch.randn(5, 4)).square().mean().backward(); opt.step()
            grad = net[0].weight.grad.clone()
            c.step()
            if i % 2: continue
            rows = {(r['name'], r['kind']): r for r in c.records if r['step'] == i}
            want = (net[0].weight - was).norm()/was.norm()
            assert rows['0.weight', 'weight']['update_ratio'] == pytest.approx(want.item(), rel=1e-5)
            assert rows['1.weight', 'weight']['update_ratio'] == 0 and math.isnan(rows['0.weight', 'weight_grad']['update_ratio'])
            assert rows['0.weight', 'weight_grad']['norm'] == pytest.approx(grad.norm().item(), rel=1e-5)
    assert {r['step'] for r in c.records} == {0, 2} and not c.before
