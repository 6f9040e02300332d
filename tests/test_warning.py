"The warning of a layer that has lost its gradient, and what it does"

import pytest, torch, torch.nn as nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

from mpcourse.learner import MonitorCB, WarnCB
from mpcourse.dynamic import DynamicScaler
from mpcourse.scaler import StaticScaler
from mpcourse.toys import cross_entropy, get_toy, relu_mlp
from mpcourse.underflow import early_warning

pytestmark = pytest.mark.library
H, B = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    assert modes() == []




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
