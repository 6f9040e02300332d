"The callback on a model that has everything: probes before and after it, skipped steps, exits of every kind, other callbacks beside it"
import contextlib, copy, gc, inspect, pickle, random, sys, warnings
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Adam, Callback, CancelBackwardException, CancelBatchException, CancelFitException, CancelStepException, CrossEntropyLossFlat, Learner, OptimWrapper, SGD, load_learner
from fastai.callback.all import GradientAccumulation, GradientClip
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpcourse.callback import HalfPrecisionCB, MixedPrecisionCB, StepHistory, autocast_depth, quiet_fit, run_in, tensor_dls
from mpcourse.dynamic import DynamicScaler
from mpcourse.formats import same_bits
from mpcourse.scaler import StaticScaler
from mpcourse.step import StepOutcome
from mpcourse.tensorcore import fp32_accumulate

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


def guards(learn): return {'_do_fit', '_do_one_batch'} & vars(learn).keys()


def hooks_of(model): return [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_hooks)) for m in model.modules()]


def assert_clean(learn, ids=None, hooks=None):
    "FP32, its own parameters, no hooks, no mode, an optimizer on the same parameters"
    m = learn.model
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert {t.dtype for t in m.state_dict().values() if t.is_floating_point()} == {F32}
    assert not any('forward' in vars(mod) for mod in m.modules())
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
    def look(self, event):
        m = self.learn.model
        assert [m.emb.weight.dtype, m.conv.bias.dtype, m.frozen.weight.dtype, m.head.weight.dtype] == [F32]*4, event
        assert [t.dtype for t in (m.bn.weight, m.bn.running_mean, m.norm.bias)] == [F32]*3, event
        assert {p.dtype for p in m.parameters()} == {F32} and m.head.weight is m.emb.weight, event
        assert torch.is_autocast_enabled() is False
        if self.learn.opt is not None:
            assert {id(p) for ps in self.learn.opt.param_lists for p in ps} <= {id(p) for p in m.parameters()}
            assert {p.dtype for ps in self.learn.opt.param_lists for p in ps} == {F32}
        self.seen.append((event, self.learn.training))

    @property
    def after(self): return self.order > 10
    def before_fit(self): self.look('before_fit')
    def before_epoch(self): self.look('before_epoch')
    def before_train(self): self.look('before_train')
    def before_validate(self): self.look('before_validate')
    def after_epoch(self): self.look('after_epoch')
    def after_fit(self): self.look('after_fit')

    def before_batch(self):
        self.look('before_batch')
        self.inputs, self.copy = tuple(x.clone() for x in self.learn.xb), copy.deepcopy(self.learn.model)
        assert [x.dtype for x in self.inputs[1:]] == [F32]*len(self.inputs[1:]) and self.inputs[0].dtype == torch.int64

    def preds(self):
        p = self.learn.pred
        return [p[0], p[1]['h']] if isinstance(p, tuple) else [p]

    def after_pred(self):
        self.look('after_pred')
        assert {p.dtype for p in self.preds()} == {F32 if self.after else self.dtype}
        assert all(map(same_bits, self.learn.xb, self.inputs))       # as they came

    def after_loss(self):
        self.look('after_loss')
        assert self.learn.loss.dtype == F32 and same_bits(self.learn.loss.detach(), self.learn.loss_grad.detach())
        self.loss = self.learn.loss.detach().clone()

    def before_backward(self):
        self.look('before_backward')
        want = self.loss*self.scale if self.after else self.loss
        assert same_bits(self.learn.loss_grad.detach(), want) and same_bits(self.learn.loss.detach(), self.loss)

    def after_backward(self):
        self.look('after_backward')
        if self.after: assert all(same_bits(a, b) for a,b in zip(self.learn.xb, self.inputs)) and len(self.learn.xb) == len(self.inputs)
        self.compare(self.scale)

    def before_step(self):
        self.look('before_step')
        self.compare(1. if self.after else self.scale)

    def compare(self, scale):
        ref = fp32_grads(self.learn, self.copy, self.inputs)
        all_ = torch.cat([g.flatten() for g in ref.values() if g is not None]).norm()
        for n,p in self.learn.model.named_parameters():
            if not p.requires_grad or n == 'unused': assert p.grad is None; continue
            assert p.grad.dtype == F32 and p.grad.shape == p.shape
            off = (p.grad/scale - ref[n]).norm()
            assert off <= .05*ref[n].norm() + .02*all_, (n, off, ref[n].norm(), all_)

    def after_step(self):
        self.look('after_step')
        assert same_bits(self.learn.loss.detach(), self.loss)
    def after_batch(self):
        self.look('after_batch')
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


def test_a_product_in_the_loss_is_fp32():
    seen = set()
    def loss(pred, y):
        seen.add((pred @ pred.T).dtype)
        return F.cross_entropy(pred, y)
    fit(learner(loss_func=loss, mixed=dict(scaler=StaticScaler())), 1)
    assert seen == {F32}


@pytest.mark.parametrize('kw', [dict(), dict(compute=nullcontext), dict(compute=fp32_accumulate), dict(compute=partial(fp32_accumulate, 'saturate'))])
def test_every_way_to_compute_trains_alike(kw):
    seen = []
    mode = lambda learn: seen.append([type(m).__name__ for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()])
    a = fit(learner(cbs=At('after_pred', mode), mixed=dict(scaler=StaticScaler(), **kw)), 1)
    b = fit(learner(mixed=None), 1)
    assert_clean(a)
    wa, wb, w0 = weights(a), weights(b), weights(learner())
    moved = sum((wb[n] - w0[n]).norm()**2 for n in wb)**.5
    assert sum((wa[n] - wb[n]).norm()**2 for n in wb)**.5 < .1*moved
    assert all(s == ([] if kw.get('compute') is nullcontext else ['fp32_accumulate']) for s in seen)      # on a CPU


def test_saturating_overflow_is_clipped_and_infinite_otherwise():
    "The same huge activation: ±65504, or an infinity, with which every step is skipped"
    def run(overflow):
        seen = []
        learn = learner(mixed=dict(scaler=StaticScaler(1.), compute=partial(fp32_accumulate, overflow)), inputs=2)
        learn.model.mid.register_forward_hook(lambda m, a, out: seen.append(out.abs().max().item()))
        learn.model.mid.weight.data.mul_(1e6).clamp_(-6e4, 6e4)
        learn.model.frozen.weight.data.mul_(100)
        return fit(learn, 1), seen
    assert max(run('saturate')[1]) == 65504
    learn, seen = run('inf')
    assert max(seen) == torch.inf and learn.mixed_precision_cb.history.skipped.all()


# --- a skipped step ---

def inf_grad(learn): dict(learn.model.named_parameters())['mid.weight'].grad[0, 0] = torch.inf


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


def ours(name, path):
    "Each callback of the course's, and the Learner it needs"
    from mpcourse.als import ALSScaler
    from mpcourse.learner import ALSViewCB, RunningMeanCB
    from mpcourse.checkpoint import CheckpointCB
    from mpcourse.learner import MonitorCB
    make = dict(monitor=MonitorCB, checkpoint=partial(CheckpointCB, path/'x.ckpt', every=1), mean=partial(RunningMeanCB, 8), view=partial(ALSViewCB, 1))
    return learner(mixed=ALSScaler(2.**8, activations=False) if name == 'view' else 2.**8), make[name]()


@pytest.mark.parametrize('name', ('monitor', 'checkpoint', 'mean', 'view', 'mixed'))
@pytest.mark.parametrize('event', ('before_batch', 'after_backward', 'after_epoch', 'before_epoch'))
def test_after_ctrl_c_a_callback_that_is_removed_leaves_a_learner_that_fits(name, event, tmp_path):
    learn, cb = (learner(mixed=2.**8), None) if name == 'mixed' else ours(name, tmp_path)
    cb = cb or learn.mixed_precision_cb
    if name != 'mixed': learn.add_cb(cb)
    stop = At(event, interrupt, order=60)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=stop)
    was = weights(learn)
    fit(learn.remove_cb(cb), 1)
    assert not same(weights(learn), was)
    assert not any(n.startswith('_do_') and getattr(f.args[0], '__self__', None) is cb for n, f in vars(learn).items())


def cancel(learn): raise CancelBatchException
def interrupt(learn): raise KeyboardInterrupt
def no_backward(learn): raise CancelBackwardException


@pytest.mark.parametrize('at', (0, 2))
def test_a_cancelled_backward_pass_goes_on_as_in_fp32(at, opt=Adam):
    "In the first batch no parameter has a gradient yet"
    def run(**kw):
        learn = learner(opt, shuffle=False, **kw)
        learn.add_cb(At('before_backward', no_backward, when=at_iter(at)))
        start = weights(learn)
        fit(learn, 1)
        return [(p - start[n]).abs().sum() > 0 for n, p in weights(learn).items() if p.is_floating_point()]
    assert run() == run(mixed=None) and (any(run()) or at == 0)


@pytest.mark.parametrize('opt', ['adam', 'adamw'])
def test_a_cancelled_backward_pass_of_a_nan_loss_does_not_skip_the_next_step(opt):
    seen = []
    def loss(p, y): seen.append(p); return F.cross_entropy(p, y)*(torch.nan if len(seen) == 1 else 1)
    learn = learner(opt, shuffle=False, loss_func=loss)
    learn.add_cb(At('before_backward', no_backward, order=50, when=at_iter(0)))
    fit(learn, 1)
    assert not learn.mixed_precision_cb.history.skipped.any()


def test_a_scale_too_large_skips_everything_by_itself_and_nothing_moves():
    "No injected infinity: the backward pass overflows in half"
    learn = learner(mixed=2.**30)
    was = weights(learn)
    fit(learn, 1)
    assert same(weights(learn), was) and learn.mixed_precision_cb.history.skipped.all() and len(learn.mixed_precision_cb.history) == 4
    assert 'loss scale of 1.07374e+09' in learn.mixed_precision_cb.last_outcome.message


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
        with torch.no_grad(), fp32_accumulate(): want = ref(data(12, 1, 8)[0])
        near = (preds - want).abs().max() <= 2**-9*want.abs().max()      # BatchNorm's kernel rounds half inputs once less
        assert preds.dtype == F32 and near and abs(got['loss'] - F.cross_entropy(preds, data(12, 1, 8)[1])) < 1e-5
    learn = learner(mixed=dict(scaler=StaticScaler(), compute=fp32_accumulate))
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


# --- exits ---

def boom(learn): raise RuntimeError('boom')
def ctrl_c(learn): raise KeyboardInterrupt
def cancel_fit(learn): raise CancelFitException


WHERE = 'before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch ' \
        'before_validate after_epoch'.split()


@pytest.mark.parametrize('exit, opt', [(ctrl_c, 'fused'), (cancel_fit, 'sgd')], ids=['ctrl-c', 'cancel'])
@pytest.mark.parametrize('event', WHERE)
def test_restored_after_every_exit_from_every_event(event, exit, opt):
    "Mistakes 3 and 9: the model is FP32, the optimizer's parameters are the model's, no mode is left, and a second fit trains"
    learn, order = learner(opt), 5 if opt == 'fused' else 15
    ids, hooks, armed = [id(p) for p in learn.model.parameters()], hooks_of(learn.model), [True]
    def go(l):
        if armed and (l.opt is None or event not in EVENTS or at_iter(1)(l)): exit(l)
    learn.add_cb(At(event, go, order))
    if exit is cancel_fit: fit(learn, 2)
    else:
        with pytest.raises(KeyboardInterrupt): fit(learn, 2)
    assert_clean(learn, ids, hooks)
    # nothing that carries the scale is left for a fit without the callback
    left = [p.grad for p in learn.model.parameters() if p.grad is not None]
    assert all((g == 0).all() for g in left)
    armed.clear()
    was = weights(learn)
    fit(learn, 1)
    assert_clean(learn, ids, hooks)
    assert not same(weights(learn)['mid.weight'], was['mid.weight']) and learn.mixed_precision_cb.history.skipped.sum() == 0


@pytest.mark.parametrize('where', ['forward', 'backward', 'param', 'loss', 'metric', 'data'])
def test_restored_after_an_exception_in_the_models_own_code(where):
    exc, learn = KeyboardInterrupt, learner(mixed=dict(scaler=StaticScaler()))
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
    assert not torch.is_autocast_enabled('cpu')
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
    learn.to_fp32()
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

class Watch:
    "A hook in the model, counted"
    on = 0
    def __init__(self, model):
        Watch.on += 1
        self.handle = model.register_forward_hook(lambda *args: None)
    def read(self): return {}
    def reset(self): pass
    def remove(self):
        Watch.on -= 1
        self.handle.remove()


class Climber(StaticScaler):
    "Doubles with every step, so that every step leaves a trace; watches the model"
    def next_scale(self, stats): return self.scale*2
    def watch(self, model): return Watch(model)


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
    assert vars(again)['_do_fit'].args[1] is again
    fit(learn, 1)                                       # the one that was exported trains on


@pytest.mark.parametrize('how', [copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l))], ids=['deepcopy', 'pickle'])
def test_copies_of_a_learner_are_learners_of_their_own(how):
    learn = fit(learner('adam'), 1)
    twin, was = how(learn), weights(learn)
    assert twin.model is not learn.model and twin.mixed_precision_cb.learn is twin
    seen = []
    twin.add_cb(At('after_pred', lambda l: seen.append((l is twin, l.pred.dtype is H))))
    fit(twin, 1)
    assert set(seen) == {(True, True)} and same(weights(learn), was) and not same(weights(twin), was)
    assert len(learn.mixed_precision_cb.history) == 4 and len(twin.mixed_precision_cb.history) == 8
    twin.to_fp32()
    assert guards(learn) and not guards(twin)


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

def test_a_policy_watches_for_a_fit_only_and_to_fp32_leaves_nothing():
    during, learn = [], learner(mixed=Climber(1.))
    learn.add_cb(watch := At('after_pred', lambda l: during.append((Watch.on, l.pred.dtype is H))))
    fit(learn, 1)
    with learn.no_bar(), learn.no_logging(): learn.validate()
    assert during == [(1, True)]*6 + [(0, True)]*2 and Watch.on == 0 and guards(learn)
    cb = learn.mixed_precision_cb
    assert learn.to_fp32() is learn and not guards(learn) and cb.learn is None and cb not in learn.cbs
    during.clear()
    fit(learn, 1)
    assert set(during) == {(0, False)}
    learn.remove_cb(watch).add_cb(cb)
    fit(learn, 1)
    assert Watch.on == 0 and len(cb.history) == 8


@pytest.mark.parametrize('exit', [boom, ctrl_c])
@pytest.mark.parametrize('event', ['before_epoch', 'before_batch', 'after_backward', 'after_batch', 'before_validate', 'after_epoch'])
def test_what_watches_is_gone_after_any_exit(event, exit):
    learn = learner(mixed=Climber(1.), cbs=At(event, exit))
    with pytest.raises((RuntimeError, KeyboardInterrupt)): fit(learn, 1)
    assert Watch.on == 0 and hooks_of(learn.model) == hooks_of(learner().model)


def test_a_callback_given_to_one_fit_is_gone_after_it_even_after_an_exception():
    learn, cb = learner(mixed=None), MixedPrecisionCB(StaticScaler())
    fit(learn, 1, cbs=cb)
    assert cb.learn is None and not guards(learn) and len(cb.history) == 4
    with pytest.raises(RuntimeError): fit(learn, 1, cbs=[cb, At('after_loss', boom)])
    assert not guards(learn) and len(learn.cbs) == len(learner(mixed=None).cbs)
    assert_clean(learn)


def test_removed_in_the_middle_of_a_batch_it_gives_everything_back():
    learn = learner()
    learn.add_cb(At('after_pred', lambda l: l.remove_cb(MixedPrecisionCB), order=20, when=at_iter(1)))
    fit(learn, 1)
    assert_clean(learn)


def test_to_mixed_again_replaces():
    learn = learner(mixed=2.**4).to_mixed(StaticScaler(2.**5)).to_mixed(dtype='bf16')
    assert len([c for c in learn.cbs if isinstance(c, MixedPrecisionCB)]) == 1 and learn.mixed_precision_cb.dtype == B
    with pytest.raises(ValueError): learn.to_mixed(dtype='fp16')
    assert learn.mixed_precision_cb.dtype == B and learn.mixed_precision_cb.learn is learn                 # nothing half-changed


def test_one_callback_for_one_learner():
    a, b = learner(), learner(mixed=None)
    first, second = a.mixed_precision_cb, MixedPrecisionCB(StaticScaler())
    for refused in (lambda: a.add_cb(second), lambda: fit(a, 1, cbs=second), lambda: b.add_cb(first)):
        with pytest.raises(ValueError, match='remove the other'): refused()
    assert a.mixed_precision_cb is first and second not in a.cbs and second.learn is None and not guards(b)
    fit(a, 1), fit(b, 1)
    assert len(first.history) == 4


@pytest.mark.parametrize('make', [lambda l: l.to_fp16(), lambda l: l.to_bf16()])
def test_fastais_own_mixed_precision_beside_ours_is_refused(make):
    learn = learner()
    make(learn)
    was = weights(learn)
    with pytest.raises(ValueError, match='casts and scales'), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, 1)
    assert same(weights(learn), was)
    assert_clean(learn)
    assert not set(vars(learn.to_fp32())) & {'mixed_precision', 'mixed_precision_cb'}             # it removes both


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_that_is_not_fp32_is_refused(dtype):
    learn = learner()
    learn.model.to(dtype)
    with pytest.raises(ValueError, match=f'is {dtype}'): fit(learn, 1)
    assert {p.dtype for p in learn.model.parameters()} == {dtype}


def test_another_model_or_another_layer_is_taken_up():
    learn = fit(learner(), 1)
    learn.model.mid = nn.Linear(8, 8)
    learn.opt = None
    seen = []
    learn.add_cb(At('after_pred', lambda l: seen.append(l.pred.dtype is H)))
    fit(learn, 1)
    learn.model, learn.opt = Composite(), None
    fit(learn, 1)
    assert set(seen) == {True}
    assert_clean(learn)


# --- bad input ---

@pytest.mark.parametrize('kw, says', [
    (dict(dtype='fp16'), 'DynamicScaler'), (dict(dtype='bf16', scaler=DynamicScaler()), "BF16 has FP32's range"), (dict(scaler=512), '512 is not a policy'),
    (dict(dtype='fp32'), 'fp32'), (dict(dtype=torch.float64, scaler=StaticScaler()), 'float64'), (dict(scaler=StaticScaler(), compute='tpu'), "'tpu'")])
def test_arguments_that_cannot_work_are_sentences(kw, says):
    learn = learner(mixed=None)
    with pytest.raises(ValueError, match=says): learn.to_mixed(**kw)
    assert not guards(learn) and len(learn.cbs) == len(learner(mixed=None).cbs)


def test_a_loss_that_is_no_scalar_is_a_sentence_with_its_shape():
    learn = learner(loss_func=lambda p, y: F.cross_entropy(p, y, reduction='none'))
    was = weights(learn)
    with pytest.raises(ValueError, match=r'A loss is one number.*\(8,\)'): fit(learn, 1)
    assert same(weights(learn), was)
    assert_clean(learn)


@pytest.mark.parametrize('at', [0, 1])
def test_a_loss_that_is_nan_is_skipped_held_and_recorded_as_what_it_is(at):
    learn = learner(inputs=2, shuffle=False, mixed=Climber(1.))
    learn.dls.train.dataset.tensors[1][8*at:8*at+8] = torch.nan
    learn.model.bn = nn.Identity(); learn.splitter = split_no_bn
    fit(learn, 1)
    history = learn.mixed_precision_cb.history
    assert history.skipped.tolist() == [i == at for i in range(4)] and history.scales.tolist() == [[1, 1, 2, 4], [1, 2, 2, 4]][at]
    assert not torch.isfinite(torch.as_tensor(learn.recorder.losses[at])) and all(p.isfinite().all() for p in learn.model.parameters())


def test_fastais_kind_of_loss_leaves_plain_tensors_in_the_scaler():
    learn = fit(learner(loss_func=CrossEntropyLossFlat()), 1)
    cb = learn.mixed_precision_cb
    tensors = [*cb.scaler.buffers(), cb.last_outcome.found_inf, cb.history.scales]
    assert {type(t) for t in tensors} == {torch.Tensor}


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


# --- history ---

def test_the_history_outlives_fit_and_is_read_at_the_end_only():
    "fastai drops its scales in after_fit"
    h = StepHistory()
    assert len(h) == 0 and h.scales.shape == (0,) and h.skipped.shape == (0,)
    for i in range(2500): h.add(StepOutcome(torch.tensor(float(i % 3 == 0)), torch.tensor(float(i)), torch.tensor(1.), torch.tensor(0), torch.tensor(0)))
    assert len(h) == 2500 and h.scales.tolist() == list(range(2500)) and h.skipped.sum() == 834 and len(h.rows) < 1000
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


@pytest.mark.parametrize('cast', ['weights', 'autocast'])
def test_ctrl_c_amid_autocasts_entry_leaves_no_autocast(cast, monkeypatch):
    enter, calls = torch.autocast.__enter__, []
    def cut_off(self):
        out = enter(self)
        calls.append(self)
        if len(calls) == 5: raise KeyboardInterrupt
        return out
    monkeypatch.setattr(torch.autocast, '__enter__', cut_off)
    learn, dtype = learner(mixed=dict(scaler=StaticScaler())), torch.get_autocast_dtype('cpu')
    with pytest.raises(KeyboardInterrupt): fit(learn, 2)
    assert len(calls) == 5 and not torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu') == dtype
    assert autocast_depth() == 0


def test_ctrl_c_at_each_bytecode_of_a_context_leaves_nothing_open():
    "A depth of autocast that is not 0 any more keeps half weights in its cache, where they grow old"
    class Batch:
        model = nn.Linear(1, 1)
        def _do_one_batch(self): pass
    cb, lib = HalfPrecisionCB('fp16'), contextlib._GeneratorContextManager
    vars(cb)['_learn'] = learn = Batch()
    watched = [inspect.unwrap(f).__code__ for f in (
        run_in, autocast_depth, cb.one_batch, lib.__enter__, lib.__exit__, contextlib.ExitStack.enter_context, contextlib.ExitStack.__exit__,
        torch.autocast.__enter__, torch.autocast.__exit__, fp32_accumulate.__enter__, fp32_accumulate.__exit__)]
    def interrupt(at):
        "Ctrl-C before bytecode `at`, if there are that many; the exception, which keeps its frames alive"
        seen = 0
        def trace(frame, event, arg):
            nonlocal seen
            if frame.f_code not in watched: return None
            frame.f_trace_opcodes = True
            if event == 'opcode':
                seen += 1
                if seen > at: raise KeyboardInterrupt
            return trace
        before = sys.gettrace()
        sys.settrace(trace)
        try: run_in(cb.one_batch, learn, '_do_one_batch')
        except KeyboardInterrupt as e: return e
        finally: sys.settrace(before)
    def state(): return torch.is_autocast_enabled('cpu'), autocast_depth(), len(_get_current_dispatch_mode_stack())
    at = 0
    while (e := interrupt(at)):
        assert state() == (False, 0, 0), at
        del e
        gc.collect(0)
        assert state() == (False, 0, 0), at
        at += 1
    assert at > 200


def test_ctrl_c_amid_no_grads_exit_leaves_gradients_on():
    class AmidExit(Callback):
        "no_grad has been entered, and Ctrl-C comes before it puts gradients back"
        def after_epoch(self):
            torch.set_grad_enabled(False)
            raise KeyboardInterrupt
    learn = learner(mixed=dict(scaler=StaticScaler()))
    learn.add_cb(amid := AmidExit())
    try:
        with pytest.raises(KeyboardInterrupt): fit(learn, 2)
        assert torch.is_grad_enabled()
    finally: torch.set_grad_enabled(True)
    learn.remove_cb(amid)
    fit(learn, 1)



def test_a_step_that_another_callback_cancels_does_not_skip_the_next():
    "A guard against NaN losses that runs first; the batch after the bad one is good"
    class Guard(Callback):
        order = 5
        def before_step(self):
            if not self.learn.loss.isfinite(): raise CancelStepException
    class Spoil(Callback):
        order = -5
        def after_pred(self):
            if self.learn.training and self.learn.train_iter == 1: self.learn.pred = self.learn.pred*torch.nan
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    learn = Learner(tensor_dls((x, y), (x, y), bs=16), nn.Linear(4, 1), loss_func=F.mse_loss, opt_func=SGD, cbs=[Guard(), Spoil()])
    cb = MixedPrecisionCB(DynamicScaler(2.**8))
    learn.add_cb(cb)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr=.1)
    assert [bool(s) for s in cb.history.skipped] == [False]*3 and cb.scaler.scale == 2.**8


def test_fp32_is_fp32_again_and_a_batch_outside_a_fit_is_refused():
    learn = learner(mixed=None, cbs=HalfPrecisionCB('bf16')).to_fp32()
    assert not learn.cbs.attrgot('dtype').filter()
    learn.to_mixed(StaticScaler(8.)).create_opt()
    learn.training = True
    with pytest.raises(ValueError, match='outside a fit'): learn.one_batch(0, learn.dls.one_batch())
