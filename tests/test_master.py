"""Masters against a float64 reference"""
import warnings

import pytest, torch, torch.nn as nn
from hypothesis import assume, given, settings, strategies as st

from mpcourse.tensorcore import fp32_accumulate
from mpcourse.formats import same_bits
from mpcourse.half import model_to_half
from mpcourse.master import get_master, to_master_grads, to_model_params, exchange_params
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
    if not flat: net[3].bias.grad = None
    for step in range(2):
        to_master_grads(ps, ms, torch.tensor(2.**k, device=device) if as_tensor else 2.**k, flat)
        for g,m in zip(ps, ms):
            got = [x.view_as(p) for x, p in zip(m[0].grad.split([p.numel() for p in g]), g)] if flat else [x.grad for x in m]
            for p,x in zip(g, got):
                if p.grad is None: assert x is None
                else: assert same_bits(x, p.grad.float()*2.**k)
        if step == 0 and not flat: net[0].bias.grad, net[3].bias.grad = None, torch.ones_like(net[3].bias)


def test_a_flat_master_does_not_move_a_weight_without_a_gradient():
    "It would decay, or move by its momentum"
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    ps, ms = get_master([used, unused], flat=True)
    to_master_grads(ps, ms, 1., flat=True)
    assert ms[0][0].grad is None
    used.grad = torch.ones(2)
    with pytest.raises(ValueError, match='1 of 2 parameters'): to_master_grads(ps, ms, 1., flat=True)


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
    for p,m in zip(ps[0], [x.view_as(p) for x, p in zip(ms[0][0].split([p.numel() for p in ps[0]]), ps[0])] if flat else ms[0]): assert same_bits(p.data, m.data.to(p.dtype))
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
        with fp32_accumulate(): (net(x).float().square().mean()*2.**k).backward()
        assume(all(p.grad.isfinite().all() for p in net.parameters()))      # overflow is chapter 06's
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


def test_flat_masters_need_an_optimizer_of_their_own():
    opt = torch.optim.SGD(small().parameters(), lr=.1)
    groups, masters = get_master(opt, flat=True)
    with pytest.raises(ValueError, match=r'\[6\] and \[1\].*new optimizer'): exchange_params(opt, groups, masters)
    assert [len(g['params']) for g in opt.param_groups] == [6]


def test_named_parameters_are_no_parameters():
    with pytest.raises(TypeError, match='is no parameter'): get_master(list(nn.Linear(2, 2).named_parameters()))
