"""Masters against a float64 reference; half weights within forward against a model that is half; training states that are killed, cut and foreign."""
import copy, inspect, os, pickle, subprocess, sys, warnings

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from mpcourse.tensorcore import fast_half
from mpcourse.formats import same_bits
from mpcourse.half import model_to_half
from mpcourse.master import HalfWeights, get_master, to_master_grads, to_model_params, exchange_params
import mpcourse.master as M

pytestmark = pytest.mark.library
H, F32 = torch.float16, torch.float32
DEVICES = ['cpu', 'cuda'][:1 + torch.cuda.is_available()]


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


def all_same(xs, ys):
    xs, ys = list(xs), list(ys)
    return len(xs) == len(ys) and all(same_bits(a.detach(), b.detach()) for a,b in zip(xs, ys))


def small(seed=0, device='cpu'):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def quiet(f, *args, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return f(*args, **kw)


# --- masters ---

def test_masters_follow_groups_and_leave_out_the_frozen():
    net = small()
    net[0].bias.requires_grad_(False)
    opt = torch.optim.SGD([dict(params=[net[0].weight, net[0].bias], lr=.1), dict(params=list(net[1].parameters())),
                           dict(params=[net[3].weight], lr=.3)], lr=.2)
    for what in (opt, opt.param_groups, [g['params'] for g in opt.param_groups]):
        ps, ms = get_master(what)
        assert [[id(p) for p in g] for g in ps] == [[id(net[0].weight)], [id(p) for p in net[1].parameters()], [id(net[3].weight)]]
        assert all(same_bits(p.data, m.data) and m.data_ptr() != p.data_ptr() and m.requires_grad and m.is_leaf
                   for a,b in zip(ps, ms) for p,m in zip(a, b))
    assert get_master(list(net.parameters()))[0][0][1] is net[1].weight


def test_the_copy_is_taken_before_rounding():
    net = small()
    _, (early,) = get_master(list(net.parameters()))
    model_to_half(net)
    with pytest.warns(UserWarning, match='before the model is put in half'): _, (late,) = get_master(list(net.parameters()))
    assert all(m.dtype is F32 for m in early + late)
    assert same_bits(early[0].data, small()[0].weight.data) and not same_bits(early[0].data, late[0].data)


def test_wide_parameters_stay_wide():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64)/3)
    assert same_bits(get_master([p])[1][0][0].data, p.data)


@pytest.mark.parametrize('ps', [[], [[], []], [nn.Parameter(torch.ones(1), requires_grad=False)]])
def test_nothing_to_train(ps):
    with pytest.raises(ValueError, match='requires_grad'): get_master(ps)


def test_a_flat_master_joins_what_has_the_same_group():
    one, half = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).half())
    ps, ms = quiet(get_master, [[one, half], [], [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(()))]], flat=True)
    assert [len(g) for g in ms] == [1, 0, 1] and ms[2][0].shape == (7,) and ms[0][0].dtype is F32
    with torch.no_grad(): ms[0][0].copy_(torch.tensor([1.0001, 1.0001]))
    to_model_params(ps, ms, flat=True)
    assert same_bits(one.data, torch.tensor([1.0001])) and half.dtype is H and half == 1


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('as_tensor', [False, True])
@pytest.mark.parametrize('k', [0, -15, 3])
def test_gradients_go_up_and_are_unscaled_in_fp32(device, flat, as_tensor, k):
    net = small(device=device)
    ps, ms = get_master([list(net[0].parameters()), list(net[1:].parameters())], flat)
    model_to_half(net)
    for p in net.parameters(): p.grad = (torch.randn_like(p.float())*2.**-10).to(p.dtype)
    net[3].bias.grad = None
    for step in range(2):
        to_master_grads(ps, ms, torch.tensor(2.**k, device=device) if as_tensor else 2.**k, flat)
        for g,m in zip(ps, ms):
            got = M._unflatten_dense_tensors(m[0].grad, g) if flat else [x.grad for x in m]
            for p,x in zip(g, got):
                if p is net[3].bias: assert x is None or flat and not x.any()
                else: assert same_bits(x, p.grad.float()*2.**k)
        if step == 0: net[0].bias.grad, net[3].bias.grad = None, torch.ones_like(net[3].bias)
        if step == 0: to_master_grads(ps, ms, 1., flat); net[3].bias.grad = None; net[0].bias.grad = torch.ones_like(net[0].bias)


def test_small_gradients_survive():
    p = nn.Parameter(torch.ones(1))
    ps, ms = get_master([p])
    p.data = p.data.half()
    p.grad = torch.full_like(p, 3e-4)
    to_master_grads(ps, ms, 2.**-20)
    assert ms[0][0].grad.item() == p.grad.item()*2.**-20 and (p.grad*2.**-20).item() == 0


@pytest.mark.parametrize('flat', [False, True])
def test_weights_go_down_rounded_once(flat):
    net = small()
    ps, ms = get_master([list(net.parameters())], flat)
    model_to_half(net)
    with torch.no_grad(): ms[0][0].mul_(1.01)
    to_model_params(ps, ms, flat)
    for p,m in zip(ps[0], M._unflatten_dense_tensors(ms[0][0], ps[0]) if flat else ms[0]): assert same_bits(p.data, m.data.to(p.dtype))
    assert net[0].weight.dtype is H and net[1].weight.dtype is F32


def test_what_does_not_belong_together_is_refused():
    net = small()
    ps, ms = get_master([list(net.parameters())])
    _, flat = get_master([list(net.parameters())], flat=True)
    for f in (to_master_grads, to_model_params):
        for a,b,kw in ((ps, flat, {}), (ps, ms, dict(flat=True)), (ps, ms*2, {}), (ps, [ms[0][:-1]], {})):
            with pytest.raises((ValueError, RuntimeError)): f(a, b, **kw)


# --- the update against float64, with a bound from running error analysis: every FP32 operation adds u·|its result| ---

U = 2.**-24
try: import fastai.optimizer as fastai
except ImportError: fastai = None
KINDS = ['sgd', 'adam', 'adamw'] + ['fastai sgd', 'fastai adam']*(fastai is not None)


class Ref:
    "A weight and an optimizer's state in float64, each with a bound of what FP32 may have lost"
    def __init__(self, w, lr, wd, mom=.9, betas=(.9, .999), eps=1e-8):
        self.w, self.e, self.lr, self.wd, self.mom, self.betas, self.eps, self.t = w.double(), torch.zeros_like(w).double(), lr, wd, mom, betas, eps, 0

    def decay(self): self.w, self.e = self.w*(1 - self.lr*self.wd), self.e + 3*U*self.w.abs()

    def sgd(self, g, decoupled):
        if decoupled: self.decay()
        wd = 0 if decoupled else self.wd
        d = g + wd*self.w
        e = wd*self.e + 2*U*(wd*self.w).abs() + U*(d.abs() + wd*self.e)
        if self.t == 0: self.b, self.eb = d, e
        else:
            self.eb = self.mom*self.eb + e + 2*U*(self.mom*self.b).abs()
            self.b = self.mom*self.b + d
            self.eb = self.eb + U*self.b.abs()
        self.move(self.lr*self.b, self.lr*self.eb + 2*U*self.lr*self.b.abs())

    def adam(self, g, decoupled):
        b1, b2 = self.betas
        if decoupled: self.decay()
        if self.t == 0: self.m, self.v, self.em = torch.zeros_like(g), torch.zeros_like(g), torch.zeros_like(g)
        self.t += 1
        self.em = b1*self.em + 4*U*(self.m.abs() + g.abs())
        self.m, self.v = b1*self.m + (1 - b1)*g, b2*self.v + (1 - b2)*g*g
        rel = 6*U*self.t + 16*U                              # of v, which is a sum of positive terms, and of the quotient
        step, root = self.lr/(1 - b1**self.t), (self.v/(1 - b2**self.t)).sqrt() + self.eps
        up = step*self.m/root
        self.move(up, step*self.em/root*(1 + rel) + up.abs()*rel)

    def move(self, up, e):
        self.w, self.e = self.w - up, self.e + e
        self.e = 1.01*(self.e + U*self.w.abs() + U*up.abs())
        if not hasattr(self, 'm'): self.t += 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), widths=st.lists(st.integers(1, 9), min_size=2, max_size=4), k=st.integers(-4, 16),
       norm=st.booleans(), kind=st.sampled_from(KINDS))
def test_master_update_is_that_of_float64(seed, widths, k, norm, kind):
    torch.manual_seed(seed)
    layers = [l for a,b in zip(widths, widths[1:]) for l in [nn.Linear(a, b)] + [nn.LayerNorm(b)]*norm + [nn.Tanh()]]
    net, x = nn.Sequential(*layers), torch.randn(6, widths[0]).half()
    lr, wd = .05, .125
    opt = {'sgd': lambda ps: torch.optim.SGD(ps, lr=lr, momentum=.9, weight_decay=wd), 'adam': lambda ps: torch.optim.Adam(ps, lr=lr),
           'adamw': lambda ps: torch.optim.AdamW(ps, lr=lr, weight_decay=wd),
           'fastai sgd': lambda ps: fastai.SGD(ps, lr=lr, mom=.9, wd=wd), 'fastai adam': lambda ps: fastai.Adam(ps, lr=lr, wd=wd)}[kind](list(net.parameters()))
    refs = [Ref(p.detach(), lr, wd, **(dict(betas=(.9, .99), eps=1e-5) if kind == 'fastai adam' else {})) for p in net.parameters()]
    ps, ms = get_master(opt)
    model_to_half(net)
    exchange_params(opt, ps, ms)
    for _ in range(4):
        net.zero_grad()
        with fast_half(): (net(x).float().square().mean()*2.**k).backward()
        assume(all(p.grad.isfinite().all() for p in net.parameters()))      # overflow is chapter 08's
        to_master_grads(ps, ms, 2.**-k)
        for r,p in zip(refs, net.parameters()):
            g = p.grad.double()*2.**-k
            (r.sgd if 'sgd' in kind else r.adam)(g, kind not in ('sgd', 'adam'))
        opt.step()
        to_model_params(ps, ms)
        for r,p,m in zip(refs, ps[0], ms[0]):
            off = (m.double() - r.w).abs()
            assert (off <= r.e).all(), f'{kind}: off by {off.max():.3g}, bound {r.e.max():.3g}'
            assert r.e.max() < 1e-4 and same_bits(p.data, m.data.to(p.dtype))


# --- the optimizer moves the masters ---

def fastai_opt(name):
    fo = pytest.importorskip('fastai.optimizer')
    if name == 'wrapped': return lambda groups: fo.OptimWrapper(groups, torch.optim.AdamW, lr=.01)
    return {'sgd': lambda groups: fo.SGD(groups, lr=.05, mom=.9, wd=.01), 'adam': lambda groups: fo.Adam(groups, lr=.01, wd=.01)}[name]


OPTS = {'sgd': lambda gs: torch.optim.SGD([dict(params=gs[0], lr=.05), dict(params=gs[1], weight_decay=.1)], lr=.1, momentum=.9),
        'adam': lambda gs: torch.optim.Adam([dict(params=g) for g in gs], lr=.01, amsgrad=True),
        'adamw': lambda gs: torch.optim.AdamW([dict(params=g) for g in gs], lr=.01),
        'fused': lambda gs: torch.optim.AdamW([dict(params=g) for g in gs], lr=.01, fused=True),
        'nadam': lambda gs: torch.optim.NAdam([dict(params=g) for g in gs], lr=.01),
        'adagrad': lambda gs: torch.optim.Adagrad([dict(params=g) for g in gs], lr=.01)}
every_opt = pytest.mark.parametrize('make', [*OPTS, 'fastai sgd', 'fastai adam', 'fastai wrapped'])


def make_opt(make, net):
    gs = [list(net[0].parameters()), list(net[1:].parameters())]
    return (OPTS[make] if make in OPTS else fastai_opt(make.removeprefix('fastai ')))(gs)


def plain_steps(net, opt, n):
    for _ in range(n):
        opt.zero_grad()
        net(torch.randn(5, 8)).square().mean().backward()
        opt.step()


def master_steps(net, opt, n):
    ps, ms = get_master(opt)
    exchange_params(opt, ps, ms)
    for _ in range(n):
        for p in net.parameters(): p.grad = None
        net(torch.randn(5, 8)).square().mean().backward()
        to_master_grads(ps, ms)
        opt.step()
        to_model_params(ps, ms)
    exchange_params(opt, ms, ps)


@every_opt
def test_state_moves_over_and_back(make):
    "With masters and back, in the middle of a training: not a bit differs from the training without"
    a, b = small(), small()
    oa, ob = make_opt(make, a), make_opt(make, b)
    before = [[id(p) for p in g] for g in M.group_params(ob)]
    for net,opt,mid in ((a, oa, plain_steps), (b, ob, master_steps)):
        torch.manual_seed(1)
        plain_steps(net, opt, 3)
        mid(net, opt, 3)
        plain_steps(net, opt, 3)
    assert all_same(a.parameters(), b.parameters())
    assert [[id(p) for p in g] for g in M.group_params(ob)] == before
    assert {id(p) for p in M.inner_optimizer(ob).state} == {id(p) for p in b.parameters()}


@every_opt
def test_frozen_parameters_keep_their_place(make):
    net = small()
    net[1].requires_grad_(False)
    opt = make_opt(make, net)
    before = [[id(p) for p in g] for g in M.group_params(opt)]
    held = net[1].weight.detach().clone()
    ps, ms = get_master(opt)
    exchange_params(opt, ps, ms)
    assert [id(p) for p in M.group_params(opt)[1]][:2] == before[1][:2] and [len(g) for g in M.group_params(opt)] == [2, 4]
    with pytest.raises(ValueError, match='does not hold these parameters'): exchange_params(opt, [[nn.Parameter(torch.ones(1))], []], [[nn.Parameter(torch.ones(1))], []])
    exchange_params(opt, ms, ps)
    master_steps(net, opt, 2)
    assert [[id(p) for p in g] for g in M.group_params(opt)] == before and same_bits(net[1].weight.data, held)


def test_masters_are_handed_over_once():
    net = small()
    opt = make_opt('sgd', net)
    groups = get_master(opt)
    exchange_params(opt, *groups)
    with pytest.raises(ValueError, match='has masters by now'): exchange_params(opt, *groups)


def test_half_state_becomes_fp32():
    p = nn.Parameter(torch.ones(3).half())
    opt = torch.optim.SGD([p], lr=.1, momentum=.9)
    p.grad = torch.ones_like(p)
    opt.step()
    exchange_params(opt, *quiet(get_master, opt))
    (state,) = opt.state.values()
    assert state['momentum_buffer'].dtype is F32


# --- half weights within forward ---

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight, self.again = self.tok.weight, self.head
    def forward(self, x): return self.again(self.head(self.tok(x.abs().long() % 12)) @ self.tok.weight)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.d = nn.ParameterList([torch.randn(8), torch.randn(8)]), nn.ParameterDict({'u': torch.randn(8)})
        self.w, self.none = nn.Parameter(torch.randn(8)), None
        self.register_parameter('nothing', None)
    def forward(self, x): return x*self.a[0] + self.a[1]*self.d['u'] + self.w


class Rnn(nn.Module):
    def __init__(self, kind): super().__init__(); self.rnn = kind(8, 6, num_layers=2, bidirectional=True, batch_first=True)
    def forward(self, x): return self.rnn(x[:, None].expand(-1, 3, -1))[0]


class Mha(nn.Module):
    def __init__(self): super().__init__(); self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
    def forward(self, x): return self.mha(x[None], x[None], x[None])[0]


def conv_bn(): return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
def shared():
    lin = nn.Linear(8, 8)
    return nn.Sequential(lin, nn.Tanh(), lin)


MODELS = {'mlp': small, 'conv': conv_bn, 'lstm': lambda: Rnn(nn.LSTM), 'gru': lambda: Rnn(nn.GRU), 'mha': Mha, 'tied': Tied, 'lists': Lists,
          'shared': shared, 'root': lambda: nn.Linear(8, 3), 'encoder': lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
          'weight_norm': lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 4)))}
every_model = pytest.mark.parametrize('name', MODELS)


def made(name, device='cpu'):
    torch.manual_seed(0)
    return MODELS[name]().to(device)


def traces(model):
    "All that lending might leave behind"
    return [(m, {k: id(v) for k,v in m.__dict__.items() if not isinstance(v, dict)}, {k: id(v) for k,v in m._parameters.items()},
             {k: id(v) for k,v in m._buffers.items()}, list(m._forward_hooks), list(m._forward_pre_hooks), list(m._state_dict_hooks),
             set(m.__dict__)) for m in model.modules()]


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('dtype', [H, torch.bfloat16])
@every_model
def test_half_weights_compute_what_a_half_model_computes(name, dtype, device):
    net, twin, x = made(name, device), model_to_half(made(name, device), dtype), torch.randn(5, 8, device=device).to(dtype)
    before, hw, weights = traces(net), HalfWeights(net, dtype), [p.detach().clone() for p in net.parameters()]
    with hw: out = net(x); out.float().square().mean().backward()
    want = twin(x)
    want.float().square().mean().backward()
    assert out.dtype is dtype and same_bits(out.detach(), want.detach())
    for (n,p),q in zip(net.named_parameters(), twin.parameters()): assert p.grad.dtype is F32 and same_bits(p.grad, q.grad.float()), n
    assert traces(net) == before and all_same(net.parameters(), weights)
    assert all(same_bits(a, b.to(a.dtype)) for a,b in zip(net.buffers(), twin.buffers()))
    net.eval(), twin.eval()
    for ctx in (torch.no_grad(), torch.inference_mode()):
        with ctx, hw: out = net(x)
        with ctx: assert same_bits(out, twin(x))
    with torch.no_grad(): assert net(x.float()).dtype is F32


@every_model
def test_only_forward_sees_half(name):
    "Not even a state dict that is taken within it"
    net, x = made(name), torch.randn(5, 8).half()
    ps, sd, got = list(net.parameters()), {k: v.clone() for k,v in net.state_dict().items() if 'running' not in k and 'num' not in k}, {}
    def look(m, args, out):
        got.update({k: v.clone() for k,v in net.state_dict().items()})
        assert [id(p) for p in net.parameters()] == [id(p) for p in ps] and all(p.is_leaf and p.dtype is F32 for p in ps)
    list(net.modules())[-1].register_forward_hook(look)
    with HalfWeights(net): net(x); look(net, None, None)
    assert all(same_bits(got[k], sd[k]) for k in sd)


def test_gradients_add_up_in_fp32_over_micro_batches():
    net, xs, hw = small(), torch.randn(4, 5, 8).half(), None
    hw, each = HalfWeights(net), []
    for x in xs:
        with hw: g = torch.autograd.grad(net(x).float().mean(), list(net.parameters()))
        each.append(g)
    for x in xs:
        with hw: net(x).float().mean().backward()
    want = [sum(gs[1:], gs[0]) for gs in zip(*each)]
    assert all_same([p.grad for p in net.parameters()], want)


def test_frozen_and_unused():
    net = small()
    net[0].requires_grad_(False)
    net.unused = nn.Linear(2, 2)
    with HalfWeights(net):
        net[3](net[1](net[0](torch.randn(2, 8).half()))).float().sum().backward()
    assert net[0].weight.grad is None and net.unused.weight.grad is None and net[3].weight.grad is not None
    net[0].requires_grad_(True)
    with HalfWeights(net): net[0](torch.randn(2, 8).half()).sum().backward()
    assert net[0].weight.grad.dtype is F32


def test_installed_and_removed():
    net, x = small(), torch.randn(2, 8).half()
    before, hw = traces(net), HalfWeights(net)
    hw.remove()
    assert traces(net) == before and hw.install() is hw and hw.install() is hw
    assert net(x).dtype is H
    with torch.no_grad(): net[0].weight.add_(1)                 # between two passes: the next one casts anew
    twin = model_to_half(copy.deepcopy(net))
    assert same_bits(net(x).detach(), twin(x).detach())
    hw.remove(), hw.remove()
    assert traces(net) == before and net(x.float()).dtype is F32
    with hw: assert net(x).dtype is H
    assert traces(net) == before


def test_another_pair_of_half_weights_inside():
    net, x = small(), torch.randn(2, 8)
    before = traces(net)
    with HalfWeights(net):
        with HalfWeights(net): net(x.half()).sum().backward()
        assert net(x.half()).dtype is H
    assert all(p.grad.dtype is F32 for p in net.parameters())
    assert traces(net) == before


class Bomb(nn.Module):
    "Raises in a layer that is deep inside"
    def __init__(self, error): super().__init__(); self.lin, self.error = nn.Linear(8, 8), error
    def forward(self, x): raise self.error


@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt])
def test_exceptions_leave_nothing_behind(error, monkeypatch):
    net = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), Bomb(error))
    net[1].register_forward_hook(lambda m, a, out: out[0])
    fresh = traces(net)
    hw = HalfWeights(net).install()
    before = traces(net)
    with pytest.raises(error): net(torch.randn(2, 8).half())
    assert traces(net) == before and not hw.active and not torch.is_autocast_enabled('cpu')
    real, n = M._shadow, [0]
    def failing(modules, names, dtype, put):
        def counted(*args):
            n[0] += 1
            if n[0] == 3: raise error
            put(*args)
        real(modules, names, dtype, counted)
    monkeypatch.setattr(M, '_shadow', failing)
    with pytest.raises(error): net(torch.randn(2, 8).half())
    monkeypatch.undo()
    assert traces(net) == before and not hw.active
    hw.remove()
    assert traces(net) == fresh
    with pytest.raises(error), hw: raise error
    assert traces(net) == fresh


def test_buffers_stay_fp32_and_meet_half_numbers():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            for n,v in dict(kept=torch.rand(8), inplace=torch.ones(8)/3, replaced=torch.ones(8), grows=torch.zeros(1)).items(): self.register_buffer(n, v)
            self.register_buffer('none', None)
        def forward(self, x):
            with torch.no_grad(): self.inplace[0] += 1
            self.replaced = self.replaced*.5
            self.grows = torch.cat([self.grows, self.grows.new_ones(1)])
            return self.out(self.lin(x)*self.kept + self.replaced)
    net = Buffers()
    kept, inplace, held = net.kept, net.inplace, net.inplace.clone()
    with HalfWeights(net): out = [net(torch.randn(2, 8).half()) for _ in range(2)][1]
    assert out.dtype is H and net.kept is kept and net.inplace is inplace
    assert same_bits(inplace[1:], held[1:]) and same_bits(inplace[0], held[0] + 1 + 1)
    assert (net.replaced == .25).all() and net.grows.tolist() == [0, 1, 1] and {b.dtype for b in net.buffers()} == {F32}


class Positions(nn.Module):
    def __init__(self): super().__init__(); self.register_buffer('pe', torch.linspace(-1, 1, 8))
    def forward(self, x): return x + self.pe


@pytest.mark.parametrize('dtype', [H, torch.bfloat16])
def test_a_table_that_is_added_hands_half_on(dtype):
    net, seen = nn.Sequential(nn.Linear(8, 8), Positions(), nn.LayerNorm(8), nn.Bilinear(8, 8, 2)), []
    net[3].forward = lambda h: nn.functional.bilinear(h, h, net[3].weight, net[3].bias)      # on no list of autocast's
    net[1].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    twin = model_to_half(copy.deepcopy(net[:3]), dtype)
    x = torch.randn(2, 8).to(dtype)
    with HalfWeights(net, dtype): out, h = net(x), net[:3](x)
    assert out.dtype is dtype and set(seen) == {dtype} and same_bits(h.detach(), twin(x).detach())


def test_what_autocast_knows_not_is_cast_at_the_layer():
    "An FP32 input of a layer with half weights, for a product on no list of autocast's"
    class Twice(nn.Bilinear):
        def forward(self, x): return super().forward(x, x)
    with HalfWeights(net := nn.Sequential(Twice(8, 8, 4))): assert net(torch.randn(2, 8)).dtype is H


def test_spectral_norm_keeps_its_vectors():
    net = parametrizations.spectral_norm(nn.Linear(8, 8), eps=1e-4)
    u = net.parametrizations.weight[0]._u
    held = u.clone()
    with fast_half(), HalfWeights(net): net(torch.randn(2, 8).half()).float().sum().backward()
    assert net.parametrizations.weight[0]._u is u and u.dtype is F32 and not same_bits(u, held) and u.isfinite().all()
    assert net.parametrizations.weight.original.grad.dtype is F32


def test_hooks_of_others_fire():
    net, seen = small(), []
    net[0].register_forward_pre_hook(lambda m, a: seen.append(('pre', a[0].dtype)))
    net[0].register_forward_hook(lambda m, a, o: seen.append(('forward', o.dtype)))
    net[0].register_full_backward_hook(lambda m, gi, go: seen.append(('backward', go[0].dtype)))
    net[0].weight.register_hook(lambda g: seen.append(('gradient', g.dtype)))
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(('accumulated', p.grad.dtype)))
    hw = HalfWeights(net)
    for _ in range(2):
        with hw: net(torch.randn(2, 8).half().requires_grad_()).sum().backward()
    once = [('pre', H), ('forward', H), ('backward', H), ('gradient', F32), ('accumulated', F32)]
    assert sorted(map(str, seen)) == sorted(map(str, once*2))


@pytest.mark.parametrize('reentrant', [False, True])
def test_checkpointed_activations(reentrant):
    "The whole model and a block inside, computed a second time within backward"
    class Blocks(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.a, self.b, self.head = nn.Linear(8, 8), small(), nn.Linear(4, 2)
        def forward(self, x, how=None):
            h = self.a(x)
            return self.head(self.b(h) if how is None else checkpoint(self.b, h, use_reentrant=how))
    x = torch.randn(5, 8).half().requires_grad_()
    def grads(f):
        net = Blocks()
        with HalfWeights(net): f(net).float().square().mean().backward()
        return [p.grad for p in net.parameters()]
    want = grads(lambda net: net(x))
    assert all_same(want, grads(lambda net: net(x, reentrant)))
    assert all_same(want, grads(lambda net: checkpoint(net, x, use_reentrant=reentrant)))


@pytest.mark.parametrize('reentrant', [False, True])
def test_a_checkpointed_function_of_a_weight(reentrant):
    "Computed again outside every forward, where the weight is FP32: autocast, which checkpoint restores, casts it"
    class Own(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.w = nn.Parameter(torch.randn(8, 8))
        def forward(self, x, how=None):
            def f(x): return F.linear(x, self.w).tanh()
            return f(x) if how is None else checkpoint(f, x, use_reentrant=how)
    a, b, x = Own(), Own(), torch.randn(5, 8).half().requires_grad_()
    with HalfWeights(a): a(x).float().square().mean().backward()
    with HalfWeights(b): b(x, reentrant).float().square().mean().backward()
    assert same_bits(a.w.grad, b.w.grad)


def test_two_passes_before_one_backward():
    a, b, x, y = small(), small(), torch.randn(5, 8).half(), torch.randn(5, 8).half()
    with HalfWeights(a): (a(x).float().square().mean() + a(y).float().square().mean()).backward()
    with HalfWeights(b):
        for v in (y, x): b(v).float().square().mean().backward()
    assert all_same([p.grad for p in a.parameters()], [p.grad for p in b.parameters()])


class Writer(nn.Module):
    "Generates by calling its parts, not itself"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8)), nn.Linear(8, 8)
    def forward(self, ids): return self.head(self.body(ids))
    def generate(self, ids, n):
        for _ in range(n): ids = torch.cat([ids, self.head(self.body(ids)[:, -1:]).argmax(-1)], 1)
        return ids


def test_parts_that_are_called_directly():
    net, twin, ids = Writer(), model_to_half(Writer()), torch.tensor([[1, 2]])
    with HalfWeights(net):
        assert torch.equal(net.generate(ids, 5), twin.generate(ids, 5)) and str(inspect.signature(net.forward)) == '(ids)'
        h = net.body(ids)
        assert h.dtype is H and same_bits(h.detach(), twin.body(ids).detach()) and net.forward(ids).dtype is H
        net.head(h).float().sum().backward()
    assert all(p.grad.dtype is F32 for p in net.parameters())


def test_functional_call_reaches_the_given_tensors():
    net, x = small(), torch.randn(5, 8).half()
    given = {n: p.detach().clone().requires_grad_() for n,p in net.named_parameters()}
    with HalfWeights(net):
        torch.func.functional_call(net, given, (x,)).float().square().mean().backward()
        net(x).float().square().mean().backward()
    assert all_same([g.grad for g in given.values()], [p.grad for p in net.parameters()])


def test_a_layer_that_is_replaced_later():
    net, x = small(), torch.randn(5, 8).half()
    with HalfWeights(net):
        net[3] = nn.Linear(16, 5)
        out = net(x)
        out.float().sum().backward()
    assert out.dtype is H and out.shape == (5, 5) and net[3].weight.grad.dtype is F32 and 'forward' not in vars(net[3])


@pytest.mark.parametrize('how', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
@every_model
def test_a_copy_is_fp32_and_on_its_own(how, name):
    if name == 'weight_norm' and how is not copy.deepcopy: pytest.skip('PyTorch does not pickle parametrized modules')
    net, x = made(name).eval(), torch.randn(5, 8)
    with HalfWeights(net):
        twin = how(net)
        assert net(x.half()).dtype is H
    assert first(twin(x)).dtype is F32 and same_bits(first(twin(x)).detach(), first(net(x)).detach())
    with torch.no_grad():
        for p in twin.parameters(): p.zero_()
    assert not same_bits(first(twin(x)).detach(), first(net(x)).detach()) and all(p.abs().max() > 0 for p in net.parameters() if p.dim() > 1)
    with HalfWeights(twin): assert first(twin(x.half())).dtype is H


def first(out): return out[0] if isinstance(out, tuple) else out


class Copied(nn.Linear):
    root = [None, 0]
    def forward(self, x):
        for how in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match='within its forward'): how(self.root[0])
            self.root[1] += 1
        return super().forward(x)


def test_no_copy_is_taken_within_forward():
    net = Copied.root[0] = nn.Sequential(Copied(8, 8))
    with HalfWeights(net): net(torch.randn(2, 8).half())
    assert Copied.root[1] == 2


@pytest.mark.parametrize('dtype', [H, torch.bfloat16, torch.float64])
def test_weights_that_are_not_fp32_are_refused(dtype):
    with pytest.raises(ValueError, match=f'0.weight is {dtype}'): HalfWeights(small().to(dtype))
    if dtype is not torch.float64:
        with pytest.raises(ValueError, match=f'0.weight is {dtype}'): HalfWeights(model_to_half(small(), dtype))


def test_a_transformer_with_a_padding_mask_evaluates():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    mask, x = torch.zeros(2, 5, dtype=torch.bool), torch.randn(2, 5, 8)
    mask[:, 3:] = True
    with torch.no_grad():
        want = net(x, src_key_padding_mask=mask)
        with HalfWeights(net): got = net(x.half(), src_key_padding_mask=mask)
    assert got.dtype is H and (got[:, :3] - want[:, :3]).abs().max() < .02 and net.use_nested_tensor


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_compile_recognises_the_copies(backend):
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters
    dynamo.reset(), counters.clear()
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    compiled, hw, seen, opt = torch.compile(net, backend=backend), HalfWeights(net), [], torch.optim.SGD(net.parameters(), lr=.1)
    for _ in range(4):
        x = torch.randn(3, 8)
        with hw:
            out = compiled(x.half())
            assert same_bits(out.detach(), net(x.half()).detach())
            out.float().sum().backward()
        with torch.no_grad(): assert torch.allclose(compiled(x), net(x))
        opt.step()
        opt.zero_grad()
        seen.append(counters['stats']['unique_graphs'])
    assert seen[1:] == seen[1:2]*3 and seen[1] <= 4, f'compiled again in later steps: {seen}'
    dynamo.reset()


@pytest.mark.parametrize('make', ['adam', 'fused'])
def test_optimizers_do_not_notice(make):
    net, x = small(), torch.randn(5, 8).half()
    opt, hw = make_opt(make, net), HalfWeights(net)
    for _ in range(3):
        with hw: net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert {id(p) for p in opt.state} == {id(p) for p in net.parameters()} and all(s['exp_avg'].dtype is F32 for s in opt.state.values())


def test_copies_and_averages_between_steps():
    net = small()
    ema = torch.optim.swa_utils.AveragedModel(net)
    hw = HalfWeights(net)
    with hw: net(torch.randn(2, 8).half()).sum().backward()
    ema.update_parameters(net)
    assert all_same(copy.deepcopy(net).parameters(), net.parameters()) and all_same(pickle.loads(pickle.dumps(net)).parameters(), net.parameters())


def test_no_half_is_no_half():
    with pytest.raises(ValueError, match='float64'): HalfWeights(nn.Linear(3, 3), torch.float64)


DDP = '''
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from mpcourse.master import HalfWeights
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
ddp = DistributedDataParallel(net)
out = []
for wrapped in (net, ddp):
    hw = HalfWeights(wrapped)
    for step in range(2):
        torch.manual_seed(10*step + rank)
        x = torch.randn(6, 8).half()
        with hw: loss = wrapped(x).float().square().mean(); loss.backward()
        out.append([p.grad.clone() for p in net.parameters()])
        net.zero_grad()
torch.save(out, f'{folder}/{rank}.pt')
'''


def run_python(code, *args, **kw): return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], env={**os.environ, 'OMP_NUM_THREADS': '1'}, **kw)


def test_two_processes_have_the_same_fp32_gradients(ranks):
    a, b = ranks(DDP)
    assert not same_bits(a[0][0], b[0][0])
    for step in (0, 1):
        for ga,gb,da,db in zip(a[step], b[step], a[2 + step], b[2 + step]):
            assert da.dtype is F32 and same_bits(da, db) and torch.allclose(da, (ga + gb)/2, rtol=1e-6, atol=1e-9)


class Codebook(nn.Module):
    "A codebook that is a running average, kept as a parameter"
    def __init__(self):
        super().__init__()
        self.one, self.codes = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    def forward(self, x):
        with torch.no_grad(): self.codes.mul_(.9).add_(x.detach().mean(0), alpha=.1)
        return self.one(x)@self.codes


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad(): self.weight.clamp_(-.01, .01)
        return super().forward(x)


@pytest.mark.parametrize('model, x, name', [(nn.Embedding(8, 4, max_norm=.5), torch.arange(8), 'weight'), (Codebook(), torch.randn(3, 4), 'codes'),
                                            (nn.Sequential(nn.Linear(4, 4), Clamped(4, 4)), torch.randn(3, 4), '1.weight')], ids=['max_norm', 'codebook', 'clamp'])
def test_a_weight_that_the_forward_pass_moves_is_refused_by_name_and_autocast_keeps_it(model, x, name):
    from mpcourse.scaler import StaticScaler
    from mpcourse.step import MixedStep
    def loss(pred, y): return pred.square().mean()
    opt, was = torch.optim.SGD(model.parameters(), lr=0.), [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"{name} is changed.*cast='autocast'"): MixedStep(StaticScaler(2.))(model, x, None, opt, loss)
    assert all(map(torch.equal, model.parameters(), was)) and not any('weight' in vars(m) for m in model.modules())
    MixedStep(StaticScaler(2.), cast='autocast')(model, x, None, opt, loss)
    assert not all(map(torch.equal, model.parameters(), was))


@pytest.mark.skipif(torch.__version__.startswith('2.6'), reason='torch 2.6 traces no generator as a context')
def test_a_model_compiles_into_one_graph_with_half_weights():
    m = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    with HalfWeights(m): assert torch.compile(m, fullgraph=True, backend='eager')(torch.randn(2, 4)).dtype == torch.float16
