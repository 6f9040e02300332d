"""Unscaling against torch's and a float64 reference; skipped steps against every bit; decisions that ranks share; states that are foreign."""
import copy, warnings
from collections import namedtuple
from contextlib import nullcontext

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.optimizer import Adam as FAdam, SGD as FSGD, OptimWrapper
from hypothesis import assume, example, given, settings, strategies as st

from mpcourse.tensorcore import fast_half
from mpcourse.formats import same_bits
from mpcourse.half import model_to_half
from mpcourse.master import get_master, to_master_grads, to_model_params, use_master
from mpcourse.scaler1 import CEILING, FLOOR, LossScaler, Observation, StaticScaler, valid_scale, reduce
from mpcourse.step1 import (MixedStep, StepOutcome, arm, refuse_bad_loss, count_wanted, disarm, judge,
                           master_gradients, named_gradients, skips_itself, take_step, unscale_)

pytestmark = pytest.mark.library
H, B, F32 = torch.float16, torch.bfloat16, torch.float32
BAD = [torch.inf, -torch.inf, torch.nan]


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def batch(n=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)


def scaler_of(s):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return StaticScaler(s)


def one(*grads, masters=None):
    return [(f'p{i}', g, g if masters is None else masters[i]) for i,g in enumerate(grads)]


def flat_state(opt):
    "Everything an optimizer remembers, as {path: tensor or number}, empty states left out"
    inner = getattr(opt, 'opt', opt)
    ps = [p for g in (inner.param_lists if hasattr(inner, 'param_lists') else [g['params'] for g in inner.param_groups]) for p in g]
    return {(i, k): v.clone() if isinstance(v, torch.Tensor) else v
            for i,p in enumerate(ps) if p in inner.state for k,v in inner.state[p].items()}


def same_states(a, b):
    def eq(x, y): return same_bits(x, y) if isinstance(x, torch.Tensor) else x == y
    return a.keys() == b.keys() and all(eq(a[k], b[k]) for k in a)


OPTS = dict(
    sgd=lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9, weight_decay=.1),
    sgd_fused=lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9, weight_decay=.1, fused=True),
    adam=lambda ps: torch.optim.Adam(ps, lr=.1, weight_decay=.1),
    adamw=lambda ps: torch.optim.AdamW(ps, lr=.1, weight_decay=.1),
    adamw_fused=lambda ps: torch.optim.AdamW(ps, lr=.1, weight_decay=.1, fused=True),
    fastai_sgd=lambda ps: FSGD(ps, lr=.1, mom=.9, wd=.1),
    fastai_adam=lambda ps: FAdam(ps, lr=.1, wd=.1),
    wrapped=lambda ps: OptimWrapper(ps, torch.optim.AdamW, lr=.1, weight_decay=.1),
    wrapped_fused=lambda ps: OptimWrapper(ps, torch.optim.AdamW, lr=.1, weight_decay=.1, fused=True))


# --- scales ---

@pytest.mark.parametrize('s', [0, -1, -0., float('nan'), float('inf'), -float('inf'), 2.**-25, 2.**128, 1e300])
def test_a_scale_that_cannot_work_is_refused_with_its_value(s):
    with pytest.raises(ValueError, match=r'loss scale of .* cannot work') as e: StaticScaler(s)
    assert str(s) in str(e.value)


@pytest.mark.parametrize('s', [3., 1000, .3, 2.**10 + 1])
def test_a_scale_that_is_no_power_of_two_warns_and_names_one(s):
    with pytest.warns(UserWarning, match='not a power of two') as w: assert valid_scale(s) == s
    assert f'{2.**np.floor(np.log2(s)):g}' in str(w[0].message)


@pytest.mark.parametrize('k', [-24, -1, 0, 1, 10, 24, 127])
def test_powers_of_two_from_floor_to_ceiling_pass_in_silence(k):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert StaticScaler(2.**k).scale.item() == 2.**k
    assert FLOOR <= 2.**k <= CEILING


# --- scaling the loss ---

def test_losses_of_any_nesting_are_scaled_and_others_refused():
    sc, Pair = StaticScaler(8.), namedtuple('Pair', 'a b')
    l = torch.tensor(.5)
    out = sc.scale_loss(dict(a=l, b=[l, (l, l)], c=Pair(l, l)))
    assert out['a'] == 4 and out['b'][0] == 4 and isinstance(out['b'][1], tuple) and out['b'][1][1] == 4
    assert isinstance(out['c'], Pair) and out['c'].b == 4
    assert l == .5                                                      # mistake 4: never in place
    for bad in (torch.ones(3), torch.ones(2, 1), torch.ones(0)):
        with pytest.raises(ValueError, match='A loss is one number') as e: sc.scale_loss(bad)
        assert str(tuple(bad.shape)) in str(e.value)
    with pytest.raises(ValueError): sc.scale_loss([l, torch.ones(3)])


@pytest.mark.parametrize('dtype', [H, B])
def test_a_half_loss_is_scaled_in_fp32_where_it_does_not_overflow(dtype):
    p = torch.tensor(3., dtype=dtype, requires_grad=True)
    out = StaticScaler(2.**20).scale_loss(p*1)
    assert out.dtype == F32 and out == 3*2.**20


# --- unscaling ---

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
scales = st.one_of(st.integers(-24, 126).map(lambda k: 2.**k), st.floats(2.**-20, 2.**100))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(floats, min_size=1, max_size=5), min_size=1, max_size=4), scales)
def test_unscale_is_gradscalers_bit_for_bit(values, s):
    "Also where the scale is no power of two; below 1 only where nothing leaves FP32, which torch does not see"
    grads = [torch.tensor(v, dtype=F32) for v in values]
    ps = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p,g in zip(ps, grads): p.grad = g.clone()
    theirs, opt = torch.amp.GradScaler('cpu', init_scale=s), torch.optim.SGD(ps)
    theirs.scale(torch.tensor(1.))
    theirs.unscale_(opt)
    flag = sum(float(f) for f in theirs._found_inf_per_device(opt).values())
    obs = unscale_(one(*grads), scaler_of(s))
    assert all(same_bits(g, p.grad) for g,p in zip(grads, ps))
    if s >= 1: assert (obs['found_inf'] > 0) == (flag > 0)
    assert (obs['found_inf'] > 0) == any(not p.grad.isfinite().all() for p in ps) or flag > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=8), scales, st.sampled_from([H, B]))
@example([2.**-24, 65504.], 2.**-24, H)
@example([2.**-24], 2.**126, H)
def test_unscaling_into_fp32_is_right_to_two_roundings(values, s, dtype):
    "The inverse is rounded once, the product once: 2·2⁻²⁴ relative, and half of FP32's smallest number"
    g = torch.tensor(values, dtype=dtype)
    m, sc = torch.empty(len(values)), scaler_of(s)
    s32 = sc.scale.double().item()
    obs = unscale_([('w', g, m)], sc)
    want = g.double()/s32
    assert m.dtype == F32 and g.dtype == dtype and obs['found_inf'] == 0
    assert ((m.double() - want).abs() <= want.abs()*(2**-23 + 2.**-48) + 2.**-150).all()
    if np.log2(s) % 1 == 0 and s <= 2.**100: assert (m.double() == want).all()          # nothing rounds at all


def test_a_gradient_that_half_cannot_hold_survives_as_fp32():
    g, m = torch.tensor([2.**-24]).half(), torch.zeros(1)
    unscale_([('w', g, m)], StaticScaler(2.**24))
    assert m.item() == 2.**-48 and g.item() == 2.**-24


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6), st.sampled_from(BAD), st.sampled_from([F32, H, B]), st.booleans())
def test_one_bad_number_anywhere_is_seen(n, where, bad, dtype, masters):
    grads = [torch.randn(3, i + 1).to(dtype) for i in range(n)]
    k = where % n
    grads[k].view(-1)[where % grads[k].numel()] = bad
    ms = [torch.zeros_like(g, dtype=F32) for g in grads] if masters else None
    assert unscale_(one(*grads, masters=ms), StaticScaler(2.**4))['found_inf'] > 0


@pytest.mark.parametrize('bad', [g for g in (3e38, 65504., 1.)])
def test_large_finite_numbers_raise_no_false_alarm(bad):
    "Mistake 11: a sum of finite FP32 numbers may overflow by itself; we look at each number"
    assert unscale_(one(torch.full((100,), bad)), StaticScaler(1.))['found_inf'] == 0


def test_below_one_the_unscaled_gradient_may_overflow_and_is_seen():
    "torch's check looks before it multiplies"
    sc = StaticScaler(2.**-10)
    for g in (torch.tensor([3e38]), torch.tensor([3e38]).bfloat16(), torch.tensor([60000.]).half()):
        obs = unscale_(one(g), sc)
        assert obs['found_inf'] > 0 and not g.isfinite().all(), g.dtype
    m = torch.zeros(1)
    assert unscale_([('w', torch.tensor([60000.]).half(), m)], sc)['found_inf'] == 0 and m == 60000.*2**10
    assert unscale_([('w', torch.tensor([3e38]).bfloat16(), m)], sc)['found_inf'] > 0


def test_below_one_is_seen_also_after_the_scale_was_loaded():
    sc = StaticScaler(2.**10)
    sc.load_state_dict(StaticScaler(2.**-10).state_dict())
    assert unscale_(one(torch.tensor([3e38])), sc)['found_inf'] > 0


def test_the_inverse_follows_the_scale_however_it_is_changed():
    sc = StaticScaler(2.**10)
    assert sc.inv_scale() == 2.**-10
    sc.scale = torch.tensor(4.)
    assert sc.inv_scale() == .25
    sc.scale.mul_(4)
    assert sc.inv_scale() == 1/16


def test_sparse_gradients_are_refused_by_name_and_nothing_is_touched():
    sparse = torch.sparse_coo_tensor([[1]], [2.], (4,))
    g = torch.full((2,), 8.)
    with pytest.raises(ValueError, match='gradient of emb.weight is sparse.*sparse=False'):
        unscale_([('fc.weight', g, g), ('emb.weight', sparse, sparse)], StaticScaler(8.))
    assert (g == 8).all()


def test_without_a_single_gradient_there_is_a_sentence():
    for named in ([], [('w', None, None)]):
        with pytest.raises(ValueError, match='No parameter has a gradient'): unscale_(named, StaticScaler())
    assert unscale_([('a', None, None), *one(torch.ones(2))], StaticScaler(2.))['found_inf'] == 0


def test_many_dtypes_in_one_call_each_get_their_own_unscaling():
    g = [torch.full((3,), 8.), torch.full((2,), 8.).half(), torch.full((2, 2), 8.).bfloat16(), torch.full((), 8.)]
    ms = [g[0], torch.zeros(2), torch.zeros(2, 2, dtype=torch.float64), g[3]]
    obs = unscale_(one(*g, masters=ms), StaticScaler(8.))
    assert obs['found_inf'] == 0 and all((m == 1).all() for m in ms)
    g[1][0] = torch.nan
    assert unscale_(one(*g, masters=ms), StaticScaler(8.))['found_inf'] > 0


def test_a_scaler_may_have_an_inverse_for_each_name():
    class Two(StaticScaler):
        def inv_scale(self, name=None): return self.a if name == 'p0' else self.b
    sc = Two(2.)
    sc.a, sc.b = torch.tensor(.5), torch.tensor(.25)
    gs = [torch.ones(2), torch.ones(2), torch.ones(1)]
    unscale_(one(*gs), sc)
    assert [g[0].item() for g in gs] == [.5, .25, .25]


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs two devices')
def test_gradients_on_two_devices():
    a, b = torch.full((2,), 8.), torch.full((2,), 8., device='cuda')
    obs = unscale_(one(a, b), StaticScaler(8.))
    assert (a == 1).all() and (b == 1).all() and obs['found_inf'] == 0
    b[0] = torch.nan
    assert unscale_(one(a, b), StaticScaler(8.))['found_inf'] > 0


# --- observations ---

class Curious(StaticScaler):
    wants = frozenset({'found_inf', 'total', ('above', 8.), ('above', 2.)})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-20, 20, width=16), min_size=1, max_size=6), min_size=2, max_size=6), st.data())
def test_observations_add_up_over_any_split(values, data):
    "Counted on scaled gradients, as they overflow; parts sum to the whole, in any order"
    gs = [torch.tensor(v).half() for v in values]
    def look(xs): return unscale_([('w', x, torch.zeros_like(x, dtype=F32)) for x in xs], Curious(4.))
    k = data.draw(st.integers(1, len(gs) - 1))
    a, b, whole = look(gs[:k]), look(gs[k:]), look(gs)
    for name in ('total', ('above', 8.), ('above', 2.)): assert (a + b)[name] == whole[name] == (b + a)[name]
    x = torch.cat(gs).float()
    assert whole['total'] == len(x) and whole['above', 8.] == (x.abs() >= 8).sum() and whole['above', 2.] == (x.abs() >= 2).sum()
    assert whole.values.dtype == F32 and whole.values.shape == (4,)


def test_observations_of_different_things_do_not_add_and_unknown_ones_are_named():
    a, b = Observation(('found_inf',), torch.zeros(1)), Observation(('found_inf', 'total'), torch.zeros(2))
    with pytest.raises(ValueError, match='do not add up'): a + b
    with pytest.raises(KeyError, match="'total' was not observed"): a['total']
    with pytest.raises(ValueError, match="no statistic 'median'"): count_wanted('median', [torch.ones(1)])
    assert reduce(a) is a


@pytest.mark.parametrize('wants', [frozenset({'amax'}), ('total',), frozenset({('above', 2.)}), frozenset()])
def test_what_a_policy_wants_is_counted_also_where_it_does_not_ask_for_found_inf(wants):
    scaler, grad = StaticScaler(4.), torch.tensor([1., -3.]).half()
    scaler.wants = wants
    seen = unscale_([('w', grad, torch.zeros(2))], scaler)
    want = {'amax': 3., 'total': 2., ('above', 2.): 1.}
    assert seen['found_inf'] == 0 and all(seen[w] == want[w] for w in wants)


GLOO = '''
from functools import partial
from mpcourse.scaler1 import *
from mpcourse.step1 import *
from mpcourse.scaler1 import reduce
W = dist.group.WORLD
mine = Observation(('found_inf', 'total'), torch.tensor([float(rank), 10.]))
obs = reduce(mine, W)
assert obs.values.tolist() == [1., 20.] and mine.values.tolist() == [float(rank), 10.], obs
out = {}
for name, make in dict(sgd=partial(torch.optim.SGD, lr=.1, momentum=.9, weight_decay=.1), adamw=partial(torch.optim.AdamW, lr=.1),
                       fused=partial(torch.optim.AdamW, lr=.1, fused=True)).items():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    opt, step, skipped, stuck = make(net.parameters()), MixedStep(StaticScaler(2.**8), group=W), [], True
    g = torch.Generator().manual_seed(5)
    for i in range(6):
        x, y = torch.randn(3, 4, generator=g), torch.randint(2, (3,), generator=g)
        h = net[0].weight.register_hook(lambda t: t.index_fill(0, torch.tensor(1), torch.inf)) if (i, rank) in ((2, 1), (4, 0)) else None
        before = [p.detach().clone() for p in net.parameters()]
        r = step(net, x, y, opt, torch.nn.functional.cross_entropy)
        if h: h.remove()
        moved = any(not torch.equal(a, b) for a, b in zip(before, net.parameters()))
        skipped.append(bool(r['skipped'])); stuck &= moved == (not skipped[-1])
        if name != 'fused' and i in (2, 4):
            assert step.outcome.offenders == (('0.weight',) if h else ()), step.outcome.offenders
            if not h: assert 'a gradient elsewhere' in step.outcome.why
    state = [v for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    out[name] = (skipped, stuck, [p.detach() for p in net.parameters()] + state)
torch.save(out, f'{folder}/{rank}.pt')
'''


def test_two_processes_decide_as_one(ranks):
    "When one of them overflows both skip; with the same data their weights and optimizer states stay equal in every bit"
    a, b = ranks(GLOO)
    for name in a:
        assert a[name][0] == b[name][0] == [False, False, True, False, True, False], name
        assert a[name][1] and b[name][1], name
        assert len(a[name][2]) > 4 and all(same_bits(x, y) for x,y in zip(a[name][2], b[name][2])), name


# --- a skipped step ---

def overflow(net, where=0):
    "Give a parameter a hook that makes its gradient infinite in one place"
    p = list(net.parameters())[where]
    return p.register_hook(lambda g: g.index_fill(0, torch.tensor(0), torch.inf))


@pytest.mark.parametrize('clip', [None, .5])
@pytest.mark.parametrize('name', OPTS)
def test_a_skipped_step_leaves_every_bit(name, clip):
    "Mistake 1: no weight, no momentum, no Adam counter moves, and training goes on as if the batch had not been"
    net, (x, y) = small(), batch()
    opt, step = OPTS[name](list(net.parameters())), MixedStep(StaticScaler(2.**6), clip=clip)
    for _ in range(2): assert not step(net, x, y, opt, F.cross_entropy)['skipped']
    twin_net = copy.deepcopy(net)
    weights, state = [p.detach().clone() for p in net.parameters()], flat_state(opt)
    assert state
    h = overflow(net)
    assert step(net, x, y, opt, F.cross_entropy)['skipped'] and not step.outcome.stepped
    h.remove()
    assert all(same_bits(p.detach(), w) for p,w in zip(net.parameters(), weights))
    assert same_states(flat_state(opt), state)
    step(net, x, y, opt, F.cross_entropy)
    assert not any(same_bits(p.detach(), w) for p,w in zip(net.parameters(), weights))
    assert twin_net[0].weight.isfinite().all() and all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize('name', OPTS)
def test_a_first_step_that_is_skipped_leaves_no_trace_either(name):
    "The state that a fused optimizer makes for itself on a skipped first step must be that of no step at all"
    def run(bad_first):
        net, (x, y) = small(), batch()
        opt, step = OPTS[name](list(net.parameters())), MixedStep(StaticScaler(2.**6))
        if bad_first:
            # where a kernel that returns early leaves memory as it was, let there be something in it
            junk = [torch.full_like(p, torch.nan) for p in net.parameters()]; del junk
            h = overflow(net); step(net, x, y, opt, F.cross_entropy); h.remove()
            assert not step.outcome.stepped
        for _ in range(2): step(net, x, y, opt, F.cross_entropy)
        return net, opt
    (a, oa), (b, ob) = run(False), run(True)
    assert all(same_bits(p.detach(), q.detach()) for p,q in zip(a.parameters(), b.parameters()))
    assert same_states(flat_state(oa), flat_state(ob))


@pytest.mark.parametrize('name, most', [('sgd', 1), ('adamw', 1), ('fastai_adam', 1), ('adamw_fused', 0), ('wrapped_fused', 0)])
@pytest.mark.parametrize('bad', [False, True])
def test_at_most_one_host_synchronisation_a_step_and_none_where_fused(name, most, bad, looks):
    "Mistake 11: fastai looks at every parameter. Of the decision only: an optimizer's own arithmetic is not counted"
    net, (x, y) = small(), batch()
    ps = list(net.parameters())
    opt, sc = OPTS[name](ps), StaticScaler(4.)
    class Quiet:                                                    # the optimizer without its own look at its counters
        def __init__(self): self.opt = getattr(opt, 'opt', opt)
        def step(self): self.stepped = True
    F.cross_entropy(net(x), y).backward()
    if bad: ps[0].grad[0] = torch.inf
    named, quiet = named_gradients(opt, net), Quiet()
    looks.clear()
    outcome = judge(named, sc)
    assert not looks                                                # judging never looks
    if skips_itself(opt): take_step(quiet, outcome)
    else: assert outcome.stepped != bad
    before = len([s for s in looks if s != '__bool__'])             # item() of the flag; finding offenders looks again, once in a blue moon
    assert before <= most and (bad or len(looks) <= most)
    assert outcome.stepped != bad                                   # whoever wants to know may look later


@pytest.mark.parametrize('bad', [False, True])
def test_a_fused_step_by_itself_looks_at_nothing(bad, looks):
    net, (x, y) = small(), batch()
    opt, sc = OPTS['adamw_fused'](net.parameters()), StaticScaler(4.)
    F.cross_entropy(net(x), y).backward()
    if bad: net[0].weight.grad[0] = torch.nan
    was = net[0].weight.detach().clone()
    looks.clear()
    take_step(opt, judge(named_gradients(opt, net), sc))
    assert not looks
    assert same_bits(was, net[0].weight.detach()) == bad
    assert not hasattr(opt, 'found_inf') and not hasattr(opt, 'grad_scale')


def test_the_flag_is_taken_back_when_the_optimizer_raises():
    net = small()
    opt = OPTS['adamw_fused'](net.parameters())
    opt.register_step_pre_hook(lambda *a: 1/0)
    for p in net.parameters(): p.grad = torch.ones_like(p)
    with pytest.raises(ZeroDivisionError): take_step(opt, judge(named_gradients(opt), StaticScaler()))
    assert not hasattr(opt, 'found_inf')
    disarm(None), disarm(opt)


# --- outcomes ---

def test_an_outcome_looks_once_names_offenders_and_says_why(looks):
    net, (x, y) = small(), batch()
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    (F.cross_entropy(net(x), y)*8).backward()
    net[0].bias.grad[2], net[3].weight.grad[0, 0] = torch.nan, -torch.inf
    looks.clear()
    out = judge(named_gradients(opt, net), StaticScaler(8.))
    assert out.offenders is None and not looks
    assert out.stepped is False and out.offenders == ('0.bias', '3.weight') and out.grads is None
    looks.clear()
    assert out.stepped is False and not looks
    assert out.why == ('The step was skipped: at a loss scale of 8 the gradient of 0.bias, 3.weight was not finite. The next scale is 8.')
    ok = judge(one(torch.ones(3)), StaticScaler(8.))
    assert ok.stepped is True and ok.offenders == () and ok.why == 'The step was taken at a loss scale of 8.'
    many = judge(one(*[torch.tensor([torch.nan])]*5), StaticScaler(2.))
    assert 'p0, p1, p2 …' in many.why
    assert 'a gradient elsewhere' in StepOutcome(torch.tensor(1.), torch.tensor(1.), torch.tensor(1.)).why


def test_scales_before_and_after_belong_to_the_step():
    class Halving(StaticScaler):
        def update(self, obs): self.scale = torch.where(obs['found_inf'] > 0, self.scale/2, self.scale)
    sc = Halving(8.)
    out = judge(one(torch.tensor([torch.inf])), sc)
    assert (out.scale, out.next_scale, sc.scale) == (8., 4., 4.) and out.why.endswith('The next scale is 4.')
    g = torch.tensor([8.])
    assert judge(one(g), sc).scale == 4. and g == 2.


def test_parameters_without_a_name_get_their_place():
    net = small()
    for p in net.parameters(): p.grad = torch.ones_like(p)
    net[0].bias.grad = None
    opt = torch.optim.SGD([dict(params=list(net[0].parameters())), dict(params=list(net[3].parameters()))])
    assert [n for n,*_ in named_gradients(opt)] == ['group 0, parameter 0', 'group 1, parameter 0', 'group 1, parameter 1']
    assert [n for n,*_ in named_gradients(opt, net)] == ['0.weight', '3.weight', '3.bias']
    half = copy.deepcopy(net)
    groups, masters = get_master([list(half[0].parameters()), list(half[3].parameters())])
    for p in half.parameters():
        if p is not groups[0][1]: p.data, p.grad = p.data.half(), None
    for p in half.parameters(): p.grad = torch.full_like(p, 4.)
    groups[0][1].grad = None
    triples = master_gradients(groups, masters, half)
    assert [n for n,*_ in triples] == ['0.weight', '3.weight', '3.bias'] and masters[0][1].grad is None
    unscale_(triples, StaticScaler(4.))
    assert all((m.grad == 1).all() and m.grad.dtype == F32 for i,g in enumerate(masters) for j,m in enumerate(g) if (i, j) != (0, 1))


# --- states ---

@pytest.mark.parametrize('s', [2.**-24, 1., 1000., 2.**127])
def test_a_state_goes_round_bit_for_bit(s, tmp_path):
    a, b = scaler_of(s), StaticScaler(2.)
    torch.save(a.state_dict(), tmp_path/'s.pt')
    b.inv_scale()
    b.load_state_dict(torch.load(tmp_path/'s.pt', weights_only=True))
    assert same_bits(a.scale, b.scale) and same_bits(a.inv_scale(), b.inv_scale())
    a.state_dict()['scale'].zero_()
    assert a.scale == torch.tensor(s)                                   # a state is a copy


class Other(LossScaler):
    state_names, version = ('scale', 'count'), 2
    def __init__(self, s=4.):
        super().__init__(s)
        self.count = torch.tensor(3)


@pytest.mark.parametrize('state, says', [
    ({}, 'no policy of ours'), (torch.amp.GradScaler('cpu').state_dict(), 'no policy of ours'), (StaticScaler().state_dict(), "'StaticScaler'"),
    (Other().state_dict() | dict(version=3), 'version 3.*up to 2.*upgrade'),
    ({k: v for k,v in Other().state_dict().items() if k != 'count'}, 'lacks count'),
    ({k: v for k,v in Other().state_dict().items() if k not in ('count', 'scale')}, 'lacks scale, count'),
    ({k: v for k,v in Other().state_dict().items() if k != 'version'}, 'version'),
    (Other().state_dict() | dict(scale=torch.tensor(0.)), 'cannot work'), (Other().state_dict() | dict(scale=torch.tensor(torch.nan)), 'cannot work'),
    (Other().state_dict() | dict(count='three'), 'count'), (Other().state_dict() | dict(scale=torch.ones(2)), 'scale'),
    (Other().state_dict() | dict(scale='1'), 'scale')])
def test_a_state_that_does_not_fit_is_a_sentence_and_changes_nothing(state, says):
    sc = Other(8.)
    sc.count = torch.tensor(5)
    with pytest.raises(ValueError, match=says): sc.load_state_dict(state)
    assert sc.scale == 8 and sc.count == 5


def test_a_scaler_moves_with_all_its_state_and_shows_itself():
    sc = Other(8.)
    assert sc.to('meta') is sc and sc.scale.is_meta and sc.count.is_meta
    assert repr(StaticScaler(1024)) == 'StaticScaler(scale=1024)' and not hasattr(StaticScaler().attach(small()).remove(), 'x')


# --- the step ---

class Approx:
    "A float64 value with a bound on how far a computation in half precision may be from it"
    U, TINY = 2.**-11, 2.**-25                          # half a unit in the last place; half of the smallest subnormal number
    def __init__(self, v, e=0.): self.v, self.e = np.asarray(v, np.float64), np.zeros(np.shape(v)) + e
    def rounded(self): return Approx(self.v, self.e + (np.abs(self.v) + self.e)*self.U + self.TINY)
    def __matmul__(self, o):
        size = (np.abs(self.v) + self.e) @ (np.abs(o.v) + o.e)
        e = size - np.abs(self.v) @ np.abs(o.v) + 1e-30 if (self.e.any() or o.e.any()) else 0*size
        return Approx(self.v @ o.v, e + size*(self.v.shape[-1] + 1)*2.**-24)         # sums in FP32, in any order
    def plus(self, o): return Approx(self.v + o.v, self.e + o.e + (np.abs(self.v + o.v) + self.e + o.e)*2.**-23)
    def masked(self, by): return Approx(self.v*(by.v > 0), np.where(np.abs(by.v) <= by.e, np.abs(self.v) + self.e, self.e*(by.v > 0)))
    def times(self, k): return Approx(self.v*k, (self.e + np.abs(self.v)*2.**-22)*abs(k))
    @property
    def T(self): return Approx(self.v.T, self.e.T)


def half_grads(ws, bs, x, t, s):
    "Bounded float64 gradients of s·mean((net(x) − t)²) of an MLP with ReLU, weights and inputs rounded to half first"
    h16 = lambda a: Approx(a.detach().half().double().numpy())
    hs, zs = [h16(x)], []
    for i,(w,b) in enumerate(zip(ws, bs)):
        z = (hs[-1] @ h16(w).T).plus(h16(b)).rounded()
        zs.append(z)
        hs.append(Approx(np.maximum(z.v, 0), z.e) if i < len(ws) - 1 else z)
    n = hs[-1].v.size
    d = hs[-1].plus(Approx(-t.double().numpy())).times(2*s/n).rounded()
    out = []
    for i in reversed(range(len(ws))):
        ones = Approx(np.ones((1, len(d.v))))
        out.append(((d.T @ hs[i]).rounded(), (ones @ d).rounded()))
        if i: d = (d @ h16(ws[i])).rounded().masked(zs[i - 1])
    return out[::-1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(1, 5), st.integers(-3, 14), st.integers(0, 10**6), st.booleans())
def test_the_master_update_is_a_float64_references_within_a_derived_bound(sizes, n, k, seed, fast):
    "Random nets, data and scales; a wrong, missing or doubled scale is off by a factor of two at least"
    g = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(a, b) for a,b in zip(sizes, sizes[1:])]
    for l in layers:
        for p in l.parameters(): p.data = torch.randn(p.shape, generator=g)*.7
    net = nn.Sequential(*[m for l in layers for m in (l, nn.ReLU())][:-1])
    x, t, lr, s = torch.randn(n, sizes[0], generator=g), torch.randn(n, sizes[-1], generator=g), .5, 2.**k
    was = [(l.weight.detach().clone(), l.bias.detach().clone()) for l in layers]
    want = half_grads([w for w,_ in was], [b for _,b in was], x, t, s)
    assume(all(np.abs(a.v + a.e).max() < 6e4 for ab in want for a in ab))
    step, opt = MixedStep(StaticScaler(s), compute=fast_half if fast else nullcontext), torch.optim.SGD(net.parameters(), lr=lr)
    step(net, x, t, opt, F.mse_loss)
    if not fast: return                                 # native half sums in an order and a width of its own: it runs, no more is derived
    for l,old,ref in zip(layers, was, want):
        for p,w,a in zip((l.weight, l.bias), old, ref):
            ideal = w.double().numpy() - lr*(a.v.reshape(p.shape)/s)
            bound = lr*a.e.reshape(p.shape)/s*1.01 + (np.abs(w.numpy()) + lr*np.abs(a.v.reshape(p.shape))/s + lr*a.e.reshape(p.shape)/s)*2.**-22
            assert (np.abs(p.detach().double().numpy() - ideal) <= bound).all()
            assert p.dtype == F32 and p.grad.dtype == F32


@pytest.mark.parametrize('make', [lambda ps: torch.optim.SGD(ps, lr=.05, momentum=.9, weight_decay=.01), lambda ps: torch.optim.Adam(ps, lr=.01)])
@pytest.mark.parametrize('dtype, s', [(H, 2.**8), (H, 2.**15), (B, 1.)])
def test_lent_weights_train_as_the_classical_loop_with_masters_does(make, dtype, s):
    "get_master, model_to_half, to_master_grads, to_model_params: the same FP32 weights, in every bit"
    net, classic = small(), small()
    opt, step = make(net.parameters()), MixedStep(StaticScaler(s), dtype)
    copt = make(classic.parameters())
    groups, masters = get_master(copt)                                  # mistake 8: before rounding
    use_master(copt, groups, masters)
    model_to_half(classic, dtype)
    assert not same_bits(masters[0][0].detach(), masters[0][0].detach().to(dtype).float())
    for i in range(4):
        x, y = batch(seed=i)
        step(net, x, y, opt, F.cross_entropy)
        with fast_half():
            for p in classic.parameters(): p.grad = None
            (F.cross_entropy(classic(x.to(dtype)).float(), y)*s).backward()
        to_master_grads(groups, masters, 1/s)
        copt.step()
        to_model_params(groups, masters)
        assert all(same_bits(p.detach(), m.detach()) for p,m in zip(net.parameters(), masters[0]))


class Spy(nn.Module):
    "Two inputs; writes down what it sees"
    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.out = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    def forward(self, tok, x):
        self.seen = dict(tok=tok.dtype, x=x.dtype, emb=self.emb.weight.dtype, norm=self.norm.weight.dtype, out=self.out.weight.dtype)
        return self.out(self.norm(self.emb(tok) + x))


@pytest.mark.parametrize('dtype', [H, B])
def test_the_step_casts_by_policy_computes_the_loss_in_fp32_and_records_it_unscaled(dtype):
    net, seen = Spy(), {}
    def loss(pred, y):
        seen.update(pred=pred.dtype)
        return F.cross_entropy(pred, y)
    xb, y = (torch.randint(7, (5,)), torch.randn(5, 4)), torch.randint(2, (5,))
    opt = torch.optim.SGD(net.parameters(), lr=0.)
    for s in (1., 2.**10):
        out = MixedStep(StaticScaler(s), dtype)(net, xb, y, opt, loss)
        if s == 1: base = out['loss']
    assert net.seen == dict(tok=torch.int64, x=dtype, emb=dtype, norm=F32, out=dtype) and seen == dict(pred=F32)
    assert out['loss'].dtype == F32 and same_bits(out['loss'], base) and not out['loss'].requires_grad and out['scale'] == 2.**10
    assert abs(out['loss'] - F.cross_entropy(net(*xb), y)) < .05
    assert {p.dtype for p in net.parameters()} == {F32} and xb[1].dtype == F32


@pytest.mark.parametrize('clip', [.01, 100.])
def test_clipping_comes_after_unscaling(clip):
    net, ref, (x, y) = small(), small(), batch()
    opt = torch.optim.SGD(net.parameters(), lr=1.)
    MixedStep(StaticScaler(2.**10), clip=clip)(net, x, y, opt, F.cross_entropy)
    F.cross_entropy(ref(x), y).backward()
    norm = torch.cat([p.grad.flatten() for p in ref.parameters()]).norm()
    moved = torch.cat([(a - b).detach().flatten() for a,b in zip(ref.parameters(), net.parameters())]).norm()
    assert abs(moved - min(norm, clip)) < .02*min(norm, clip)


def test_a_loss_that_is_nan_before_the_first_step_is_said_and_nothing_moves():
    net, (x, y) = small(), batch()
    opt, step = torch.optim.SGD(net.parameters(), lr=.1), MixedStep(StaticScaler())
    was = [p.detach().clone() for p in net.parameters()]
    x[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match='loss of batch 0 is nan before any step'): step(net, x, y, opt, F.cross_entropy)
    with pytest.raises(FloatingPointError, match='loss of batch 7 is inf'): refuse_bad_loss(torch.tensor(torch.inf), 7)
    assert all(same_bits(p.detach(), w) for p,w in zip(net.parameters(), was)) and not opt.state and {p.dtype for p in net.parameters()} == {F32}
    assert net[0].weight.grad is None
    with pytest.raises(FloatingPointError): step(net, x, y, opt, F.cross_entropy)       # no step yet, so it is still said


@pytest.mark.parametrize('where', ['model', 'loss', 'shape', 'sparse'])
def test_after_an_exception_the_model_is_its_own_again(where):
    net, (x, y) = small(), batch()
    opt, step = torch.optim.SGD(net.parameters(), lr=.1), MixedStep(StaticScaler())
    was = [p.detach().clone() for p in net.parameters()]
    loss, says = F.cross_entropy, None
    if where == 'model': net[2].register_forward_hook(lambda *a: 1/0); says = ZeroDivisionError
    if where == 'loss': loss, says = (lambda *a: 1/0), ZeroDivisionError
    if where == 'shape': loss, says = nn.CrossEntropyLoss(reduction='none'), ValueError
    if where == 'sparse':
        net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
        x, says, was = torch.randint(5, (4, 2)), (ValueError, RuntimeError), [p.detach().clone() for p in net.parameters()]
        opt = torch.optim.SGD(net.parameters(), lr=.1)
    with pytest.raises(says) as e: step(net, x, y, opt, loss)
    if where == 'sparse': assert 'sparse' in str(e.value)
    assert all(same_bits(p.detach(), w) for p,w in zip(net.parameters(), was)) and 'weight' not in vars(net[0])
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert step.lent is None or not step.lent.before


def test_the_step_serves_another_model_when_given_one():
    step, (x, y) = MixedStep(StaticScaler(4.)), batch()
    for seed in (0, 1, 0):
        net = small(seed)
        step(net, x, y, torch.optim.SGD(net.parameters(), lr=.1), F.cross_entropy)
        assert step.lent.model is net and not same_bits(net[0].weight.detach(), small(seed)[0].weight.detach())


def test_arm_gives_the_flag_only_of_what_was_found():
    opt = OPTS['adamw_fused']([nn.Parameter(torch.ones(2))])
    for flag, want in ((0., 0.), (3., 1.)):
        arm(opt, StepOutcome(torch.tensor(flag), torch.tensor(1.), torch.tensor(1.)))
        assert opt.found_inf == want and opt.grad_scale is None
        disarm(opt)


def test_a_scaler_has_to_be_made():
    for what in ('megatron', None, 1024., StaticScaler):
        with pytest.raises(ValueError, match='is no loss scaler: give one that is made'): MixedStep(what)


@pytest.mark.parametrize('what', ['foo', [1], None])
def test_a_state_has_to_be_a_dict(what):
    with pytest.raises(ValueError, match='is no state of a scaler'): StaticScaler().load_state_dict(what)


class Gatherer(StaticScaler):
    "Counts weight gradients above 2 of parameters named '0…', and has hooks, so to say, that saw five more"
    wants = frozenset({'found_inf', 'total', ('above', 2.), ('amax', 'activations')})

    def __init__(self, scale=1.):
        super().__init__(scale)
        self.seen, self.hooked = [], {}

    def tracks(self, name): return name.startswith('0')
    def gathered(self): return self.hooked
    def forget(self): self.hooked = {}
    def update(self, obs): self.seen.append({n: obs[n].item() for n in obs.names})


def two_parameters(a, b): return [('0.weight', g := torch.tensor(a), g), ('1.weight', h := torch.tensor(b), h)]


def test_what_hooks_have_gathered_joins_what_was_counted_and_is_forgotten():
    s = Gatherer()
    s.hooked = {('above', 2.): torch.tensor(5.), 'total': 7, ('amax', 'activations'): torch.tensor(9.)}
    judge(two_parameters([1., 2., -3.], [4., 5.]), s)
    assert s.seen == [{'found_inf': 0, ('above', 2.): 7, 'total': 10, ('amax', 'activations'): 9}] and s.hooked == {}


def test_untracked_gradients_are_not_counted_but_must_be_finite():
    s = Gatherer()
    s.hooked = {('amax', 'activations'): torch.tensor(1.)}
    assert not judge(two_parameters([1., 2.], [torch.inf, 3.]), s).stepped
    assert s.seen[0][('above', 2.)] == 1 and s.seen[0]['total'] == 2 and s.seen[0]['found_inf'] == 1
    assert count_wanted(('above', 2.), []) == count_wanted('amax', []) == count_wanted('total', []) == 0


def test_a_scaler_that_is_not_attached_says_so_and_what_was_gathered_is_dropped_when_it_raises():
    s, triples = Gatherer(), two_parameters([1.], [1.])
    with pytest.raises(RuntimeError, match=r"wants \('amax', 'activations'\), which only hooks can tell: attach"): judge(triples, s)

    def fall(obs): raise FloatingPointError('At the floor.')
    s.update, s.hooked = fall, {('amax', 'activations'): torch.tensor(1.)}
    with pytest.raises(FloatingPointError): judge(triples, s)
    assert s.hooked == {}


def test_observations_merge_sums_as_sums_and_maxima_as_maxima():
    a = Observation(('found_inf', 'total', 'amax'), torch.tensor([1., 2., 8.]))
    b = Observation(('amax', ('amax', 'x'), 'total'), torch.tensor([9., 4., 5.]))
    both = a.merge(b)
    assert both.names == ('found_inf', 'total', 'amax', ('amax', 'x')) and both.values.tolist() == [1, 7, 9, 4]
    assert b.merge(a)['amax'] == 9 and a.merge(a).values.tolist() == [2, 4, 8]


def test_several_maxima_go_over_ranks_in_one_sum(ranks):
    seen = ranks('''
import torch, torch.distributed as dist
from mpcourse.scaler1 import Observation, reduce
obs = Observation(('found_inf', 'amax', ('amax', 'x')), torch.tensor([1., [3., 5.][rank], [9., 2.][rank]]))
torch.save(reduce(obs, dist.group.WORLD).values.tolist(), f'{folder}/{rank}.pt')
''')
    assert seen == [[2, 5, 9]]*2


def test_a_mixed_step_begins_with_nothing_gathered():
    s, model = Gatherer(), small()
    s.hooked = {('amax', 'activations'): torch.tensor(1.)}
    step, (x, y), opt = MixedStep(s, compute=nullcontext), batch(), torch.optim.SGD(model.parameters(), .1)
    with pytest.raises(RuntimeError, match='attach'): step(model, x, y, opt, F.cross_entropy)


def test_ranks_that_decide_alone_by_what_their_hooks_see_are_warned(ranks):
    seen = ranks('''
import warnings
import torch
from mpcourse.scaler1 import StaticScaler
from mpcourse.step1 import judge
class Hooked(StaticScaler):
    def gathered(self): return {('amax', 'activations'): torch.ones(())}
def said(scaler, group=None):
    g = torch.ones(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        judge([('w', g, g)], scaler, group)
    return [str(w.message) for w in told]
torch.save((said(Hooked(8.)), said(Hooked(8.), dist.group.WORLD), said(StaticScaler(8.))), f'{folder}/{rank}.pt')
''')
    for alone,together,plain in seen:
        assert len(alone) == 1 and 'on each of 2 ranks' in alone[0] and 'group=torch.distributed.group.WORLD' in alone[0]
        assert together == plain == []
