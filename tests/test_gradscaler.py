"""Torch's documented recipes bit for bit, its error states, what reaches the weights, who waits; Lightning, Accelerate."""
import copy, gc, inspect, io, pickle, warnings, weakref

import pytest, torch, torch.nn as nn
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mpcourse.dynamic import DynamicScaler, from_torch
from mpcourse.formats import same_bits
from mpcourse.gradscaler import GradScaler
from mpcourse.policies import POLICIES as BY_NAME, get_policy
from mpcourse.scaler import LossScaler, StaticScaler
from mpcourse.step import MixedStep

Torch = torch.amp.GradScaler
library = pytest.mark.library
INF, NAN, H = torch.inf, torch.nan, torch.float16
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTS = dict(
    sgd=lambda ps: SGD(ps, lr=.05),
    momentum=lambda ps: SGD(ps, lr=.05, momentum=.9, weight_decay=.1),
    sgd_fused=lambda ps: SGD(ps, lr=.05, fused=True),
    momentum_fused=lambda ps: SGD(ps, lr=.05, momentum=.9, fused=True),
    adam=lambda ps: Adam(ps, lr=.01),
    adamw_fused=lambda ps: AdamW(ps, lr=.01, fused=True))
optimizers = pytest.mark.parametrize('make_opt', OPTS.values(), ids=OPTS)


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


def net(seed=0, out=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out))


def half(): return torch.autocast('cpu', H)


def data(n=24, bad=(3, 4, 9, 10, 11, 17)):
    "Batches, some of which have an infinity in them; the first is good, so that a momentum is there"
    g = torch.Generator().manual_seed(1)
    for i in range(n):
        x, y = torch.randn(4, 6, generator=g), torch.randn(4, 3, generator=g)
        if i in bad: x[0, 0] = INF
        yield x, y


def mse(out, y): return (out.float() - y).square().mean()


# --- torch's documented recipes: each is run with torch's scaler and with ours ---

def typical(scaler, make_opt):
    model = net(); opt = make_opt(model.parameters())
    for x, y in data():
        opt.zero_grad()
        with half(): loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        yield [model], [opt]


def clipping(scaler, make_opt):
    model = net(); opt = make_opt(model.parameters())
    for x, y in data():
        opt.zero_grad()
        with half(): loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), .5)
        scaler.step(opt)
        scaler.update()
        yield [model], [opt]


def accumulation(scaler, make_opt, every=3):
    model = net(); opt = make_opt(model.parameters())
    for i, (x, y) in enumerate(data()):
        with half(): loss = mse(model(x), y)/every
        scaler.scale(loss).backward()
        if (i + 1) % every == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        yield [model], [opt]


def penalty(scaler, make_opt):
    model = net(); opt = make_opt(model.parameters())
    for x, y in data():
        opt.zero_grad()
        with half(): loss = mse(model(x), y)
        scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
        inv_scale = 1./scaler.get_scale()
        grads = [p*inv_scale for p in scaled]
        with half():
            norm = 0
            for g in grads: norm += g.pow(2).sum()
            loss = loss + norm.sqrt()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        yield [model], [opt]


def several(scaler, make_opt):
    "Two models, two losses, two optimizers; the first loss goes through both models. Only one of them is unscaled by hand"
    model0, model1 = net(0), net(1)
    opt0, opt1 = make_opt(model0.parameters()), make_opt(model1.parameters())
    for i, (x, y) in enumerate(data(bad=())):
        opt0.zero_grad(); opt1.zero_grad()
        with half():
            out0, out1 = model0(x), model1(x)
            loss0, loss1 = mse(2*out0 + 3*out1, y), mse(3*out0 - 5*out1, y)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        if i in (3, 8): model0[0].weight.grad[0, 0] = INF                  # one skips, the other steps
        if i in (4, 8): model1[2].bias.grad[0] = NAN
        scaler.unscale_(opt0)
        scaler.step(opt0)
        scaler.step(opt1)
        scaler.update()
        yield [model0, model1], [opt0, opt1]


RECIPES = [typical, clipping, accumulation, penalty, several]


def everything(models, opts):
    "All tensors that a recipe has made"
    yield from (p for m in models for p in m.parameters())
    for o in opts:
        for s in o.state.values():
            yield from (torch.as_tensor(v) for _, v in sorted(s.items()) if v is not None)

@library
@pytest.mark.parametrize('recipe', RECIPES, ids=lambda r: r.__name__)
@optimizers
def test_documented_recipes_bit_for_bit(recipe, make_opt):
    kw = dict(device='cpu', init_scale=2.**12, growth_interval=2)
    ours, theirs = GradScaler(**kw, skip_nonfinite_loss=False), Torch(**kw)
    scales = []
    for a, b in zip(recipe(ours, make_opt), recipe(theirs, make_opt)):
        assert ours.get_scale() == theirs.get_scale() and ours._get_growth_tracker() == theirs._get_growth_tracker()
        xs, ys = list(everything(*a)), list(everything(*b))
        assert len(xs) == len(ys) and all(map(same_bits, xs, ys))
        assert all(x.isfinite().all() for x in xs)
        scales.append(ours.get_scale())
    moves = {b/a for a, b in zip(scales, scales[1:])}
    assert moves == {.5, 1., 2.}                                           # it grew, and it backed off
    start = net().state_dict()['0.weight']
    assert not same_bits(start, a[0][0][0].weight.detach())


@library
def test_one_optimizer_skips_while_the_other_steps():
    scaler, before = GradScaler(init_scale=2.**8, growth_interval=30), None
    for i, (models, _) in enumerate(several(scaler, OPTS['adam'])):
        now = [m[0].weight.detach().clone() for m in models]
        if before is not None:
            moved = [not same_bits(x, y) for x, y in zip(now, before)]
            assert moved == [i not in (3, 8), i not in (4, 8)]
            assert scaler.last_outcome.stepped == all(moved)
        before = now


@library
@settings(max_examples=25, deadline=None)
@given(script=st.lists(st.tuples(st.sampled_from([1., -3., INF, NAN]), st.sampled_from([2., 0., -INF]), st.booleans()), max_size=16),  # 2^16 is halved to our floor at most
       interval=st.integers(1, 5), fused=st.booleans())
def test_random_scripts_step_for_step(script, interval, fused):
    "Two optimizers with any gradients, one of them unscaled by hand at times"
    def run(scaler):
        ps = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        opts = [Adam([p], lr=.1, fused=fused) for p in ps]
        for a, b, by_hand in script:
            scaler.scale(torch.ones(()))
            ps[0].grad, ps[1].grad = torch.full((3,), a), torch.full((2,), b)
            if by_hand: scaler.unscale_(opts[0])
            for o in opts: scaler.step(o)
            scaler.update()
            yield scaler.get_scale(), scaler._get_growth_tracker(), *(p.detach().clone() for p in ps)
    for a, b in zip(run(GradScaler(growth_interval=interval)), run(Torch('cpu', growth_interval=interval))):
        assert a[:2] == b[:2] and all(map(same_bits, a[2:], b[2:]))


def bad_steps(scaler, pattern, opt=None, grads=None):
    "One parameter; 1 in the pattern is a step whose gradient is infinite. Returns scales and the parameter"
    p = nn.Parameter(torch.ones(2)); opt = opt([p]) if opt else SGD([p], lr=.1)
    scales = []
    for i, bad in enumerate(pattern):
        loss = scaler.scale((p*p).sum())
        loss.backward()
        if grads is not None: p.grad.copy_(torch.tensor(grads))
        if int(bad): p.grad[0] = INF
        scaler.step(opt); scaler.update(); opt.zero_grad()
        scales.append(scaler.get_scale())
    return scales, p.detach()


@library
def test_sparse_gradients_as_torch_takes_them():
    def run(scaler):
        torch.manual_seed(0)
        emb = nn.Embedding(10, 4, sparse=True); opt = SGD(emb.parameters(), lr=.1)
        for i in range(8):
            opt.zero_grad()
            loss = emb(torch.tensor([1, 1, 3, i])).square().sum()*(INF if i == 3 else 1.)
            scaler.scale(loss).backward()
            scaler.step(opt); scaler.update()
        return emb.weight.detach(), scaler.get_scale()
    (w, s), (v, t) = run(GradScaler(growth_interval=2, skip_nonfinite_loss=False)), run(Torch('cpu', growth_interval=2))
    assert same_bits(w, v) and s == t and w.isfinite().all()


@library
def test_a_sparse_half_gradient_is_added_up_before_the_look():
    p = nn.Parameter(torch.zeros(4, 2, dtype=H))
    opt, scaler = SGD([p], lr=1.), GradScaler(init_scale=2.)
    scaler.scale(torch.ones(()))
    big = torch.full((2, 2), 60000., dtype=H)
    p.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), big, (4, 2), check_invariants=True)
    assert scaler._check_inf_per_device(opt)[torch.device('cpu')] == 1


@library
def test_half_parameters_of_a_fused_optimizer_as_torch_takes_them():
    def run(scaler):
        p = nn.Parameter(torch.ones(4, dtype=H)); opt = Adam([p], lr=.1, fused=True)
        for i in range(6):
            p.grad = torch.full((4,), INF if i == 2 else 64., dtype=H)
            scaler.scale(torch.ones(())); scaler.step(opt); scaler.update()
        return p.detach(), scaler.get_scale()
    (w, s), (v, t) = run(GradScaler(growth_interval=2)), run(Torch('cpu', growth_interval=2))
    assert same_bits(w, v) and s == t and not (w == 1).any()


# --- torch's error states ---

def fresh(scaler, grad=1., make_opt=None, scaled=True):
    p = nn.Parameter(torch.ones(2)); opt = make_opt([p]) if make_opt else SGD([p], lr=.1)
    if scaled: scaler.scale(torch.ones(()))
    if grad is not None: p.grad = torch.full((2,), grad)
    return scaler, opt, p


def unscale_twice(s): s, o, _ = fresh(s); s.unscale_(o); s.unscale_(o)
def unscale_after_step(s): s, o, _ = fresh(s); s.step(o); s.unscale_(o)
def step_twice(s): s, o, _ = fresh(s); s.step(o); s.step(o)
def step_twice_fused(s): s, o, _ = fresh(s, make_opt=OPTS['adamw_fused']); s.step(o); s.step(o)
def closure(s): s, o, _ = fresh(s); s.step(o, closure=lambda: 1)
def no_gradients(s): s, o, _ = fresh(s, grad=None); s.step(o)
def no_checks(s): s, o, _ = fresh(s); s.update()
def no_checks_fused(s): s, o, _ = fresh(s, grad=None, make_opt=OPTS['adamw_fused']); s.step(o); s.update()
def step_before_scale(s): s, o, _ = fresh(s, scaled=False); s.step(o)
def unscale_before_scale(s): s, o, _ = fresh(s, scaled=False); s.unscale_(o)
def update_before_scale(s): s.update()
def update_with_an_integer(s): s, o, _ = fresh(s); s.update(2)
def update_with_two_numbers(s): s, o, _ = fresh(s); s.update(torch.ones(2))
def update_with_a_gradient(s): s, o, _ = fresh(s); s.update(torch.ones((), requires_grad=True))
def half_gradients(s):
    p = nn.Parameter(torch.ones(2, dtype=H)); p.grad = torch.ones(2, dtype=H)
    s.scale(torch.ones(())); s.unscale_(SGD([p], lr=.1))
def half_gradients_in_step(s):
    p = nn.Parameter(torch.ones(2, dtype=H)); p.grad = torch.ones(2, dtype=H)
    s.scale(torch.ones(())); s.step(SGD([p], lr=.1))
def pickled_in_between(s): s, o, _ = fresh(s); s.unscale_(o); pickle.dumps(s)
def empty_state(s): s.load_state_dict({})
def scale_of_a_string(s): s.scale(['a'])


ERRORS = [unscale_twice, unscale_after_step, step_twice, step_twice_fused, closure, no_gradients, no_checks, no_checks_fused, step_before_scale,
          unscale_before_scale, update_before_scale, update_with_an_integer, update_with_two_numbers, update_with_a_gradient,
          half_gradients, half_gradients_in_step, pickled_in_between, empty_state]


@library
@pytest.mark.parametrize('wrong', ERRORS, ids=lambda f: f.__name__)
def test_torchs_error_states_are_kept(wrong):
    with pytest.raises(Exception) as theirs: wrong(Torch('cpu'))
    with pytest.raises(Exception) as ours: wrong(GradScaler())
    assert type(ours.value) is type(theirs.value)
    if wrong is not empty_state: assert str(ours.value).startswith(str(theirs.value))


@library
@pytest.mark.parametrize('kw', [dict(init_scale=0.), dict(init_scale=-1.), dict(init_scale=INF), dict(growth_interval=0), dict(backoff_factor=0.),
                                dict(backoff_factor=-1.), dict(backoff_factor=1.), dict(growth_factor=NAN), dict(growth_factor=1.)], ids=str)
def test_what_cannot_work_is_refused_with_its_value(kw):
    with pytest.raises(ValueError, match=str(*kw.values())): GradScaler('cpu', **kw)


@library
def test_numbers_beside_a_policy_are_not_ignored():
    with pytest.raises(ValueError, match='init_scale, growth_interval'): GradScaler(StaticScaler(), init_scale=2., growth_interval=5)
    with pytest.raises(ValueError, match='skip_nonfinite_loss'): GradScaler(policy=StaticScaler(), skip_nonfinite_loss=False)
    with pytest.raises(ValueError, match='megatron'): GradScaler(policy='megatron')
    with pytest.raises(ValueError, match=r"GradScaler\(get_policy\('megatron'\)\)"): GradScaler('megatron')


@library
def test_torchs_order_of_arguments():
    "All that torch's signature takes by place, ours takes by the same place"
    order = [n for n in inspect.signature(Torch).parameters]
    values = dict(device='cpu', init_scale=2.**24, growth_factor=4., backoff_factor=.25, growth_interval=3, enabled=True)
    assert order == list(values) == [n for n in inspect.signature(GradScaler).parameters][:6]
    for n in range(1, len(order) + 1):
        args = [values[k] for k in order[:n]]
        ours, theirs = GradScaler(*args), Torch(*args)
        got = ours.state_dict()
        got.pop('policy')
        assert got == theirs.state_dict() and ours._device == 'cpu' and isinstance(ours, Torch)
        assert bad_steps(ours, PATTERN)[0] == bad_steps(theirs, PATTERN)[0]
    assert not GradScaler(torch.device('cpu'), 2., 2., .5, 5, False).is_enabled()


@library
def test_the_device_is_that_of_the_first_loss():
    s = GradScaler()
    assert s._device is None and s._scale is None and s._growth_tracker is None and s.get_scale() == 2.**16
    s.scale(torch.ones((), device='meta'))
    assert s._device == s._scale.device.type == 'meta'


@library
@pytest.mark.skipif(torch.cuda.is_available(), reason='there is CUDA here')
def test_cuda_without_cuda_is_disabled_as_in_torch():
    with pytest.warns(UserWarning, match='CUDA is not available'): s = GradScaler('cuda')
    assert not s.is_enabled()
    assert isinstance(s, Torch)


@library
def test_disabled_hands_through():
    ours, theirs = GradScaler(enabled=False), Torch('cpu', enabled=False)
    for s in (ours, theirs):
        p = nn.Parameter(torch.ones(2)); opt = SGD([p], lr=.5)
        loss = p.sum()
        assert s.scale(loss) is loss and s.get_scale() == 1. and s.state_dict() == {} and not s.is_enabled() and s._get_growth_tracker() == 0
        loss.backward(); s.unscale_(opt); s.step(opt, closure=None); s.update(); s.update(3.); s.load_state_dict({})
        assert p.tolist() == [.5, .5]
        pickle.loads(pickle.dumps(s))
    assert ours.last_outcome is None


# --- states ---

POLICIES = dict(torch=lambda: None, static=lambda: StaticScaler(2.**8), dynamic=lambda: DynamicScaler(2.**10, growth_interval=3),
                patient=lambda: DynamicScaler(growth_interval=3, hysteresis=2), metaseq=lambda: get_policy('metaseq'))
policies = pytest.mark.parametrize('policy', POLICIES.values(), ids=POLICIES)
PATTERN = '0100011010000010110000'


@library
@pytest.mark.parametrize('name', BY_NAME)
@pytest.mark.parametrize('make_opt', [OPTS['momentum'], OPTS['adamw_fused']])
def test_every_policy_by_its_name(name, make_opt):
    "A storm, then gradients of zero: no weight is lost; the state goes over"
    s = GradScaler(get_policy(name))
    scales, w = bad_steps(s, '0' + '1'*60 + '0', make_opt, grads=[0., 0.])
    assert w.isfinite().all() and all(0 < x < INF for x in scales)
    for one in (s, copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        other = GradScaler(get_policy(name))
        other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
        assert str(other.state_dict()) == str(s.state_dict())
    assert bad_steps(other, '000')[0] == bad_steps(s, '000')[0]


@library
@policies
@pytest.mark.parametrize('started', [False, True])
def test_a_restored_scaler_goes_on_bit_for_bit(policy, started):
    one, other, file = GradScaler(policy=policy()), GradScaler(policy=policy()), io.BytesIO()
    bad_steps(one, PATTERN[:9])
    torch.save(one.state_dict(), file)
    file.seek(0)
    if started: bad_steps(other, '11')
    other.load_state_dict(torch.load(file, weights_only=True))
    assert bad_steps(one, PATTERN)[0] == bad_steps(other, PATTERN)[0]
    assert str(one.state_dict()) == str(other.state_dict())


@library
@policies
@pytest.mark.parametrize('how', [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=['copy', 'pickle'])
def test_copies_go_their_own_way(policy, how):
    one = GradScaler(policy=policy())
    bad_steps(one, PATTERN)
    other = how(one)
    assert bad_steps(one, PATTERN)[0] == bad_steps(other, PATTERN)[0]
    before = one.get_scale()
    other.scale(torch.ones(()))
    other.update(2.)
    assert one.get_scale() == before and other.get_scale() == 2.


@library
@pytest.mark.parametrize('started', [False, True])
def test_torchs_state_is_loaded_and_ours_by_torch(started):
    theirs = Torch('cpu', init_scale=2.**40, growth_factor=4., backoff_factor=.25, growth_interval=5)
    bad_steps(theirs, PATTERN[:9])
    ours = GradScaler()
    if started: bad_steps(ours, '1')
    ours.load_state_dict(theirs.state_dict())
    got = ours.state_dict(); policy = got.pop('policy')
    assert got == theirs.state_dict() and policy['_extra_state']['policy'] == 'DynamicScaler'
    assert bad_steps(ours, PATTERN)[0] == bad_steps(theirs, PATTERN)[0]
    again = Torch('cpu'); again.load_state_dict(ours.state_dict())
    assert bad_steps(ours, PATTERN)[0] == bad_steps(again, PATTERN)[0]


@library
def test_torchs_state_below_one_is_loaded():
    "Its rule has no floor"
    theirs, ours = Torch('cpu', init_scale=.5), GradScaler()
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == from_torch(theirs.state_dict()).scale == .5
    assert bad_steps(ours, '0000')[0] == bad_steps(theirs, '0000')[0]


@library
@pytest.mark.parametrize('make, change, error', [
    (lambda: GradScaler(StaticScaler()), lambda d: Torch('cpu').state_dict(), ValueError),
    (GradScaler, lambda d: d | dict(policy=StaticScaler().state_dict()), ValueError),
    (GradScaler, lambda d: {k: v for k, v in d.items() if k not in ('policy', 'growth_interval')}, ValueError),
    (GradScaler, lambda d: dict(policy=GradScaler(init_scale=4.).state_dict()['policy']), KeyError),
    (GradScaler, lambda d: {}, RuntimeError)])
def test_a_foreign_state_is_refused_and_changes_nothing(make, change, error):
    s = make()
    bad_steps(s, '0010')
    before = str(s.state_dict())
    with pytest.raises(error): s.load_state_dict(change(s.state_dict()))
    assert str(s.state_dict()) == before


@library
def test_the_numbers_can_be_set_and_read():
    s, t = GradScaler(), Torch('cpu')
    for x in (s, t):
        x.set_growth_factor(4.)
        x.set_backoff_factor(.25)
        x.set_growth_interval(3)
        assert (x.get_growth_factor(), x.get_backoff_factor(), x.get_growth_interval()) == (4., .25, 3)
    assert bad_steps(s, PATTERN)[0] == bad_steps(t, PATTERN)[0]
    with pytest.raises(ValueError, match='1.0'): s.set_growth_factor(1.)
    with pytest.raises(ValueError, match='StaticScaler.*no growth_interval'): GradScaler(StaticScaler(8.)).set_growth_interval(3)
    again = GradScaler()
    again.load_state_dict(s.state_dict())
    assert again.get_growth_interval() == 3 and s.get_growth_factor() == 4.


@library
def test_started_from_outside_after_loading():
    "As accelerator.load_state does for FSDP2"
    s = GradScaler(); state = Torch('cpu').state_dict() | dict(scale=32.)
    s.load_state_dict(state); s._lazy_init_scale_growth_tracker('cpu')
    p = nn.Parameter(torch.ones(2)); p.grad = torch.full((2,), 32.); opt = SGD([p], lr=.5)
    s.unscale_(opt); s.step(opt); s.update()
    assert p.tolist() == [.5, .5] and s.get_scale() == 32.


@library
def test_every_shape_of_outputs():
    ours, theirs = GradScaler(init_scale=8.), Torch('cpu', init_scale=8.)
    for make in (lambda: torch.ones(3), lambda: [torch.ones(()), torch.ones(2)], lambda: (torch.ones(()), [torch.ones(1)]),
                 lambda: torch.tensor(3., dtype=H), lambda: torch.ones(3, dtype=H)):
        a, b = ours.scale(make()), theirs.scale(make())
        assert type(a) is type(b) and str(a) == str(b)
    assert [t.item() for t in ours.scale(torch.ones(()) for _ in range(2))] == [8., 8.]
    for wrong in (3, [3.]):
        with pytest.raises((TypeError, ValueError)): ours.scale(wrong)


# --- never a NaN in a weight ---

@library
@optimizers
@pytest.mark.parametrize('low', [1., 2.**-100])
def test_two_hundred_bad_steps_and_a_dead_gradient(make_opt, low):
    "Torch's scale is zero then, and the finite gradient of the next batch becomes NaN after the look"
    storm = '0' + '1'*200 + '0'
    scales, w = bad_steps(Torch('cpu'), storm, make_opt, grads=[0., 0.])
    assert scales[-1] == 0 and w.isnan().all()
    scales, w = bad_steps(GradScaler(DynamicScaler(min_scale=low)), storm, make_opt, grads=[0., 0.])
    assert scales[-1] == low and w.isfinite().all()


@library
@optimizers
@pytest.mark.parametrize('scale', [2.**-10, .5])
def test_a_gradient_that_overflows_while_it_is_unscaled(make_opt, scale):
    scaler, opt, p = fresh(Torch('cpu', init_scale=scale), grad=3e38, make_opt=make_opt)
    scaler.step(opt)
    assert not p.isfinite().all() or 'Adam' in type(opt).__name__
    for policy in (StaticScaler(scale), DynamicScaler(scale, min_scale=2.**-20)):
        scaler, opt, p = fresh(GradScaler(policy), grad=3e38, make_opt=make_opt)
        scaler.step(opt)
        scaler.update()
        assert p.tolist() == [1., 1.] and not scaler.last_outcome.stepped
        assert not any(v.any() for s in opt.state.values() for v in s.values())    # nothing moved


@library
@pytest.mark.parametrize('value', [0., -1., NAN, INF, .5])
def test_a_number_that_cannot_be_a_scale_is_refused(value):
    s, *_ = fresh(GradScaler())
    with pytest.raises(ValueError, match='cannot work'): s.update(value)
    assert s.get_scale() == 2.**16


@library
def test_the_first_step_of_fused_sgd_with_momentum():
    "Torch's kernel makes the buffer before it skips, and leaves in it whatever lay in that memory"
    def make(ps): return SGD(ps, lr=.1, momentum=.9, fused=True)
    s, opt, p = fresh(Torch('cpu'), grad=INF, make_opt=make)
    s.step(opt)
    assert opt.state[p]['momentum_buffer'] is not None
    s, opt, p = fresh(GradScaler(), grad=INF, make_opt=make)
    s.step(opt); s.update()
    assert p.tolist() == [1., 1.] and not opt.state[p].get('momentum_buffer') is not None
    assert opt._step_supports_amp_scaling and s.get_scale() == 2.**15
    s.scale(torch.ones(())); p.grad = torch.full((2,), 2.**15); s.step(opt); s.update()
    assert opt.state[p]['momentum_buffer'].tolist() == [1., 1.]


@library
@optimizers
def test_a_loss_that_is_not_finite_is_held_and_a_gradient_that_is_not_is_not(make_opt):
    "Loss and gradient: infinite where the other is finite, too"
    s, w = GradScaler(growth_interval=3), nn.Parameter(torch.ones(2))
    opt, seen = make_opt([w]), []
    for loss, grad in ((1., 1.), (NAN, NAN), (INF, 1.), (1., INF), (1., 1.), (1., 1.), (1., 1.)):
        before = w.detach().clone()
        s.scale(torch.tensor(loss))
        w.grad = torch.full((2,), grad)
        s.step(opt)
        s.update()
        seen.append((s.get_scale(), same_bits(before, w.detach())))
    k = 2.**16
    assert [x for x, _ in seen] == [k, k, k, k/2, k/2, k/2, k] and [x for _, x in seen] == [False, True, True, True, False, False, False]


# --- what policies see, and what became of a step ---

class Watcher(StaticScaler):
    "Wants much, and keeps what it is shown"
    required_stats = 'found_inf', 'numel', 'amax', ('above', 64.)
    def next_scale(self, stats):
        self.seen = {n: v.item() for n, v in stats.items() if n != 'loss_finite'}
        return self.scale


@library
@pytest.mark.parametrize('by_hand', [False, True])
@pytest.mark.parametrize('fused', [False, True])
def test_counts_are_taken_with_the_scale_in_and_add_up_over_optimizers(by_hand, fused):
    s = GradScaler(Watcher(2.**6))
    ps = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    opts = [SGD([p], lr=1., fused=fused) for p in ps]
    for _ in range(2):                                                      # nothing is left of the step before
        s.scale(torch.ones(()))
        ps[0].grad, ps[1].grad = torch.tensor([64., 1.]), torch.tensor([-96., 65., 2.])
        if by_hand: s.unscale_(opts[0])
        for o in opts: s.step(o)
        s.update()
        assert s.policy.seen == {'found_inf': 0., 'numel': 5., 'amax': 96., ('above', 64.): 3.}
    assert ps[0].tolist() == [-1., 1. - 2/64]


@library
def test_accumulated_micro_batches_are_seen_once():
    s, p = GradScaler(Watcher(2.**6)), nn.Parameter(torch.ones(2))
    opt = SGD([p], lr=1.)
    for _ in range(3): s.scale(p.sum()).backward()
    s.step(opt)
    s.update()
    assert s.policy.seen['amax'] == 192


class Hooked(Watcher):
    "Wants something of activations"
    required_stats = 'found_inf', ('amax', 'activations')
    def watch(self, model):
        if model is None: raise ValueError('Hooked watches the model: give it.')
        return Eye(model)


class Eye:
    def __init__(self, model): self.hook = model.register_forward_hook(lambda m, i, o: self.note(o))
    def note(self, o): self.seen = max(self.seen, o.abs().max().item())
    def read(self): return {('amax', 'activations'): torch.tensor(self.seen)}
    def reset(self): self.seen = 0.
    def remove(self): self.hook.remove()


@library
def test_a_policy_that_watches_sees_the_model_and_is_refused_without():
    with pytest.raises(ValueError, match='watches'): GradScaler(Hooked(8.))
    model = net()
    s, opt = GradScaler(Hooked(8.), model=model), SGD(model.parameters(), lr=0.)
    for k in (1., .1):
        out = model(torch.ones(2, 6)*k)
        s.scale(out.sum()).backward()
        s.step(opt)
        s.update()
        opt.zero_grad()
        assert s.policy.seen['amax', 'activations'] == out.abs().max().item()
    alone = pickle.loads(pickle.dumps(s))
    with pytest.raises(ValueError, match='watches'): alone.scale(torch.ones(()))
    alone.model = model
    alone.scale(torch.ones(()))


@library
def test_a_policy_with_a_scale_for_each_layer_is_refused():
    class Layers(StaticScaler):
        def inv_scale(self, name=None): return torch.tensor(.5)
    with pytest.raises(ValueError, match='each layer'): GradScaler(Layers(2.))


@library
def test_the_outcome_tells_what_became_of_the_step():
    model = net()
    s = GradScaler(growth_interval=2, model=model, skip_nonfinite_loss=False)
    opt = SGD(model.parameters(), lr=.1)
    assert s.last_outcome is None
    for x, y in data(5, bad=(3,)):
        opt.zero_grad()
        s.scale(mse(model(x), y)).backward()
        if not x.isfinite().all(): model[2].weight.grad.zero_(), model[2].bias.grad.zero_(), model[0].bias.grad.zero_()
        before = s.get_scale()
        s.step(opt)
        s.update()
        o = s.last_outcome
        assert o.scale.item() == before and o.next_scale.item() == s.get_scale() and o.stepped == bool(x.isfinite().all())
        if not o.stepped: skipped = o
    assert skipped.nonfinite == ('0.weight',) and '0.weight' in skipped.message
    assert skipped.scale == 2.**17 and skipped.next_scale == 2.**16         # still, after later steps


@library
def test_without_a_model_places_are_named():
    s, opt, p = fresh(GradScaler(), grad=NAN)
    s.step(opt)
    s.update()
    assert not s.last_outcome.stepped and s.last_outcome.nonfinite == ('group 0, parameter 0',)


@library
@pytest.mark.parametrize('fused', [False, True])
def test_no_gradient_is_kept_alive(fused):
    s, opt, p = fresh(GradScaler(), grad=INF, make_opt=lambda ps: Adam(ps, fused=fused))
    s.step(opt)
    s.update()
    grad, o = weakref.ref(p.grad), weakref.ref(opt)
    opt.zero_grad()
    assert grad() is None
    del opt
    gc.collect()
    assert o() is None and not s.last_outcome.stepped


@library
def test_fifty_held_steps_and_the_floor_are_said():
    s, opt, p = fresh(GradScaler(init_scale=2.), grad=INF)
    s.step(opt)
    with pytest.warns(UserWarning, match='floor of 1'): s.update()
    with pytest.warns(UserWarning, match='since step 1'):
        for _ in range(50):
            s.scale(torch.tensor(NAN))
            s.step(opt)
            s.update()


@library
def test_what_the_optimizer_returns_is_returned():
    class Odd(SGD):
        def step(self, closure=None, more=0): super().step(); return 7. + more
    for s in (GradScaler(), Torch('cpu')):
        s, opt, _ = fresh(s, make_opt=lambda ps: Odd(ps, lr=.1))
        assert s.step(opt, None, more=1) == 8.
        s, opt, _ = fresh(s, grad=INF, make_opt=lambda ps: Odd(ps, lr=.1))
        assert s.step(opt) is None


@library
def test_an_exception_in_a_fused_step_leaves_nothing_behind():
    "Torch's leaves grad_scale on the optimizer, and its next step is divided twice"
    class Breaks(Adam):
        broken = True
        def step(self, closure=None):
            if self.broken: raise KeyboardInterrupt
            return super().step(closure)
    for s, clean in ((GradScaler(), True), (Torch('cpu'), False)):
        s, opt, p = fresh(s, make_opt=lambda ps: Breaks(ps, fused=True))
        with pytest.raises(KeyboardInterrupt): s.step(opt)
        assert not hasattr(opt, 'grad_scale') == clean


@library
def test_a_grad_scale_that_the_user_set_is_multiplied_in():
    def run(s):
        s, opt, p = fresh(s, grad=8., make_opt=lambda ps: SGD(ps, lr=1., fused=True))
        opt.grad_scale = torch.tensor(4.)
        s.step(opt)
        return p.detach()
    assert same_bits(run(GradScaler(init_scale=2.)), run(Torch('cpu', init_scale=2.))) and run(GradScaler(init_scale=2.)).tolist() == [0., 0.]


@library
def test_an_optimizer_of_the_old_contract_gets_the_scaler():
    class Old(SGD):
        def __init__(self, ps): super().__init__(ps, lr=1.); self._step_supports_amp_scaling = True
        def step(self, closure=None, grad_scaler=None):
            grad_scaler.unscale_(self); self.found = sum(v.item() for v in grad_scaler._found_inf_per_device(self).values())
            return None if self.found else super().step()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for s in (GradScaler(init_scale=2.), Torch('cpu', init_scale=2.)):
            s, opt, p = fresh(s, make_opt=Old)
            s.step(opt); s.update()
            assert p.tolist() == [.5, .5] and opt.found == 0
            s, opt, p = fresh(s, grad=INF, make_opt=Old); s.step(opt); s.update()
            assert p.tolist() == [1., 1.] and s.get_scale() == 1.


# --- who waits ---

class Reads(TorchDispatchMode):
    "Counts numbers that the host reads out of tensors: each would wait for a GPU"
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **kwargs or {})


def reads_per_step(scaler, make_opt, extra=lambda s, o: None, n=12, device='cpu'):
    ps = [nn.Parameter(torch.ones(3, device=device)) for _ in range(4)]; opt, loss = make_opt(ps), torch.ones((), device=device)
    def one(bad=False):
        for p in ps: p.grad = torch.full_like(p, INF if bad else 1.)
        scaler.scale(loss); extra(scaler, opt); scaler.step(opt); scaler.update()
    fused = getattr(opt, '_step_supports_amp_scaling', False)         # a skipped step asks whose gradient it was
    one()                                                    # torch's SGD makes its buffers, see above
    with Reads() as own:
        for p in ps: p.grad = torch.ones_like(p)
        for _ in range(n): opt.step()
    with Reads() as reads:
        for i in range(n): one(fused and i % 4 == 3)
    return (reads.count - own.count)/n


@library
@pytest.mark.parametrize('policy', [p for n, p in POLICIES.items() if n != 'metaseq'], ids=[n for n in POLICIES if n != 'metaseq'])
@pytest.mark.parametrize('make_opt, most', [(OPTS['sgd'], 1), (OPTS['adam'], 1), (OPTS['sgd_fused'], 0), (OPTS['momentum_fused'], 0), (OPTS['adamw_fused'], 0)])
@pytest.mark.parametrize('extra', [lambda s, o: None, lambda s, o: s.unscale_(o)], ids=['', 'unscaled'])
def test_one_read_per_step_and_none_with_fused_optimizers(policy, make_opt, most, extra):
    assert reads_per_step(GradScaler(policy=policy()), make_opt, extra) == most


@library
@pytest.mark.parametrize('trained', ['drop-in', 'step'])
def test_a_skipped_step_reads_as_often_with_many_layers_as_with_one(trained):
    def reads(layers):
        net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        opt, scaler = torch.optim.SGD(net.parameters(), lr=.1), GradScaler(skip_nonfinite_loss=False)
        x, step = torch.full((3, 2), INF), MixedStep(scaler.policy)
        with Reads() as seen:
            if trained == 'step': step(net, x, x, opt, lambda pred, y: pred.sum())
            else:
                scaler.scale(net(x).sum()).backward(); scaler.step(opt); scaler.update()
        assert not (step.outcome if trained == 'step' else scaler.last_outcome).stepped
        return seen.count
    assert reads(1) == reads(12)


@library
def test_the_counter_counts():
    assert reads_per_step(Torch('cpu'), OPTS['sgd']) == 1 and reads_per_step(Torch('cpu'), OPTS['adamw_fused']) == 0
    assert reads_per_step(GradScaler(), OPTS['adamw_fused'], lambda s, o: s.get_scale()) == 1


@library
@pytest.mark.skipif(not torch.cuda.is_available(), reason='there is no CUDA here')
@pytest.mark.parametrize('make_opt, most', [(OPTS['sgd'], 1), (OPTS['adamw_fused'], 0)])
def test_a_gpu_is_waited_for_once_or_never(make_opt, most):
    "Torch's own detector of waits; the first step, which moves the policy to the GPU, is not counted"
    s = GradScaler(); ps = [nn.Parameter(torch.ones(3, device='cuda')) for _ in range(4)]
    opt, loss = make_opt(ps), torch.ones((), device='cuda')
    for i in range(30):
        for p in ps: p.grad = torch.full_like(p, INF if i % 4 == 3 else 1.)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            torch.cuda.set_sync_debug_mode('warn')
            try: s.scale(loss); s.step(opt); s.update()
            finally: torch.cuda.set_sync_debug_mode('default')
        waits = [w for w in seen if 'synchronizing CUDA operation' in str(w.message)]
        assert i == 0 or len(waits) <= most + 4*(i % 4 == 3)      # a skipped step is looked at
    assert s.get_scale() == 2.**9


# --- Lightning ---

class Dtypes(TorchDispatchMode):
    "The dtypes of the results of matrix products, forward and backward"
    def __init__(self): super().__init__(); self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default): self.seen.append(out.dtype)
        return out


def lit(pl, make_opt, batches):
    class Lit(pl.LightningModule):
        def __init__(self): super().__init__(); self.net, self.grads, self.products = net(), [], Dtypes()
        def training_step(self, b, i): return mse(self.net(b[0]), b[1])
        def configure_optimizers(self): return make_opt(self.parameters())
        def on_before_backward(self, loss): self.products.__enter__()
        def on_after_backward(self): self.products.__exit__(None, None, None); self.grads.append(self.net[0].weight.grad.clone())
        def train_dataloader(self): return torch.utils.data.DataLoader(batches, batch_size=None)
    return Lit()


def fit_lit(pl, model, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = pl.Trainer(max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False,
                             enable_model_summary=False, **kw)
        trainer.fit(model)
    return trainer


def on_grid(g):
    "Does FP16 hold every entry?"
    return bool((g.isfinite().logical_not() | (g.half().float() == g)).all())


@pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw_fused'])
def test_lightning_with_our_scaler(lightning, opt):
    from lightning.pytorch.plugins.precision import MixedPrecision
    batches, runs = list(data()), []
    clip = {} if 'fused' in opt else dict(gradient_clip_val=.5)
    for scaler in (GradScaler(growth_interval=3, skip_nonfinite_loss=False), Torch('cpu', growth_interval=3)):
        model = lit(lightning, OPTS[opt], batches)
        trainer = fit_lit(lightning, model, plugins=[MixedPrecision('16-mixed', 'cpu', scaler)], **clip)
        assert trainer.precision_plugin.scaler is scaler
        runs.append((model, scaler))
    (model, ours), (other, theirs) = runs
    assert ours.get_scale() == theirs.get_scale() and ours.get_scale() != 2.**16
    assert all(map(same_bits, model.net.state_dict().values(), other.net.state_dict().values()))
    assert set(model.products.seen) == {H} and len(model.products.seen) >= len(batches)
    assert all(map(on_grid, model.grads)) and any(g.any() for g in model.grads)
    assert ours.last_outcome.stepped


def test_lightning_rewrites_16_mixed_on_a_cpu(lightning):
    "Why the plugin is needed: by name alone there is no scaler, and no FP16"
    model = lit(lightning, OPTS['sgd'], list(data(4)))
    trainer = fit_lit(lightning, model, precision='16-mixed')
    assert getattr(trainer.precision_plugin, 'scaler', None) is None and set(model.products.seen) == {torch.bfloat16}


def test_lightning_refuses_to_clip_for_fused_optimizers(lightning):
    from lightning.pytorch.plugins.precision import MixedPrecision
    for scaler in (GradScaler(), Torch('cpu')):
        with pytest.raises(RuntimeError, match='does not allow for gradient clipping'):
            fit_lit(lightning, lit(lightning, OPTS['adamw_fused'], list(data(4))), gradient_clip_val=1., plugins=[MixedPrecision('16-mixed', 'cpu', scaler)])


def test_lightning_checkpoints_the_policy(lightning, tmp_path):
    from lightning.pytorch.plugins.precision import MixedPrecision
    def plugin(): return MixedPrecision('16-mixed', 'cpu', GradScaler(DynamicScaler(2.**10, growth_interval=3, hysteresis=2, skip_nonfinite_loss=False)))
    trainer = fit_lit(lightning, lit(lightning, OPTS['sgd'], list(data())), plugins=[plugin()])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer.save_checkpoint(tmp_path/'x.ckpt')
    saved = torch.load(tmp_path/'x.ckpt', weights_only=True)['MixedPrecision']
    other = plugin(); other.load_state_dict(saved)
    assert str(other.scaler.state_dict()) == str(trainer.precision_plugin.scaler.state_dict())
    assert other.scaler.get_scale() != 2.**10


# --- Accelerate ---

@pytest.fixture
def accelerate():
    module = pytest.importorskip('accelerate')
    from accelerate.state import AcceleratorState, GradientState
    yield module
    AcceleratorState._reset_state(True); GradientState._reset_state()


def accelerated(accelerate, scaler, make_opt, batches, clip=None, **kw):
    accelerator = accelerate.Accelerator(cpu=True, **kw)
    accelerator.scaler = scaler                              # before prepare
    model = net(); opt = make_opt(model.parameters())
    model, opt = accelerator.prepare(model, opt)
    products, skipped, grads = Dtypes(), [], []
    for x, y in batches:
        with accelerator.accumulate(model):
            with torch.autocast('cpu', H): out = model(x)
            with products: accelerator.backward(mse(out, y))
            grads.append(model[0].weight.grad.clone())
            if clip and accelerator.sync_gradients:
                scaler.unscale_(opt.optimizer)
                accelerator.clip_grad_norm_(model.parameters(), clip)
            opt.step(); opt.zero_grad()
            skipped.append(opt.step_was_skipped)
    return accelerator, model, products.seen, grads, skipped


@pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw_fused'])
@pytest.mark.parametrize('kw', [dict(), dict(clip=.5), dict(gradient_accumulation_steps=2)], ids=['plain', 'clip', 'accumulate'])
def test_accelerate_with_our_scaler(accelerate, opt, kw):
    ours, theirs = GradScaler(growth_interval=3, skip_nonfinite_loss=False), Torch('cpu', growth_interval=3)
    _, model, products, grads, skipped = accelerated(accelerate, ours, OPTS[opt], list(data()), **kw)
    _, other, *_, skipped2 = accelerated(accelerate, theirs, OPTS[opt], list(data()), **kw)
    assert ours.get_scale() == theirs.get_scale() and skipped == skipped2
    assert ours.get_scale() != 2.**16 and any(skipped) != ('fused' in opt)
    assert all(map(same_bits, model.state_dict().values(), other.state_dict().values()))
    assert set(products) == {H} and all(g.dtype == torch.float32 for g in grads)
    if 'gradient_accumulation_steps' not in kw: assert all(map(on_grid, grads)) and any(g.any() for g in grads)


def test_accelerate_saves_and_loads_the_policy(accelerate, tmp_path):
    scaler = GradScaler(DynamicScaler(2.**10, growth_interval=3, hysteresis=2, skip_nonfinite_loss=False))
    accelerator, *_ = accelerated(accelerate, scaler, OPTS['sgd'], list(data()))
    state = str(scaler.state_dict()); assert scaler.get_scale() != 2.**10
    accelerator.save_state(str(tmp_path))
    bad_steps(scaler, '1111'); assert str(scaler.state_dict()) != state
    accelerator.load_state(str(tmp_path))
    assert str(scaler.state_dict()) == state


def test_accelerate_on_a_cpu_is_silently_fp32(accelerate):
    "Why scaler and autocast are set by hand there"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision='fp16')
    model = accelerator.prepare(net())
    assert accelerator.scaler is None and model(torch.randn(2, 6)).dtype == torch.float32
    with Dtypes() as products: model(torch.randn(2, 6))
    assert set(products.seen) == {torch.float32}


def test_accelerate_clips_scaled_gradients_unless_it_knows(accelerate):
    "clip_grad_norm_ unscales only in its own FP16 mode, so elsewhere `unscale_` comes first"
    for native, norm in ((False, 2.**10), (True, 1.)):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision='fp16')
        accelerator.native_amp, accelerator.scaler = native, GradScaler(init_scale=2.**10)
        model = nn.Linear(1, 1, bias=False); opt = SGD(model.parameters(), lr=.1)
        model, opt = accelerator.prepare(model, opt)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1e9).item() == norm


# --- what torch's users do ---

class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)
    def forward(self, x): return self.head(self.enc(x))


class Sized(Norms):
    def __len__(self): return 0


def skipped_step(net, given, call=None, **kw):
    "One step whose gradients overflow; are the buffers as before, and what was said?"
    scaler, opt = GradScaler(init_scale=2.**60, model=given), torch.optim.SGD(net.parameters(), .01, **kw)
    old = {n: b.clone() for n, b in net.named_buffers()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        with torch.autocast('cpu', torch.float16): loss = (call or net)(torch.randn(16, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    assert not scaler.last_outcome.stepped
    return all(same_bits(old[n], b) for n, b in net.named_buffers()), [str(w.message) for w in told]


@pytest.mark.parametrize('make', [Norms, Sized, lambda: torch.compile(Norms(), backend='eager')], ids=['plain', 'length 0', 'compiled'])
def test_any_model_keeps_its_buffers(make):
    net = make()
    assert skipped_step(net, net) == (True, [])


@pytest.mark.parametrize('give', [lambda m: m, lambda m: nn.Sequential(m), lambda m: nn.ModuleList([m, nn.Linear(1, 1)]), lambda m: [nn.Linear(1, 1), m]], ids=['itself', 'wrapped', 'ModuleList', 'list'])
@pytest.mark.parametrize('call', [lambda m: m, lambda m: m.forward, lambda m: lambda x: m.head(m.enc(x))], ids=['model', 'forward', 'parts'])
def test_buffers_are_kept_whichever_part_is_called(give, call):
    net = Norms()
    assert skipped_step(net, give(net), call(net)) == (True, [])


def test_a_model_that_is_not_the_one_called_is_named():
    kept, told = skipped_step(Norms(), Norms())
    assert not kept and len(told) == 1 and 'no forward pass of the Norms' in told[0]


@pytest.mark.parametrize('fused', [False, True])
def test_a_bad_loss_without_a_model_is_told_once(fused):
    "With a fused optimizer, which nobody looks at, within fifty steps"
    net = Norms()
    scaler, opt = GradScaler(), torch.optim.SGD(net.parameters(), .01, fused=fused)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for i in range(100):
            loss = net(torch.randn(4, 8)*(torch.nan if i in (3, 60) else 1.)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert [str(w.message).count('GradScaler(model=model)') for w in told] == [1] and told[0].filename == __file__


def test_scale_within_vmap_is_torchs():
    from torch.func import functional_call, grad, vmap
    x, y, ends = torch.randn(16, 8), torch.randn(16, 1), []
    for scaler in (torch.amp.GradScaler('cpu', init_scale=8.), GradScaler(init_scale=8.)):
        torch.manual_seed(0)
        net = nn.Linear(8, 1)
        opt = torch.optim.SGD(net.parameters(), .1)
        def loss(ps, a, b): return scaler.scale((functional_call(net, ps, (a,)) - b).square().mean())
        grads = vmap(grad(loss), (None, 0, 0))({n: p.detach() for n, p in net.named_parameters()}, x, y)
        for n, p in net.named_parameters(): p.grad = grads[n].mean(0)
        scaler.step(opt)
        scaler.update()
        vmap(lambda a, b: scaler.scale((a - b).square().sum()))(net(x), y).mean().backward()
        scaler.step(opt)
        scaler.update()
        ends.append(net.weight.detach())
    assert same_bits(*ends)


@pytest.mark.filterwarnings('ignore')
def test_a_captured_graph_sees_the_new_scale():
    "What a CUDA graph does, by jit.trace"
    def gradients(scaler):
        torch.manual_seed(0)
        net, x, seen = nn.Linear(8, 1), torch.randn(16, 8), []
        opt = torch.optim.SGD(net.parameters(), 0.)
        opt.register_step_pre_hook(lambda *_: seen.append(net.weight.grad.clone()))
        scaler.scale(torch.zeros(1))
        captured = torch.jit.trace(lambda loss: scaler.scale(loss), torch.ones(()), check_trace=False)
        for _ in range(4):
            opt.zero_grad()
            captured(net(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
        return seen
    ours, theirs = (gradients(make('cpu', init_scale=8., growth_interval=1)) for make in (GradScaler, torch.amp.GradScaler))
    assert all(map(same_bits, ours, theirs))


def test_scale_refuses_what_torch_refuses():
    for scaler in (GradScaler(), torch.amp.GradScaler('cpu')):
        with pytest.raises(ValueError, match='iterable'): scaler.scale(5)


def test_a_loss_that_is_not_finite_holds_every_optimizer():
    "Also where all gradients are finite"
    ps, scaler = [nn.Parameter(torch.ones(2)) for _ in range(3)], GradScaler()
    opts = [torch.optim.SGD([p], lr=.1) for p in ps]
    scaler.scale(torch.tensor(torch.inf))
    for p in ps: p.grad = torch.ones(2)
    for opt in opts: scaler.step(opt)
    scaler.update()
    assert all(p.tolist() == [1., 1.] for p in ps) and scaler.get_scale() == 2.**16 and not scaler.last_outcome.stepped


class Operations(TorchDispatchMode):
    "Counts what a step dispatches"
    count = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def operations(scaler, **kw):
    ps = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    opt = torch.optim.SGD(ps, lr=.1, **kw)
    for _ in range(2):
        loss = torch.ones((), requires_grad=True)*2
        for p in ps: p.grad = torch.ones(4)
        with Operations() as seen:
            scaler.scale(loss)
            scaler.step(opt)
            scaler.update()
    return seen.count


@pytest.mark.parametrize('kw', [dict(), dict(foreach=True), dict(fused=True)], ids=str)
def test_a_step_dispatches_thirty_operations_at_most(kw):
    theirs, ours = operations(torch.amp.GradScaler('cpu'), **kw), operations(GradScaler(), **kw)
    assert theirs <= 16 and ours <= 30


# --- policies of one's own ---

class Fixed(DynamicScaler):
    "Its constructor takes fewer arguments than the class has settings"
    def __init__(self, init_scale=64.): super().__init__(init_scale, growth_interval=3)


class Steady(LossScaler):
    "Never grows"
    def __init__(self, init_scale=64., growth_factor=1.): super().__init__(init_scale, growth_factor=growth_factor)
    def next_scale(self, stats): return torch.where(stats['found_inf'] > 0, self.scale/2, self.scale)


@pytest.mark.parametrize('policy, growth', [(Fixed, 2.), (Steady, 1.)])
def test_a_policy_is_taken_as_it_is(policy, growth):
    given = policy()
    scaler = GradScaler(given)
    assert scaler.policy is given and given.scale == 64 and scaler.state_dict()['growth_factor'] == growth


@pytest.mark.parametrize('new_scale', [None, 1024., torch.tensor(1024.)], ids=['policy', 'float', 'tensor'])
def test_buffers_come_back_whoever_chooses_the_next_scale(new_scale):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    scaler, opt = GradScaler('cpu', model=model), SGD(model.parameters(), lr=.1)
    scaler.scale(model(torch.full((4, 3), INF)).square().mean()).backward()
    scaler.step(opt)
    scaler.update(new_scale)
    assert not model[1].running_mean.any() and model[1].num_batches_tracked == 0


def test_a_scaler_that_torch_disables_leaves_no_hook():
    if torch.cuda.is_available(): pytest.skip('torch enables it here')
    model = nn.BatchNorm1d(3)
    with pytest.warns(UserWarning): scaler = GradScaler('cuda', model=model)
    assert not scaler.is_enabled() and not model._forward_pre_hooks


def test_no_model_and_no_state_are_named():
    with pytest.raises(TypeError, match='model=3'): GradScaler('cpu', model=3)
    for policy in (DynamicScaler(), StaticScaler(8.)):
        with pytest.raises(ValueError, match='scale'): GradScaler(policy).load_state_dict({'foo': 1})


def test_the_second_optimizer_sees_the_loss_too():
    "ALS never doubles at a loss of zero"
    from mpcourse.als import ALSScaler
    scales = []
    for n in (1, 2):
        ps = [nn.Parameter(torch.zeros(2)) for _ in range(n)]
        opts, scaler = [SGD([p], lr=.1) for p in ps], GradScaler(ALSScaler(1024., activations=False))
        scaler.scale(sum((p*0).sum() for p in ps)).backward()
        for opt in opts: scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.]*2


# --- what torch lets pass ---

def test_the_outcome_is_no_longer_that_of_the_step_before():
    net, opt, scaler = nn.Linear(2, 1), None, GradScaler(init_scale=4.)
    opt = torch.optim.SGD(net.parameters(), .1)
    for last in range(3):
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.step(opt)
        assert scaler.last_outcome is None, 'the decision comes with update()'
        scaler.update()
        assert scaler.last_outcome.stepped
        opt.zero_grad()


@pytest.mark.parametrize('wrap', [lambda l: {'loss': l}, lambda l: [{'loss': l}], lambda l: (l, 'loss')])
def test_a_mapping_is_no_loss(wrap):
    scaler = GradScaler()
    with pytest.raises(TypeError, match='takes a loss or a list of losses'): scaler.scale(wrap(torch.ones(1)))
    assert scaler.scale([torch.ones(1), (torch.ones(1),)])[1][0] == 2.**16


def shared(fused=False):
    trunk, actor, critic = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    opts = [torch.optim.Adam([*trunk.parameters(), *head.parameters()], fused=fused) for head in (actor, critic)]
    return trunk, (actor, critic), opts


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('first', ['unscale_', 'step'])
def test_a_weight_in_two_optimizers_is_not_unscaled_twice(first, fused):
    trunk, heads, opts = shared(fused)
    scaler = GradScaler(init_scale=2.**16)
    h = trunk(torch.ones(2, 4))
    scaler.scale(sum(head(h).sum() for head in heads)).backward()
    getattr(scaler, first)(opts[0])
    g = trunk.weight.grad.clone()
    with pytest.raises(ValueError, match='A weight is in two optimizers, and this Adam'): scaler.unscale_(opts[1])
    assert torch.equal(trunk.weight.grad, g)


@pytest.mark.parametrize('set_to_none', [False, True])
def test_a_weight_in_two_optimizers_with_a_backward_pass_for_each(set_to_none):
    "As in torch's loop of two losses, in which each optimizer steps after its own backward pass"
    trunk, heads, opts = shared()
    scaler = GradScaler(init_scale=2.**16)
    for head, opt in zip(heads, opts):
        opt.zero_grad(set_to_none=set_to_none)
        scaler.scale(head(trunk(torch.ones(2, 4))).sum()).backward()
        scaler.unscale_(opt)
        assert trunk.weight.grad.abs().max() > 1e-3
        scaler.step(opt)
    scaler.update()
    assert scaler.last_outcome.stepped
