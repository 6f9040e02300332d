"Promise 2: what is saved is FP32; lr_find changes no bit; after any exception, Ctrl-C included, the model is FP32 and no hook is left"
import copy, pickle
from functools import partial

import pytest, torch, torch.nn.functional as F
from fastai.basics import (BCEWithLogitsLossFlat, Callback, CrossEntropyLossFlat, FocalLossFlat, L1LossFlat, LabelSmoothingCrossEntropyFlat,
                           MSELossFlat, OptimWrapper, load_learner)
from fastai.callback.tracker import SaveModelCallback
from torch import nn

import adapter as A

EVENTS = ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch')
ADAM = partial(OptimWrapper, opt=torch.optim.Adam)


class Net(nn.Module):
    "Linear, convolution, norm, buffer, something recurrent"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.rnn, self.head = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)
        self.rms = nn.RMSNorm(6)
        self.register_buffer('shift', torch.tensor([1/3, 1/7, 1/11]))
        self.bomb = None
    def forward(self, x):
        h, _ = self.rnn(self.norm(self.conv(x)).transpose(1, 2))
        if self.bomb: raise self.bomb
        return self.head(self.rms(h[:, -1])) + self.shift


def data(n=48):
    g = torch.Generator().manual_seed(2)
    return torch.randn(n, 2, 5, generator=g), torch.randint(0, 3, (n,), generator=g)


def learner(tmp_path, policy='dynamic', rule={}, **kw):
    x, y = data()
    scaler = A.make_scaler(policy, init_scale=2.**8, **rule)
    return A.make_learner(Net(), (x, y), (x[:16], y[:16]), scaler, loss_func=F.cross_entropy, lr=1e-2, path=tmp_path, **kw)


def is_plain(model, compute=True):
    "FP32 everywhere, on its own parameters, without a hook; and it computes in FP32"
    assert all(t.dtype == torch.float32 for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    for name,m in model.named_modules():
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks, m._state_dict_hooks)
        assert not any(map(len, hooks)), f'{name} has hooks: {hooks}'
        over = [n for n in (*m._parameters, *m._buffers, 'forward') if n in m.__dict__]
        assert not over, f'{name} has {over} in the way of its own'
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    for m in model.modules():
        if isinstance(m, nn.GRU): assert all(w is p for w,p in zip(m._flat_weights, m.parameters()))
    if compute:
        with torch.no_grad(): assert model(data(4)[0]).dtype == torch.float32


def fp32(state): return all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())


class At(Callback):
    "Does something at an event of one training batch"
    def __init__(self, event, do, batch=2, order=50):
        self.order, self.do, self.batch = order, do, batch
        setattr(self, event, self.fire)
    def fire(self):
        if self.learn.training and self.learn.iter == self.batch and self.learn.epoch == 0: self.do(self.learn)


def raises(error):
    def do(learn): raise error
    return do


def weights(m): return {k: v.detach().clone() for k,v in m.state_dict().items()}
def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize('event', EVENTS)
def test_a_file_saved_at_any_event_is_fp32_and_has_all_digits(event, tmp_path):
    seen = {}
    def do(learn):
        file = learn.save('x', with_opt=True)
        seen['file'] = torch.load(file, map_location='cpu', weights_only=False)
        seen['own'] = [p.detach().clone() for p in learn.model.parameters()]
    learn = learner(tmp_path)
    with learn.no_logging(): learn.fit(1, cbs=At(event, do))
    state = seen['file']['model']
    assert fp32(state) and len(state) == len(learn.model.state_dict())
    names = [n for n,_ in learn.model.named_parameters()]
    assert all(torch.equal(state[n], p) for n,p in zip(names, seen['own']))
    assert any((state[n].half().float() != state[n]).any() for n in names)
    assert torch.equal(state['shift'], Net().shift)
    moments = [v for s in seen['file']['opt']['state'] for v in s.values() if isinstance(v, torch.Tensor)]
    assert all(v.dtype == torch.float32 for v in moments)


LOSSES = [CrossEntropyLossFlat(), LabelSmoothingCrossEntropyFlat(), FocalLossFlat(), F.cross_entropy,
          BCEWithLogitsLossFlat(thresh=.5), MSELossFlat(), L1LossFlat()]


@pytest.mark.parametrize('emulated', (False, True))
@pytest.mark.parametrize('loss', LOSSES, ids=lambda l: getattr(l, '__name__', type(l).__name__))
def test_what_learn_save_wrote_learn_load_reads_with_every_loss_of_fastais(loss, emulated, tmp_path):
    x, y = data(32)
    y = y if 'ross' in str(loss) or 'Focal' in str(loss) else F.one_hot(y, 3).float()
    torch.manual_seed(0)
    model, both = nn.Linear(x[0].numel(), 3), (x.flatten(1), y)
    learn = A.make_learner(model, both, both, A.make_scaler('static', init_scale=2.**8), emulated=emulated, loss_func=loss, path=tmp_path)
    with learn.no_logging(): learn.fit(1)
    assert all(type(p.grad) in (torch.Tensor, type(None)) for p in model.parameters())
    learn.save('x')
    was = weights(model)
    nn.init.zeros_(model.weight)
    learn.load('x')
    assert same(weights(model), was) and learn.opt.state_dict()['state']


def test_save_model_callback_writes_and_loads_fp32(tmp_path):
    learn = learner(tmp_path)
    with learn.no_logging(): learn.fit(2, cbs=SaveModelCallback(fname='best', every_epoch=True))
    for i in range(2): assert fp32(torch.load(tmp_path/'models'/f'best_{i}.pth', weights_only=True))
    assert same(weights(learn.model), torch.load(tmp_path/'models'/'best_1.pth', weights_only=True))


def test_an_exported_learner_predicts_the_same(tmp_path):
    learn = learner(tmp_path)
    with learn.no_logging(): learn.fit(1)
    learn.export('x.pkl')
    other = load_learner(tmp_path/'x.pkl')
    is_plain(other.model)
    learn.model.eval(); other.model.eval()
    with torch.no_grad(): assert torch.equal(learn.model(data(4)[0]), other.model(data(4)[0]))


@pytest.mark.parametrize('event', ('after_pred', 'after_batch'))
def test_a_running_average_is_of_the_fp32_weights(event, tmp_path):
    class EMA(Callback):
        order = 60
        def before_fit(self): self.sd, self.n = {k: v.double() for k,v in self.learn.model.state_dict().items()}, 0
        def go(self):
            if not self.learn.training: return
            now = self.learn.model.state_dict()
            assert fp32(now)
            self.sd = {k: v.lerp(now[k].double(), .01) for k,v in self.sd.items()}; self.n += 1
    ema = EMA(); setattr(ema, event, ema.go)
    learn = learner(tmp_path); start = weights(learn.model)
    with learn.no_logging(): learn.fit(1, lr=1e-4, cbs=ema)
    moved = (ema.sd['head.weight'] - start['head.weight']).abs().max()
    assert ema.n == 6 and 0 < moved < 1e-4              # smaller than FP16 steps of such weights


@pytest.mark.parametrize('policy', ('dynamic', 'als'))
def test_lr_find_changes_no_bit(policy, tmp_path):
    learn = learner(tmp_path, policy, dict(growth_interval=2) if policy == 'dynamic' else {})
    with learn.no_logging(): learn.fit(1)
    before, moments, scale = weights(learn.model), copy.deepcopy(learn.opt.state_dict()['state']), A.scale_of(learn)
    learn.lr_find(num_it=8, show_plot=False)
    assert same(before, weights(learn.model))
    for old,new in zip(moments, learn.opt.state_dict()['state']): assert str(old) == str(new)
    assert A.scale_of(learn) == scale
    is_plain(learn.model)


@pytest.mark.parametrize('policy', ('dynamic', 'als'))
def test_an_interrupted_lr_find_leaves_a_plain_model(policy, tmp_path):
    learn = learner(tmp_path, policy)
    with learn.no_logging(): learn.fit(1)
    with pytest.raises(KeyboardInterrupt), learn.added_cbs([At('after_backward', raises(KeyboardInterrupt()))]):
        learn.lr_find(num_it=8, show_plot=False)
    is_plain(learn.model)




@pytest.mark.parametrize('policy', ('dynamic', 'als'))
@pytest.mark.parametrize('error', (KeyboardInterrupt(), ValueError('x')), ids=('ctrl-c', 'error'))
@pytest.mark.parametrize('event', EVENTS)
def test_after_an_exception_the_model_is_plain(event, error, policy, tmp_path):
    learn = learner(tmp_path, policy)
    with pytest.raises(type(error)), learn.no_logging(): learn.fit(1, cbs=At(event, raises(error)))
    is_plain(learn.model)
    assert not any(p.grad is not None and p.grad.abs().max() > 10 for p in learn.model.parameters())    # no scale in them
    before = weights(learn.model)
    with learn.no_logging(): learn.fit(1)                                                                  # it goes on
    assert not same(before, weights(learn.model)) and all(v.isfinite().all() for v in learn.model.state_dict().values())
    is_plain(learn.model)


@pytest.mark.parametrize('error', (KeyboardInterrupt(), ValueError('x')), ids=('ctrl-c', 'error'))
@pytest.mark.parametrize('where', ('forward', 'loss'))
def test_after_an_exception_in_a_step_the_model_is_plain(where, error):
    model, (x, y) = Net(), data()
    opt, step = torch.optim.SGD(model.parameters(), lr=.1), A.make_step(A.make_scaler('dynamic', init_scale=2.**8))
    step(model, x, y, opt, F.cross_entropy)
    before = weights(model)
    if where == 'forward': model.bomb = error
    with pytest.raises(type(error)): step(model, x, y, opt, raises_loss(error) if where == 'loss' else F.cross_entropy)
    model.bomb = None
    is_plain(model)
    assert all(torch.equal(before[n], p) for n,p in model.named_parameters())
    step(model, x, y, opt, F.cross_entropy)
    assert all(p.isfinite().all() for p in model.parameters())


def raises_loss(error):
    def loss(pred, y): raise error
    return loss


@pytest.mark.parametrize('policy', ('dynamic', 'als'))
def test_after_a_fit_a_validation_and_a_prediction_the_model_is_plain(policy, tmp_path):
    learn = learner(tmp_path, policy)
    with learn.no_logging(): learn.fit(1)
    is_plain(learn.model)
    before = weights(learn.model)
    with learn.no_logging(): learn.validate(); learn.get_preds()
    is_plain(learn.model)
    assert same(before, weights(learn.model))


def test_within_a_batch_the_model_computes_in_half_and_its_norm_in_fp32(tmp_path):
    "The negative of all the others: without this they would hold for a callback that does nothing"
    seen, norms = set(), set()
    learn = learner(tmp_path)
    learn.model.head.register_forward_hook(lambda m, a, out: seen.add(out.dtype))
    def far(m, args): norms.add(m.running_mean.dtype)
    learn.model.norm.register_forward_pre_hook(far)
    with learn.no_logging(): learn.fit(1)
    assert seen == {torch.float16} and norms == {torch.float32}


def test_a_statistic_beyond_half_stays_finite(tmp_path):
    "Norms are FP32: a variance of 10^6 is no infinity, and its update is not rounded to half"
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lin, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        def forward(self, x): return self.head(self.norm(self.lin(x)*300))
    model, step = Wide(), A.make_step(A.make_scaler('static', init_scale=4.))
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))*30, torch.arange(16)%3
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(5): step(model, x, y, opt, F.cross_entropy)
    var = model.norm.running_var
    assert var.isfinite().all() and var.max() > 65504 and (var.clamp(max=6e4).half().float() != var).any()


def test_to_fp32_ends_mixed_precision(tmp_path):
    learn, seen = learner(tmp_path), set()
    learn.to_fp32()
    learn.model.head.register_forward_hook(lambda m, a, out: seen.add(out.dtype))
    with learn.no_logging(): learn.fit(1)
    assert seen == {torch.float32}


def test_a_copy_taken_within_a_batch_computes_with_its_own_parameters(tmp_path):
    copies = []
    def do(learn):
        try: copies.append(pickle.loads(pickle.dumps(learn.model)))
        except (TypeError, ValueError, RuntimeError, pickle.PicklingError): pass
    learn = learner(tmp_path)
    with learn.no_logging(): learn.fit(1, cbs=At('after_pred', do))
    for m in copies:
        with torch.no_grad():
            for p in m.parameters(): p.zero_()
            out = m.eval()(data(4)[0])
            assert out.dtype == torch.float32 and not (out - m.shift).any()
