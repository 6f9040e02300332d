"""Products in eight bits against hand-made ones, scales against the published rules, and a conversion that misses no product."""
import copy, io, math, pickle

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mpcourse.formats import get_format, same_bits
from mpcourse.half import model_to_half
from mpcourse.fp8 import (SCALINGS, CurrentScaling, DelayedScaling, FixedScaling, FP8Linear, FP8Recipe, amax_scale, fp8_attention, fp8_linear,
                          fp8_matmul, fp8_products, has_native_fp8, mx_quantize, mx_round, native_matmul, reduce_amax, signal_to_noise, simulate_fp8)
from mpcourse.rounding import quantize
from mpcourse.toys import char_transformer, cross_entropy, deep_sigmoid, relu_mlp
from mpcourse.zoo import cnn, two_towers
from mpcourse.unit import constrain, linear_factors
from mpcourse.unit_models import KINDS_OF_MODEL, CharModel, UnitLinear, unit_scale

pytestmark = pytest.mark.library
FMTS = [('e4m3', 'e5m2'), ('e4m3fnuz', 'e5m2fnuz'), ('e5m2', 'e4m3')]
OCP_FNUZ = pytest.mark.parametrize('fwd,bwd', FMTS)
EVERY = pytest.mark.parametrize('scaling', SCALINGS)


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(): torch.manual_seed(0); yield


def r(*shape, **kw): return torch.randn(*shape, **kw)
def off(a, b): return ((a.double() - b.double()).norm()/b.double().norm()).item()


# --- how much a format keeps ---

@pytest.mark.parametrize('fmt,bits', [('fp16', 10), ('bf16', 7), ('e4m3', 3), ('e5m2', 2), ('e4m3fnuz', 3)])
def test_signal_to_noise_is_six_decibels_a_bit(fmt, bits):
    # within an octave the error is uniform in a step: step²/12; the mean over normal numbers is measured
    assert abs(signal_to_noise(fmt, 1.) - (13.3 + 6.02*bits)) < 1


def test_signal_to_noise_outside():
    f = get_format('e5m2')
    assert abs(signal_to_noise(f, f.smallest_subnormal/64)) < 1e-9 and signal_to_noise(f, 64*f.max) < 1
    assert signal_to_noise('fp16', 1e6, overflow='inf') == -math.inf
    with pytest.raises(ValueError, match='no standard deviation'): signal_to_noise('e4m3', 0.)


# --- scales ---

def te_scales(amaxes, fmt_max, n, algo, margin):
    "TransformerEngine's delayed scaling in plain Python: the scale that each step uses"
    history, scale, used = [0.]*n, 1., []
    for a in amaxes:
        used.append(scale)
        if a == 0: continue                     # nothing is rolled
        history[0] = a
        top = history[0] if algo == 'most_recent' else max(h for h in history + [0.] if h == h)     # fmaxf drops a NaN
        if top > 0 and top < math.inf: scale = min(fmt_max/top/2**margin, torch.finfo(torch.float32).max)
        history = history[1:] + history[:1]
        history[0] = 0.
    return used


@pytest.mark.parametrize('algo', ['max', 'most_recent'])
@pytest.mark.parametrize('n', [1, 2, 5, 1024])
@pytest.mark.parametrize('bad', [[], [0.], [math.inf], [math.nan], [1e-44]])
def test_delayed_scaling_is_transformer_engines(algo, n, bad):
    amaxes = (r(12).abs()*4).tolist() + bad + (r(12).abs()/8).tolist()
    for margin in (0, 2):
        s = DelayedScaling(n, algo, margin, strict=True)
        got = [s(torch.tensor([a, -a/2]), 'e4m3').item() for a in amaxes]
        assert torch.allclose(torch.tensor(got), torch.tensor(te_scales(amaxes, 448, n, algo, margin)), rtol=1e-6)


def test_an_infinity_does_not_stop_a_delayed_scale():
    ours, strict = DelayedScaling(8), DelayedScaling(8, strict=True)
    for v in (1., math.inf, math.nan, 1., 2.): a, b = [s(torch.tensor([v]), 'e4m3').item() for s in (ours, strict)]
    assert ours.scale == 224 and strict.scale == 448


def test_the_history_is_the_last_steps_that_saw_something():
    s = DelayedScaling(3)
    for v in (1., 2., 0., 3., math.inf, 4.): s(torch.tensor([v]), 'e4m3')
    assert s.history.tolist() == [2, 3, 4]
    strict = DelayedScaling(3, strict=True)
    for v in (1., 0., math.inf, 4.): strict(torch.tensor([v]), 'e4m3')
    assert strict.history.tolist() == [1, math.inf, 4] and strict.scale == 448


TWO_RANKS = '''
from torch import nn
from mpcourse.fp8 import FP8Linear, FP8Recipe, reduce_amax, simulate_fp8
torch.manual_seed(0)
recipe = FP8Recipe('delayed', history=3)
lin, eight = FP8Linear(8, 4, recipe=recipe), simulate_fp8(nn.Sequential(nn.Linear(8, 4)), recipe)
for k in range(2):
    x = torch.full((2, 8), [[1., 4.], [2., 8.]][k][rank])
    for m in (lin, eight): m(x).sum().backward()
    for m in (lin, eight): reduce_amax(m)
found = [{k: v.tolist() for k, v in b.items()} for b in (lin.scalings.state_dict(), eight.fp8.scalings['0', 0].state_dict())]
torch.save(found, f'{folder}/{rank}.pt')
'''


def test_ranks_agree_on_the_largest_maximum(ranks):
    (a, b), other = ranks(TWO_RANKS)
    assert [a, b] == other and a['a.history'] == b['a.history'] == [0, 4, 8] and a['a.scale'] == b['a.scale'] == 56


def test_one_process_reduces_nothing():
    lin = FP8Linear(8, 4, recipe=FP8Recipe('delayed', history=3))
    lin(torch.ones(2, 8))
    before = copy.deepcopy(lin.state_dict())
    reduce_amax(lin)
    assert all(torch.equal(v, before[k]) for k, v in lin.state_dict().items())


def test_delayed_scale_holds_in_eval():
    s = DelayedScaling(4).eval()
    s(torch.tensor([3.]), 'e4m3')
    assert s.scale == 1 and not s.history.any()


@pytest.mark.parametrize('amax', [1e-44, 1e-30, 1e-3, .3, 1., 448., 1e30, 3e38])
@pytest.mark.parametrize('fmt', ['e4m3', 'e5m2', 'e4m3fnuz', 'e5m2fnuz'])
def test_a_current_scale_reaches_the_top_and_no_further(amax, fmt):
    x, top = torch.tensor([amax, -amax/3]), get_format(fmt).max
    for two in (False, True):
        s = CurrentScaling(power_of_two=two)(x, fmt)
        assert s.isfinite() and s > 0 and (x*s).abs().max() <= top*(1 + 1e-6)
        if two: assert torch.frexp(s).mantissa == .5
        if amax > 1e-30: assert (x*s).abs().max() > top/(2.01 if two else 1.01)
    assert CurrentScaling(margin=3)(torch.ones(2), fmt) == top/8


def test_amax_scale_keeps_what_was_before():
    for a in (0., math.inf, math.nan): assert amax_scale(torch.tensor(a), 'e5m2', torch.tensor(7.)) == 7
    assert CurrentScaling()(torch.zeros(3), 'e4m3') == 1 and CurrentScaling()(torch.zeros(0), 'e4m3') == 1


def mx_by_hand(row, fmt, block, scale_rounding):
    "MX of a list of floats, block by block, in Python"
    fmt, out = get_format(fmt), []
    for i in range(0, len(row), block):
        part = row[i:i+block]
        top = max(map(abs, part))
        e = math.frexp(top)[1] - 1 - fmt.emax
        e = max(-127, e + (scale_rounding == 'up' and top > fmt.max*2.**e)) if top else -127
        out += [quantize(v*2.**-e, fmt)*2.**e for v in part]
    return out


@pytest.mark.parametrize('fmt', ['e4m3', 'e5m2', 'e2m1', 'e3m2'])
@pytest.mark.parametrize('n,block', [(64, 32), (33, 32), (7, 32), (48, 16)])
@pytest.mark.parametrize('scale_rounding', ['up', 'floor'])
def test_mx_is_the_specifications(fmt, n, block, scale_rounding):
    x = r(3, n)*torch.logspace(-6, 6, n, base=2)
    x[1, :5] = 0
    want = torch.tensor([mx_by_hand(row, fmt, block, scale_rounding) for row in x.double().tolist()])
    how = dict(block=block, scale_rounding=scale_rounding)
    assert torch.equal(mx_round(x, fmt, **how), want.float())
    assert torch.equal(mx_round(x.T.contiguous(), fmt, dim=0, **how), want.float().T)
    q, s = mx_quantize(x, fmt, **how)
    assert s.shape == (3, -(-n//block)) and (torch.frexp(s).mantissa == .5).all() and torch.equal(quantize(q, fmt), q)


@pytest.mark.parametrize('amax, up, floor', [(448., 0, 0), (449., 1, 0), (511., 1, 0), (512., 1, 1), (225., 0, -1), (224., -1, -1), (150., -1, -1), (1., -8, -8)])
def test_a_scale_rounded_up_cuts_nothing(amax, up, floor):
    x = torch.tensor([amax, -amax])
    for how, e in dict(up=up, floor=floor).items():
        q, s = mx_quantize(x, scale_rounding=how)
        assert s.log2() == e and q.abs().max() <= 448
        assert amax/s <= 448 or how == 'floor'
    assert mx_quantize(x)[1] == mx_quantize(x, scale_rounding='up')[1] == 2.**up


def test_the_largest_number_of_a_block_is_cut_by_floor_alone():
    x = r(2000, 32)
    cut = {how: (x.abs()/mx_quantize(x, scale_rounding=how)[1] > 448).any(-1).float().mean() for how in ('up', 'floor')}
    assert cut['up'] == 0 and .1 < cut['floor'] < .25
    w = r(32, 8)
    for how in ('up', 'floor'):
        y = fp8_matmul(x, w, FP8Recipe('mx', scale_rounding=how))
        assert torch.equal(y, mx_round(x, scale_rounding=how) @ mx_round(w, dim=0, scale_rounding=how))


def test_mx_blocks_are_apart():
    x = r(2, 96)
    y = x.clone()
    y[0, 40] = 1e30
    assert same_bits(mx_round(x)[:, :32], mx_round(y)[:, :32]) and same_bits(mx_round(x)[:, 64:], mx_round(y)[:, 64:])
    for bad in (math.inf, math.nan):
        y[0, 40] = bad
        got = mx_round(y)
        assert got[0, 32:64].isnan().all() and got.isnan().sum() == 32


def test_mx_at_the_ends_of_the_range():
    for v in (1e-40, 1e-38, 3e38): assert off(mx_round(torch.full((32,), v)), torch.full((32,), v)) < .07
    for v in (0., 1e-45, 1e-40): assert mx_quantize(torch.full((32,), v))[1] == 2.**-127      # the smallest that E8M0 has
    assert (mx_round(torch.zeros(32)) == 0).all()
    with pytest.raises(ValueError, match='an empty tensor has no scale'): mx_quantize(torch.zeros(3, 0))


# --- products ---

@OCP_FNUZ
def test_three_products_by_hand(fwd, bwd):
    x, w, g = r(16, 32), r(8, 32), r(16, 8)
    xs = [t.clone().requires_grad_() for t in (x, w)]
    y = fp8_linear(*xs, recipe=FP8Recipe(forward=fwd, backward=bwd))
    x8, w8, g8 = quantize(x, fwd), quantize(w, fwd), quantize(g, bwd)
    assert same_bits(y, x8 @ w8.T)
    gx, gw = torch.autograd.grad(y, xs, g)
    torch.testing.assert_close(gx, g8 @ w8, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gw, g8.T @ x8, rtol=1e-6, atol=1e-6)


@OCP_FNUZ
def test_scaled_products_by_hand(fwd, bwd):
    x, w, g = r(16, 32)*2.**-20, r(8, 32)*2.**9, r(16, 8)*2.**-30
    def cast(t, fmt): return quantize(t*(s := get_format(fmt).max/t.abs().max()), fmt)/s
    xs = [t.clone().requires_grad_() for t in (x, w)]
    y = fp8_linear(*xs, recipe=FP8Recipe('current', fwd, bwd))
    gx, gw = torch.autograd.grad(y, xs, g)
    assert off(y, cast(x, fwd) @ cast(w, fwd).T) < 1e-6
    assert off(gx, cast(g, bwd) @ cast(w, fwd)) < 1e-6 and off(gw, cast(g, bwd).T @ cast(x, fwd)) < 1e-6


def test_mx_products_lie_along_their_sums():
    a, b, g = r(40, 64, requires_grad=True), r(64, 48, requires_grad=True), r(40, 48)
    y = fp8_matmul(a, b, FP8Recipe('mx'))
    ga, gb = torch.autograd.grad(y, (a, b), g)
    assert torch.equal(y, mx_round(a.detach()) @ mx_round(b.detach(), dim=0))
    assert torch.equal(ga, mx_round(g, 'e5m2') @ mx_round(b.detach(), dim=1).T)
    assert torch.equal(gb, mx_round(a.detach(), dim=0).T @ mx_round(g, 'e5m2', dim=0))


SHAPES = [((4, 8), (8, 6)), ((3, 4, 8), (8, 6)), ((3, 4, 8), (3, 8, 6)), ((2, 3, 4, 8), (2, 3, 8, 6)), ((2, 1, 4, 8), (3, 8, 6)), ((8,), (8, 6)),
          ((4, 8), (8,)), ((8,), (8,)), ((3, 4, 8), (8,)), ((8,), (3, 8, 6))]


@EVERY
@pytest.mark.parametrize('sa,sb', SHAPES)
def test_shapes_are_torchs(scaling, sa, sb):
    a, b = torch.rand(*sa, requires_grad=True), torch.rand(*sb, requires_grad=True)     # without cancellation
    y, want = fp8_matmul(a, b, FP8Recipe(scaling)), a @ b
    assert y.shape == want.shape and off(y, want) < .2
    g = torch.ones_like(want)
    for u,v in zip(torch.autograd.grad(y, (a, b), g), torch.autograd.grad(want, (a, b), g)): assert u.shape == v.shape and off(u, v) < .2


@EVERY
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_come_back(scaling, dtype):
    a, b = r(8, 32, dtype=dtype, requires_grad=True), r(32, 8, dtype=dtype, requires_grad=True)
    y = fp8_matmul(a, b, FP8Recipe(scaling))
    y.sum().backward()
    assert {t.dtype for t in (y, a.grad, b.grad)} == {dtype} and off(y, a @ b) < .1


@pytest.mark.parametrize('v,want', [(1.0625, 1.), (1.1875, 1.25), (1.3125, 1.25), (-1.1875, -1.25)])
def test_nearest_means_nearest_ties_to_even(v, want):
    for _ in range(5): assert fp8_matmul(torch.tensor([[v]]), torch.ones(1, 1)).item() == want


def test_nearest_stays_nearest_in_a_converted_model():
    one, x = nn.Sequential(nn.Linear(1, 1, bias=False)), torch.tensor([[1.03125], [1.0625], [1.1875]]).repeat(100, 1)
    nn.init.ones_(one[0].weight)
    eight, rough = simulate_fp8(one), simulate_fp8(one, FP8Recipe(rounding='stochastic'))
    assert torch.equal(eight(x), torch.tensor([[1.], [1.], [1.25]]).repeat(100, 1)) and same_bits(eight(x), eight(x))
    assert rough(x[::3]).unique().tolist() == [1., 1.125]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_values_are_those_of_single(dtype):
    "Every code that lies within e4m3's range, ties to even among them, and its gradient in e5m2"
    x = torch.arange(2**15, dtype=torch.int16).view(dtype)
    x = torch.cat([x, -x])[:, None]
    x = x[x.isfinite() & (x.abs() <= 448)][:, None].requires_grad_()
    got = []
    for t in (x, x.detach().float().requires_grad_()):
        y = fp8_matmul(t, torch.ones(1, 1, dtype=t.dtype))
        got.append((y, *torch.autograd.grad(y, t, t.detach())))
    for a, b in zip(*got): assert a.dtype is dtype and same_bits(a, b.to(dtype))


def test_stochastic_means_stochastic():
    a, one = torch.full((4000, 1), 1.03125), torch.ones(1, 1)
    got = fp8_matmul(a, one, FP8Recipe(rounding='stochastic'))
    assert set(got.unique().tolist()) == {1., 1.125} and abs(got.mean() - 1.03125) < .005
    assert set(fp8_matmul(a, one, FP8Recipe(rounding='toward_zero')).unique().tolist()) == {1.}


def test_overflow_is_what_was_asked_for():
    big, one = torch.tensor([[1e4]]), torch.ones(1, 1)
    assert fp8_matmul(big, one) == 448 and fp8_matmul(big, one, FP8Recipe(forward='e4m3fnuz', backward='e5m2fnuz')) == 240
    assert fp8_matmul(big, one, FP8Recipe(overflow='nan')).isnan() and fp8_matmul(big, one, FP8Recipe('current')).item() == pytest.approx(1e4)
    assert fp8_matmul(big*10, one, FP8Recipe(forward='e5m2', overflow='inf')).isinf()


@pytest.mark.parametrize('kw,says', [(dict(overflow='inf'), 'e4m3 has no inf'), (dict(overflow='inf', forward='e5m2', backward='e5m2fnuz'), 'e5m2fnuz has no inf'),
                                     (dict(scaling='tensor'), "no FP8 scaling 'tensor'"), (dict(forward='fp16'), 'fp16 is no format'), (dict(backward='e8m0'), 'e8m0 is no format'),
                                     (dict(forward='e9'), 'no format'), (dict(rounding='up'), "no rounding 'up'"), (dict(overflow='clip'), "no overflow 'clip'"),
                                     (dict(scaling='delayed', algo='mean'), "no amax rule 'mean'"), (dict(scaling='delayed', history=0), 'history=0 cannot'), (dict(margin=.5), 'margin=0.5 cannot'), (dict(margin=200), 'margin=200'), (dict(algo='mean'), 'no amax rule'),
                                     (dict(scaling='mx', overflow='nan'), 'MX formats saturate'), (dict(scaling='mx', block=0), 'block=0 cannot'),
                                     (dict(scaling='mx', scale_rounding='down'), "'down': take 'up' or 'floor'")])
def test_a_recipe_that_cannot_be_is_refused(kw, says):
    with pytest.raises(ValueError, match=says): FP8Recipe(**kw)


def test_bad_operands():
    for f in (fp8_matmul, native_matmul, fp8_linear, lambda a, b: fp8_attention(a, b, b), lambda a, b: mx_quantize(a), lambda a, b: mx_round(a),
              lambda a, b: simulate_fp8(nn.Sequential(nn.Conv1d(2, 2, 1)))(a[None]), lambda a, b: FP8Linear(2, 2)(a)):
        for bad, says in ((torch.ones(2, 2).long(), 'floating-point numbers, not torch.int64: cast them first'), (r(2, 0), r'given shape .*2, 0\): an empty tensor has no scale')):
            with pytest.raises(ValueError, match=says): f(bad, r(2, 2))
    with pytest.raises(ValueError, match='block of 0 numbers'): mx_quantize(r(4), block=0)
    with pytest.raises(ValueError, match=r'shape \(0, 4\)'): fp8_matmul(r(0, 4), r(4, 2))
    with pytest.raises(ValueError, match='scale of -1'): FixedScaling(-1.)


def test_a_refused_operand_leaves_no_trace_in_delayed_scales():
    layer = FP8Linear(4, 4, recipe=FP8Recipe('delayed', history=4))
    layer(r(8, 4))
    before = copy.deepcopy(layer.state_dict())
    for bad in (torch.ones(2, 4).long(), r(0, 4)):
        with pytest.raises(ValueError): layer(bad)
    assert all(same_bits(p, before[n]) for n, p in layer.state_dict().items())


@EVERY
def test_fp8_linear_is_a_linear_layer(scaling):
    lin = nn.Linear(32, 16)
    eight = FP8Linear(32, 16, recipe=FP8Recipe(scaling, history=4))
    eight.load_state_dict(lin.state_dict(), strict=False)
    x = r(64, 32)
    for _ in range(2): y = eight(x)
    assert isinstance(eight, nn.Linear) and 0 < off(y, lin(x)) < .06
    y.sum().backward()
    assert torch.allclose(eight.bias.grad, torch.full((16,), 64.))     # the bias is not cast, nor its gradient
    twin = FP8Linear(32, 16, recipe=FP8Recipe(scaling, history=4))
    twin.load_state_dict(eight.state_dict())
    assert same_bits(twin(x), eight(x)) and same_bits(pickle.loads(pickle.dumps(eight)).eval()(x), eight.eval()(x))


# --- the machine's own ---

@pytest.mark.parametrize('fa,fb', [('e4m3', 'e4m3'), ('e5m2', 'e4m3'), ('e4m3', 'e5m2'), ('e4m3fnuz', 'e4m3fnuz')])
@pytest.mark.parametrize('shape', [(16, 32, 16), (7, 5, 3), (48, 100, 33)])
def test_native_agrees_with_the_emulation(fa, fb, shape):
    if not has_native_fp8('cpu', fa, fb): pytest.skip('this torch has no FP8 product on a CPU')
    i, k, j = shape
    a, b = r(i, k)*2.**-10, r(k, j)*2.**8
    def cast(t, f): return quantize(t*(s := CurrentScaling()(t, f)), f)/s
    torch.testing.assert_close(native_matmul(a, b, fa, fb), cast(a, fa) @ cast(b, fb), rtol=1e-5, atol=1e-5)
    if fa == fb == 'e4m3': torch.testing.assert_close(native_matmul(a, b), fp8_matmul(a, b, FP8Recipe('current')), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('value, there', [(16., True), (16*(1 + 2**-23), True), (15.999, True), (0., False), (float('nan'), False), (17., False)])
def test_a_native_product_may_be_rounded_and_not_be_another(value, there, monkeypatch):
    monkeypatch.setattr('mpcourse.fp8.native_matmul', lambda a, b, *fmts: torch.full((16, 16), value))
    assert has_native_fp8() is there


def test_has_native_never_raises(monkeypatch):
    monkeypatch.delattr(torch, '_scaled_mm')
    assert has_native_fp8() is False
    with pytest.raises(NotImplementedError, match='leave native off'): native_matmul(r(2, 2), r(2, 2))


def needs_native(*pairs):
    if not all(has_native_fp8('cpu', *p) for p in pairs): pytest.skip('this torch has no FP8 product on a CPU')


NATIVE = pytest.mark.parametrize('scaling', ['none', 'current', 'delayed'])


@NATIVE
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('sa,sb', [((48, 64), (64, 32)), ((7, 5), (5, 3)), ((2, 3, 20), (20, 9)), ((20,), (20, 9)), ((4, 20), (20,))])
def test_native_products_have_the_emulations_gradients(scaling, dtype, sa, sb):
    needs_native(('e4m3', 'e4m3'), ('e5m2', 'e4m3'), ('e4m3', 'e5m2'))
    g, all_of = None, {}
    for native in (True, False):
        torch.manual_seed(0)
        xs = [r(*shape, dtype=dtype).requires_grad_() for shape in (sa, sb)]
        recipe = FP8Recipe(scaling, native=native, history=4)
        scalings, out = recipe.scalings(), []
        for _ in range(3):      # delayed scales are in use from the second step on
            y = fp8_matmul(*xs, recipe, scalings)
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
            out = [y, *torch.autograd.grad(y, xs, g)]
        all_of[native] = out, [b for b in scalings.buffers()]
    for u, v, x in zip(all_of[True][0], all_of[False][0], (torch.empty(all_of[True][0][0].shape), *xs)):
        assert u.dtype == v.dtype == dtype and u.shape == v.shape == x.shape and v.norm() > 0
        assert off(u, v) < {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
    for u, v in zip(all_of[True][1], all_of[False][1]): torch.testing.assert_close(u, v, rtol=2e-2, atol=0)


def test_native_saturates_as_the_emulation_and_keeps_nan():
    needs_native(('e4m3', 'e4m3'))
    a, b = torch.eye(16), torch.eye(16)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3] = 1e6, -1e6, math.inf, 449.
    got, want = [fp8_matmul(a, b, FP8Recipe('none', native=n)) for n in (True, False)]
    assert torch.equal(got.diag(), want.diag()) and got[0, 0] == got[2, 2] == got[3, 3] == 448 and got[1, 1] == -448
    a[4, 4] = math.nan
    assert fp8_matmul(a, b, FP8Recipe('none', native=True))[4].isnan().all()
    ends = native_matmul(torch.full((16, 16), 1e6), b, 'e5m2', 'e4m3', FixedScaling())      # torch's cast to E5M2 overflows
    assert (ends == 57344).all()


def test_native_operands_wait_in_eight_bits():
    needs_native(('e4m3', 'e4m3'))
    lin, kept = FP8Linear(64, 32, bias=False, recipe=FP8Recipe('current', native=True)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t): lin(r(48, 64, requires_grad=True))
    assert [t.dtype for t in kept if t.dim() == 2] == [torch.float8_e4m3fn]*2


def test_native_gradients_are_computed_only_where_needed(monkeypatch):
    needs_native(('e4m3', 'e4m3'), ('e5m2', 'e4m3'), ('e4m3', 'e5m2'))
    a, b, products, theirs = r(16, 32), r(32, 16, requires_grad=True), [], torch._scaled_mm
    monkeypatch.setattr(torch, '_scaled_mm', lambda *xs, **kw: products.append(1) or theirs(*xs, **kw))
    fp8_matmul(a, b, FP8Recipe('current', native=True)).sum().backward()
    assert len(products) == 2
    assert a.grad is None and off(b.grad, a.T @ torch.ones(16, 16)) < .1
    y = fp8_matmul(a, b, FP8Recipe('current', native=True))
    grad, = torch.autograd.grad(y.square().sum(), b, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): grad.sum().backward()


def test_a_model_trains_natively():
    needs_native(('e4m3', 'e4m3'), ('e5m2', 'e4m3'), ('e4m3', 'e5m2'))
    ids, losses = torch.arange(512).view(16, 32) % 96, {}
    for native in (True, False):
        torch.manual_seed(0)
        model = simulate_fp8(CharModel('pre-norm', False, context=32), FP8Recipe('delayed', native=native, history=4))
        opt, losses[native] = torch.optim.SGD(model.parameters(), .1), []
        for _ in range(4):
            loss = cross_entropy(model(ids), ids)
            opt.zero_grad(); loss.backward(); opt.step(); losses[native].append(loss.item())
    assert losses[True] == pytest.approx(losses[False], rel=2e-3) and losses[True][-1] < losses[True][0] - .02


@pytest.mark.parametrize('kw', [dict(scaling='mx'), dict(rounding='stochastic'), dict(overflow='inf')])
def test_native_refuses_what_no_machine_does(kw):
    with pytest.raises(ValueError, match='native=True cannot be with'): FP8Recipe(native=True, **({'forward': 'e5m2'} if 'overflow' in kw else {}), **kw)


def test_native_says_what_the_machine_lacks(monkeypatch):
    def refuse(*a, **kw): raise RuntimeError('not implemented')
    monkeypatch.setattr(torch, '_scaled_mm', refuse)
    with pytest.raises(NotImplementedError, match='no product of torch.float8_e4m3fn and torch.float8_e4m3fn: leave native off'):
        fp8_matmul(r(16, 16), r(16, 16), FP8Recipe(native=True))


# --- attention ---

@EVERY
@pytest.mark.parametrize('kw', [{}, dict(is_causal=True), dict(attn_mask=torch.ones(6, 6).tril().bool()), dict(attn_mask=torch.ones(6, 6)), dict(scale=.1)])
def test_attention_is_torchs_nearly(scaling, kw):
    q, k, v = [r(2, 3, 6, 16, requires_grad=True) for _ in range(3)]
    y, want, g = fp8_attention(q, k, v, **kw, recipe=FP8Recipe(scaling)), F.scaled_dot_product_attention(q, k, v, **kw), r(2, 3, 6, 16)
    assert off(y, want) < .08
    for u,w in zip(torch.autograd.grad(y, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g)): assert off(u, w) < .2


def test_grouped_queries_share_a_key():
    class Grouped(nn.Module):
        def __init__(self): super().__init__(); self.q, self.kv = nn.Linear(16, 32), nn.Linear(16, 16)
        def forward(self, x):
            q, kv = (l(x).unflatten(-1, (-1, 8)).transpose(1, 2) for l in (self.q, self.kv))
            return F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
    torch.manual_seed(0)
    model, x = Grouped(), torch.randn(3, 6, 16)
    with torch.no_grad(): want, got = model(x), simulate_fp8(model)(x)
    assert got.shape == want.shape == (3, 4, 6, 8)
    assert .001 < (got - want).norm()/want.norm() < .15
    per_head = (got - want).flatten(2).norm(dim=2)/want.flatten(2).norm(dim=2)
    assert (per_head < .2).all(), per_head          # a head that met the wrong key would be far off


def test_small_shares_of_attention_survive():
    "One key in 2048 has a share of 2^-11, which E4M3 flushes unless it is scaled; shares have a scale that is known"
    q, v = torch.zeros(1, 4, 8), torch.ones(1, 2048, 8)
    assert off(fp8_attention(q, r(1, 2048, 8)*0, v), torch.ones(1, 4, 8)) < 1e-3
    assert quantize(2.**-11, 'e4m3') == 0


# --- whole models ---

IMAGES = dict(relu_mlp=relu_mlp, deep_sigmoid=deep_sigmoid, cnn=cnn)


@pytest.mark.parametrize('scaling', ['none', 'current', 'delayed'])
@pytest.mark.parametrize('name', IMAGES)
def test_image_models_convert(name, scaling):
    model, x = IMAGES[name](), torch.rand(8, 1, 8, 8)
    eight = simulate_fp8(model, FP8Recipe(scaling))
    assert list(eight.state_dict()) == list(model.state_dict()) + ['fp8_scales._extra_state']*(scaling == 'delayed')
    y = eight(x)
    assert 0 < off(y, model(x)) < .5 and len(eight.fp8.scalings) == sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in model.modules())
    y.sum().backward()
    assert all(p.grad is not None for p in eight.parameters()) and all(p.grad is None for p in model.parameters())


@EVERY
@pytest.mark.parametrize('unit', [False, True])
@pytest.mark.parametrize('kind', KINDS_OF_MODEL)
def test_character_models_convert(kind, unit, scaling):
    model, ids = CharModel(kind, unit, d=32, layers=1, context=16), torch.randint(96, (2, 16))
    if scaling == 'mx' and kind == 'convolution':
        with pytest.raises(ValueError, match="'body.0.f.conv' computes a convolution"): simulate_fp8(model, FP8Recipe('mx'))
        return
    eight = simulate_fp8(model, FP8Recipe(scaling))
    assert 0 < off(eight(ids), model(ids)) < .4
    cross_entropy(eight(ids), ids).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in eight.parameters())


def test_products_in_somebodys_forward_convert():
    model, ids = char_transformer(context=16), torch.randint(96, (2, 16))
    eight = simulate_fp8(model)
    assert 0 < off(eight(ids), model(ids)) < .3
    assert {k for k in eight.fp8.scalings if k[0] == 'blocks.0.attn'} == {('blocks.0.attn', 0), ('blocks.0.attn', 1)}
    towers = two_towers()
    args = torch.rand(4, 1, 8, 8), torch.randint(96, (10, 5))
    assert 0 < off(simulate_fp8(towers)(*args), towers(*args)) < .5


@pytest.mark.parametrize('need_weights', [False, True])
def test_torchs_own_attention_layer_converts(need_weights):
    m = nn.MultiheadAttention(32, 4, batch_first=True)
    eight, x = simulate_fp8(m), r(2, 6, 32)
    y, want = eight(x, x, x, need_weights=need_weights)[0], m(x, x, x, need_weights=need_weights)[0]
    assert 0 < off(y, want) < .2 and len(eight.fp8.scalings) == 4


@pytest.mark.parametrize('train', [True, False])
def test_torchs_transformer_layer_converts(train):
    m = nn.TransformerEncoderLayer(32, 4, 64, dropout=0., batch_first=True).train(train)
    eight, x = simulate_fp8(m).train(train), r(2, 6, 32)
    with torch.set_grad_enabled(train): assert 0 < off(eight(x), m(x)) < .1
    assert len(eight.fp8.scalings) == 6


class Does(nn.Module):
    "Computes anything"
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)


PRODUCTS = {'@': lambda x: x @ x.T, 'matmul': lambda x: torch.matmul(x, x.T), 'method': lambda x: x.matmul(x.T), 'mm': lambda x: x.mm(x.T), 'mv': lambda x: x.mv(x[0]),
            'dot': lambda x: x[0].dot(x[1]), 'bmm': lambda x: x[None].bmm(x.T[None]), 'addmm': lambda x: torch.addmm(x[0, 0], x, x.T, beta=2, alpha=.5),
            'baddbmm': lambda x: torch.baddbmm(x[:1, :1, None], x[None], x.T[None], beta=0), 'linear': lambda x: F.linear(x, x), 'conv1d': lambda x: F.conv1d(x[None], x[:, :, None]),
            'conv_transpose1d': lambda x: F.conv_transpose1d(x.T[None], x.T[:, :, None]), 'conv3d': lambda x: F.conv3d(x[None, :, :, None, None], x[:, :, None, None, None].transpose(0, 1)[:, :8], padding=0),
            'conv2d': lambda x: F.conv2d(x[None, :, :, None], x[:, :8, None, None].contiguous(), x[0], padding='same')}


@pytest.mark.parametrize('name', PRODUCTS)
def test_every_way_to_multiply_converts(name):
    x, f = r(8, 8), PRODUCTS[name]
    got, want = simulate_fp8(nn.Sequential(Does(f)))(x), f(x)
    assert got.shape == want.shape and 0 < off(got, want) < .2


REFUSED = {'einsum': lambda x: torch.einsum('ij,kj->ik', x, x), 'tensordot': lambda x: torch.tensordot(x, x, 1), 'multi_dot': lambda x: torch.linalg.multi_dot([x, x, x]),
           'in place': lambda x: torch.zeros(8, 8).addmm_(x, x), 'bilinear': lambda x: F.bilinear(x, x, x[None])}


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_not_known_is_refused_by_name(name):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Does(REFUSED[name]))), r(8, 8)
    eight = simulate_fp8(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Module '1\.0' computes .* not converted to FP8"): eight(x)
    assert off(simulate_fp8(model, skip='1.*')(x), model(x)) < .3
    assert torch.equal(model(x), model(x)) and eight.fp8.depth == 0     # and nothing stays switched on


@pytest.mark.parametrize('m', [nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNN(8, 8), nn.RNNCell(8, 8), nn.Bilinear(8, 8, 8)])
def test_sealed_layers_are_refused_at_once(m):
    with pytest.raises(ValueError, match=f"Module '1' computes a {type(m).__name__}"): simulate_fp8(nn.Sequential(nn.Identity(), m))
    with pytest.raises(ValueError, match='The model itself'): simulate_fp8(m)
    simulate_fp8(nn.Sequential(nn.Identity(), m), skip='1')


def test_root_containers_are_converted():
    model, x = nn.Sequential(nn.Linear(8, 8)), r(4, 8)
    assert not torch.equal(simulate_fp8(model)(x), model(x))
    assert torch.equal(simulate_fp8(model)(x), fp8_linear(x, model[0].weight, model[0].bias))


def test_a_part_of_a_converted_model_is_converted():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), r(4, 8)
    eight = simulate_fp8(model)
    assert torch.equal(eight[0](x), fp8_linear(x, model[0].weight, model[0].bias)) and eight.fp8.depth == 0


def test_skipped_modules_stay_exact():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), r(4, 8)
    assert torch.equal(simulate_fp8(model, skip=('0', '1'))(x), model(x))
    assert torch.equal(simulate_fp8(model, skip='0')(x), fp8_linear(model[0](x), model[1].weight, model[1].bias))
    with pytest.raises(ValueError, match="skip='head' matches no module"): simulate_fp8(model, skip='head')
    with pytest.raises(ValueError, match='converted to FP8 before'): simulate_fp8(simulate_fp8(model))


def test_integers_and_exceptions_pass_through():
    assert torch.equal(simulate_fp8(Does(lambda x: x @ x))(torch.eye(3).long()), torch.eye(3).long())
    def fails(x): raise KeyError('mine')
    eight = simulate_fp8(nn.Sequential(nn.Linear(4, 4), Does(fails)))
    for _ in range(2):
        with pytest.raises(KeyError): eight(r(2, 4))
    assert eight.fp8.depth == 0 and not eight.fp8.names and torch.equal(torch.einsum('ij->ji', torch.eye(2)), torch.eye(2))


def test_delayed_scales_have_a_memory_and_travel():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), r(16, 8)*100
    eight = simulate_fp8(model, FP8Recipe('delayed', history=4))
    for _ in range(3): eight(x).sum().backward()
    assert off(eight(x), model(x)) < .1 and sorted(eight.fp8.scalings) == [('0', 0), ('2', 0)]
    assert eight.fp8.scalings['0', 0]['g'].history.max() > 0
    buf = io.BytesIO()
    torch.save(eight.fp8.state_dict(), buf)
    buf.seek(0)
    fresh = simulate_fp8(model, FP8Recipe('delayed', history=4))
    fresh.fp8.load_state_dict(torch.load(buf, weights_only=True))
    assert same_bits(fresh(x), copy.deepcopy(eight)(x))
    held = {k: s['a'].scale.clone() for k, s in eight.fp8.scalings.items()}
    eight.eval()(x*9)
    assert all(same_bits(held[k], s['a'].scale) for k, s in eight.fp8.scalings.items())


def test_copies_are_apart():
    eight = simulate_fp8(nn.Sequential(nn.Linear(8, 8)), FP8Recipe('delayed'))
    twin = copy.deepcopy(eight)
    twin(r(4, 8))
    assert twin.fp8 is not eight.fp8 and twin.fp8.scalings and not eight.fp8.scalings


def test_checkpointed_layers_are_converted_again():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        def forward(self, x): return checkpoint(self.b, F.relu(self.a(x)), use_reentrant=False) if self.again else self.b(F.relu(self.a(x)))
    grads = []
    torch.manual_seed(0)
    net = Net()
    for net.again in (False, True):
        eight = simulate_fp8(net)
        eight(torch.ones(4, 8)).square().sum().backward()
        grads.append([p.grad for p in eight.parameters()])
    for u, v in zip(*grads): assert torch.equal(u, v)


def test_the_context_alone():
    a, b = r(4, 8), r(8, 4)
    with fp8_products(): y = a @ b
    assert torch.equal(y, fp8_matmul(a, b)) and torch.equal(a @ b, torch.matmul(a, b))
    with pytest.raises(ValueError, match='The code computes'):
        with fp8_products(): torch.einsum('ij,jk->ik', a, b)


# --- the claim and its failing twin ---

def first_gradients(model, ids, loss_func, factor):
    loss = loss_func(model(ids), ids)
    (loss*factor).backward()
    ps = [p for n, p in model.named_parameters() if p.dim() > 1 and n[:3] not in ('tok', 'pos')]
    return sum((p.grad == 0).sum().item() for p in ps)/sum(p.numel() for p in ps)


def test_who_needs_a_scale():
    from mpcourse.unit import unit_cross_entropy
    ids, zeros = torch.arange(512).view(16, 32) % 96, {}
    for unit in (False, True):
        model = CharModel('pre-norm', unit, context=32)
        for name in ('none', 'current', 'mx'):
            # the mean over half a million characters; that of a unit-scaled model has the gradient of one over 512
            factor = 1. if unit else 2.**-10
            zeros[unit, name] = first_gradients(simulate_fp8(model, FP8Recipe(name)), ids, unit_cross_entropy if unit else cross_entropy, factor)
    assert zeros[False, 'none'] > .5 and max(v for k, v in zeros.items() if k != (False, 'none')) < .02


def test_unit_scaled_conversion_and_fp8_agree():
    model = unit_scale(relu_mlp(), readout='7', constraint='none')
    x = torch.rand(32, 1, 8, 8)
    assert 0 < off(simulate_fp8(model)(x), model(x)) < .1


@EVERY
def test_half_models_keep_their_dtype(scaling):
    model, x = relu_mlp().half(), torch.rand(8, 1, 8, 8).half()
    eight = simulate_fp8(model, FP8Recipe(scaling))
    y = eight(x)
    y.float().sum().backward()
    assert y.dtype == torch.float16 and 0 < off(y, relu_mlp()(x.float())) < .2
    assert all(p.grad.dtype == torch.float16 for p in eight.parameters())


def test_a_converted_model_can_be_pickled():
    eight, x = simulate_fp8(nn.Sequential(nn.Linear(8, 8)), FP8Recipe('delayed')), r(4, 8)
    eight(x)
    back = pickle.loads(pickle.dumps(eight))
    assert same_bits(back(x), eight(x)) and back.fp8.scalings.keys() == eight.fp8.scalings.keys()


def test_operands_and_gradients_of_a_unit_scaled_layer_are_cast_at_their_own_size():
    "Its factors wait behind the products; before the cast, that of x, 2^-3.5, would push the gradient among the subnormals"
    lin = UnitLinear(64, 256, bias=True)
    eight, x, g = simulate_fp8(nn.Sequential(lin)), r(32, 64, requires_grad=True), r(32, 256)*2.**-13
    y = eight(x)
    got = torch.autograd.grad(y, (x, eight[0].weight), g)
    f = constrain(linear_factors(64, 256, 32))
    g8, x8, w8 = quantize(g, 'e5m2'), quantize(x, 'e4m3'), quantize(lin.weight, 'e4m3')
    torch.testing.assert_close(y, f['y']*(x8 @ w8.T), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[0], f['x']*(g8 @ w8), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(got[1], f['w']*(g8.T @ x8), rtol=1e-5, atol=1e-8)
    early = quantize(g*f['x'], 'e5m2')/f['x']
    assert off(early, g) > 2*off(g8, g)


# --- in somebody's program ---

class Interrupted(nn.Module):
    def forward(self, x): raise KeyboardInterrupt


def test_an_interrupt_leaves_no_eight_bits_behind():
    model, a = simulate_fp8(nn.Sequential(nn.Linear(8, 8), nn.Sequential(Interrupted()))), r(64, 64)
    want = a @ a
    with pytest.raises(KeyboardInterrupt): model(r(2, 8))
    assert torch.equal(a @ a, want) and torch.equal(torch.einsum('ij,jk->ik', a, a), want) and not model.fp8.depth and not model.fp8.names
    with pytest.raises(KeyboardInterrupt): model[1](r(2, 8))
    assert torch.equal(a @ a, want)


def test_a_converted_forward_shows_its_signature():
    import inspect
    assert list(inspect.signature(simulate_fp8(nn.Linear(8, 8)).forward).parameters) == ['input']


@pytest.mark.parametrize('to_half', [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: model_to_half(m)])
def test_delayed_scales_stay_single_in_a_half_model(to_half):
    lin, x = to_half(FP8Linear(8, 8, bias=False, recipe=FP8Recipe('delayed', history=4))), 1e-3*r(16, 8)
    for _ in range(3):
        y = lin(x.to(lin.weight.dtype))
        lin.zero_grad()
        (y.float()*1e-3).sum().backward()
    s = lin.scalings['g']
    assert s.scale.dtype == s.history.dtype == torch.float32 and 65504 < s.scale < math.inf
    assert off(y, x @ lin.weight.float().T) < .1 and lin.weight.grad.float().norm() > 0


def test_a_scale_that_was_lost_begins_anew():
    s = DelayedScaling(4)
    for v in (1e-4, 1e-4): s(torch.tensor([v]), 'e4m3')
    s.half()
    assert s.scale.isinf() and s(torch.tensor([2.]), 'e4m3') == 1 and s.scale == 224


@pytest.mark.parametrize('native', [False, True])
@pytest.mark.parametrize('sa,sb', [((2, 3), (4, 5)), ((2, 17), (20, 4)), ((3, 2, 8), (9, 8)), ((8,), (9,)), ((8,), (9, 3))])
def test_shapes_that_do_not_match_are_refused(sa, sb, native):
    recipe = FP8Recipe('delayed', native=native)
    scalings = recipe.scalings()
    with pytest.raises(ValueError, match='cannot be multiplied'): fp8_matmul(torch.ones(sa), torch.ones(sb), recipe, scalings)
    assert not scalings['a'].history.any()


def test_native_matmul_takes_two_matrices():
    with pytest.raises(ValueError, match='cannot be multiplied'): native_matmul(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(ValueError, match='takes two matrices'): native_matmul(torch.ones(2, 3, 4), torch.ones(4, 5))


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('simulated', [True, False])
@pytest.mark.parametrize('native', [False, True])
def test_checkpointing_changes_nothing_with_delayed_scales(reentrant, simulated, native):
    if native: needs_native(('e4m3', 'e4m3'), ('e5m2', 'e4m3'), ('e4m3', 'e5m2'))
    found = {}
    for again in (True, False):
        torch.manual_seed(0)
        recipe = FP8Recipe('delayed', history=8, native=native)
        net = simulate_fp8(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), recipe) if simulated else FP8Linear(8, 8, recipe=recipe)
        grads = []
        for k in range(3):
            x = (2.**k*r(4, 8)).requires_grad_()
            y = checkpoint(net, x, use_reentrant=reentrant) if again else net(x)
            grads += torch.autograd.grad(y.square().sum(), [x]) if not reentrant else []
            if reentrant: y.square().sum().backward(); grads.append(x.grad)
        scales = net.fp8.scalings['0', 0] if simulated else net.scalings
        found[again] = grads + [b for b in scales.buffers()]
    assert all(torch.equal(u, v) for u, v in zip(found[True], found[False])) and found[True][-2].count_nonzero() == 3


@EVERY
def test_second_derivatives_are_refused_and_not_dropped(scaling):
    x = torch.ones(3, 8, requires_grad=True)
    net = simulate_fp8(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), FP8Recipe(scaling))
    g, = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): g.square().sum().backward()


@EVERY
def test_a_query_that_sees_nothing_gets_zeros(scaling):
    q, k, v = (r(2, 3, 16, requires_grad=True) for _ in 'qkv')
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    for m in (mask, torch.zeros(3, 3).masked_fill(~mask, -math.inf)):
        y = fp8_attention(q, k, v, attn_mask=m, recipe=FP8Recipe(scaling))
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        assert not y[:, 1].any() and off(y, want) < .2
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def trained(model, steps):
    opt = torch.optim.SGD(model.parameters(), .1)
    for k in range(*steps):
        x = r(4, 8)*(k + 1)
        model.zero_grad(); model(x).square().mean().backward(); opt.step()
    return model


@pytest.mark.parametrize('wrapped', [False, True])
def test_delayed_scales_are_in_a_checkpoint(wrapped):
    def fresh():
        net = simulate_fp8(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))), FP8Recipe('delayed', history=4))
        return nn.Sequential(net) if wrapped else net
    model = trained(fresh(), (0, 3))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, x = fresh(), r(4, 8)
    state = torch.load(file)
    kept = dict(state)
    other.load_state_dict(state)
    assert len(kept) == len(dict(model.named_parameters())) + 1
    torch.manual_seed(1); trained(model, (3, 5))
    torch.manual_seed(1); trained(other, (3, 5))
    assert same_bits(model(x), other(x)) and all(torch.equal(u, v) for u, v in zip(model.parameters(), other.parameters()))


def test_a_training_state_resumes_bit_for_bit(tmp_path):
    from mpcourse.checkpoint import load_training_state, save_training_state
    def fresh():
        torch.manual_seed(0)
        net = simulate_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), FP8Recipe('delayed', history=4))
        return net, torch.optim.Adam(net.parameters(), .01)
    def go(net, opt, n):
        for _ in range(n):
            opt.zero_grad(); net(r(4, 8)).square().mean().backward(); opt.step()
    net, opt = fresh()
    go(net, opt, 3)
    save_training_state(tmp_path/'s.pt', net, opt)
    go(net, opt, 3)
    other, opt = fresh()
    load_training_state(tmp_path/'s.pt', other, opt)
    go(other, opt, 3)
    assert all(same_bits(u, v) for u, v in zip(net.parameters(), other.parameters()))
    assert all(torch.equal(t, other.fp8.state_dict()[k][n]) for k, d in net.fp8.state_dict().items() for n, t in d.items())


def test_a_plain_checkpoint_loads_into_a_converted_model():
    net = nn.Sequential(nn.Linear(8, 8))
    eight = simulate_fp8(nn.Sequential(nn.Linear(8, 8)), FP8Recipe('delayed'))
    eight.load_state_dict(net.state_dict())
    assert torch.equal(eight[0].weight, net[0].weight) and list(eight.state_dict())[:2] == ['0.weight', '0.bias']


def test_scales_of_another_recipe_are_refused_whole():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    eight, other = [trained(simulate_fp8(net, FP8Recipe('delayed', history=h)), (0, 2)) for h in (4, 3)]
    state = eight.fp8.state_dict()
    mixed = {('0', 0): state['0', 0], ('1', 0): other.fp8.state_dict()['1', 0]}
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match="scales of .'1', 0.*give its recipe"): eight.fp8.load_state_dict(mixed)
    assert all(torch.equal(v, before[k][n]) for k, d in eight.fp8.state_dict().items() for n, v in d.items())


def test_an_evaluation_in_between_loses_no_gradient():
    lin, x = FP8Linear(8, 8, recipe=FP8Recipe('delayed', history=4)), r(4, 8)
    for _ in range(3):
        y = lin(x)
        lin.eval()(x)
        lin.train()
        y.sum().backward()
        lin.eval()
        lin.train()
    y = lin(x)
    lin.eval()
    y.sum().backward()
    assert lin.scalings['g'].history.count_nonzero() == 4 and lin.scalings['a'].history.count_nonzero() == 4


def test_a_frozen_part_keeps_its_scales():
    net = simulate_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), FP8Recipe('delayed', history=4))
    net(r(4, 8))
    net[0].eval()
    before = net.fp8.scalings['0', 0]['a'].history.clone()
    net(9*r(4, 8))
    assert torch.equal(net.fp8.scalings['0', 0]['a'].history, before) and net.fp8.scalings['1', 0]['a'].history.count_nonzero() == 2


@EVERY
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_a_result(scaling, dtype):
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), r(4, 16)
    exact = simulate_fp8(net, FP8Recipe(scaling))(x)
    with torch.autocast('cpu', dtype): y, plain = simulate_fp8(net, FP8Recipe(scaling))(x), net(x)
    assert y.dtype == plain.dtype == dtype and off(y, exact) < .05
    one = simulate_fp8(nn.Linear(16, 8, bias=False), FP8Recipe(scaling)).eval()
    exact = one(x)
    with torch.autocast('cpu', dtype): assert torch.equal(one(x), exact.to(dtype))      # the sum was in FP32


def test_operands_by_name_convert():
    x = r(4, 8, 8)
    for f in (lambda x: x.baddbmm(batch1=x, batch2=x, beta=.5, alpha=2), lambda x: torch.matmul(x, other=x), lambda x: torch.bmm(x, mat2=x),
              lambda x: torch.addmm(x[0], mat1=x[1], mat2=x[2]), lambda x: torch.matmul(input=x, other=x)):
        y = simulate_fp8(Does(f), 'current')(x)
        assert 0 < off(y, f(x)) < .1
    with pytest.raises(ValueError, match='matmul with out='): simulate_fp8(Does(lambda x: torch.matmul(x, x, out=x)))(x)


def test_a_recipe_in_the_wrong_place_is_refused():
    with pytest.raises(ValueError, match='give recipe='): FP8Linear(8, 8, FP8Recipe('mx'))
    assert FP8Linear(8, 8, recipe='mx').recipe == simulate_fp8(nn.Linear(8, 8), 'mx').fp8.recipe == FP8Recipe('mx')
    with pytest.raises(ValueError, match='3 is no recipe'): simulate_fp8(nn.Linear(8, 8), 3)
    with pytest.raises(ValueError, match="no FP8 scaling 'tensor'"): simulate_fp8(nn.Linear(8, 8), 'tensor')
    with pytest.raises(ValueError, match='skip=3 matches no module'): simulate_fp8(nn.Linear(8, 8), skip=[3])
    with pytest.raises(ValueError, match='0 has been converted to FP8 before'): simulate_fp8(nn.Sequential(FP8Linear(8, 8)))
    with pytest.raises(ValueError, match='0 has been converted to FP8 before'): simulate_fp8(nn.Sequential(simulate_fp8(nn.Linear(8, 8))))


ODD_RANKS = '''
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from mpcourse.fp8 import FP8Recipe, reduce_amax, simulate_fp8

class Order(nn.Module):
    "Layers in another order on each rank"
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8)))
    def forward(self, x, order): return sum(self.layers[k](x*(1 + 9*(k == 'b'))) for k in order)

torch.manual_seed(0)
model = DistributedDataParallel(simulate_fp8(Order(), FP8Recipe('delayed', history=3)))
model(torch.full((2, 8), 1. + rank), 'ab'[::1 - 2*rank]).sum().backward()
reduce_amax(model)
scales = {k[0]: s['a'].scale.item() for k, s in model.module.fp8.scalings.items()}
alone = simulate_fp8(Order(), FP8Recipe('delayed'))
alone(torch.ones(2, 8), 'ab'[:1 + rank]).sum()          # once a layer less
try: reduce_amax(alone)
except RuntimeError as e: said = str(e)
torch.save((scales, said), f'{folder}/{rank}.pt')
'''


def test_ranks_are_matched_by_name_and_a_missing_product_is_named(ranks):
    (a, said), (b, other) = ranks(ODD_RANKS)
    assert a == b == {'layers.a': 224, 'layers.b': pytest.approx(22.4)}
    assert 'not run the same products' in said and "('layers.a', 0)" in said and "('layers.b', 0)" in other


def test_a_scale_is_rounded_once():
    "As torchao divides; a number over a tensor is a product with a rounded inverse"
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0))*100
    got = torch.stack([amax_scale(a, 'e4m3', torch.ones(())) for a in amax])
    assert torch.equal(got, (448/amax.double()).float()) and (got != 448/amax).any()
