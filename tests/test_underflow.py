"""What was flushed: count_flushed against brute force in every format; the probe; who was first to overflow; the verdict."""
import copy, weakref
from contextlib import nullcontext

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

from mpcourse.emulate import emulate
from mpcourse.tensorcore import fast_half
from mpcourse.formats import get_format, same_bits
from mpcourse.hooks import TensorHooks
from mpcourse.underflow import (FlushProbe, Overflow, OverflowWatch, Verdict, act_on, known_reaction, count_flushed,
                                count_zeros, early_warning, find_overflow, plot_ridges, plot_underflow,
                                probe_flushed, underflow_rates)
from mpcourse.plots import log2_hist
from mpcourse.failures import flushed
from mpcourse.rounding import quantize
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, cross_entropy, fit, get_toy, half_pass, plain_step, relu_mlp

pytestmark = pytest.mark.library
FORMATS = 'fp16 bf16 e4m3 e5m2 e4m3fnuz e5m2fnuz e2m1 e2m3 e3m2'.split()
H, B = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    assert modes() == []


def rand(*shape, seed=0, scale=1.): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))*scale
def on_grid(x, fmt): return quantize(x, fmt)
def brute(before, after): return int(((after == 0) & (before != 0)).sum()), int(((after == 0) & (before == 0)).sum())
def counted(c, t): return tuple(int(v) for v in (c.zeros(t).flushed, c.zeros(t).structural))


OPS = dict(mul=lambda a, b: a*b, mm=lambda a, b: a @ b.T, sub=lambda a, b: a - b, mean=lambda a, b: (a*0 + b).mean(0), tanh=lambda a, b: a.tanh(),
           scalar=lambda a, b: a*2.**-3, softmax=lambda a, b: (a*2.**8).softmax(1), relu=lambda a, b: a.relu(), square=lambda a, b: a.square())


def small(fmt, *shape, seed=0):
    "Numbers on the grid, in sizes whose products lie about its smallest"
    return on_grid(rand(*shape, seed=seed)*get_format(fmt).smallest_subnormal**.5, fmt)


# ---------------------------------------------------------------- each op's own rounding, by brute force
@pytest.mark.parametrize('op', OPS)
@pytest.mark.parametrize('fmt', FORMATS)
def test_own_rounding_in_every_format(fmt, op):
    a, b = small(fmt, 16, 24), small(fmt, 16, 24, seed=1)
    if op in ('mean', 'relu', 'scalar'): a, b = (on_grid(rand(16, 24, seed=s)*get_format(fmt).smallest_subnormal*3, fmt) for s in (0, 1))
    f = OPS[op]
    if op in ('mean', 'softmax'):            # more than one op: the last one's operands are what is compared
        with emulate(fmt): x = a*0 + b if op == 'mean' else a*2.**8
        f = (lambda x, _: x.mean(0)) if op == 'mean' else (lambda x, _: x.softmax(1))
        a = x
    with count_flushed(through=False) as c, emulate(fmt): low = f(a, b)
    assert counted(c, low) == brute(f(a, b), low) and same_bits(low, on_grid(f(a, b), fmt))
    if op in ('mul', 'mm', 'scalar'): assert counted(c, low)[0] > 0
    if op == 'relu': assert counted(c, low)[1] > 100 and counted(c, low)[0] == 0


@pytest.mark.parametrize('opts', [dict(rounding='toward_zero'), dict(subnormals=False), dict(rounding='stochastic')], ids=str)
@pytest.mark.parametrize('fmt', FORMATS)
def test_every_way_of_rounding(fmt, opts):
    gen = lambda: dict(opts, generator=torch.Generator().manual_seed(3)) if 'stochastic' in opts.values() else opts
    a, b = small(fmt, 32, 32), small(fmt, 32, 32, seed=1)
    with count_flushed() as c, emulate(fmt, inputs=False, **gen()): low = a*b
    assert counted(c, low) == brute(a*b, low) and counted(c, low)[0] > 0
    if 'rounding' not in opts or opts['rounding'] != 'stochastic': assert same_bits(low, quantize(a*b, fmt, **opts))


@pytest.mark.parametrize('op', OPS)
@pytest.mark.parametrize('dtype', [H, B], ids=str)
def test_own_rounding_of_real_halves(dtype, op):
    fmt = 'fp16' if dtype == H else 'bf16'
    a, b = small(fmt, 16, 24).to(dtype), small(fmt, 16, 24, seed=1).to(dtype)
    f = OPS[op]
    if op == 'mean': a, b, f = rand(16, 24, scale=2.**-25 if dtype == H else 2.**-134).to(dtype), b, lambda a, b: a.mean(0)
    if op == 'softmax': a, f = (rand(16, 24)*16).to(dtype), lambda a, b: a.softmax(1)
    with count_flushed(through=False) as c, fast_half(): low = f(a, b)
    assert low.dtype == dtype and counted(c, low) == brute(f(a.float(), b.float()), low)


def test_every_half_and_the_edge():
    x = torch.arange(1, 2**16).to(torch.int16).view(H).float()
    x = torch.cat([x[x.isfinite()]*2.**-k for k in (0, 1, 13, 25)] + [torch.tensor([2.**-25, -2.**-25, 2.**-25*(1 + 2**-20), 0., -0.])])
    with count_flushed() as c: low = x.half()
    want = brute(x, low)
    assert counted(c, low) == want and want[0] > 1000
    edge = torch.tensor([2.**-25, -2.**-25, 2.**-25*(1 + 2**-20), 0., -0.])
    with count_flushed() as c: low = edge.half()
    assert counted(c, low) == (2, 2)


def test_backward_in_every_format():
    for fmt in FORMATS:
        w0, g = small(fmt, 12, 16), small(fmt, 8, 16, seed=2)
        x = on_grid(rand(8, 12), fmt).requires_grad_()
        with count_flushed(through=False) as c, emulate(fmt):
            y = x @ w0
            y.backward(g)
        exactly = g @ w0.T
        assert counted(c, x.grad) == brute(exactly, x.grad), fmt
        assert counted(c, x.grad)[0] > 0 or fmt == 'e2m1'


# ---------------------------------------------------------------- records follow the numbers
def lossy(dtype=H):
    "A context, a product of which about half is flushed, and what it is before"
    a, b = rand(8, 12, scale=2.**-12), rand(8, 12, seed=1, scale=2.**-13)
    return a.to(dtype), b.to(dtype), a.to(dtype).float()*b.to(dtype).float()


LOOKS = dict(t=lambda x: x.t(), slice=lambda x: x[2:5, 1::2], view=lambda x: x.view(4, 24), select=lambda x: x[3], chunk=lambda x: x.chunk(3, 1)[1],
             expand=lambda x: x[0].expand(5, 12), unfold=lambda x: x.unfold(1, 3, 2), detach=lambda x: x.detach(), diagonal=lambda x: x.diagonal(),
             clone=lambda x: x.clone(), contiguous=lambda x: x.t().contiguous(), float=lambda x: x.float(), double=lambda x: x.double(),
             reshape=lambda x: x.t().reshape(-1), cat=lambda x: torch.cat([x, x.t().reshape(8, 12)]), stack=lambda x: torch.stack([x, x], 1),
             index=lambda x: x[torch.tensor([0, 3, 3])], index_select=lambda x: x.index_select(1, torch.tensor([5, 2])), flip=lambda x: x.flip(0),
             gather=lambda x: x.gather(0, torch.zeros(2, 12, dtype=torch.int64)), roll=lambda x: x.roll(1, 0), repeat=lambda x: x.repeat(2, 1),
             where=lambda x: torch.where(torch.arange(12) > 5, x, x.flip(0)), pad=lambda x: F.pad(x, (1, 2)))


@pytest.mark.parametrize('through', [False, True])
@pytest.mark.parametrize('look', LOOKS)
def test_moved_and_viewed(look, through):
    a, b, before = lossy()
    with count_flushed(through) as c, fast_half():
        low = a*b
        seen = LOOKS[look](low)
    wanted = LOOKS[look](before)
    assert counted(c, seen) == brute(wanted, seen) and counted(c, low)[0] > 10
    if look not in ('pad',): assert counted(c, seen)[0] > 0


def test_written_in_place():
    a, b, before = lossy()
    with count_flushed() as c, fast_half():
        low, out = a*b, torch.ones(16, 12, dtype=H)
        out[:8] = low
        assert counted(c, out) == brute(before, low)
        out[:4] = 0
        assert counted(c, out)[0] == brute(before[4:], low[4:])[0]
        out[4:8].copy_(low[4:] + 1)
        assert counted(c, out) == (0, 48)
        x = (torch.ones(8, 12)*2.**-20).half()
        x.mul_(2.**-6)
        assert counted(c, x) == (96, 0)
        x.zero_()
        assert counted(c, x) == (0, 96)
        x.fill_(1).masked_fill_(torch.arange(12) > 5, 0)
        assert counted(c, x) == (0, 48)
        torch.mul(a, b, out=x)
        assert counted(c, x) == brute(before, x)


def test_masks_and_embeddings():
    "What is filled in is no loss; a row that nobody uses has a structural zero"
    with count_flushed() as c, fast_half():
        s = torch.ones(4, 4).half().masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        assert counted(c, s) == (0, 0)
        p = s.softmax(1)
        assert counted(c, p) == (0, 6)
        emb = nn.Embedding(10, 6).half()
        out = emb(torch.tensor([1, 1, 7]))
        out.backward((torch.ones(3, 6)*2.**-24).half())
        assert counted(c, emb.weight.grad) == (0, 8*6)


def test_casts_of_weights_and_their_gradients():
    w, x = (rand(4, 6)*2.**-20).requires_grad_(), torch.ones(3, 6).half()*2.**-7
    seen = {}
    with count_flushed(through=False) as c, fast_half():
        w.register_hook(lambda g: seen.update(dtype=g.dtype, zeros=counted(c, g)))
        low = w.half()
        assert counted(c, low) == brute(w, low)
        (x @ low.t()).backward((torch.ones(3, 4)*2.**-20).half())
    assert seen == dict(dtype=torch.float32, zeros=(24, 0))           # 3 · 2^-27 in half is nothing; FP32 would hold it
    assert (w.grad == 0).all()


def test_structural_zeros():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad(): net[0].bias[:3] = -100
    x = rand(5, 6); x[:, :2] = 0
    got, step = {}, MixedStep(StaticScaler(2.**10))
    with count_flushed() as c, TensorHooks(net, lambda n, k, t: got.__setitem__((n, k), counted(c, t)), ('activation', 'activation_grad', 'weight_grad')):
        step(net, x, torch.tensor([0, 1, 2, 0, 1]), torch.optim.SGD(net.parameters(), lr=0.), cross_entropy)
    g = net[0].weight.grad
    assert got['0.weight', 'weight_grad'] == (0, int((g == 0).sum())) and (g[:, :2] == 0).all() and (g[:3] == 0).all()
    assert got['1', 'activation'][0] == 0 and got['1', 'activation'][1] >= 15 and got['2.weight', 'weight_grad'][0] == 0


def test_through_tells_who_misses_what():
    "Own: who flushed it; through: whose gradient it is missing from; the same for one op alone"
    a = (torch.ones(4, 4)*2.**-13).half()
    for through,second in ((False, (0, 16)), (True, (16, 0))):
        with count_flushed(through) as c, fast_half():
            x = a*2.**-13
            y = x @ (torch.ones(4, 4)*8.).half()
            z = (y + 1)*0
        assert counted(c, x) == (16, 0) and counted(c, y) == second and counted(c, z) == (0, 16)
    with count_flushed() as c, fast_half(): y = (a*2.**-13)*2.**13 + 1
    assert counted(c, y) == (0, 0)


# ---------------------------------------------------------------- the training is as it was
@pytest.mark.parametrize('name', ['deep_sigmoid', 'cnn', 'two_towers', 'char_lm'])
@pytest.mark.parametrize('through', [False, True])
def test_bits_of_a_training_stay(name, through):
    toy = get_toy(name)
    def run(ctx):
        m = toy.model(0); step = MixedStep(StaticScaler(2.**8))
        def watched(*a):
            with ctx() as c: out = step(*a)
            assert c is None or not c.untold
            return out
        fit(m, batches(toy.data(), 16, 3), toy.opt(m.parameters()), toy.loss_func, watched)
        return m.state_dict()
    a, b = run(nullcontext), run(lambda: count_flushed(through))
    assert all(same_bits(a[k], b[k]) if a[k].is_floating_point() else torch.equal(a[k], b[k]) for k in a)


def test_dice_and_statistics():
    "Dropout throws once; what it makes zero is structural; BatchNorm's running statistics move once"
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(.5), nn.BatchNorm1d(16), nn.AlphaDropout(.3))
    x = rand(32, 8)
    def run(ctx):
        torch.manual_seed(5); m = copy.deepcopy(net).half()
        with fast_half():
            m[2].float(); y = m[1](m[0](x.half())); z = m[3](m[2](y)); z.float().sum().backward()
        return m, y, z, torch.get_rng_state()
    m0, y0, z0, r0 = run(nullcontext)
    with count_flushed() as c: m1, y1, z1, r1 = run(nullcontext)
    assert same_bits(y0, y1) and same_bits(z0, z1) and torch.equal(r0, r1)
    assert same_bits(m0[2].running_mean, m1[2].running_mean) and torch.equal(m0[2].num_batches_tracked, m1[2].num_batches_tracked)
    assert counted(c, y1)[0] == 0 and counted(c, y1)[1] > 100 and not c.untold


@pytest.mark.parametrize('f', [lambda x: torch.native_dropout(x, .5, True)[0], lambda x: F.rrelu(x.float(), training=True).half(),
                               lambda x: torch.bernoulli(x.clamp(0, 1))], ids=['dropout', 'rrelu', 'bernoulli'])
def test_ops_that_throw_dice_inside(f):
    x = rand(64, 64).half()
    torch.manual_seed(7); y0, r0 = f(x), torch.get_rng_state()
    torch.manual_seed(7)
    with count_flushed() as c: y1 = f(x)
    assert same_bits(y0, y1) and torch.equal(r0, torch.get_rng_state())
    assert c.zeros(y1) is None or counted(c, y1)[0] == 0


def test_modes_in_any_order_and_after_errors():
    a, b, before = lossy()
    with fast_half(), count_flushed() as c: low = a*b
    assert counted(c, low) == brute(before, low)
    with emulate('e4m3'), count_flushed() as c: y = torch.tensor([1., 2.**-11])*1.
    assert counted(c, y) == (1, 0)
    m = fast_half(); m.__enter__()
    c = count_flushed(); c.__enter__()                              # opened within, closed without
    low = a*b
    m.__exit__(None, None, None)
    assert modes() == [c] and counted(c, low) == brute(before, low)
    with pytest.raises(ValueError, match='at work already'): c.__enter__()
    c.end()
    assert modes() == [] and c.zeros(low) is None
    with pytest.raises(RuntimeError), count_flushed(), fast_half(): torch.ones(2, 3) @ torch.ones(2, 3)
    assert modes() == []


def test_nothing_is_kept():
    a, b, _ = lossy()
    with count_flushed() as c, fast_half():
        low = a*b
        ref = weakref.ref(low)
        n = len(c._lost.of)
        for _ in range(300): (a*b).float()
        assert len(c._lost.of) < n + 70
        del low
        assert ref() is None
    assert c.share('x', 'activation', rand(3)).isnan() and c.share('x', 'weight', torch.tensor([1., 2.**-30])) == .5
    assert count_flushed().share('x', 'weight', rand(3)).isnan()


# ---------------------------------------------------------------- the probe
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


@pytest.mark.parametrize('through', [False, True])
def test_probe_and_carried_count_agree(through):
    "To the entry, where the forward pass loses nothing; the own count differs where nothing arrives"
    net, batch = sig8()
    found, got = probe_flushed(net, batch, cross_entropy), {}
    with count_flushed(through) as c, TensorHooks(net, lambda n, k, t: got.__setitem__((n, k), c.share(n, k, t).item()), ('activation_grad', 'weight_grad')):
        MixedStep(StaticScaler(1.))(net, *batch, torch.optim.SGD(net.parameters(), lr=0.), cross_entropy)
    far = [k for k in got if abs(got[k] - found[k].share.item()) > .02]
    assert (not far) if through else ('1.weight', 'weight_grad') in far


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
    "While half weights are lent and fast_half is on, and after an error"
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
    e4 = probe_flushed(net, batch, cross_entropy, torch.float32, compute=lambda: emulate('e4m3'), kinds='weight_grad')
    bf = probe_flushed(net, batch, cross_entropy, B, kinds='weight_grad')
    assert e4['1.weight', 'weight_grad'].share == 1 and bf['1.weight', 'weight_grad'].share < .01
    assert list(probe_flushed(net, batch, cross_entropy, kinds='weight_grad', names='3.*')) == [('3.weight', 'weight_grad'), ('3.bias', 'weight_grad')]
    with pytest.raises(ValueError, match='matches no module or parameter'): probe_flushed(net, batch, cross_entropy, names='nowhere')
    with pytest.raises(ValueError, match='No gradient reached'):
        probe_flushed(nn.Linear(2, 2).requires_grad_(False), (rand(3, 2), None), lambda p, y: p.sum())


# ---------------------------------------------------------------- who was first
def heavy(k=20):
    net = relu_mlp()
    with torch.no_grad(): net[3].weight.mul_(2.**k)
    return net


def test_find_overflow():
    net, batch = sig8()
    find = lambda net, batch=batch, **kw: find_overflow(net, batch, cross_entropy, **kw)
    assert find(net) is None and find(net, dtype=B, scale=2.**60) is None
    at_loss, fwd = find(net, scale=2.**30), find(heavy())
    assert (at_loss.name, at_loss.direction, at_loss.what) == ('the loss', 'backward', 'inf')
    assert (fwd.name, fwd.direction, fwd.what, fwd.kind) == ('3.weight', 'forward', 'inf', 'weight') or (fwd.name, fwd.direction) == ('3', 'forward')
    glitch = batch[0].clone(); glitch[3] = 1e5
    assert (f := find(net, (glitch, batch[1]))).name == 'input' and f.op == 'the cast' and f.what == 'inf'
    glitch[3] = torch.nan
    assert find(net, (glitch, batch[1])).what == 'nan' and find(net, (glitch, batch[1])).op is None
    nan = relu_mlp()
    with torch.no_grad(): nan[5].weight[2, 2] = torch.nan
    assert (find(nan).name, find(nan).kind) == ('5.weight', 'weight')
    mid = relu_mlp()
    with torch.no_grad(): mid[5].weight.mul_(2.**8); mid[7].weight.mul_(2.**8)
    hit = find(mid, scale=2.**15)
    assert (hit.name, hit.direction) in (('5', 'backward'), ('7', 'backward')) and hit.what == 'inf'
    assert not any(m._forward_hooks or m._forward_pre_hooks for n in (net, mid) for m in n.modules()) and modes() == []


@pytest.mark.parametrize('replay', [find_overflow, probe_flushed])
def test_what_cannot_be_replayed(replay):
    net, batch = sig8()
    for bad, what in ((batch[0], 'Tensor'), ((*batch, 1), 'tuple of 3'), (batch[:1], 'tuple of 1'), (None, 'NoneType'), (dict(x=1, y=2), 'dict')):
        with pytest.raises(ValueError, match=rf'A batch is a pair \(inputs, targets\), not a {what}'): replay(net, bad, cross_entropy)
    for bad in (0, -1., float('inf'), float('nan'), None, '4', True, StaticScaler(4.)):
        with pytest.raises(ValueError, match='A loss scale of .* cannot be: give a finite number above 0'): replay(net, batch, cross_entropy, scale=bad)
    for bad in ('fp8', torch.int64, torch.float64, None, ['fp16']):
        with pytest.raises(ValueError, match="cannot be run again in .*: take 'fp16', 'bf16'"): replay(net, batch, cross_entropy, bad)
    for name, dtype in (('fp16', H), ('bf16', B), ('fp32', torch.float32)):
        assert str(replay(net, list(batch), cross_entropy, name)) == str(replay(net, batch, cross_entropy, dtype, torch.tensor(1.)))
    with pytest.raises(ValueError, match='cannot be run again in'): FlushProbe(lambda: batch, cross_entropy, 'half')
    assert FlushProbe(lambda: batch, cross_entropy, 'bf16').dtype == B


def test_a_mask_is_no_overflow():
    toy = get_toy('char_lm'); lm, text = toy.model(0), next(batches(toy.data(), 4, 1))
    assert find_overflow(lm, text, cross_entropy) is None
    with torch.no_grad(): lm.blocks[1].attn.qkv.weight.mul_(2.**9)
    f = find_overflow(lm, text, cross_entropy)
    assert (f.name, f.direction, f.op, f.what) == ('blocks.1.attn', 'forward', 'bmm', 'inf') and 'blocks.1.attn' in str(f)


class Masked(nn.Module):
    "The logarithm of a mask: minus infinity, which the softmax makes zero"
    def forward(self, x): return (x + (torch.arange(x.shape[1]) < 3).to(x.dtype).log()).softmax(1)


class Clipped(nn.Module):
    "A square root at zero: its gradient is infinite, and the ReLU takes it away"
    def forward(self, x): return x.relu().sqrt()


@pytest.mark.parametrize('layer', [Masked, Clipped])
def test_what_does_no_harm_is_no_overflow(layer):
    torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 8), layer(), nn.Linear(8, 2))
    batch = rand(16, 4), torch.randint(2, (16,))
    assert find_overflow(net, batch, cross_entropy) is None
    with OverflowWatch(net) as watch:
        half_pass(H, 1.)(net, *batch, torch.optim.SGD(net.parameters(), lr=0.), cross_entropy)
        assert watch.step() is None
    assert find_overflow(net, batch, lambda p, y: cross_entropy(p, y)*torch.inf).name == ('1' if layer is Masked else 'the loss')   # a suspect


def test_overflow_watch():
    net, step = relu_mlp(), half_pass(H, 2.**10)
    opt = torch.optim.SGD(net.parameters(), lr=0.)
    xs, start = list(batches(get_toy('cnn').data(), 16, 5)), copy.deepcopy(net.state_dict())
    with OverflowWatch(net) as watch:
        for i,(x, y) in enumerate(xs):
            if i in (2, 4): x = x.clone(); x[0, 0, 4, 4] = 1e5
            h = net[5].register_forward_hook(lambda m, a, o: o*2.**24) if i == 3 else None
            step(net, x, y, opt, cross_entropy); found = watch.step()
            if h: h.remove()
            assert (found is not None) == (i >= 2)
            if i == 2: assert found == watch.first == Overflow('0', 'forward', 'inf', 'activation', 2)      # Flatten hands the input on
            net.load_state_dict(start)
    assert [e.step for e in watch.events] == [2, 3, 4] and watch.events[1].direction == 'forward' and watch.steps == 5
    step(net, *xs[0], opt, cross_entropy)
    assert watch._seen == [] and not any(m._forward_hooks for m in net.modules())
    with OverflowWatch(net) as watch:
        half_pass(H, 2.**40)(net, *xs[0], opt, cross_entropy)
        assert watch.step().direction == 'backward' and watch.step() is None


# ---------------------------------------------------------------- the verdict
def rows(rates, kind='weight_grad', **kw): return [dict(step=i, name=n, kind=kind, flushed=r, **kw) for i,r in enumerate(rates) for n in 'ab']


STORIES = [([.003]*6, 'fine'), ([.0099]*9, 'fine'), ([.05, .06, .06, .07, .08, .09], 'warn'), ([.06]*6, 'watch'), ([.09, .08, .07, .06, .06, .06], 'watch'),
           ([0, 0, 0, .005, .012, .02], 'watch'), ([.02]*5, 'watch'), ([.1]*4, 'warn'), ([1.]*3, 'warn'), ([.5]*2, 'unknown'), ([], 'unknown'), ([0.]*3, 'fine')]


@pytest.mark.parametrize('story, level', STORIES, ids=str)
def test_thresholds(story, level):
    if not story:
        with pytest.raises(ValueError, match='have no step'): early_warning([])
        return
    v = early_warning(rows(story))
    assert v.level == level and v.warns == (level == 'warn') and bool(v.advice) == (level in ('watch', 'warn'))
    assert level == 'unknown' or abs(v.rate - sum(story[-(-(-len(story)//3)):])/(-(-len(story)//3))) < 1e-9


def test_verdict_of_records():
    import pandas as pd
    grow = rows([.05, .06, .06, .07, .08, .09])
    assert early_warning(pd.DataFrame(grow)) == early_warning(grow)
    noise = rows([0.]*6, 'activation') + [dict(r, step=r['step'] + 100, flushed=0., overflow=.1) for r in grow] + rows([float('nan')]*6, 'weight')
    assert early_warning([dict(r, overflow=r.get('overflow', 0.)) for r in grow + noise]).level == 'warn'      # skipped steps do not count
    assert early_warning(grow, high=.5).level == 'watch' and early_warning(grow, low=.5, high=.5).level == 'fine'
    for bad in (dict(low=-1), dict(high=2), dict(low=.2, high=.1)):
        with pytest.raises(ValueError, match='they are shares'): early_warning(grow, **bad)
    with pytest.raises(ValueError, match="stats that include 'flushed'"): early_warning([dict(step=0, name='a', kind='weight_grad', zeros=.1)])
    room = early_warning([dict(r, min=-2.**-10, max=2.**-12, scale=2.**4) for r in grow])
    full = early_warning([dict(r, min=-2.**-10, max=2.**-12, scale=2.**25) for r in grow])
    assert room.advice[0].startswith('a larger loss scale, by up to 2^20') and full.advice[0].startswith('BF16')
    assert not any('larger loss' in a for a in full.advice)
    uneven = early_warning([dict(r, flushed=r['flushed']*2*(r['name'] == 'a')) for r in grow])
    assert any('a scale for each layer: a loses' in a for a in uneven.advice)


def test_plots():
    import matplotlib.pyplot as plt
    recs = rows([.1, .2, .3]) + [dict(step=7, name=n, kind='weight_grad', flushed=float('nan'), overflow=1.) for n in 'ab']
    ax = plot_underflow([dict(r, overflow=r.get('overflow', 0.)) for r in recs])
    assert [t.get_text() for t in ax.get_yticklabels()] == ['b', 'a'] and ax.collections[0].get_array().shape == (2, 4)
    assert ax.collections[0].get_array().mask[:, 3].all()
    assert list(underflow_rates(rows([.1, .2]))) == ['b', 'a'] and list(underflow_rates(rows([.1], 'activation'), 'activation')) == ['a', 'b']
    with pytest.raises(ValueError, match='nothing to draw'): plot_underflow(rows([.1]), kind='moment')
    ax = plot_ridges({'x': log2_hist(rand(100)), 'zeros': log2_hist(torch.zeros(4)), 'bad': log2_hist(torch.tensor([torch.nan]))}, scale=2.**4)
    assert [t.get_text() for t in ax.get_yticklabels()] == ['x', 'zeros', 'bad']
    with pytest.raises(ValueError, match='no histogram'): plot_ridges({})
    plt.close('all')


def test_ridges_of_records():
    import matplotlib.pyplot as plt
    from mpcourse.monitor import TensorCollector
    net, batch = sig8()
    step, opt = MixedStep(scaler := StaticScaler(4.)), torch.optim.SGD(net.parameters(), lr=0.)
    with TensorCollector(net, 1, names='*.weight', kinds=('weight', 'weight_grad'), stats=('norm', 'hist'), scaler=scaler) as c:
        for _ in range(2): step(net, *batch, opt, cross_entropy); c.step()
    names = [n for n,_ in net.named_parameters() if n.endswith('weight')]
    for kind in ('weight', 'weight_grad'):
        ax, last = plot_ridges(c.records, kind=kind), {r['name']: r['hist'] for r in c.records if (r['step'], r['kind']) == (1, kind)}
        assert [t.get_text() for t in ax.get_yticklabels()] == names
        want = plot_ridges({n: last[n] for n in names})
        assert [t.get_text() for t in ax.texts] == [t.get_text() for t in want.texts] and ax.get_xlim() == want.get_xlim()
    without = [{k: v for k,v in r.items() if k != 'hist'} for r in c.records]
    half = without[-len(without)//2:]
    assert plot_ridges([r for r in c.records if r['step'] == 0] + [dict(r, step=1) for r in half])        # the last that has them
    for bad in (without, []):
        with pytest.raises(ValueError, match="no histogram of any weight_grad in these records: collect with stats that include 'hist'"): plot_ridges(bad)
    with pytest.raises(ValueError, match='no histogram of any moment'): plot_ridges(c.records, kind='moment')
    with pytest.raises(ValueError, match='A frame has no histograms'): plot_ridges(c.frame())
    plt.close('all')


# ---------------------------------------------------------------- what a warning does
BAD = Verdict('warn', 'half is gone', ('BF16',))


def learner(scaler, cbs=()):
    from fastai.basics import Learner
    from mpcourse.callback import tensor_dls
    data = get_toy('cnn').data()
    torch.manual_seed(0)
    part = data.train[0][:256], data.train[1][:256]
    return Learner(tensor_dls(part, part, 64), relu_mlp(), loss_func=cross_entropy, lr=.05, cbs=list(cbs)).to_mixed(scaler)


def mixed(learn): return next(cb for cb in learn.cbs if type(cb).__name__ == 'MixedPrecisionCB')


def test_reactions():
    learn, told = learner(StaticScaler(4.)), []
    assert not any(act_on(Verdict(l, ''), learn, 'raise') for l in ('fine', 'watch', 'unknown'))
    with pytest.warns(UserWarning, match='half is gone'): assert act_on(BAD, learn, 'log')
    with pytest.raises(FloatingPointError, match='half is gone\n- BF16'): act_on(BAD, learn, 'raise')
    assert act_on(BAD, learn, lambda v, l: told.append((v, l))) and told == [(BAD, learn)]
    for bad in ('BF16!', None, 7):
        with pytest.raises(ValueError, match='on_warn cannot be'): known_reaction(bad)
    learn.remove_cb(mixed(learn))
    with pytest.raises(ValueError, match='to_mixed'): act_on(BAD, learn, 'bf16')


@pytest.mark.parametrize('new, when', [('bf16', 'after_step'), ('bf16', 'after_batch'), (StaticScaler(2.**8), 'after_step'), (StaticScaler(2.**8), 'after_batch')], ids=str)
def test_switching_amid_a_fit(new, when):
    from fastai.basics import Callback
    from mpcourse.callback import quiet_fit
    dtypes = []
    class Switch(Callback):
        def after_pred(self): dtypes.append(self.learn.model[1]._forward_out)
    def react(cb):
        if cb.learn.iter == 1 and cb.learn.training: act_on(BAD, cb.learn, new)
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
    with pytest.raises(ValueError, match="BF16 has FP32's range"): cb.switch(StaticScaler(2.), 'bf16')
    with pytest.raises(ValueError, match='give a loss scaler'): cb.switch()


# ---------------------------------------------------------------- with the collector and its callback
@pytest.mark.parametrize('how', ['exact', 'probe'])
def test_the_collector_tells_the_same(how):
    from mpcourse.monitor import TensorCollector
    net, batch = sig8()
    step, opt = MixedStep(scaler := StaticScaler(4.)), torch.optim.SGD(net.parameters(), lr=0.)
    flush = FlushProbe(lambda: batch, cross_entropy) if how == 'probe' else count_flushed()
    with TensorCollector(net, 2, kinds=('weight_grad', 'activation_grad'), stats=('zeros', 'flushed'), scaler=scaler, flush=flush) as c:
        for _ in range(3): step(net, *batch, opt, cross_entropy); c.step()
        assert modes() == [] and sorted({r['step'] for r in c.records}) == [0, 2]
        want = probe_flushed(net, batch, cross_entropy, scale=4.)
        for r in c.records: assert abs(r['flushed'] - want[r['name'], r['kind']].share.item()) < .02, r
        assert {r['name'] for r in c.records if r['flushed'] > .1} & {'1.weight'}


@pytest.mark.parametrize('how', ['exact', 'probe'])
def test_what_the_cast_of_a_weight_flushes(how):
    import matplotlib.pyplot as plt
    from mpcourse.monitor import TensorCollector
    net, batch = sig8()
    with torch.no_grad(): net[3].weight[:, ::4] = 2.**-30
    step, opt = MixedStep(scaler := StaticScaler(4.)), torch.optim.SGD(net.parameters(), lr=0.)
    flush = FlushProbe(lambda: batch, cross_entropy) if how == 'probe' else count_flushed()
    with TensorCollector(net, 1, kinds=('weight', 'weight_grad'), stats=('zeros', 'flushed'), scaler=scaler, flush=flush) as c:
        for _ in range(2): step(net, *batch, opt, cross_entropy); c.step()
    for r in c.records:
        if r['kind'] != 'weight': continue
        p = net.get_parameter(r['name']).detach()
        assert r['flushed'] == pytest.approx(count_zeros(p, p.half()).share.item()), r
    told = underflow_rates(c.frame(), 'weight')
    assert told['3.weight'].tolist() == [.25, .25] and told['1.weight'].max() == 0
    assert plot_underflow(c.frame(), kind='weight').collections[0].get_array().shape == (told.shape[1], 2)
    plt.close('all')


def test_a_weights_cast_counts_also_after_its_update():
    "What its gradient lost on the way is no matter of the weight"
    x, w = torch.full((4,), 2.**-14, dtype=H), torch.tensor([2.**-30, 1., 1., 1.])
    with count_flushed() as c: w += (x*x).float()
    assert c.zeros(w).share == 0 and c.share('', 'weight', w) == .25
    assert c.share('', 'weight', torch.zeros(3)) == 0 and count_flushed().share('', 'weight', w).isnan()      # nothing narrow was seen


def test_a_collection_given_up_leaves_no_mode():
    from mpcourse.monitor import TensorCollector
    net, batch = sig8()
    c = TensorCollector(net, 1, kinds=('weight_grad',), stats=('flushed',), flush=count_flushed())
    with fast_half(): net.half()(batch[0].half())
    assert len(modes()) == 1
    c.close()
    assert modes() == []
    with pytest.raises(ValueError, match="flush cannot be 'exactly': give count_flushed"): TensorCollector(net, flush='exactly')
    with pytest.raises(ValueError, match="flush cannot be 'probe'"): TensorCollector(net, flush='probe')


@pytest.mark.parametrize('how', ['exact', 'probe'])
def test_monitor_cb_acts_once(how):
    from mpcourse.callback import quiet_fit
    from mpcourse.underflow import MonitorCB
    told = []
    watcher = MonitorCB(every=1, kinds=('weight_grad',), stats=('flushed', 'overflow'), flush=how, on_warn=lambda v, l: told.append((v, l.iter)))
    learn = learner(StaticScaler(2.**-20), [watcher])
    quiet_fit(learn, 2)
    assert len(told) == 1 and told[0][1] == 2 and told[0][0] is watcher.warning and modes() == []
    with pytest.raises(ValueError, match='on_warn cannot be'): MonitorCB(on_warn='shout')


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


@pytest.mark.parametrize('again', [False, True], ids=['', 'checkpointed'])
def test_under_autocast(again):
    "The FP32 copies of half gradients keep their record, also where a block is computed twice: as the probe says"
    from torch.utils.checkpoint import checkpoint
    (net, (x, y)), got = sig8(), {}
    with count_flushed() as c, TensorHooks(net, lambda n, k, t: got.__setitem__((n, k), c.share(n, k, t).item()), 'weight_grad'), fast_half():
        with torch.autocast('cpu', H):
            out = checkpoint(net[:8], x, use_reentrant=False) if again else net[:8](x)
            loss = cross_entropy(net[8:](out).float(), y)
        loss.backward()
    want = probe_flushed(net, (x, y), cross_entropy, kinds='weight_grad')
    assert not c.untold and got['1.weight', 'weight_grad'] == 1
    for k in got: assert abs(got[k] - want[k].share.item()) < .02, k


def test_a_recurrent_layer():
    class Last(nn.Module):
        def __init__(self): super().__init__(); self.rnn, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        def forward(self, x): return self.out(self.rnn(x)[0][:, -1])
    torch.manual_seed(0)
    net, batch = Last(), (rand(4, 5, 8), torch.tensor([0, 1, 2, 0]))
    found = probe_of(net, batch, scale=2.**-12, kinds='weight_grad')
    assert found['rnn.weight_hh_l0', 'weight_grad'][0] > 0
    with count_flushed() as c, fast_half(): y = net.half()(batch[0].half())
    assert not c.untold and counted(c, y) == (0, 0)
