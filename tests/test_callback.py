"""The callback's promises on a model that has everything: probes before and after it, skipped steps, exits of every kind, killed processes."""
import copy, json, os, pickle, random, signal, subprocess, sys, warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Adam, Callback, CancelBatchException, CancelFitException, Learner, OptimWrapper, SGD, load_learner
from fastai.callback.all import GradientAccumulation, GradientClip, SaveModelCallback
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpcourse.callback as C
from mpcourse.callback import MixedPrecisionCB, StepHistory, quiet_fit, tensor_dls
from mpcourse.checkpoint import CheckpointCB
from mpcourse.tensorcore import fast_half
from mpcourse.formats import same_bits
from mpcourse.checkpoint import save_training_state
from mpcourse.scaler1 import Handle, StaticScaler

pytestmark = pytest.mark.library
H, B, F32 = torch.float16, torch.bfloat16, torch.float32


# --- the model that has everything ---

class Composite(nn.Module):
    "Tied embedding, convolution, BatchNorm, LayerNorm, a frozen layer, an unused parameter; one or two inputs and outputs"
    def __init__(self, outputs=1, drop=0.):
        super().__init__()
        self.emb, self.conv, self.bn = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.frozen, self.mid, self.norm = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head, self.unused, self.drop, self.outputs = nn.Linear(8, 11, bias=False), nn.Parameter(torch.ones(3)), nn.Dropout(drop), outputs
        self.head.weight = self.emb.weight

    def forward(self, tok, x=None):
        h = self.emb(tok)
        if x is not None: h = h + x.unsqueeze(-1)
        h = F.relu(self.bn(self.conv(h.transpose(1, 2)))).mean(-1)
        h = self.drop(self.mid(F.relu(self.frozen(h))))
        out = self.head(self.norm(h))
        return (out, dict(h=h)) if self.outputs == 2 else out


def split(m):
    groups = [[*m.emb.parameters(), *m.conv.parameters(), *m.bn.parameters()], [*m.mid.parameters(), *m.norm.parameters(), m.unused]]
    return [[p for p in g if p.requires_grad] for g in groups]


def two_losses(pred, y): return F.cross_entropy(pred[0], y) + pred[1]['h'].pow(2).mean()


OPTS = dict(sgd=partial(SGD, mom=.9), adam=Adam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
            fused=partial(OptimWrapper, opt=torch.optim.AdamW, fused=True))


def seed_all(seed=0): torch.manual_seed(seed); random.seed(seed); np.random.seed(seed)


def data(n=32, inputs=1, seed=7):
    g = torch.Generator().manual_seed(seed)
    tok = torch.randint(11, (n, 6), generator=g)
    return (tok, *[torch.randn(n, 6, generator=g) for _ in range(inputs - 1)], tok[:, 0])


def learner(opt='sgd', inputs=1, outputs=1, cbs=None, mixed=2.**10, seed=0, drop=0., bs=8, n=32, path=None, shuffle=True, **kw):
    "A Learner on the composite model; mixed is a scale, a scaler, a dict for to_mixed, or None"
    seed_all(seed)
    model, train, valid = Composite(outputs, drop), data(n, inputs), data(12, inputs, 8)
    dls = tensor_dls(train, valid, bs)
    if not shuffle: dls.loaders[0] = dls[0].new(shuffle=False)
    learn = Learner(dls, model, loss_func=kw.pop('loss_func', two_losses if outputs == 2 else F.cross_entropy),
                    opt_func=OPTS.get(opt, opt), splitter=split, cbs=cbs, wd=kw.pop('wd', .1), lr=kw.pop('lr', .05), path=path or '.', **kw)
    if mixed is not None: learn.to_mixed(**(mixed if isinstance(mixed, dict) else dict(scaler=StaticScaler(mixed) if isinstance(mixed, float) else mixed)))
    return learn


def fit(learn, *a, **k): return quiet_fit(learn, *a, **k)


class At(Callback):
    "Do something at an event"
    def __init__(self, event, f, order=5, when=lambda learn: True):
        self.order = order
        setattr(self, event, lambda: f(self.learn) if when(self.learn) else None)


def at_iter(k): return lambda learn: learn.training and learn.train_iter == k


def tree(x):
    "A deep copy of what counts: tensors cloned, containers plain"
    if isinstance(x, torch.Tensor): return x.detach().clone()
    if isinstance(x, dict): return {k: tree(v) for k,v in x.items()}
    if isinstance(x, (list, tuple)) or hasattr(x, 'items') or type(x).__name__ == 'L': return [tree(v) for v in x]
    return x


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor): return same_bits(a, b)
    if isinstance(a, dict): return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list): return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def weights(learn): return tree(dict(learn.model.named_parameters()))
def whole(learn): return dict(w=weights(learn), opt=tree(learn.opt.state_dict()))


def hooks_of(model): return [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_hooks)) for m in model.modules()]


def assert_clean(learn, ids=None, hooks=None):
    "FP32, its own parameters, no hooks, no mode, an optimizer on the same parameters"
    m = learn.model
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert {t.dtype for t in m.state_dict().values() if t.is_floating_point()} == {F32}
    assert not any(n in vars(mod) for mod in m.modules() for n in ('weight', 'bias', 'unused'))
    assert all(isinstance(getattr(mod, n), nn.Parameter) for mod in m.modules() for n,p in mod._parameters.items() if p is not None)
    assert m.head.weight is m.emb.weight
    if ids is not None: assert [id(p) for p in m.parameters()] == ids
    if hooks is not None: assert hooks_of(m) == hooks
    if learn.opt is not None:
        assert {id(p) for ps in learn.opt.param_lists for p in ps} <= {id(p) for p in m.parameters()}
        inner = getattr(learn.opt, 'opt', learn.opt)
        assert 'found_inf' not in vars(inner) and 'grad_scale' not in vars(inner)


def fp32_grads(learn, ref, inputs):
    "Gradients of this batch by a copy of the model in FP32, in the mode it is in"
    for p in ref.parameters(): p.grad = None
    learn.loss_func(ref(*inputs), *learn.yb).backward()
    return {n: p.grad for n,p in ref.named_parameters()}


# --- probes ---

class Probe(Callback):
    "Asserts at every event what a callback at its place may expect"
    def __init__(self, order, scale, dtype=H): self.order, self.scale, self.dtype, self.seen = order, scale, dtype, []
    def look(self, lent, event):
        m = self.learn.model
        assert [m.emb.weight.dtype, m.conv.bias.dtype, m.frozen.weight.dtype, m.head.weight.dtype] == [F32]*4, event
        assert ('forward' in vars(m)) == lent, event            # only within forward are weights half
        assert [t.dtype for t in (m.bn.weight, m.bn.running_mean, m.norm.bias)] == [F32]*3, event
        assert {p.dtype for p in m.parameters()} == {F32} and m.head.weight is m.emb.weight, event
        assert torch.is_autocast_enabled() is False
        if self.learn.opt is not None:
            assert {id(p) for ps in self.learn.opt.param_lists for p in ps} <= {id(p) for p in m.parameters()}
            assert {p.dtype for ps in self.learn.opt.param_lists for p in ps} == {F32}
        self.seen.append((event, self.learn.training))

    @property
    def after(self): return self.order > 10
    def before_fit(self): self.look(False, 'before_fit')
    def before_epoch(self): self.look(False, 'before_epoch')
    def before_train(self): self.look(False, 'before_train')
    def before_validate(self): self.look(False, 'before_validate')
    def after_epoch(self): self.look(False, 'after_epoch')
    def after_fit(self): self.look(False, 'after_fit')

    def before_batch(self):
        self.look(False, 'before_batch')
        self.inputs, self.copy = tuple(x.clone() for x in self.learn.xb), copy.deepcopy(self.learn.model)
        assert [x.dtype for x in self.inputs[1:]] == [F32]*len(self.inputs[1:]) and self.inputs[0].dtype == torch.int64

    def preds(self):
        p = self.learn.pred
        return [p[0], p[1]['h']] if isinstance(p, tuple) else [p]

    def after_pred(self):
        self.look(True, 'after_pred')
        assert {p.dtype for p in self.preds()} == {F32 if self.after else self.dtype}
        assert self.learn.xb[0].dtype == torch.int64 and all(x.dtype == self.dtype for x in self.learn.xb[1:])

    def after_loss(self):
        self.look(True, 'after_loss')
        assert self.learn.loss.dtype == F32 and same_bits(self.learn.loss.detach(), self.learn.loss_grad.detach())
        self.loss = self.learn.loss.detach().clone()

    def before_backward(self):
        self.look(True, 'before_backward')
        want = self.loss*self.scale if self.after else self.loss
        assert same_bits(self.learn.loss_grad.detach(), want) and same_bits(self.learn.loss.detach(), self.loss)

    def after_backward(self):
        self.look(not self.after, 'after_backward')
        if self.after: assert all(same_bits(a, b) for a,b in zip(self.learn.xb, self.inputs)) and len(self.learn.xb) == len(self.inputs)
        self.compare(self.scale)

    def before_step(self):
        self.look(False, 'before_step')
        self.compare(1. if self.after else self.scale)

    def compare(self, scale):
        ref = fp32_grads(self.learn, self.copy, self.inputs)
        all_ = torch.cat([g.flatten() for g in ref.values() if g is not None]).norm()
        for n,p in self.learn.model.named_parameters():
            if not p.requires_grad or n == 'unused': assert p.grad is None; continue
            assert p.grad.dtype == F32 and p.grad.shape == p.shape
            off = (p.grad/scale - ref[n]).norm()
            assert off <= .03*ref[n].norm() + .01*all_, (n, off, ref[n].norm(), all_)

    def after_step(self):
        self.look(False, 'after_step')
        assert same_bits(self.learn.loss.detach(), self.loss)
    def after_batch(self):
        self.look(False, 'after_batch')
        assert same_bits(self.learn.loss.detach(), self.loss)


EVENTS = 'before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch'.split()


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('inputs, outputs', [(1, 1), (2, 1), (2, 2)])
def test_probes_before_and_after_the_callback(opt, inputs, outputs):
    "Mistakes 4, 10 and 13: only the differentiated loss is scaled, every norm stays FP32, and all of it runs on a CPU"
    scale = 2.**9
    early, late = Probe(9, scale), Probe(11, scale)
    learn = fit(learner(opt, inputs, outputs, cbs=[late, early], mixed=scale), 2)
    for p in (early, late):
        assert [e for e,t in p.seen if t and e in EVENTS] == EVENTS*8
        assert [e for e,t in p.seen if not t and e in EVENTS] == ['before_batch', 'after_pred', 'after_loss', 'after_batch']*4
    assert not learn.mixed_precision_cb.history.skipped.any() and (learn.mixed_precision_cb.history.scales == scale).all()
    assert_clean(learn)


def test_probes_in_bf16():
    learn = fit(learner('adam', 2, 2, cbs=[Probe(9, 1., B), Probe(11, 1., B)], mixed=dict(dtype='bf16'), lr=1e-3), 1)
    assert_clean(learn)
    assert learn.mixed_precision_cb.dtype == B


@pytest.mark.parametrize('kw', [dict(compute='native'), dict(compute='fast_half'), dict(compute='auto'), dict(overflow='saturate')])
def test_every_way_to_compute_trains_alike(kw):
    seen = []
    mode = lambda learn: seen.append([type(m).__name__ for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()])
    a = fit(learner(cbs=At('after_pred', mode), mixed=dict(scaler=StaticScaler(), **kw)), 1)
    b = fit(learner(mixed=None), 1)
    assert_clean(a)
    wa, wb, w0 = weights(a), weights(b), weights(learner())
    moved = sum((wb[n] - w0[n]).norm()**2 for n in wb)**.5
    assert sum((wa[n] - wb[n]).norm()**2 for n in wb)**.5 < .1*moved
    want = dict(native=[], fast_half=['fast_half'], auto=['fast_half']).get(kw.get('compute'))      # on a CPU
    if want is not None: assert all(s == want for s in seen)
    if 'overflow' in kw: assert all(s == ['fast_half'] for s in seen)


def test_auto_asks_where_the_model_is_and_nothing_else(monkeypatch):
    import time
    def no_clock(): raise AssertionError('a stopwatch decides')
    for name in ('perf_counter', 'monotonic', 'process_time'): monkeypatch.setattr(time, name, no_clock)
    cpu, *others = [C.compute_context('auto', 'inf', torch.device(d)) for d in ('cpu', 'cuda', 'mps', 'meta')]
    assert cpu.func is fast_half and all(c is C.nullcontext for c in others)
    assert all(C.compute_context('native', 'inf', torch.device(d)) is C.nullcontext for d in ('cpu', 'cuda'))


def test_saturating_overflow_is_clipped_and_infinite_otherwise():
    "The same huge activation: ±65504 or an infinity, which skips every step"
    def run(overflow):
        seen = []
        learn = learner(mixed=dict(scaler=StaticScaler(1.), compute='fast_half', overflow=overflow), inputs=2)
        learn.model.mid.register_forward_hook(lambda m, a, out: seen.append(out.abs().max().item()))
        learn.model.mid.weight.data.mul_(1e6).clamp_(-6e4, 6e4)
        learn.model.frozen.weight.data.mul_(100)
        return fit(learn, 1), seen
    assert max(run('saturate')[1]) == 65504
    with pytest.raises(FloatingPointError): run('inf')


# --- a skipped step ---

def inf_grad(learn): dict(learn.model.named_parameters())['mid.weight'].grad[0, 0] = torch.inf


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('where', [0, 2])
def test_a_skipped_step_leaves_every_bit(opt, where):
    "Mistake 1: weights, momentum and counters; BatchNorm's running statistics may move, they were seen in the forward pass"
    kept = {}
    def keep(learn): kept.update(before=whole(learn))
    def check(learn): kept.update(after=whole(learn), bn=learn.model.bn.num_batches_tracked.item())
    learn = learner(opt, cbs=[At('before_batch', keep, when=at_iter(where)), At('after_backward', inf_grad, when=at_iter(where)),
                              At('after_batch', check, order=-20, when=at_iter(where))])
    fit(learn, 1)
    a, b = kept['before'], kept['after']
    assert same(a['w'], b['w']) and kept['bn'] == where + 1
    if where or opt != 'fused': assert same(a['opt'], b['opt'])
    else: assert all((v == 0).all() for s in b['opt']['state'].values() for v in s.values())    # made, and still what a fresh one is
    cb = learn.mixed_precision_cb
    assert cb.history.skipped.tolist() == [i == where for i in range(4)] and len(cb.history) == 4
    if where == 2 and opt != 'fused':
        learn = learner(opt, cbs=[At('after_backward', inf_grad, when=at_iter(3))])
        fit(learn, 1)
        assert learn.mixed_precision_cb.last_outcome.offenders == ('mid.weight',)


@pytest.mark.parametrize('opt', OPTS)
def test_training_goes_on_after_a_skipped_step_as_if_the_batch_had_not_been(opt):
    "Mistake 9 too: the optimizer's state of before is there after. Without BatchNorm's memory there is no trace of the batch"
    def run(skip):
        learn = learner(opt, shuffle=False)
        learn.model.bn.eval(); learn.model.bn.requires_grad_(False)
        learn.add_cb(At('before_batch', lambda l: l.model.bn.eval()))
        if skip: learn.add_cb(At('after_backward', inf_grad, when=at_iter(2)))
        else: learn.add_cb(At('before_batch', cancel, when=at_iter(2)))
        return whole(fit(learn, 1))
    assert same(run(True), run(False))


def cancel(learn): raise CancelBatchException


def test_a_scale_too_large_skips_everything_by_itself_and_nothing_moves():
    "No injected infinity: the backward pass overflows in half"
    learn = learner(mixed=2.**30)
    was = weights(learn)
    fit(learn, 1)
    assert same(weights(learn), was) and learn.mixed_precision_cb.history.skipped.all() and len(learn.mixed_precision_cb.history) == 4
    assert 'loss scale of 1.07374e+09' in learn.mixed_precision_cb.last_outcome.why


# --- losses and validation ---

@pytest.mark.parametrize('opt', ['sgd', 'fused'])
def test_recorded_and_validation_losses_are_plain_fp32_losses(opt):
    "Mistake 4: at any scale the record is the same bits; and it is FP32 training's within half precision"
    lr = dict(sgd=.05, fused=1e-3)[opt]
    runs = [fit(learner(opt, mixed=s, metrics=lambda p, y: p.dtype.itemsize, lr=lr), 2) for s in (1., 2.**6, 2.**12)]
    losses = [torch.stack([torch.as_tensor(l) for l in r.recorder.losses]) for r in runs]
    assert torch.allclose(losses[1], losses[2], rtol=1e-3) and torch.allclose(losses[0], losses[1], rtol=5e-3)
    ref = fit(learner(opt, mixed=None, lr=lr), 2)
    assert torch.allclose(losses[2], torch.stack([torch.as_tensor(l) for l in ref.recorder.losses]), rtol=5e-3)
    for a,b in zip(runs[2].recorder.values, ref.recorder.values): assert np.allclose(a[:2], b[:2], rtol=1e-2) and a[2] == 4


class Model16(nn.Module):
    "Independent reference: weights of a model in half but for norms, by hand"
    def __init__(self, m):
        super().__init__()
        self.m = copy.deepcopy(m).half()
        for n in ('bn', 'norm'): setattr(self.m, n, copy.deepcopy(getattr(m, n)))
    def forward(self, tok):
        m = self.m
        h = m.conv(m.emb(tok).transpose(1, 2))
        h = F.relu(m.bn(h.float()).half()).mean(-1)
        h = m.mid(F.relu(m.frozen(h)))
        return m.head(m.norm(h.float()).half()).float()


@pytest.mark.parametrize('when', ['fresh', 'after', 'inside'])
def test_validate_and_get_preds_compute_in_half_unscaled_and_leave_all_as_it_was(when):
    got = {}
    def look(learn):
        model, was = learn.model, weights(learn)
        state = None if learn.opt is None else tree(learn.opt.state_dict())
        preds, targs = learn.get_preds(reorder=False)
        got.update(preds=preds, loss=learn.validate()[0])
        assert same(weights(learn), was) and learn.mixed_precision_cb.scaler.scale == 2.**10
        assert learn.opt is None or same(tree(learn.opt.state_dict()), state)
        ref = Model16(model).eval()
        with torch.no_grad(), fast_half(): want = ref(data(12, 1, 8)[0])
        near = (preds - want).abs().max() <= 2**-9*want.abs().max()      # BatchNorm's kernel rounds half inputs once less
        assert preds.dtype == F32 and near and abs(got['loss'] - F.cross_entropy(preds, data(12, 1, 8)[1])) < 1e-5
    learn = learner(mixed=dict(scaler=StaticScaler(), compute='fast_half'))
    with learn.no_bar(), learn.no_logging():
        if when == 'inside':
            learn.add_cb(At('after_epoch', lambda l: look(l) if not hasattr(l, 'gather_preds') and not l.lock.locked() else None))
            learn.fit(2)
        else:
            if when == 'after': learn.fit(1)
            look(learn)
    assert got['preds'].shape == (12, 11)
    assert_clean(learn)
    assert len(learn.mixed_precision_cb.history) == dict(fresh=0, after=4, inside=8)[when]


def test_a_wholly_frozen_model_can_be_validated_and_not_trained():
    learn = fit(learner(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.freeze_to(2)
    for p in learn.model.parameters(): p.requires_grad_(False)
    with learn.no_bar(), learn.no_logging(): assert learn.validate()[0] > 0 and learn.get_preds()[0].shape == (12, 11)
    was = whole(learn)
    with pytest.raises(ValueError, match='no trainable parameter.*unfreeze'): fit(learn, 1)
    assert same(whole(learn), was)
    assert_clean(learn)


# --- exits ---

def boom(learn): raise RuntimeError('boom')
def ctrl_c(learn): raise KeyboardInterrupt
def cancel_fit(learn): raise CancelFitException


WHERE = 'before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch ' \
        'before_validate after_epoch'.split()


@pytest.mark.parametrize('exit', [boom, ctrl_c, cancel_fit], ids=lambda f: f.__name__)
@pytest.mark.parametrize('order', [5, 15])
@pytest.mark.parametrize('event', WHERE)
def test_restored_after_every_exit_from_every_event(event, order, exit):
    "Mistakes 3 and 9: the model is FP32, the optimizer's parameters are the model's, no mode is left, and a second fit trains"
    learn = learner('fused' if order == 5 else 'sgd')
    ids, hooks, armed = [id(p) for p in learn.model.parameters()], hooks_of(learn.model), [True]
    def go(l):
        if armed and (l.opt is None or event not in EVENTS or at_iter(1)(l)): exit(l)
    learn.add_cb(At(event, go, order))
    if exit is cancel_fit: fit(learn, 2)
    else:
        with pytest.raises((RuntimeError, KeyboardInterrupt)): fit(learn, 2)
    assert_clean(learn, ids, hooks)
    # nothing that carries the scale is left for a fit without the callback
    left = [p.grad for p in learn.model.parameters() if p.grad is not None]
    assert all((g == 0).all() for g in left)
    armed.clear()
    was = weights(learn)
    fit(learn, 1)
    assert_clean(learn, ids, hooks)
    assert not same(weights(learn)['mid.weight'], was['mid.weight']) and learn.mixed_precision_cb.history.skipped.sum() == 0


@pytest.mark.parametrize('exc', [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize('where', ['forward', 'backward', 'param', 'loss', 'metric', 'data'])
def test_restored_after_an_exception_in_the_models_own_code(where, exc):
    learn = learner()
    ids, n = [id(p) for p in learn.model.parameters()], [0]
    def go(*a):
        n[0] += 1
        if n[0] == 2: raise exc('boom')
    if where == 'forward': learn.model.mid.register_forward_hook(go)
    if where == 'backward': learn.model.mid.register_full_backward_hook(go)
    if where == 'param': learn.model.mid.weight.register_hook(go)
    if where == 'loss': learn.loss_func = lambda p, y: (go(), F.cross_entropy(p, y))[1]
    if where == 'metric': learn.metrics = lambda p, y: (go(), 0.)[1]
    if where == 'data':
        item = learn.dls.train.do_item
        learn.dls.train.do_item = lambda s: (go(), item(s))[1]
    hooks = hooks_of(learn.model)
    with pytest.raises(exc): fit(learn, 2)
    assert_clean(learn, ids, hooks)
    fit(learn, 1)
    assert_clean(learn, ids, hooks)


def test_a_second_fit_continues():
    "fit(2) twice is the training of FP32 with the same states kept; the scaler, the optimizer and the history go on"
    learn = learner('adam')
    fit(learn, 1)
    step = [s['step'] for s in learn.opt.state_dict()['state'] if 'step' in s]
    fit(learn, 1)
    assert [s['step'] for s in learn.opt.state_dict()['state'] if 'step' in s] == [2*s for s in step] and set(step) == {4}
    assert len(learn.mixed_precision_cb.history) == 8


def test_an_existing_optimizer_state_is_kept():
    "Mistake 9: FP32 first, then half, then FP32 again: one optimizer, one state"
    learn = fit(learner('adam', mixed=None), 1)
    opt = learn.opt
    was = whole(learn)
    learn.to_mixed(StaticScaler())
    assert same(whole(learn), was)
    fit(learn, 1)
    learn.remove_cb(MixedPrecisionCB)
    fit(learn, 1)
    assert learn.opt is opt and {s['step'] for s in opt.state_dict()['state'] if 'step' in s} == {12}


def test_masters_keep_what_half_would_round_away():
    "Mistake 8: updates far below half's spacing add up, and the start is not rounded"
    learn = learner('sgd', lr=1e-7, wd=0.)
    was = weights(learn)
    assert not torch.equal(was['mid.weight'], was['mid.weight'].half().float())
    fit(learn, 1)
    now = weights(learn)
    off = (now['mid.weight'] - was['mid.weight']).abs()
    assert 0 < off.max() < 1e-5 and torch.equal(now['unused'], was['unused'])


# --- what others do in a fit ---

class Climber(StaticScaler):
    "Doubles with every step, so that every step leaves a trace; writes down whether it is attached"
    attached = 0
    def update(self, obs): self.scale = self.scale*2
    def attach(self, model):
        Climber.attached += 1
        class Off(Handle):
            def remove(self): Climber.attached -= 1
        return Off()


@pytest.mark.parametrize('opt', ['sgd', 'adam', 'fused'])
@pytest.mark.parametrize('trained', [False, True])
def test_lr_find_changes_no_bit(opt, trained, tmp_path):
    learn = learner(opt, mixed=Climber(1.), path=tmp_path)
    if trained: fit(learn, 1)
    cb = learn.mixed_precision_cb
    def bits(): return dict(model=tree(learn.model.state_dict()), scaler=tree(cb.scaler.state_dict()), steps=len(cb.history),
                            opt=tree(learn.opt.state_dict()['state']) if trained else None)
    was = bits()
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=6, show_plot=False, suggest_funcs=())
    assert same(bits(), was)
    if not trained:
        state = learn.opt.state_dict()['state']
        assert not any(isinstance(v, torch.Tensor) and v.any() for s in (state.values() if isinstance(state, dict) else state) for v in s.values())
    assert_clean(learn)
    fit(learn, 1)
    assert cb.scaler.scale == 2.**(4*(1 + trained)) and len(cb.history) == 4*(1 + trained)


def test_a_validation_inside_lr_find_does_not_hide_its_end_from_the_scaler(tmp_path):
    "fastai fires after_fit for it, and its LRFinder puts the weights back too early; the scaler must not follow"
    learn = learner(mixed=Climber(1.), path=tmp_path, cbs=At('after_batch', lambda l: l.validate(), order=90, when=at_iter(3)))
    cb, seen = learn.mixed_precision_cb, []
    learn.add_cb(At('before_step', lambda l: seen.append(cb.scaler.scale.item())))
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=6, show_plot=False, suggest_funcs=())
    assert seen == [2.**i for i in range(len(seen))] and cb.scaler.scale == 1 and len(cb.history) == 0


def test_an_lr_find_that_is_interrupted_leaves_no_trace_in_the_scaler(tmp_path):
    learn, on = learner(mixed=Climber(1.), path=tmp_path), [True]
    learn.add_cb(At('after_batch', lambda l: ctrl_c(l) if on else None, when=at_iter(4)))
    with pytest.raises(KeyboardInterrupt), learn.no_bar(), learn.no_logging(): learn.lr_find(show_plot=False)
    on.clear()
    fit(learn, 1)
    assert learn.mixed_precision_cb.scaler.scale == 2.**4 and len(learn.mixed_precision_cb.history) == 4


@pytest.mark.parametrize('event', ['after_pred', 'before_backward', 'after_step', 'after_batch', 'after_epoch'])
def test_what_is_saved_inside_fit_is_fp32_and_the_masters(event, tmp_path):
    "Also in the middle of a batch, while half weights are lent"
    saved = []
    def save(l):
        if event in EVENTS and not at_iter(2)(l): return
        saved.append((l.save('mid', with_opt=True), tree(dict(l.model.named_parameters())), tree(dict(l.model.named_buffers()))))
    learn = fit(learner('adam', cbs=At(event, save), path=tmp_path), 1)
    file, masters, buffers = saved[-1]
    got = torch.load(file, weights_only=False)
    for n,p in {**masters, **buffers}.items(): assert same_bits(got['model'][n], p), n
    assert {v.dtype for v in got['model'].values() if v.is_floating_point()} == {F32}
    assert not same_bits(masters['mid.weight'], masters['mid.weight'].half().float())
    assert all(v.dtype == F32 for s in got['opt']['state'] for v in s.values() if isinstance(v, torch.Tensor))
    learn.load('mid')
    assert same(weights(learn), masters)


def test_save_model_callback_writes_the_best_masters_and_loads_them(tmp_path):
    kept = []
    learn = learner('adam', cbs=[SaveModelCallback(every_epoch=True, with_opt=True), At('after_epoch', lambda l: kept.append(weights(l)))], path=tmp_path)
    fit(learn, 2)
    for i,want in enumerate(kept):
        got = torch.load(tmp_path/'models'/f'model_{i}.pth', weights_only=False)['model']
        assert all(same_bits(got[n], p) for n,p in want.items())
    learn = fit(learner('adam', cbs=SaveModelCallback(), path=tmp_path), 2)
    best = torch.load(tmp_path/'models'/'model.pth', weights_only=False)
    assert all(same_bits(best[n], p) for n,p in weights(learn).items())


def moves(learn, method='fit', *args, **kw):
    "How far each parameter went, and the learner"
    was = weights(learn)
    fit(learn, *(args or (1,)), method=method, **kw)
    now = weights(learn)
    return {n: now[n] - was[n] for n in was}


@pytest.mark.parametrize('method, args, kw', [('fit_one_cycle', (2,), dict(lr_max=.05)), ('fit_one_cycle', (2,), dict(lr_max=slice(.005, .05))),
                                              ('fit', (1,), dict(lr=slice(.005, .05))), ('fit_flat_cos', (1,), {})])
def test_schedules_and_discriminative_rates_move_as_in_fp32(method, args, kw):
    a, b = moves(learner(), method, *args, **kw), moves(learner(mixed=None), method, *args, **kw)
    for part in (['emb.weight', 'conv.weight', 'bn.weight'], ['mid.weight', 'norm.weight']):
        off = sum((a[n] - b[n]).norm()**2 for n in part)**.5
        assert 0 < off < .1*sum(b[n].norm()**2 for n in part)**.5, part
    assert not a['frozen.weight'].any()


def test_freeze_and_unfreeze():
    learn = learner(wd=0.)
    learn.create_opt()
    learn.freeze()
    m = moves(learn)
    assert not m['emb.weight'].any() and not m['conv.weight'].any() and m['mid.weight'].any()
    learn.unfreeze()
    m = moves(learn)
    assert m['emb.weight'].any() and m['conv.weight'].any() and m['mid.weight'].any() and not m['frozen.weight'].any()
    assert_clean(learn)


@pytest.mark.parametrize('opt', ['sgd', 'fused'])
def test_gradient_clip_sees_unscaled_gradients_and_clips_the_global_norm(opt):
    "Mistake of fastai's ancestor: clipping group by group; and of many loops: clipping scaled gradients"
    before, after, ref = [], [], []
    def norm(l): return torch.cat([p.grad.flatten() for p in l.model.parameters() if p.grad is not None]).norm().item()
    probe = lambda out, order: At('before_step', lambda l: out.append(norm(l)), order)
    fit(learner(opt, cbs=[GradientClip(.3), probe(before, 10.5), probe(after, 12)]), 1)
    fit(learner(opt, mixed=None, cbs=[GradientClip(.3), probe(ref, 10.5)]), 1)
    assert min(ref) > .3 and np.allclose(before[:2], ref[:2], rtol=.02) and np.allclose(after, .3, rtol=1e-3)


@pytest.mark.parametrize('opt', ['sgd', 'fused'])
def test_a_skipped_step_beside_gradient_clip(opt):
    "An infinite norm would make every gradient NaN"
    kept = []
    learn = learner(opt, cbs=[GradientClip(.3), At('after_backward', inf_grad, when=at_iter(2)), At('before_batch', lambda l: kept.append(whole(l)) if l.training else None)])
    fit(learn, 1)
    assert same(kept[2], kept[3]) and learn.mixed_precision_cb.history.skipped.tolist() == [False, False, True, False]


def no_norm(learn):
    "BatchNorm counts batches: without it two halves are a whole"
    learn.model.bn = nn.Identity()
    return learn


def split_no_bn(m): return [[*m.emb.parameters(), *m.conv.parameters()], [*m.mid.parameters(), *m.norm.parameters(), m.unused]]


@pytest.mark.parametrize('opt', ['sgd', 'adam', 'fused'])
def test_accumulated_micro_batches_are_one_big_batch(opt):
    def run(bs, *cbs, mixed=2.**8):
        learn = no_norm(learner(opt, cbs=list(cbs), bs=bs, shuffle=False, mixed=mixed))
        learn.splitter = split_no_bn
        return moves(learn), learn
    (a, la), (b, lb), (c, _) = run(4, GradientAccumulation(8)), run(8), run(8, mixed=None)
    assert len(la.mixed_precision_cb.history) == len(lb.mixed_precision_cb.history) == 4
    size = sum(v.norm()**2 for v in c.values())**.5
    bound = .1 if opt == 'sgd' else .2         # Adam divides small gradients by their own size
    assert sum((a[n] - b[n]).norm()**2 for n in a)**.5 < bound*size and sum((b[n] - c[n]).norm()**2 for n in a)**.5 < bound*size


@pytest.mark.parametrize('opt', ['sgd', 'fused'])
def test_an_overflow_in_one_micro_batch_skips_the_whole_step(opt):
    kept = []
    learn = learner(opt, bs=4, cbs=[GradientAccumulation(8), At('after_backward', inf_grad, when=at_iter(2)),
                                    At('after_batch', lambda l: kept.append(whole(l)) if l.training else None)])
    fit(learn, 1)
    assert learn.mixed_precision_cb.history.skipped.tolist() == [False, True, False, False]
    assert same(kept[1], kept[3]) and same(kept[1], kept[2]) and not same(kept[3]['w'], kept[5]['w'])
    assert all(v.isfinite().all() for v in kept[-1]['w'].values())


def test_gradients_of_an_unfinished_accumulation_do_not_outlive_the_fit():
    "They carry the scale: a fit without the callback would take a step a thousand times too long"
    learn = learner(bs=4, n=36, cbs=GradientAccumulation(8))       # nine micro-batches
    fit(learn, 1)
    assert all((p.grad == 0).all() for p in learn.model.parameters() if p.grad is not None)


class EMA(Callback):
    def before_fit(self): self.avg = AveragedModel(self.learn.model, multi_avg_fn=get_ema_multi_avg_fn(.5)); self.mine = None
    def after_step(self):
        self.avg.update_parameters(self.learn.model)
        now = weights(self.learn)
        self.mine = now if self.mine is None else {n: .5*self.mine[n] + .5*now[n] for n in now}


def test_a_running_average_of_the_model_is_of_the_masters():
    learn = fit(learner(cbs=EMA()), 1)
    avg = dict(learn.ema.avg.module.named_parameters())
    assert all(p.dtype == F32 and torch.allclose(p, learn.ema.mine[n], atol=1e-6, rtol=1e-6) for n,p in avg.items())
    assert not torch.equal(avg['mid.weight'], avg['mid.weight'].half().float())


@pytest.mark.parametrize('trained', [False, True])
def test_export_and_load_learner_predict_the_same_bits(trained, tmp_path):
    learn = learner('adam', path=tmp_path)
    if trained: fit(learn, 1)
    with learn.no_bar(), learn.no_logging(): want = learn.get_preds()[0]
    dl = learn.dls.valid
    learn.export('x.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        again = load_learner(tmp_path/'x.pkl')
    with again.no_bar(), again.no_logging(): got = again.get_preds(dl=dl)[0]
    assert same_bits(got, want)
    assert_clean(again)
    assert again._do_one_batch.learn is again and again._do_one_batch.cb is again.mixed_precision_cb
    fit(learn, 1)                                       # the one that was exported trains on


@pytest.mark.parametrize('how', [copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l))], ids=['deepcopy', 'pickle'])
def test_copies_of_a_learner_are_learners_of_their_own(how):
    learn = fit(learner('adam'), 1)
    twin, was = how(learn), weights(learn)
    assert twin.model is not learn.model and twin._do_one_batch.learn is twin and twin._do_one_batch.cb is not learn._do_one_batch.cb
    seen = []
    twin.add_cb(At('after_pred', lambda l: seen.append((l is twin, *('forward' in vars(m.model.mid) for m in (l, learn))))))
    fit(twin, 1)
    assert set(seen) == {(True, True, False)} and same(weights(learn), was) and not same(weights(twin), was)
    assert len(learn.mixed_precision_cb.history) == 4 and len(twin.mixed_precision_cb.history) == 8
    twin.remove_cb(MixedPrecisionCB)
    assert '_do_one_batch' in vars(learn) and '_do_one_batch' not in vars(twin)


def test_hooks_of_others_fire_on_the_models_own_layers_and_see_half():
    learn, seen = learner(inputs=2), {}
    def fwd(m, a, out): seen.setdefault('forward', set()).add((a[0].dtype, out.dtype))
    def bwd(m, gi, go): seen.setdefault('backward', set()).add(go[0].dtype)
    def par(g): seen.setdefault('param', set()).add(g.dtype)
    learn.model.mid.register_forward_hook(fwd)
    learn.model.mid.register_full_backward_hook(bwd)
    learn.model.mid.weight.register_hook(par)
    learn.model.norm.register_forward_hook(lambda m, a, out: seen.setdefault('norm', set()).add(out.dtype))
    learn.model.norm.register_full_backward_hook(lambda m, gi, go: seen.setdefault('norm back', set()).add(go[0].dtype))
    fit(learn, 1)
    assert seen['forward'] == {(H, H)} and seen['backward'] == {H} and seen['param'] == {F32} and seen['norm'] == {H}
    assert seen['norm back'] <= {H, F32}


# --- which callbacks there may be ---

def test_removing_the_callback_removes_the_guard_and_the_scalers_hooks():
    Climber.attached = 0
    during = []
    learn = learner(mixed=Climber(1.), cbs=(watch := At('after_pred', lambda l: during.append(Climber.attached))))
    fit(learn, 1).remove_cb(watch)
    assert set(during) == {1} and Climber.attached == 0 and isinstance(vars(learn)['_do_one_batch'], C.Guard)
    cb = learn.mixed_precision_cb
    learn.remove_cb(cb)
    assert Climber.attached == 0 and '_do_one_batch' not in vars(learn) and cb.learn is None and cb not in learn.cbs
    seen = []
    learn.add_cb(At('after_pred', lambda l: seen.append('forward' in vars(l.model.mid))))
    fit(learn, 1)
    assert set(seen) == {False}
    learn.add_cb(cb)
    fit(learn, 1)
    assert True in seen and Climber.attached == 0


def test_a_callback_given_to_one_fit_is_gone_after_it_even_after_an_exception():
    learn, cb = learner(mixed=None), MixedPrecisionCB(StaticScaler())
    fit(learn, 1, cbs=cb)
    assert cb.learn is None and '_do_one_batch' not in vars(learn) and len(cb.history) == 4
    with pytest.raises(RuntimeError): fit(learn, 1, cbs=[cb, At('after_loss', boom)])
    assert '_do_one_batch' not in vars(learn) and len(learn.cbs) == len(learner(mixed=None).cbs)
    assert_clean(learn)


def test_removed_in_the_middle_of_a_batch_it_gives_everything_back():
    learn = learner()
    learn.add_cb(At('after_pred', lambda l: l.remove_cb(MixedPrecisionCB), order=20, when=at_iter(1)))
    fit(learn, 1)
    assert_clean(learn)


def test_to_mixed_again_replaces():
    learn = learner(mixed=2.**4).to_mixed(StaticScaler(2.**5)).to_mixed(dtype='bf16')
    assert len([c for c in learn.cbs if isinstance(c, MixedPrecisionCB)]) == 1 and learn.mixed_precision_cb.dtype == B
    assert learn._do_one_batch.cb is learn.mixed_precision_cb
    with pytest.raises(ValueError): learn.to_mixed()
    assert learn.mixed_precision_cb.dtype == B and learn._do_one_batch.cb is learn.mixed_precision_cb      # nothing half-changed


def test_two_at_once_are_refused():
    learn = learner()
    first, second = learn.mixed_precision_cb, MixedPrecisionCB(StaticScaler())
    with pytest.raises(ValueError, match='has a MixedPrecisionCB already: remove it'): learn.add_cb(second)
    assert learn.mixed_precision_cb is first and second not in learn.cbs and second.learn is None and learn._do_one_batch.cb is first
    with pytest.raises(ValueError, match='MixedPrecisionCB already'): fit(learn, 1, cbs=second)
    fit(learn, 1)
    assert len(first.history) == 4


def test_one_callback_cannot_serve_two_learners():
    a, b = learner(), learner(mixed=None)
    with pytest.raises(ValueError, match='another Learner'): b.add_cb(a.mixed_precision_cb)
    assert a._do_one_batch.cb is a.mixed_precision_cb and '_do_one_batch' not in vars(b)
    fit(a, 1), fit(b, 1)


@pytest.mark.parametrize('make', [lambda l: l.to_fp16(), lambda l: l.to_bf16()])
def test_fastais_own_mixed_precision_beside_ours_is_refused(make):
    learn = learner()
    make(learn)
    was = weights(learn)
    with pytest.raises(ValueError, match="remove fastai's"), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, 1)
    assert same(weights(learn), was)
    assert_clean(learn)
    plain = learner(mixed=None)
    make(plain)
    with pytest.raises(ValueError, match="remove fastai's"): plain.to_mixed(StaticScaler())
    assert '_do_one_batch' not in vars(plain)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_not_fp32_is_refused(dtype):
    learn = learner()
    learn.model.to(dtype)
    with pytest.raises(ValueError, match=f'is {dtype}'): fit(learn, 1)
    assert {p.dtype for p in learn.model.parameters()} == {dtype} and not any('forward' in vars(m) for m in learn.model.modules())


def test_another_model_or_another_layer_is_taken_up():
    learn = fit(learner(), 1)
    learn.model.mid = nn.Linear(8, 8)
    learn.opt = None
    seen = []
    learn.add_cb(At('after_pred', lambda l: seen.append('forward' in vars(l.model.mid))))
    fit(learn, 1)
    learn.model, learn.opt = Composite(), None
    fit(learn, 1)
    assert set(seen) == {True}
    assert_clean(learn)


# --- bad input ---

@pytest.mark.parametrize('kw, says', [
    (dict(), 'FP16 without a loss scaler.*StaticScaler'), (dict(dtype='bf16', scaler=StaticScaler()), 'takes no loss scaler'), (dict(scaler=512), '512 is no loss scaler'),
    (dict(dtype='fp32'), 'fp32'), (dict(dtype=torch.float64, scaler=StaticScaler()), 'float64'), (dict(scaler=StaticScaler(), compute='tpu'), "'tpu'.*auto, native, fast_half"),
    (dict(scaler=StaticScaler(), compute='native', overflow='saturate'), 'Native kernels overflow'), (dict(scaler=StaticScaler(), overflow='wrap'), 'wrap')])
def test_arguments_that_cannot_work_are_sentences(kw, says):
    learn = learner(mixed=None)
    with pytest.raises(ValueError, match=says): learn.to_mixed(**kw)
    assert '_do_one_batch' not in vars(learn) and len(learn.cbs) == len(learner(mixed=None).cbs)


def test_a_model_without_parameters_is_a_sentence():
    dls = tensor_dls((torch.randn(8, 3), torch.randn(8, 3)), (torch.randn(8, 3), torch.randn(8, 3)), 4)
    learn = Learner(dls, nn.ReLU(), loss_func=F.mse_loss, splitter=lambda m: [list(m.parameters())]).to_mixed(StaticScaler())
    with pytest.raises(ValueError, match='parameter'): fit(learn, 1)


def test_nothing_trainable_is_a_sentence():
    learn = learner()
    learn.create_opt()
    for p in learn.model.parameters(): p.requires_grad_(False)
    with pytest.raises(ValueError, match='no trainable parameter'): fit(learn, 1)
    assert_clean(learn)


def test_an_optimizer_on_other_parameters_is_a_sentence():
    learn = fit(learner(), 1)
    learn.model = Composite()
    was = whole(learn)
    with pytest.raises(ValueError, match='built on other parameters.*learn.opt'): fit(learn, 1)
    assert same(whole(learn), was) and not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    learn.opt = None
    fit(learn, 1)


def test_a_loss_that_is_no_scalar_is_a_sentence_with_its_shape():
    learn = learner(loss_func=lambda p, y: F.cross_entropy(p, y, reduction='none'))
    was = weights(learn)
    with pytest.raises(ValueError, match=r'A loss is one number.*\(8,\)'): fit(learn, 1)
    assert same(weights(learn), was)
    assert_clean(learn)


@pytest.mark.parametrize('bad', [torch.nan, torch.inf])
def test_a_loss_that_is_bad_at_the_first_step_names_the_batch(bad):
    learn = learner(inputs=2, shuffle=False)
    learn.dls.train.dataset.tensors[1][3] = bad
    was = weights(learn)
    for _ in range(2):                                                  # a second try says it again
        with pytest.raises(FloatingPointError, match='loss of batch 0 is nan before any step'): fit(learn, 1)
        assert same(weights(learn), was)
        assert_clean(learn)


def test_a_loss_that_is_nan_later_is_skipped_and_recorded_as_what_it_is():
    learn = learner(inputs=2, shuffle=False)
    learn.dls.train.dataset.tensors[1][8:16] = torch.nan
    learn.model.bn = nn.Identity(); learn.splitter = split_no_bn
    fit(learn, 1)
    assert learn.mixed_precision_cb.history.skipped.tolist() == [False, True, False, False]
    assert not torch.isfinite(torch.as_tensor(learn.recorder.losses[1])) and all(p.isfinite().all() for p in learn.model.parameters())


def test_sparse_gradients_are_a_sentence():
    learn = learner()
    learn.model.emb.sparse = True
    was = weights(learn)
    with pytest.raises(ValueError, match='emb.*sparse.*sparse=False'): fit(learn, 1)
    assert same(weights(learn), was)
    assert_clean(learn)


def test_half_inputs_meet_an_fp32_norm_without_an_error():
    "Data that is half already, a norm first: cast up, computed in FP32"
    x, y = torch.randn(16, 6).half(), torch.randint(3, (16,))
    learn = Learner(tensor_dls((x, y), (x, y), 8), nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), loss_func=F.cross_entropy, lr=.1).to_mixed(StaticScaler())
    fit(learn, 1)
    assert len(learn.mixed_precision_cb.history) == 2 and not learn.mixed_precision_cb.history.skipped.any()


def test_a_loss_that_depends_on_no_parameter_is_a_sentence():
    learn = learner(loss_func=lambda p, y: torch.ones((), requires_grad=True)*1)
    with pytest.raises(ValueError, match='No parameter has a gradient'): fit(learn, 1)
    assert_clean(learn)


# --- history ---

def test_the_history_outlives_fit_and_is_read_at_the_end_only():
    "fastai drops its scales in after_fit"
    h = StepHistory()
    assert len(h) == 0 and h.scales.shape == (0,) and h.skipped.shape == (0,)
    from mpcourse.step1 import StepOutcome
    for i in range(600): h.add(StepOutcome(torch.tensor(float(i % 3 == 0)), torch.tensor(float(i)), torch.tensor(1.)))
    assert len(h) == 600 and h.scales.tolist() == list(range(600)) and h.skipped.sum() == 200 and len(h.pending) < 256
    learn = fit(learner(mixed=Climber(1.)), 1)
    assert learn.mixed_precision_cb.history.scales.tolist() == [1, 2, 4, 8]


def test_a_fused_step_reads_nothing_from_the_device(monkeypatch):
    "Mistake 11: one synchronisation a parameter in fastai; here none with a fused optimizer, of ours"
    seen, on = [], []
    for n in ('item', '__bool__', '__float__', 'tolist', 'cpu'):
        orig = getattr(torch.Tensor, n)
        def look(self, *a, _n=n, _o=orig, **k):
            if on: seen.append(_n)
            return _o(self, *a, **k)
        monkeypatch.setattr(torch.Tensor, n, look)
    learn = learner('fused', cbs=[At('before_step', lambda l: on.append(1), 9.9), At('before_step', lambda l: on.clear(), 10.1),
                                  At('before_backward', lambda l: on.append(1), 9.9, at_iter(2)), At('before_backward', lambda l: on.clear(), 10.1)])
    fit(learn, 1)
    assert not seen


# --- two processes ---

GLOO = '''
from test_callback import *
out = {}
for opt in ('sgd', 'fused'):
    learn = learner(opt, cbs=At('after_backward', inf_grad, when=lambda l: (l.train_iter, rank) in ((1, 0), (3, 1))))
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    out[opt] = (learn.mixed_precision_cb.history.skipped.tolist(), whole(learn)['w'], whole(learn)['opt']['state'])
torch.save(out, f'{folder}/{rank}.pt')
'''


def test_two_processes_take_the_same_decision(ranks):
    a, b = ranks(GLOO)
    for opt in a:
        assert a[opt][0] == b[opt][0] == [False, True, False, True, False, False, False, False], opt
        assert same(a[opt][1], b[opt][1]) and same(a[opt][2], b[opt][2]), opt


# --- killed and resumed ---

RUNS = dict(                                            # four batches an epoch, three epochs; with accumulation eight
    every1=dict(every=1, kill=[('after_batch', 6)]),
    every2=dict(every=2, kill=[('before_backward', 5)], opt='adam', drop=.3),
    every3=dict(every=3, kill=[('after_step', 7)], opt='fused', drop=.3, method='fit_one_cycle'),
    every5=dict(every=5, kill=[('after_pred', 9)], opt='adamw', method='fit_one_cycle'),
    boundary=dict(every=4, kill=[('before_validate', 8)], opt='adam', drop=.3, method='fit_one_cycle'),
    epoch=dict(every=4, kill=[('after_epoch', 4)], drop=.3),
    early=dict(every=5, kill=[('after_batch', 2)], drop=.3),                # before the first checkpoint: from the start
    twice=dict(every=2, kill=[('after_batch', 3), ('after_backward', 6), ('before_step', 9)], opt='adam', drop=.3, method='fit_one_cycle'),
    accumulate=dict(every=1, kill=[('after_batch', 9)], opt='adam', drop=.3, bs=4, acc=8),
    accumulate3=dict(every=2, kill=[('before_step', 14)], opt='sgd', drop=.3, bs=4, acc=12),
    climber=dict(every=3, kill=[('after_batch', 7)], scaler='climber', opt='fused', drop=.3),
    overflow=dict(every=2, kill=[('after_batch', 7)], opt='adam', skip=2),
    fp32=dict(every=2, kill=[('after_batch', 7)], opt='adam', scaler=None, drop=.3),
    two_inputs=dict(every=2, kill=[('after_batch', 7)], opt='adam', inputs=2, outputs=2, drop=.3))


def prepare(run, path, kill=None, seed=0):
    "The Learner of a run, with a checkpoint, and perhaps with its end"
    r = dict(opt='sgd', drop=0., bs=8, inputs=1, outputs=1, scaler='static', skip=None, acc=None) | RUNS[run]
    mixed = dict(static=2.**8, climber=Climber(1.)).get(r['scaler'])
    learn = learner(r['opt'], r['inputs'], r['outputs'], mixed=mixed, drop=r['drop'], bs=r['bs'], seed=seed, lr=.02)
    if r['acc']: learn.add_cb(GradientAccumulation(r['acc']))
    if r['skip'] is not None: learn.add_cb(At('after_backward', inf_grad, when=at_iter(r['skip'])))
    if path is not None: learn.add_cb(CheckpointCB(path, every=r['every']))
    if kill is not None:
        event, k = kill
        when = at_iter(k) if event in EVENTS else lambda l: l.train_iter == k
        learn.add_cb(At(event, lambda l: os.kill(os.getpid(), signal.SIGKILL), order=90, when=when))
    return learn


def train(learn, run): return fit(learn, 3, method=RUNS[run].get('method', 'fit'))


def outcome(learn):
    rec, cb = learn.recorder, getattr(learn, 'mixed_precision_cb', None)
    return dict(whole(learn), buffers=tree(dict(learn.model.named_buffers())), losses=tree(list(rec.losses)), lrs=list(map(float, rec.lrs)),
                values=[list(map(float, v)) for v in rec.values], scaler=None if cb is None else tree(cb.scaler.state_dict()), iters=list(rec.iters),
                random=(random.random(), np.random.rand(), torch.rand(()).item()), train_iter=learn.train_iter)


def killed(names, folder):
    "In a child each: train until the kill"
    import torch._dynamo  # noqa: F401                  # optimizers import it at their first step: once for all
    for run in names:
        for i,kill in enumerate(RUNS[run]['kill']):
            if not (pid := os.fork()):
                try: train(prepare(run, Path(folder)/f'{run}.pt', kill, seed=i), run)
                finally: os._exit(1)
            status = os.waitpid(pid, 0)[1]
            print(json.dumps([run, os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1]), flush=True)


@pytest.fixture(scope='module')
def graves(tmp_path_factory):
    "All runs of `RUNS`, killed"
    folder = tmp_path_factory.mktemp('killed')
    code = f'import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r}); torch.set_num_threads(1); import test_callback as t; t.killed(list(t.RUNS), {str(folder)!r})'
    p = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True, timeout=240)
    said = [json.loads(l) for l in p.stdout.splitlines() if l.startswith('[')]
    assert [s for _,s in said] == [signal.SIGKILL]*sum(len(r['kill']) for r in RUNS.values()), (said, p.stderr[-3000:])
    return folder


@pytest.mark.parametrize('run', RUNS)
def test_killed_and_resumed_is_the_uninterrupted_run_bit_for_bit(run, graves):
    "SIGKILL; then another process, other weights, other random numbers, and the same `fit`"
    path = graves/f'{run}.pt'
    assert path.exists() == (run != 'early')
    want = outcome(train(prepare(run, None), run))
    learn = prepare(run, path, seed=5 if run != 'early' else 0)
    steps = []
    learn.add_cb(At('after_pred', lambda l: steps.append(l.train_iter) if l.training else None))
    got = outcome(train(learn, run))
    assert steps == list(range(steps[0], want['train_iter'])) and (steps[0] > 0) == (run != 'early')    # done steps are not done again
    assert all(same(got[k], want[k]) for k in want), [k for k in want if not same(got[k], want[k])]
    assert not path.exists() and not list(path.parent.glob(f'.{path.name}*'))
    assert_clean(learn)


def interrupted(file, at=5, every=2, n=3, opt='adam', **kw):
    "A Learner whose fit ended with Ctrl-C, and a checkpoint"
    learn = learner(opt, cbs=[CheckpointCB(file, every=every), At('after_batch', ctrl_c, when=at_iter(at), order=90)], **kw)
    with pytest.raises(KeyboardInterrupt): fit(learn, n)
    return learn.remove_cb(At)


def test_a_checkpoint_every_so_many_steps(tmp_path):
    seen, path = [], tmp_path/'c.pt'
    learn = learner(cbs=[CheckpointCB(path, every=3), At('after_batch', lambda l: seen.append(path.exists() and path.stat().st_mtime_ns) if l.training else None, order=90)])
    fit(learn, 3)
    assert [bool(a) and a != b for b,a in zip([False] + seen, seen)] == [(i + 1) % 3 == 0 for i in range(12)]
    assert not path.exists()


@pytest.mark.parametrize('bad', [0, -1, 1.5, '3', None, True])
def test_every_is_a_whole_number_from_one(bad):
    with pytest.raises(ValueError, match='checkpoint every'): CheckpointCB('x.pt', every=bad)


@pytest.mark.parametrize('change', ['epochs', 'bs', 'data', 'lr', 'schedule', 'opt', 'wd', 'groups', 'model', 'scaler', 'no scaler'])
def test_other_arguments_are_a_sentence_and_nothing_is_changed(change, tmp_path):
    path = tmp_path/'c.pt'
    interrupted(path)
    bits = path.read_bytes()
    kw = dict(bs=dict(bs=4), data=dict(n=40, bs=10), opt=dict(opt='sgd'), scaler=dict(mixed=Climber(1.)), wd=dict(wd=.3)).get(change, {})
    if change == 'no scaler': kw = dict(mixed=None)
    learn = learner(**(dict(opt='adam') | kw), seed=3, cbs=CheckpointCB(path, every=2))
    if change == 'groups': learn.splitter = lambda m: [[p for p in m.parameters() if p.requires_grad]]
    if change == 'model': learn.model.norm = nn.LayerNorm([8], bias=False)
    learn.create_opt()
    was, rng = whole(learn), (random.getstate(), torch.get_rng_state())
    with pytest.raises(ValueError) as e:
        if change == 'schedule': fit(learn, 3, method='fit_one_cycle')
        else: fit(learn, 2 if change == 'epochs' else 3, lr=.01 if change == 'lr' else None)
    assert str(path) in str(e.value) and len(str(e.value)) > 40
    now = whole(learn)
    assert same(now['w'], was['w']) and same(now['opt']['state'], was['opt']['state'])
    assert random.getstate() == rng[0] and torch.equal(torch.get_rng_state(), rng[1])
    assert path.read_bytes() == bits
    assert_clean(learn) if change != 'model' else None


@pytest.mark.parametrize('how', ['cut', 'empty', 'text', 'bit', 'foreign', 'model file'])
def test_a_damaged_or_foreign_file_is_a_sentence_and_nothing_is_changed(how, tmp_path):
    path = tmp_path/'c.pt'
    learn = interrupted(path)
    raw = bytearray(path.read_bytes())
    if how == 'cut': path.write_bytes(raw[:len(raw)//2])
    if how == 'empty': path.write_bytes(b'')
    if how == 'text': path.write_text('hello')
    if how == 'bit':
        raw[raw.find(learn.model.frozen.weight.detach().numpy().tobytes()[:64])] ^= 1
        path.write_bytes(raw)
    if how == 'foreign': save_training_state(path, learn.model, learn.opt, learn.mixed_precision_cb.scaler, step=7)
    if how == 'model file': torch.save(learn.model.state_dict(), path)
    bits, again = path.read_bytes(), learner('adam', seed=3, cbs=CheckpointCB(path, every=2))
    again.create_opt()
    was = whole(again)
    with pytest.raises(ValueError) as e: fit(again, 3)
    assert str(path) in str(e.value)
    assert same(whole(again)['w'], was['w']) and same(whole(again)['opt']['state'], was['opt']['state']) and path.read_bytes() == bits


def test_resume_false_starts_anew(tmp_path):
    path = tmp_path/'c.pt'
    interrupted(path)
    fresh, want = learner('adam', cbs=CheckpointCB(path, every=2, resume=False)), learner('adam')
    assert same(whole(fit(fresh, 3)), whole(fit(want, 3)))


def test_validating_and_lr_find_leave_a_checkpoint_alone(tmp_path):
    "After Ctrl-C people look at their model: it must not jump back to the checkpoint, nor the checkpoint go"
    path = tmp_path/'c.pt'
    learn = interrupted(path, path=tmp_path)
    was, bits = whole(learn), path.read_bytes()
    with learn.no_bar(), learn.no_logging():
        learn.validate(), learn.get_preds()
        assert same(whole(learn), was) and path.read_bytes() == bits
        learn.lr_find(num_it=6, show_plot=False, suggest_funcs=())
    assert same(whole(learn)['w'], was['w']) and path.read_bytes() == bits


def test_validating_inside_a_fit_does_not_disturb_it(tmp_path):
    path, seen = tmp_path/'c.pt', []
    def look(l):
        if l.lock.locked(): return
        l.validate(); seen.append(path.exists())
        l.get_preds(); seen.append(path.exists())
    learn = learner('adam', cbs=[CheckpointCB(path, every=1), At('after_epoch', look, order=85)])
    plain = learner('adam', cbs=[At('after_epoch', look, order=85)])
    assert same(whole(fit(learn, 2))['w'], whole(fit(plain, 2))['w'])
    assert seen[:4] == [True]*4 and not path.exists()


def test_resumed_with_a_model_saver(tmp_path):
    "Passing over complete epochs must not upset those who watch the epochs"
    path = tmp_path/'c.pt'
    def make(*cbs, seed=0): return learner('adam', cbs=[SaveModelCallback(), CheckpointCB(path, every=2), *cbs], path=tmp_path, seed=seed)
    want = whole(fit(make(), 3))
    with pytest.raises(KeyboardInterrupt): fit(make(At('after_batch', ctrl_c, when=at_iter(9), order=90)), 3)
    assert path.exists()
    assert same(whole(fit(make(seed=4), 3))['w'], want['w'])


class Sometimes(nn.Module):
    "A layer that is used in the first step only: afterwards its gradient is zero, not None, and weight decay moves it"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(6, 3), nn.Linear(6, 3), 0
    def forward(self, x):
        self.n += self.training
        return self.a(x) + (self.b(x) if self.n == 1 else 0)


def test_resumed_where_a_layer_had_its_gradient_long_ago(tmp_path):
    def make(*cbs, seed=0):
        seed_all(seed)
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g)
        return Learner(tensor_dls((x, y), (x, y), 8), Sometimes(), loss_func=F.cross_entropy, opt_func=Adam, lr=.1, wd=.1, cbs=cbs).to_mixed(StaticScaler())
    want, path = whole(fit(make(), 2)), tmp_path/'c.pt'
    with pytest.raises(KeyboardInterrupt): fit(make(CheckpointCB(path, every=2), At('after_batch', ctrl_c, when=at_iter(4), order=90)), 2)
    learn = make(CheckpointCB(path, every=2), seed=2)
    learn.model.n = 9
    assert same(whole(fit(learn, 2)), want)


def hooks_in(model): return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Hooking(StaticScaler):
    "A scaler with a hook in the model, and something that cannot be pickled"
    def attach(self, model):
        handle = model.register_forward_hook(lambda *args: None)
        handle.seen = (i for i in ())
        return handle


def test_a_scalers_hooks_are_in_the_model_for_a_fit_only(tmp_path):
    during = []
    learn = learner(mixed=Hooking(2.**10), cbs=At('after_pred', lambda l: during.append(hooks_in(l.model))), path=tmp_path)
    before = hooks_in(learn.model)
    for _ in range(2):
        quiet_fit(learn, 1)
        assert hooks_in(learn.model) == before and learn.mixed_precision_cb._hooks is None
    learn.validate()
    assert hooks_in(learn.model) == before and max(during) > before
    learn.remove_cbs(At)
    learn.export('whole.pkl')


def test_a_scalers_hooks_are_gone_after_an_exception():
    def stop(l): raise RuntimeError('stop')
    learn = learner(mixed=Hooking(2.**10), cbs=At('after_backward', stop))
    with pytest.raises(RuntimeError, match='stop'): quiet_fit(learn, 1)
    assert hooks_in(learn.model) == 0


def test_a_checkpoint_with_fastais_own_metric_is_read_again(tmp_path):
    from fastai.metrics import accuracy as fastais
    path = tmp_path/'run.pt'
    def killed(l): raise RuntimeError('killed')
    def run(*cbs): return learner(cbs=[CheckpointCB(path, every=2), *cbs], metrics=fastais)
    with pytest.raises(RuntimeError, match='killed'): quiet_fit(run(At('after_batch', killed, when=lambda l: l.training and l.epoch == 1 and l.iter == 3, order=90)), 2)
    again, whole = run(), learner(metrics=fastais)
    quiet_fit(again, 2); quiet_fit(whole, 2)
    assert again.recorder.values == whole.recorder.values and len(whole.recorder.values) == 2
