"Promise 5: GradScaler(skip_nonfinite_loss=False) is torch's, step for step, down to its floor; its state dict is torch's with one key more; Lightning, Accelerate and Trainer take it"
import importlib, importlib.util, json, pickle, random, sys, warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest, torch, torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler as Torch

import adapter as A
from conftest import as_if_absent

OPTS = dict(sgd=partial(torch.optim.SGD, lr=.1, momentum=.9), adam=partial(torch.optim.Adam, lr=.01),
            fused_adamw=partial(torch.optim.AdamW, lr=.01, fused=True), fused_sgd=partial(torch.optim.SGD, lr=.1, momentum=.9, fused=True))
KEYS = ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker')


def ours(**kw): return A.make_gradscaler(skip_nonfinite_loss=False, device='cpu', **kw)
def theirs(**kw): return Torch('cpu', **kw)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(n)]


def run(scaler, opt, found, clip=None, micro=1, half=True, model=None, make=None):
    "Train where `found` says which steps see an infinity; all scales, weights and moments on the way"
    model = model or net(); opt, rows = make or OPTS[opt](model.parameters()), []
    for (x, y), bad in zip(data(len(found)), found):
        for k in range(micro):
            with torch.autocast('cpu', torch.float16) if half else nullcontext(): loss = F.cross_entropy(model(x[k::micro]), y[k::micro])/micro
            scaler.scale(loss).backward()
        if bad: model[0].weight.grad[0, 0] = random.Random(len(rows)).choice([torch.inf, -torch.inf, torch.nan])
        if clip:
            scaler.unscale_(opt); nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt); scaler.update(); opt.zero_grad()
        rows.append([scaler.get_scale(), *(p.detach().clone() for p in model.parameters())])
    return rows, [v.clone() for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


def equal(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


def storm(seed, n=40, p=.15):
    rnd = random.Random(seed)
    return [i > 0 and rnd.random() < p for i in range(n)]         # torch's own fused SGD needs a clean first step


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('how', (dict(), dict(clip=.5), dict(micro=2), dict(clip=.5, micro=2)), ids=str)
def test_weights_and_scales_are_torchs_bit_for_bit(opt, how):
    for seed in (0, 1):
        kw = dict(init_scale=2.**12, growth_interval=(2, 5)[seed])
        a, b = (run(make(**kw), opt, storm(seed), **how) for make in (ours, theirs))
        assert equal(a, b) and len({r[0] for r in a[0]}) > 2


@pytest.mark.parametrize('seed', range(4))
def test_a_long_random_trace_is_torchs(seed):
    "Any factors and intervals; states handed over and back on the way"
    rnd = random.Random(seed)
    kw = dict(init_scale=2.**rnd.randint(8, 20), growth_factor=rnd.choice([2., 1.5, 4.]), backoff_factor=rnd.choice([.5, .25, .7]),
              growth_interval=rnd.choice([1, 3, 7]))
    a, b, p, q = ours(**kw), theirs(**kw), *(nn.Parameter(torch.ones(2)) for _ in range(2))
    oa, ob, low = torch.optim.SGD([p], lr=.1), torch.optim.SGD([q], lr=.1), 2.**4
    for i in range(400):
        bad = rnd.random() < .35 and b.get_scale() > low or b.get_scale() > 2.**90
        for s,w,o in ((a, p, oa), (b, q, ob)):
            s.scale(torch.ones(()))
            w.grad = torch.tensor([torch.inf if bad else .3*s.get_scale(), 1.])
            s.step(o); s.update()
        assert a.get_scale() == b.get_scale() and torch.equal(p, q), f'step {i}'
        if i%97 == 5:
            state = a.state_dict()
            assert {k: state[k] for k in KEYS} == b.state_dict()
            a, b = ours(**kw), theirs(**kw)
            a.load_state_dict(b_state := {k: state[k] for k in KEYS}); b.load_state_dict(b_state)


def test_the_state_dict_is_torchs_with_one_key_more_and_goes_both_ways():
    found = storm(3, 20) + [True, False, False]                  # the tracker stands at two
    a, b = ours(init_scale=2.**12, growth_interval=3), theirs(init_scale=2.**12, growth_interval=3)
    run(a, 'sgd', found); run(b, 'sgd', found)
    mine, torchs = a.state_dict(), b.state_dict()
    assert {k: mine[k] for k in KEYS} == torchs and len(mine) == len(torchs) + 1 and torchs['_growth_tracker'] == 2
    c, d = ours(), theirs()
    c.load_state_dict(torchs); d.load_state_dict({k: mine[k] for k in KEYS})
    assert equal(run(c, 'adam', found), run(d, 'adam', found))
    e = theirs(); e.load_state_dict(mine)                       # torch ignores the key that it does not know
    assert e.state_dict() == torchs
    f = ours(); f.load_state_dict(mine); assert f.state_dict() == mine


def test_two_optimizers_and_one_that_saw_no_infinity():
    def go(s):
        m, n = net(), net(); out = []
        a, b = OPTS['adam'](m.parameters()), OPTS['sgd'](n.parameters())
        for i,(x, y) in enumerate(data(8)):
            s.scale(F.cross_entropy(m(x) + n(x), y)).backward()
            if i in (2, 5): (m, n)[i == 5][0].weight.grad[0, 0] = torch.inf
            s.step(a); s.step(b); s.update(); a.zero_grad(); b.zero_grad()
            out.append([s.get_scale(), *(p.detach().clone() for p in (*m.parameters(), *n.parameters()))])
        return out
    assert equal(go(ours(init_scale=16., growth_interval=2)), go(theirs(init_scale=16., growth_interval=2)))


def test_nested_losses_lists_disabled_and_manual_updates():
    for make in (ours, theirs):
        s = make(init_scale=8.)
        assert [float(t) for t in s.scale([torch.ones(()), (torch.ones(()), 2*torch.ones(()))][:1])] == [8.]
        s.update(4.); assert s.get_scale() == 4.
        s = make(enabled=False); one = torch.ones(())
        assert s.scale(one) is one and s.get_scale() == 1. and s.state_dict() == {}
        p = nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=1.); p.grad = torch.ones(1)
        s.step(o); s.update(); assert p.item() == 0.


@pytest.mark.parametrize('wrong', ('step twice', 'unscale twice', 'update first', 'half gradients', 'closure'))
def test_torchs_refusals_are_ours(wrong):
    kinds = []
    for make in (ours, theirs):
        s, p = make(), nn.Parameter(torch.ones(2)); o = torch.optim.SGD([p], lr=.1)
        def go():
            if wrong == 'update first': return s.update()
            s.scale(torch.ones(())); p.grad = torch.ones(2)
            if wrong == 'half gradients': p.data, p.grad = p.data.half(), None; p.grad = torch.ones(2).half(); return s.unscale_(o)
            if wrong == 'closure': return s.step(o, closure=lambda: 0)
            if wrong == 'unscale twice': s.unscale_(o); return s.unscale_(o)
            s.step(o); s.step(o)
        with pytest.raises(Exception) as e: go()
        kinds.append(type(e.value))
    assert kinds[0] is kinds[1]


def test_copies_and_pickles_go_on_as_the_original():
    for how in (pickle.dumps,):
        a = ours(init_scale=2.**10, growth_interval=2); run(a, 'sgd', storm(1, 7))
        b = pickle.loads(how(a))
        assert equal(run(a, 'sgd', storm(2)), run(b, 'sgd', storm(2)))


@pytest.mark.parametrize('policy', ('megatron', 'hysteresis', 'fastai', 'deepspeed'))
def test_another_policy_in_the_same_loop(policy):
    s = A.make_gradscaler(A.make_scaler(policy, init_scale=2.**12))
    rows, _ = run(s, 'fused_adamw', storm(4, p=.3), clip=.5)
    assert all(t.isfinite().all() for t in rows[-1][1:]) and len({r[0] for r in rows}) > 1


def test_the_floor():
    "200 overflows in a row: torch's scale is zero and its next step is NaN, ours lives"
    s, p = ours(init_scale=2.**10), nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=.1)
    for i in range(201):
        s.scale(torch.ones(())); p.grad = torch.tensor([torch.inf if i < 200 else s.get_scale()])
        s.step(o); s.update()
    assert s.get_scale() > 0 and p.item() == pytest.approx(.9)


@pytest.mark.parametrize('value', (2.**14, -2.**14))
@pytest.mark.parametrize('policy, kw', (('als', dict(activations=False)),
                                        ('logmax', {})), ids=str)
def test_a_policy_sees_the_largest_magnitude_whatever_its_sign(policy, kw, value):
    "of all gradients, of two optimizers, while the scale is in them"
    small, large = [], []
    for out, v in ((small, 1.), (large, value)):
        s = A.make_gradscaler(A.make_scaler(policy, init_scale=2.**4, **kw))
        ps = [nn.Parameter(torch.zeros(5)) for _ in range(4)]
        opts = [torch.optim.SGD(ps[:2], lr=.1), torch.optim.SGD(ps[2:], lr=.1)]
        s.scale(torch.ones(()))
        for p in ps: p.grad = torch.full_like(p, .5)
        ps[2].grad[1] = v
        for o in opts: s.step(o)
        s.update(); out.append(s.get_scale())
    assert large[0] < small[0] and (policy == 'logmax' or (small, large) == ([2.**5], [2.**3]))


def test_als_halves_at_once_whatever_its_period():
    scales = A.next_scales(A.make_scaler('als', init_scale=2.**10, period=4, activations=False), [False, True, False, False])
    assert scales == [2.**11, 2.**10, 2.**10, 2.**10]


GOLDEN = json.loads((Path(__file__).parent.parent/'golden'/'scales.json').read_text())


@pytest.mark.parametrize('policy', GOLDEN[0]['scales'])
def test_the_scales_of_every_policy_are_as_stored(policy):
    "On two bursts of bad batches"
    starts = dict(logmax=2.**10, als=2.**16, apex_amp=2.**24)
    kw = {} if policy in ('static', 'backoff', 'logmax', 'als') else dict(growth_interval=5)
    if policy == 'als': kw = dict(activations=False)
    if policy == 'backoff': kw = dict(max_scale=2.**40)
    for s in GOLDEN:
        got = A.next_scales(A.make_scaler(policy, init_scale=starts.get(policy, 2.**40), **kw), s['found_inf'], s['amax'])
        assert got == (pytest.approx(s['scales'][policy], rel=1e-3) if policy == 'logmax' else s['scales'][policy])
        assert policy == 'static' or len(set(got)) > 2


def test_pytorchs_own_case_of_a_state_dict():
    for lazy in (True, False):
        a, b = ours(init_scale=3., growth_factor=4., backoff_factor=.5, growth_interval=2), ours(init_scale=6.)
        if not lazy: b.scale(torch.ones(()))
        b.load_state_dict(a.state_dict())
        assert b.get_scale() == 3. and b.get_growth_factor() == 4. and b.get_growth_interval() == 2
        assert lazy is False or b._init_scale == 3. and b._init_growth_tracker == 0


def test_bad_batches_do_not_end_a_training_by_default():
    "45 losses of NaN, as in readings: afterwards gradients live and the scale is that of before"
    s, model = A.make_gradscaler(device='cpu'), net(); o = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = s.get_scale()
    for i,(x, y) in enumerate(data(60)):
        with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(x*(torch.nan if i < 45 else 1)), y)
        s.scale(loss).backward(); s.step(o); s.update()
        live = [p.grad.any() for p in model.parameters()]; o.zero_grad()
    assert all(live) and s.get_scale() == before


# --- Lightning and Accelerate: three lines each ---

def in_lightning(pl, scaler, make_opt, **kw):
    from lightning.pytorch.plugins.precision import MixedPrecision
    class Lit(pl.LightningModule):
        def __init__(self): super().__init__(); self.net = net()
        def training_step(self, b, i): return F.cross_entropy(self.net(b[0]), b[1])*(2.**20 if i == 5 else 1.)
        def configure_optimizers(self): return make_opt(self.parameters())
        def train_dataloader(self): return torch.utils.data.DataLoader(data(12), batch_size=None)
    model = Lit()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = pl.Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False,
                             enable_model_summary=False, plugins=[MixedPrecision('16-mixed', 'cpu', scaler)], **kw)
        trainer.fit(model)
    return [scaler.get_scale(), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize('opt', ('sgd', 'fused_adamw'))
def test_lightning(lightning, opt):
    kw = {} if 'fused' in opt else dict(gradient_clip_val=.5)
    a, b = (in_lightning(lightning, make(init_scale=2.**12, growth_interval=3), OPTS[opt], **kw) for make in (ours, theirs))
    assert equal(a, b) and a[0] != 2.**12
    c = in_lightning(lightning, A.make_gradscaler(A.make_scaler('megatron', init_scale=2.**12)), OPTS[opt], **kw)
    assert all(t.isfinite().all() for t in c[1:])


@pytest.fixture
def accelerate():
    module = pytest.importorskip('accelerate')
    from accelerate.state import AcceleratorState, GradientState
    yield module
    AcceleratorState._reset_state(True); GradientState._reset_state()


@pytest.mark.parametrize('opt', ('sgd', 'fused_adamw'))
def test_accelerate(accelerate, opt, tmp_path):
    def go(scaler):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        accelerator.scaler = scaler                                          # before prepare
        model = net(); o = OPTS[opt](model.parameters())
        model, o = accelerator.prepare(model, o)
        for i,(x, y) in enumerate(data(12)):
            with accelerator.accumulate(model):
                with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss*(2.**130 if i == 5 else 1.)); o.step(); o.zero_grad()
        accelerator.save_state(str(tmp_path))
        was = scaler.state_dict(); scaler.update(2.**3); accelerator.load_state(str(tmp_path))
        assert scaler.state_dict() == was or str(scaler.state_dict()) == str(was)
        return [scaler.get_scale(), *(p.detach().clone() for p in model.parameters())]
    a, b = (go(make(init_scale=2.**12, growth_interval=2)) for make in (ours, theirs))
    assert equal(a, b) and a[0] != 2.**12


@pytest.mark.parametrize('make', (ours, theirs))
def test_an_update_without_a_step_raises(make):
    "Question 4 of chapter 11: nothing has looked at the gradients"
    scaler, model = make(), net()
    scaler.scale(model(data(1)[0][0]).sum()).backward()
    with pytest.raises(AssertionError, match='No inf checks were recorded'): scaler.update()


def trainer_classes():
    "transformers' Trainer and its arguments"
    if importlib.util.find_spec('transformers') is None: pytest.skip('transformers is not installed')
    if 'transformers.trainer' not in sys.modules:
        with as_if_absent('torchvision'): importlib.import_module('transformers.trainer')
    from transformers import Trainer, TrainingArguments
    return Trainer, TrainingArguments


@pytest.mark.parametrize('opt', ('sgd', 'fused_adamw'))
def test_hugging_faces_trainer(accelerate, opt, tmp_path):
    Trainer, TrainingArguments = trainer_classes()
    class Classifier(nn.Module):
        def __init__(self): super().__init__(); self.net, self.dtypes = net(), set()
        def forward(self, x, labels=None):
            out = self.net(x); self.dtypes.add(out.dtype)
            return dict(loss=F.cross_entropy(out.float(), labels), logits=out)
    examples = [dict(x=x, labels=y) for xs, ys in data(12) for x, y in zip(xs, ys)]
    def go(scaler):
        class Ours(Trainer):
            def create_accelerator_and_postprocess(self):
                super().create_accelerator_and_postprocess()
                self.accelerator.scaler = scaler                             # the three lines
            def compute_loss(self, *args, **kw):
                with torch.autocast('cpu', torch.float16): return super().compute_loss(*args, **kw)
        model = Classifier()
        args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=12, max_grad_norm=0, report_to='none', save_strategy='no',
                                 disable_tqdm=True, per_device_train_batch_size=8, logging_strategy='no')
        Ours(model, args, train_dataset=examples, optimizers=(OPTS[opt](model.parameters()), None)).train()
        assert model.dtypes == {torch.float16}
        return [scaler.get_scale(), *(p.detach().clone() for p in model.parameters())]
    a, b = (go(make(init_scale=2.**20, growth_interval=3)) for make in (ours, theirs))
    assert equal(a, b) and a[0] != 2.**20


def test_trainer_with_model_init_has_no_model_for_the_scaler_yet(accelerate, tmp_path):
    "Chapter 11 says so beside the three lines"
    Trainer, TrainingArguments = trainer_classes()
    found = []
    class Ours(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            found.append(self.model)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to='none')
    Ours(None, args, model_init=net)
    Ours(net(), args)
    assert found[0] is None and isinstance(found[1], nn.Module)
