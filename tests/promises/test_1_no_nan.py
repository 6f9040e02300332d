"Promise 1: no step whose gradients were not finite writes into a weight, into optimizer state or into a buffer: a skipped step leaves every bit of them"
from functools import partial

import pytest, torch, torch.nn.functional as F
from fastai.basics import Callback, OptimWrapper
from fastai.optimizer import Adam as FastaiAdam, SGD as FastaiSGD
from torch import nn

import adapter as A

OPTS = dict(sgd=partial(torch.optim.SGD, lr=.1, momentum=.9), adam=partial(torch.optim.Adam, lr=.01),
            fused_adamw=partial(torch.optim.AdamW, lr=.01, fused=True),
            fused_sgd=partial(torch.optim.SGD, lr=.1, momentum=.9, fused=True))
POLICIES = ('dynamic', 'static', 'hysteresis', 'torch', 'fastai', 'apex_amp', 'megatron', 'logmax', 'backoff')
BAD = (torch.nan, torch.inf, -torch.inf)


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()
    @staticmethod
    def backward(ctx, g): return g*ctx.factor, None


class Net(nn.Module):
    "Hands its input on; the gradient that comes back past the middle is multiplied by `factor`"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two, self.factor = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), 1.
        self.register_buffer('ema', torch.zeros(8))
        self.register_buffer('mask', torch.ones(1).expand(8))
    def forward(self, x):
        x = self.norm(self.one(x)).tanh()*self.mask
        with torch.no_grad(): self.ema.mul_(.9).add_(x.float().mean(0), alpha=.1)
        return self.two(Spoil.apply(x, self.factor))


def data(n=64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)


def tensors(x):
    "All tensors in a nesting"
    if isinstance(x, torch.Tensor): return [x]
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [t for v in inner for t in tensors(v)]


def bits(model, opt):
    "Every number of the weights, the buffers and the optimizer's state, torch's or fastai's"
    own = (*model.parameters(), *(getattr(model, 'buffers', tuple)()))
    return [t.detach().clone() for t in (*own, *tensors(opt.state_dict()['state']))]


def raw(t): return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
def same(a, b): return len(a) == len(b) and all(torch.equal(raw(t), raw(u)) for t,u in zip(a, b))
def finite(ts): return all(t.isfinite().all() for t in ts)


class Probe(Callback):
    "Spoils the batches that the plan says, and takes the bits after each"
    order = 200
    def __init__(self, factors): self.factors, self.seen, self.scales = factors, [], []
    def before_batch(self): self.learn.model.factor = self.factors[self.learn.train_iter] if self.learn.training else 1.
    def after_batch(self):
        if self.learn.training: self.seen.append(bits(self.learn.model, self.learn.opt)); self.scales.append(A.scale_of(self.learn))


def by_step(scaler, make_opt, factors, **kw):
    model, (x, y) = Net(), data(8*len(factors))
    opt, step, seen = make_opt(model.parameters()), A.make_step(scaler, **kw), []
    for i,f in enumerate(factors):
        model.factor = f
        step(model, x[8*i:8*i+8], y[8*i:8*i+8], opt, F.cross_entropy)
        seen.append(bits(model, opt))
    return seen


def by_gradscaler(scaler, make_opt, factors, dtype=torch.bfloat16):
    "bfloat16 within autocast, so that what is infinite is what the test made so"
    model, (x, y) = Net(), data(8*len(factors))
    opt, gs, seen = make_opt(model.parameters()), A.make_gradscaler(scaler, model=model), []
    for i,f in enumerate(factors):
        model.factor = f
        with torch.autocast('cpu', dtype): loss = F.cross_entropy(model(x[8*i:8*i+8]), y[8*i:8*i+8])
        gs.scale(loss).backward(); gs.step(opt); gs.update(); opt.zero_grad()
        seen.append(bits(model, opt))
    return seen


def by_callback(scaler, make_opt, factors, **kw):
    x, y = data(8*len(factors))
    fast = dict(sgd=FastaiSGD, adam=FastaiAdam)
    name = next(n for n,o in OPTS.items() if o is make_opt)
    more = {k: v for k,v in make_opt.keywords.items() if k != 'lr'}
    opt_func = partial(fast[name], mom=.9) if name in fast else partial(OptimWrapper, opt=make_opt.func, **more)
    learn = A.make_learner(Net(), (x, y), (x[:8], y[:8]), scaler, loss_func=F.cross_entropy, opt_func=opt_func, lr=.01, **kw)
    probe = Probe(factors)
    with learn.no_logging(): learn.fit(1, cbs=probe)
    return probe.seen


HOSTS = dict(step=by_step, gradscaler=by_gradscaler, callback=by_callback)


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('host', HOSTS)
@pytest.mark.parametrize('bad', BAD)
def test_a_skipped_step_leaves_every_bit(host, opt, bad):
    "and the steps before and after it move all weights"
    factors = [1., 1., bad, 1., bad, bad, 1.]
    seen = HOSTS[host](A.make_scaler('dynamic', init_scale=2.**8), OPTS[opt], factors)
    assert len(seen) == len(factors)
    for i,f in enumerate(factors[1:], 1):
        if f == 1: assert not same(seen[i], seen[i-1]), f'step {i} was not taken'
        else: assert same(seen[i], seen[i-1]), f'step {i} was not skipped'
    assert finite(seen[-1])


@pytest.mark.parametrize('policy', (*POLICIES, 'als'))
@pytest.mark.parametrize('host', ('step', 'gradscaler'))
def test_a_storm_of_bad_steps_moves_nothing_and_ends(host, policy):
    "Down to the floor and far beyond; then weights move again and stay finite"
    scaler = A.make_scaler(policy, **(dict(activations=False) if policy == 'als' else {}), init_scale=2.**10)
    factors = [1., 1.] + [torch.nan, torch.inf, -torch.inf]*50 + [1.]*6
    seen = HOSTS[host](scaler, OPTS['adam'], factors)
    assert all(same(s, seen[1]) for s in seen[2:152])
    assert all(map(finite, seen)) and not same(seen[-1], seen[1])
    assert 0 < A.scale_of(scaler) < torch.inf


@pytest.mark.parametrize('policy', ('dynamic', 'megatron', 'als'))
def test_a_storm_in_a_learner(policy):
    factors = [1., 1.] + [torch.nan]*60 + [1.]*4
    seen = by_callback(A.make_scaler(policy, init_scale=2.**10), OPTS['sgd'], factors)
    assert all(same(s, seen[1]) for s in seen[2:62]) and finite(seen[-1]) and not same(seen[-1], seen[61])


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('scale', (2.**-10, 2.**-20))
def test_below_one_a_gradient_that_overflows_while_it_is_unscaled_is_seen(opt, scale):
    p = nn.Parameter(torch.ones(3)); opt = OPTS[opt]([p])
    gs = A.make_gradscaler(A.make_scaler('dynamic', init_scale=scale, min_scale=2.**-24))
    for g in (1e-3, 1e36, 1e38):
        before = bits(nn.ParameterList([p]), opt)
        gs.scale(torch.ones(())); p.grad = torch.tensor([g, 1., 0.])
        gs.step(opt); gs.update()
        assert finite(bits(nn.ParameterList([p]), opt))
        assert g == 1e-3 or same(before, bits(nn.ParameterList([p]), opt)), 'an infinite gradient was a step'


@pytest.mark.parametrize('policy', POLICIES)
def test_a_scale_that_grows_for_ever_stays_finite(policy):
    "Gradients of zero never overflow: infinity times zero is NaN"
    scaler = A.make_scaler(policy, **({} if policy in ('static', 'logmax', 'backoff') else dict(growth_interval=1)))
    gs, p = A.make_gradscaler(scaler), nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([p], lr=1.)
    for _ in range(200):
        gs.scale((p*0).sum()).backward(); gs.step(opt); gs.update(); opt.zero_grad()
    assert 0 < gs.get_scale() < torch.inf and torch.equal(p.detach(), torch.ones(2))


@pytest.mark.parametrize('n', (1, 3, 40))
@pytest.mark.parametrize('bad', BAD)
def test_one_bad_number_anywhere_is_seen(n, bad):
    ps = [nn.Parameter(torch.ones(7, 3)) for _ in range(n)]
    opt, gs = torch.optim.SGD(ps, lr=1.), A.make_gradscaler(A.make_scaler('static', init_scale=4.))
    for i in range(0, 2*n, 2 if n < 40 else 13):
        gs.scale(torch.ones(()))
        for p in ps: p.grad = torch.full_like(p, 65504.)
        ps[i%n].grad[-1, i%3] = bad
        gs.step(opt); gs.update()
        assert all(torch.equal(p.detach(), torch.ones(7, 3)) for p in ps)
    gs.scale(torch.ones(()))
    for p in ps: p.grad = torch.full_like(p, 3e38/4)                    # large and finite: no false alarm
    gs.step(opt); assert all((p < 0).all() for p in ps)


def test_clipping_does_not_spread_a_nan():
    seen = by_step(A.make_scaler('dynamic', init_scale=2.**8), OPTS['sgd'], [1., 1., torch.nan, 1.], clip=.5)
    assert same(seen[2], seen[1]) and finite(seen[3]) and not same(seen[3], seen[2])


@pytest.mark.parametrize('clip', (None, .05))
@pytest.mark.parametrize('scale', (2.**6, 2.**11, 2.**30))
def test_a_step_is_the_recipes_bit_for_bit(scale, clip):
    "Masters in FP32, a half copy, the loss in FP32 times S, gradients to FP32 and then divided, look, step, copy down"
    t = A.toy('deep_sigmoid', steps=12)
    half, opt = [p.detach().clone() for p in t.model.parameters()], None
    masters = [nn.Parameter(p.detach().clone()) for p in t.model.parameters()]
    names, opt, want = [n for n,_ in t.model.named_parameters()], t.opt(masters), []
    for xb, yb in t.batches:
        half = [m.detach().half().requires_grad_() for m in masters]
        out = torch.func.functional_call(t.model, dict(zip(names, half)), xb.half())
        loss = t.loss_func(out.float(), yb)
        for h,m,g in zip(half, masters, torch.autograd.grad(loss*scale, half)): m.grad = g.float()/scale
        found = not all(m.grad.isfinite().all() for m in masters)
        if clip and not found: nn.utils.clip_grad_norm_(masters, clip)
        if not found: opt.step()
        want.append((loss.item(), scale, found))
    step = A.make_step(A.make_scaler('static', init_scale=scale), clip=clip, native=True)
    got = A.train(step, t.model, t.batches, t.opt(t.model.parameters()), t.loss_func)
    assert got == want and any(f for *_,f in want) == (scale > 2.**20)
    assert all(torch.equal(p, m) for p,m in zip(t.model.parameters(), masters))


def test_the_callback_trains_as_the_step():
    x, y = data(80)
    a, b = Net(), Net()
    learn = A.make_learner(a, (x, y), (x[:8], y[:8]), A.make_scaler('dynamic', init_scale=2.**9), loss_func=F.cross_entropy,
                           opt_func=partial(OptimWrapper, opt=torch.optim.SGD), lr=.1, wd=0.)
    seen = []
    class Order(Callback):
        def before_batch(self):
            if self.learn.training: seen.append((self.learn.xb[0].clone(), self.learn.yb[0].clone()))
    with learn.no_logging(): learn.fit(1, cbs=Order())
    A.train(A.make_step(A.make_scaler('dynamic', init_scale=2.**9)), b, seen, torch.optim.SGD(b.parameters(), lr=.1), F.cross_entropy)
    assert len(seen) == 10 and all(torch.equal(p, q) for p,q in zip(a.parameters(), b.parameters()))


def test_scaled_gradients_are_unscaled_exactly():
    "A power of two changes no bit of a gradient that FP32 holds"
    g = torch.tensor([2.**-24, 6e-5, -65504., 1/3, 0.])
    for k in (-3, 0, 8, 16, 24):
        p = nn.Parameter(torch.zeros(5)); opt = torch.optim.SGD([p], lr=1.)
        gs = A.make_gradscaler(A.make_scaler('static', init_scale=2.**max(k, 0)))
        gs.scale(torch.ones(())); p.grad = g*2.**max(k, 0)
        gs.unscale_(opt); assert torch.equal(p.grad, g)
        gs.step(opt); gs.update(); assert torch.equal(p.detach(), -g)


def test_the_scale_of_a_step_halves_and_grows():
    "Bad steps 3 and 4, an interval of three"
    model, (x, y), scaler = Net(), data(80), A.make_scaler('dynamic', init_scale=2.**8, growth_interval=3)
    def spoil(i): model.factor = torch.inf if i in (3, 4) else 1.
    batches = [(x[8*i:8*i+8], y[8*i:8*i+8]) for i in range(10)]
    got = A.train(A.make_step(scaler), model, batches, torch.optim.SGD(model.parameters(), lr=.1), F.cross_entropy, spoil)
    assert [s for _,s,_ in got] == [2.**k for k in (8, 8, 8, 9, 8, 7, 7, 7, 8, 8)]
    assert [k for *_,k in got] == [i in (3, 4) for i in range(10)] and all(0 < l < 3 for l,*_ in got)


def test_bad_batches_do_not_end_a_training_with_the_default_policy():
    "45 batches of NaN: the scale stays, and gradients live afterwards"
    t, scaler = A.toy('deep_sigmoid', steps=50), A.make_scaler('dynamic')
    batches = [(xb*torch.nan if 2 <= i < 47 else xb, yb) for i,(xb, yb) in enumerate(t.batches)]
    got = A.train(A.make_step(scaler), t.model, batches, t.opt(t.model.parameters()), t.loss_func)
    assert [s for *_,s in got[2:47]] == [True]*45 and got[-1][1] == got[1][1]
    assert all(p.grad.any() for p in t.model.parameters())


def spectral():
    "A net with spectral norm, which takes a power iteration in each forward pass"
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(4, 8)), nn.BatchNorm1d(8), nn.Tanh(), norm(nn.Linear(8, 3)))


@pytest.mark.parametrize('opt', ('sgd', 'fused_adamw'))
@pytest.mark.parametrize('host', ('step', 'callback', 'gradscaler'))
def test_a_forward_pass_that_overflows_leaves_every_bit_of_the_buffers(host, opt):
    "One input of 1e6: what the skipped step wrote into running means, power iterations and counters goes back"
    model, (x, y), seen = spectral(), data(24), []
    x[8] = 1e6
    if host == 'callback':
        def take(cb): seen.append(bits(cb.learn.model, cb.learn.opt))
        Look = type('Look', (Callback,), dict(order=200, after_batch=lambda cb: take(cb) if cb.learn.training else None))
        learn = A.make_learner(model, (x, y), (x[:8], y[:8]), A.make_scaler('static', init_scale=2.), loss_func=F.cross_entropy,
                               opt_func=partial(OptimWrapper, opt=OPTS[opt].func, **{k: v for k, v in OPTS[opt].keywords.items() if k != 'lr'}), lr=.1)
        learn.dls.train.shuffle = False
        with learn.no_logging(): learn.fit(1, cbs=Look())
    else:
        opt = OPTS[opt](model.parameters())
        step = A.make_step(A.make_scaler('static', init_scale=2.))
        gs = A.make_gradscaler(A.make_scaler('static', init_scale=2.), model=model)
        for i in range(3):
            xb, yb = x[8*i:8*i+8], y[8*i:8*i+8]
            if host == 'step': step(model, xb, yb, opt, F.cross_entropy)
            else:
                with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(xb).float(), yb)
                gs.scale(loss).backward(); gs.step(opt); gs.update(); opt.zero_grad()
            seen.append(bits(model, opt))
    assert same(seen[1], seen[0]) and not same(seen[2], seen[1]) and all(map(finite, seen))


@pytest.mark.parametrize('host', ('step', 'gradscaler', 'callback'))
def test_buffers_go_back_to_before_the_first_micro_batch(host):
    "Two micro-batches make a step, the second of step 1 is infinite"
    model, (x, y), seen = spectral(), data(32), []
    x[24] = 1e6
    opt, scaler = torch.optim.SGD(model.parameters(), lr=.1), A.make_scaler('static', init_scale=2.)
    parts = [(x[8*i:8*i+8], y[8*i:8*i+8]) for i in range(4)]
    if host == 'callback':
        from fastai.callback.training import GradientAccumulation
        def take(cb):
            if cb.learn.training and cb.learn.train_iter%2 == 0: seen.append(bits(cb.learn.model, cb.learn.opt)[:-1])
        Look = type('Look', (Callback,), dict(order=200, after_batch=take))
        learn = A.make_learner(model, (x, y), (x[:8], y[:8]), scaler, loss_func=F.cross_entropy, lr=.1)
        learn.dls.train.shuffle = False
        with learn.no_logging(): learn.fit(1, cbs=[GradientAccumulation(16), Look()])
    gs, step = A.make_gradscaler(A.make_scaler('static', init_scale=2.), model=model), A.make_step(scaler)
    for pair in (parts[:2], parts[2:])*(host != 'callback'):
        opt.zero_grad()
        if host == 'step':
            if step.controller is None: step.begin(model)
            for xb, yb in pair: step.backward(model, xb, yb, F.cross_entropy)
            step.update(model, opt, 0.)
        else:
            for xb, yb in pair:
                with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(xb).float(), yb)
                gs.scale(loss).backward()
            gs.step(opt); gs.update()
        seen.append(bits(model, opt))
    assert same(*seen) and finite(seen[0])


def test_without_the_model_gradscaler_says_once_that_buffers_do_not_go_back():
    p = nn.Parameter(torch.ones(2)); opt, gs = torch.optim.SGD([p], lr=.1), A.make_gradscaler()
    with pytest.warns(UserWarning, match='model=model') as said:
        for _ in range(3):
            gs.scale((p*torch.inf).sum()).backward(); gs.step(opt); gs.update(); opt.zero_grad()
    assert len(said) == 1
