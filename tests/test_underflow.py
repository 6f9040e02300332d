"The flushed share by replay: chapter 04's count, no trace left, every kind of layer; as a column; the plots; the warning, and what it does"
import copy
from functools import partial

import pytest, torch, torch.nn as nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

import mpcourse.zoo  # noqa: F401
from mpcourse.dynamic import DynamicScaler
from mpcourse.emulate import emulate_format, exact_loss
from mpcourse.failures import flushed
from mpcourse.learner import MonitorCB, WarnCB
from mpcourse.monitor import TensorCollector, TensorHooks
from mpcourse.plots import log2_hist
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, cross_entropy, get_toy, half_pass, plain_step, relu_mlp
from mpcourse.underflow import early_warning, note_flushed, plot_ridges, plot_underflow, probe_flushed, share_table

pytestmark = pytest.mark.library
H, B = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    assert modes() == []


def rand(*shape, seed=0, scale=1.): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))*scale
def sig8(): return get_toy('deep_sigmoid').model(0), next(batches(get_toy('deep_sigmoid').data(), 64, 1))
def probe_of(net, batch, **kw): return {k: (int(z.flushed), int(z.structural)) for k,z in probe_flushed(net, batch, cross_entropy, **kw).items()}


def test_probe_is_chapter_04s_count():
    net, batch = sig8()
    found = probe_flushed(net, batch, cross_entropy, kinds='weight_grad')
    full, rough = plain_step, half_pass(H)
    grads = []
    for step in (full, rough):
        m = copy.deepcopy(net); step(m, *batch, torch.optim.SGD(m.parameters(), lr=0.), cross_entropy)
        grads.append({n: p.grad for n,p in m.named_parameters()})
    for n in grads[0]:
        assert abs(found[n, 'weight_grad'].share.item() - flushed(grads[0][n], grads[1][n])) < .02, n
    assert {k for _,k in found} == {'weight_grad'}


class Wild(nn.Module):
    "BatchNorm, dropout, a tied embedding, a frozen layer, an unused parameter"
    def __init__(self):
        super().__init__()
        self.emb, self.bn, self.drop = nn.Embedding(12, 8), nn.BatchNorm1d(8), nn.Dropout(.3)
        self.mid, self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 12, bias=False)
        self.unused, self.head.weight = nn.Parameter(torch.ones(3)), self.emb.weight
    def forward(self, i, x): return self.head(self.drop(self.frozen(self.mid(self.bn(self.emb(i) + x)).relu())))


@pytest.mark.parametrize('half', [False, True])
def test_probe_leaves_no_trace(half):
    torch.manual_seed(0)
    net = Wild()
    if half:
        from mpcourse.half import model_to_half
        model_to_half(net)
    batch = (torch.arange(10), rand(10, 8)), torch.arange(10) % 12
    seen = []
    hooks = TensorHooks(net, lambda *a: seen.append(a[:2]), ('activation', 'activation_grad', 'weight_grad'))
    for p in net.parameters(): p.grad = torch.full_like(p, 7.) if p.requires_grad else None
    own = net.mid.register_forward_hook(lambda m, a, o: o*1)
    state, rng = {k: v.clone() for k,v in net.state_dict().items()}, torch.get_rng_state()
    dicts = {n: (dict(m.__dict__), list(m._forward_hooks), list(m._forward_pre_hooks)) for n,m in net.named_modules()}
    a = probe_of(net, batch, scale=2.**-20, kinds=('weight_grad', 'activation_grad', 'activation'))
    assert seen == [] and torch.equal(rng, torch.get_rng_state()) and net.training
    assert all(torch.equal(v, net.state_dict()[k]) for k,v in state.items())
    assert all((p.grad == 7).all() for p in net.parameters() if p.requires_grad)
    assert dicts == {n: (dict(m.__dict__), list(m._forward_hooks), list(m._forward_pre_hooks)) for n,m in net.named_modules()}
    assert a == probe_of(net, batch, scale=2.**-20, kinds=('weight_grad', 'activation_grad', 'activation'))     # the same dice
    assert a['emb.weight', 'weight_grad'][0] > 0 and ('frozen.weight', 'weight_grad') not in a
    assert ('unused', 'weight_grad') not in a and ('drop', 'activation') in a
    own.remove(); hooks.remove()


def test_probe_inside_a_step():
    "Within autocast and fp32_accumulate, and after an error"
    net, batch = sig8()
    want, found, bad = probe_of(net, batch), [], []
    def broken(*a): raise RuntimeError('broken loss')
    def here(m, a):
        if found or bad: return
        bad.append(1)
        found.append(probe_of(net, batch))
        with pytest.raises(RuntimeError, match='broken'): probe_flushed(net, batch, broken)
    h = net.register_forward_pre_hook(here)
    MixedStep(StaticScaler(1.))(net, *batch, torch.optim.SGD(net.parameters(), lr=0.), cross_entropy)
    h.remove()
    assert found == [want]


def test_probe_in_other_formats_and_bad_input():
    net, batch = sig8()
    e4 = probe_flushed(net, batch, partial(exact_loss, cross_entropy), None, compute=lambda: emulate_format('e4m3'), kinds='weight_grad')
    bf = probe_flushed(net, batch, cross_entropy, B, kinds='weight_grad')
    assert e4['1.weight', 'weight_grad'].share == 1 and bf['1.weight', 'weight_grad'].share < .01
    assert list(probe_flushed(net, batch, cross_entropy, kinds='weight_grad', names='3.*')) == [('3.weight', 'weight_grad'), ('3.bias', 'weight_grad')]
    with pytest.raises(ValueError, match='matches no module or parameter'): probe_flushed(net, batch, cross_entropy, names='nowhere')


def test_structural_zeros():
    "A black column, dead units, a ReLU: nothing of it was lost"
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad(): net[0].bias[:3] = -100
    x = rand(5, 6); x[:, :2] = 0
    got = probe_of(net, (x, torch.tensor([0, 1, 2, 0, 1])), scale=2.**10, kinds=('activation', 'activation_grad', 'weight_grad'))
    assert got['0.weight', 'weight_grad'][0] == 0 and got['0.weight', 'weight_grad'][1] >= 8*2 + 3*4
    assert got['1', 'activation'][0] == 0 and got['1', 'activation'][1] >= 15 and got['2.weight', 'weight_grad'][0] == 0


@pytest.mark.parametrize('again', [False, True], ids=['', 'checkpointed'])
def test_a_block_that_is_computed_twice(again):
    from torch.utils.checkpoint import checkpoint
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net = sig8()[0]
        def forward(self, x): return self.net[8:](checkpoint(self.net[:8], x, use_reentrant=False) if again else self.net[:8](x))
    torch.manual_seed(0); net, batch = Net(), sig8()[1]
    assert probe_of(net, batch, kinds='weight_grad') == {(f'net.{n}', k): v for (n, k), v in probe_of(net.net, batch, kinds='weight_grad').items()}


def test_a_recurrent_layer():
    class Last(nn.Module):
        def __init__(self): super().__init__(); self.rnn, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        def forward(self, x): return self.out(self.rnn(x)[0][:, -1])
    torch.manual_seed(0)
    found = probe_of(Last(), (rand(4, 5, 8), torch.tensor([0, 1, 2, 0])), scale=2.**-12, kinds='weight_grad')
    assert found['rnn.weight_hh_l0', 'weight_grad'][0] > 0


# ---------------------------------------------------------------- as a column
def test_the_collector_tells_the_same():
    net, batch = sig8()
    step, opt = MixedStep(scaler := StaticScaler(4.)), torch.optim.SGD(net.parameters(), lr=0.)
    with TensorCollector(net, 2, kinds=('weight_grad', 'activation_grad'), stats='zeros', scaler=scaler) as c:
        for _ in range(3):
            note_flushed(c, batch, cross_entropy)
            step(net, *batch, opt, cross_entropy); c.step()
    want = probe_flushed(net, batch, cross_entropy, scale=4.)
    assert sorted({r['step'] for r in c.records}) == [0, 2] and len(c.frame()) == 2*len(want)
    for r in c.records: assert r['flushed'] == pytest.approx(want[r['name'], r['kind']].share.item()), r
    assert {r['name'] for r in c.records if r['flushed'] > .1} & {'1.weight'}


def test_a_probe_leaves_losses_bit_equal():
    def run(watch):
        net, batch = sig8()
        step, opt = MixedStep(scaler := StaticScaler(2.**9)), torch.optim.Adam(net.parameters(), lr=.01)
        with TensorCollector(net, 1, scaler=scaler) as c:
            losses = []
            for x, y in batches(get_toy('deep_sigmoid').data(), 32, 6):
                if watch: note_flushed(c, (x, y), cross_entropy)
                losses.append(step(net, x, y, opt, cross_entropy)['loss'].item()); c.step()
        return losses
    assert run(True) == run(False)


# ---------------------------------------------------------------- plots
def rows(rates, kind='weight_grad', **kw): return [dict(step=i, name=n, kind=kind, flushed=r, **kw) for i,r in enumerate(rates) for n in 'ab']


def test_plots():
    import matplotlib.pyplot as plt, pandas as pd
    recs = rows([.1, .2, .3], overflow=0.) + [dict(step=7, name=n, kind='weight_grad', flushed=float('nan'), overflow=1.) for n in 'ab']
    ax = plot_underflow(pd.DataFrame(recs))
    assert [t.get_text() for t in ax.get_yticklabels()] == ['b', 'a'] and ax.collections[0].get_array().shape == (2, 4)
    assert ax.collections[0].get_array().mask[:, 3].all()                                            # skipped
    assert list(share_table(pd.DataFrame(rows([.1], 'activation')), kind='activation')) == ['a', 'b']
    ax = plot_ridges({'x': log2_hist(rand(100)), 'zeros': log2_hist(torch.zeros(4)), 'bad': log2_hist(torch.tensor([torch.nan]))}, scale=2.**4)
    assert [t.get_text() for t in ax.get_yticklabels()] == ['x', 'zeros', 'bad']
    plt.close('all')


# ---------------------------------------------------------------- the warning
def frame(rates, kind='activation_grad', **kw):
    import pandas as pd
    return pd.DataFrame([dict(step=i, name=n, kind=kind, flushed=r*(n == 'a'), **kw) for i, r in enumerate(rates) for n in 'ab'])


@pytest.mark.parametrize('story, warns', [([.1]*6, False), ([.9]*6, True), ([.9]*2, False), ([.1]*6 + [.9]*3, True), ([.9]*6 + [.1]*3, False), ([], False)], ids=str)
def test_the_worst_layer_of_the_last_three_collections_counts(story, warns):
    if not story: return
    v = early_warning(frame(story), limit=.5)
    assert v.warns == warns and (len(story) < 3 or v.layer == 'a')


def test_skipped_steps_and_other_kinds_do_not_count():
    import pandas as pd
    bad = frame([.9]*9, overflow=1.).assign(step=lambda f: f.step + 100)
    assert not early_warning(pd.concat([frame([.1]*3, overflow=0.), bad, frame([.9]*9, 'weight_grad', overflow=0.)]), .5).warns
    assert early_warning(frame([.9]*9, 'weight_grad'), .5, 'weight_grad').warns


def learner(scaler, cbs=()):
    from fastai.basics import Learner
    from mpcourse.callback import tensor_dls
    data = get_toy('cnn').data()
    torch.manual_seed(0)
    part = data.train[0][:256], data.train[1][:256]
    return Learner(tensor_dls(part, part, 64), relu_mlp(), loss_func=cross_entropy, lr=.05, cbs=list(cbs)).to_mixed(scaler)


def mixed(learn): return next(cb for cb in learn.cbs if type(cb).__name__ == 'MixedPrecisionCB')


def test_monitor_and_warning_act_once():
    from mpcourse.callback import quiet_fit
    told = []
    cbs = [MonitorCB(every=1, kinds=('weight_grad', 'activation_grad'), stats=('zeros', 'overflow')), WarnCB(lambda v, l: told.append((v, l.iter)))]
    learn = learner(StaticScaler(2.**-20), cbs)
    quiet_fit(learn, 2)
    assert len(told) == 1 and told[0][1] == 2 and told[0][0] is learn.warn_cb.warning and modes() == []
    quiet = learner(StaticScaler(2.**10), [MonitorCB(every=1), WarnCB(lambda v, l: told.append(v))])
    quiet_fit(quiet, 1)
    assert len(told) == 1 and quiet.warn_cb.verdict is not None


def test_by_default_it_warns():
    from mpcourse.callback import quiet_fit
    learn = learner(StaticScaler(2.**-20), [MonitorCB(every=1, stats='zeros'), WarnCB()])
    with pytest.warns(UserWarning, match='of its gradient'): quiet_fit(learn, 1)


@pytest.mark.parametrize('new, when', [('bf16', 'after_step'), ('bf16', 'after_batch'), (StaticScaler(2.**8), 'after_step'), (StaticScaler(2.**8), 'after_batch')], ids=str)
def test_switching_amid_a_fit(new, when):
    from fastai.basics import Callback
    from mpcourse.callback import quiet_fit
    dtypes = []
    class Switch(Callback):
        def after_pred(self): dtypes.append(self.learn.model[1]._forward_out)
    def react(cb):
        if cb.learn.iter == 1 and cb.learn.training: mixed(cb.learn).switch(dtype='bf16') if new == 'bf16' else mixed(cb.learn).switch(new)
    seen = Switch(); setattr(seen, when, lambda: react(seen))
    learn = learner(StaticScaler(4.), [seen])
    def note(m, a, o): m._forward_out = o.dtype
    h = learn.model[1].register_forward_hook(note)
    quiet_fit(learn, 1)
    h.remove()
    assert dtypes[:4] == [H, H, *[B if new == 'bf16' else H]*2]
    assert mixed(learn).history.scales.tolist() == [4., 4., *[1. if new == 'bf16' else 2.**8]*2]
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in learn.model.parameters())


def test_a_scheme_that_cannot_be_is_no_switch():
    cb = mixed(learner(StaticScaler(4.)))
    with pytest.raises(ValueError, match="BF16 has FP32's range"): cb.switch(DynamicScaler(2.), 'bf16')
    with pytest.raises(ValueError, match='give a loss scaler'): cb.switch(dtype='fp16')


def test_a_switch_takes_the_old_scalers_hooks_and_gradients():
    "Half a step's gradients, accumulated at another scale, are dropped; what the old scaler watched is gone"
    from fastai.basics import Callback
    from fastai.callback.training import GradientAccumulation
    from mpcourse.als import ALSScaler
    from mpcourse.callback import quiet_fit
    def hooks(): return sum(len(m._forward_hooks) for m in learn.model.modules())
    def waiting(): return any(p.grad is not None and p.grad.any() for p in learn.model.parameters())
    class Switches(Callback):
        order = 99
        def after_batch(self):
            if not self.learn.training or self.learn.iter != 0: return
            seen.append((waiting(), hooks())); mixed(learn).switch(ALSScaler(2.**8, types=nn.ReLU)); seen.append((waiting(), hooks()))
    seen = []
    learn = learner(ALSScaler(4., types=nn.Linear), [Switches(), GradientAccumulation(128)])
    linears, relus = (sum(isinstance(m, t) for m in learn.model.modules()) for t in (nn.Linear, nn.ReLU))
    quiet_fit(learn, 1)
    assert seen == [(True, linears), (False, relus)] and linears != relus and hooks() == 0
    assert mixed(learn).history.scales[0] == 2**8
