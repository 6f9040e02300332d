"""Beside the package of the method's authors: the same numbers where it is right, a predicted ratio where factors differ, and its mistakes, which we do not share."""
import math, statistics, warnings
from functools import partial

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from conftest import each

from mpcourse.formats import same_bits
from mpcourse.unit import (CONSTRAINTS, ELEMENTWISE, attention_factors, residual_add, residual_split, softmax_factors, unit_attention, unit_cross_entropy,
                           unit_dropout, unit_embedding, unit_gelu, unit_layer_norm, unit_linear, unit_matmul, unit_mse, unit_norm, unit_readout, unit_silu,
                           unit_softmax, unit_stds, weighted_add)
from mpcourse.unit_models import unit_conv

unit_conv1d = partial(unit_conv, F.conv1d)
def unit_rms_norm(x, shape, w, eps): return unit_norm(lambda x, w, b: F.rms_norm(x, shape, w, eps), x, w, features=math.prod(shape))

with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    lib = pytest.importorskip('unit_scaling.functional', exc_type=ImportError)
    transforms, formats = (pytest.importorskip(f'unit_scaling.{m}', exc_type=ImportError) for m in ('transforms', 'formats'))

D = torch.float64
PEER = dict(geometric='gmean', harmonic='hmean', arithmetic='amean', to_output='to_output_scale', none=None)
MEANS = dict(geometric=statistics.geometric_mean, harmonic=statistics.harmonic_mean, arithmetic=statistics.fmean)
EACH = each('constraint', CONSTRAINTS)


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(): torch.manual_seed(0); yield


def r(*shape): return torch.randn(shape, dtype=D)


def tie(constraint, free=(), **ideal):
    "The factors that a constraint leaves: those not named free get one in common"
    if constraint == 'none': return ideal
    tied = {k: v for k, v in ideal.items() if k not in free}
    one = ideal['y'] if constraint == 'to_output' else MEANS[constraint](tied.values())
    return ideal | dict.fromkeys(tied, one)


def run(f, xs):
    "Output and gradients by name, for a gradient without symmetries"
    xs = {k: v.detach().clone().requires_grad_() for k, v in xs.items()}
    y = f(**xs)
    return dict(zip(['y', *xs], [y, *torch.autograd.grad(y, list(xs.values()), torch.ones_like(y).flatten().cumsum(0).view_as(y))]))


def agree(ours, theirs, xs, mine={}, other={}):
    "Same output and gradients in float64, up to the ratio of two predicted factors where they differ; both take tensors by name"
    assert mine.keys() == other.keys()
    a, b = run(ours, xs), run(theirs, xs)
    for k in a: torch.testing.assert_close(a[k], b[k]*(mine[k]/other[k] if k in mine else 1), rtol=1e-9, atol=1e-9, msg=lambda m: f'{k}: {m}')


# --- the same numbers ---

@each('shape', [(6, 5, 16, 8), (64, 32, 48), (1, 7, 3), (2, 3, 4, 5, 6)])
@EACH
def test_linear(constraint, shape):
    *batch, m, n = shape
    agree(partial(unit_linear, constraint=constraint), lambda x, w: lib.linear(x, w, None, PEER[constraint]), dict(x=r(*batch, m), w=r(n, m)))


@EACH
def test_bias(constraint):
    "Theirs is multiplied by the output's factor, ours is added behind it; the gradients are the same"
    c, f = PEER[constraint], tie(constraint, y=16**-.5, x=8**-.5)
    agree(lambda x, w, b: unit_linear(x, w, b, constraint) - (1 - f['y'])*b.detach(), lambda x, w, b: lib.linear(x, w, b, c), dict(x=r(6, 16), w=r(8, 16), b=r(8)))
    f = tie(constraint, y=(16*4)**-.5, x=(4/(8*4))**.5)
    agree(lambda x, w, b: unit_conv1d(x, w, b, 4, constraint=constraint) - (1 - f['y'])*b.detach()[:, None], lambda x, w, b: lib.conv1d(x, w, b, 4, constraint=c),
          dict(x=r(3, 16, 12), w=r(8, 16, 4), b=r(8)))


@each('shape', [(8, 16, 10), (3, 5, 64, 100)])
@EACH
def test_readout(constraint, shape):
    "Theirs divides by the whole fan-in before it ties the factors, ours behind"
    *batch, m, n = shape
    f = dict(y=m**-1, x=n**-.5)
    mine = tie(constraint, y=m**-.5, x=n**-.5)
    agree(lambda x, w: unit_readout(x, w, power=1, constraint=constraint), lambda x, w: lib.linear_readout(x, w, None, PEER[constraint]), dict(x=r(*batch, m), w=r(n, m)),
          mine | dict(y=mine['y']*m**-.5), tie(constraint, **f))


@each('left,right', [((6, 16), (16, 8)), ((64, 2), (2, 3)), ((4, 6, 16), (4, 16, 8)), ((2, 3, 5, 7), (2, 3, 7, 11))])
@EACH
def test_matmul(constraint, left, right):
    agree(lambda a, b: unit_matmul(a, b, constraint), lambda a, b: lib.matmul(a, b, PEER[constraint]), dict(a=r(*left), b=r(*right)))


@each('left,right', [((9, 6, 16), (16, 8)), ((6, 16), (4, 16, 8)), ((2, 1, 5, 7), (3, 7, 4))])
@EACH
def test_matmul_of_a_matrix_that_is_used_often(constraint, left, right):
    "Theirs forgets that a broadcast matrix gets one gradient from each use"
    (i, k), j = left[-2:], right[-1]
    batch = torch.broadcast_shapes(left[:-2], right[:-2]).numel()
    uses = [batch/math.prod(s[:-2]) for s in (left, right)]
    agree(lambda a, b: unit_matmul(a, b, constraint), lambda a, b: lib.matmul(a, b, PEER[constraint]), dict(a=r(*left), b=r(*right)),
          tie(constraint, y=k**-.5, a=(j*uses[0])**-.5, b=(i*uses[1])**-.5), tie(constraint, y=k**-.5, a=j**-.5, b=i**-.5))


CONVS = [dict(kernel=4, stride=4), dict(kernel=1), dict(kernel=2, stride=2, groups=4), dict(kernel=3), dict(kernel=3, padding=1), dict(kernel=5, stride=2, padding=2),
         dict(kernel=3, dilation=2, groups=2), dict(kernel=3, stride=2, padding=1, dilation=3, groups=4)]


@each('kw', CONVS)
@EACH
def test_conv1d(constraint, kw):
    "The same where windows tile the input; elsewhere ours counts the pairs inside, theirs takes every window and every entry for full"
    k, kw = kw['kernel'], {n: v for n, v in kw.items() if n != 'kernel'}
    b, c_in, c_out, size, g, s = 4, 16, 8, 16, kw.get('groups', 1), kw.get('stride', 1)
    seen = F.conv1d(torch.ones(1, 1, size), torch.ones(1, 1, k), **{n: v for n, v in kw.items() if n != 'groups'})
    windows, pairs = seen.numel(), seen.sum().item()
    mine = tie(constraint, 'w', y=(c_in/g*pairs/windows)**-.5, x=(c_out/g*pairs/size)**-.5, w=(b*pairs/k)**-.5)
    other = tie(constraint, 'w', y=(c_in/g*k)**-.5, x=(s*g/(c_out*k))**.5, w=(b*windows)**-.5)
    if k == s: assert mine == pytest.approx(other)
    agree(lambda x, w: unit_conv1d(x, w, constraint=constraint, **kw), lambda x, w: lib.conv1d(x, w, constraint=PEER[constraint], **kw),
          dict(x=r(b, c_in, size), w=r(c_out, c_in//g, k)), mine, other)


@each('rows,ids,features', [(20, (3, 50), 16), (7, (5,), 3), (1000, (2, 2, 2), 8)])
def test_embedding(rows, ids, features):
    ids = torch.randint(rows, ids)
    agree(partial(unit_embedding, ids), lambda w: lib.embedding(ids, w), dict(w=r(rows, features)))


@each('shape,norm', [((8, 16), (16,)), ((3, 5, 6), (6,)), ((4, 2, 3, 5), (3, 5))])
def test_norms(shape, norm):
    xs = dict(x=r(*shape)*3 + 1, w=r(*norm), b=r(*norm))
    agree(lambda x, w, b: unit_layer_norm(x, norm, w, b), lambda x, w, b: lib.layer_norm(x, norm, w, b), xs)
    agree(lambda x: unit_layer_norm(x, norm), lambda x: lib.layer_norm(x, norm), dict(x=xs['x']))
    del xs['b']     # their root mean square is taken in FP32
    a, b = (run(f, xs) for f in (lambda x, w: unit_rms_norm(x, norm, w, 1e-5), lambda x, w: lib.rms_norm(x, norm, w, 1e-5)))
    for k in a: assert (a[k] - b[k]).norm()/b[k].norm() < 2**-22, k


@each('p,training', [(.1, True), (.5, True), (.9, True), (.5, False)])
def test_dropout(p, training):
    def same(f):
        def run(x):
            torch.manual_seed(5)
            return f(x, p, training)
        return run
    agree(same(unit_dropout), same(lib.dropout), dict(x=r(32, 32)))


@each('a,b', [((6, 8), (6, 8)), ((6, 8), (8,)), ((6, 1), (5, 1, 8)), ((3,), (4, 1))])
def test_add(a, b):
    agree(weighted_add_of_two, lambda a, b: lib.add(a, b, 'to_output_scale'), dict(a=r(*a), b=r(*b)))


@each('t', [.3, 1., 2.])
def test_residual_with_its_ratio_translated(t):
    "Their tau is the ratio of the two weights, ours a share of the variance: τ = t²/(1 + t²)"
    def block(split, add, tau):
        def run(x, w, inside):
            branch, skip = split(x, tau)
            return add((branch + inside) @ w, skip, tau)
        return run
    agree(block(residual_split, residual_add, t*t/(1 + t*t)), block(lib.residual_split, lib.residual_add, t), dict(x=r(16, 16), w=r(16, 16), inside=r(16, 16)))


@each('shape', [(8, 16), (3, 4, 5), (7,)])
def test_mse(shape): agree(lambda x, t: unit_mse(x, t), lambda x, t: lib.mse_loss(x, t), dict(x=r(*shape), t=r(*shape)))


@each('n,v', [(32, 10), (1, 2), (500, 96)])
def test_cross_entropy(n, v):
    y = torch.randint(v, (n,))
    agree(lambda x: unit_cross_entropy(x, y), lambda x: lib.cross_entropy(x, y), dict(x=r(n, v)*2))
    agree(lambda x: unit_cross_entropy(x, y[0]), lambda x: lib.cross_entropy(x, y[0]), dict(x=r(v)))


def weighted_add_of_two(a, b): return weighted_add(a, b)


# --- a predicted ratio: their factors are fits, ours are integrals ---

def fit(alpha, lower, upper): return lower**(1 - alpha)*upper**alpha


TOP = (2/(1 - 1/math.pi))**.5     # the factor of ReLU, to which both activations tend
FITS = dict(gelu=dict(y=fit(.8, 2, TOP), x=fit(.8, 2, 2**.5)), silu=dict(y=fit(.8, 2, TOP), x=fit(.5, 2, 2**.5)))
TABLE = dict(gelu=ELEMENTWISE[F.gelu], silu=ELEMENTWISE[F.silu])
OFF = dict(gelu=dict(y=.0387, x=.0234), silu=dict(y=-.0115, x=.0360))      # their factor over the integral, less one


@each('name', FITS)
@EACH
def test_activations(constraint, name):
    mine, other = (tie(constraint, **f[name]) for f in (TABLE, FITS))
    ours, theirs = dict(gelu=unit_gelu, silu=unit_silu)[name], getattr(lib, name)
    agree(lambda x: ours(x, constraint), lambda x: theirs(x, constraint=PEER[constraint]), dict(x=r(5, 7, 9)), mine, other)


@each('name', FITS)
def test_the_fits_of_activations_are_off_by_percents(name):
    "So much too large or small are their outputs and gradients; ours are within half a percent"
    for k, off in OFF[name].items(): assert abs(FITS[name][k]/TABLE[name][k] - 1 - off) < 1e-4
    x = dict(x=r(2**20))
    ours = unit_stds(partial(dict(gelu=unit_gelu, silu=unit_silu)[name], constraint='none'), **x)
    theirs = unit_stds(partial(getattr(lib, name), constraint=None), **x)
    for k in 'yx': assert abs(ours[k] - 1) < .005 and abs(theirs[k] - 1 - OFF[name][k]) < .005


@each('n', [2, 10, 64, 1000])
@EACH
def test_softmax(constraint, n):
    "Theirs is n^.9 for both; ours tends to n/√(e − 1) and n/√e"
    mine, other = tie(constraint, **softmax_factors(n)), dict(y=n**.9, x=n**.9)
    agree(lambda x: unit_softmax(x, constraint=constraint), lambda x: lib.softmax(x, -1, constraint=PEER[constraint]), dict(x=r(12, n)), mine, other)
    agree(lambda x: unit_softmax(x, 0, constraint), lambda x: lib.softmax(x, 0, constraint=PEER[constraint]), dict(x=r(n, 12)), mine, other)


@each('causal', [False, True])
@each('n,d', [(4, 8), (64, 16), (200, 64)])
@EACH
def test_attention(constraint, n, d, causal):
    "With their multiplier set to what makes the logits of unit size; they have one factor for all four"
    mine = tie(constraint, **attention_factors(n, n, causal))
    other = dict.fromkeys('yqkv', fit(.2, ((math.log(n) if causal else 1)/n)**.5, 1.)**-1)
    agree(lambda q, k, v: unit_attention(q, k, v, causal, constraint=constraint),
          lambda q, k, v: lib.scaled_dot_product_attention(q, k, v, is_causal=causal, mult=d**.5), {a: r(2, n, d) for a in 'qkv'}, mine, other)


def test_closer_to_one_where_it_fits_by_eye():
    def off(stds): return max(abs(math.log(v)) for v in stds.values())
    x = dict(x=r(64, 1024))
    assert off(unit_stds(partial(unit_softmax, constraint='none'), **x)) < .05 < .15 < off(unit_stds(lambda x: lib.softmax(x, -1, constraint=None), **x))
    qkv = {n: r(16, 64, 64) for n in 'qkv'}
    for causal in (False, True):
        ours = off(unit_stds(lambda q, k, v: unit_attention(q, k, v, causal, constraint='none'), **qkv))
        assert ours < .1 < 1 < off(unit_stds(lambda q, k, v: lib.scaled_dot_product_attention(q, k, v, is_causal=causal), **qkv)), 'their logits are small'


# --- its mistakes: each of these is right in ours (the test is named), and the day that one of them fails here the package has been mended ---

class Runs(nn.Module):
    "f behind a module of our own, since the package does not look at torch's containers"
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)


class Then(nn.Module):
    "A linear layer, and a function behind it"
    def __init__(self, act):
        super().__init__()
        self.lin, self.act = nn.Linear(256, 256, bias=False), act
    def forward(self, x): return self.act(self.lin(x))


def chain(): return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))


@pytest.fixture
def fresh():
    "The package compiles whatever it converts"
    torch._dynamo.reset()
    yield torch.randn(512, 256)
    torch._dynamo.reset()


@each('share', [.5, .9])
def test_mistake_1_ignored_targets_count_in_their_mean(share):
    "Ours: test_unit, test_ignored_targets_do_not_count_in_the_mean"
    x, y = r(100, 10), torch.randint(10, (100,))
    y[:int(100*share)] = -100
    assert lib.cross_entropy(x, y).item() == pytest.approx((1 - share)*F.cross_entropy(x, y).item())
    assert unit_cross_entropy(x, y).item() == pytest.approx(F.cross_entropy(x, y).item())


def test_mistake_2_a_root_container_gets_unit_weights_and_no_factors(fresh):
    "Ours: test_unit_models, test_the_root_may_be_a_container_or_a_layer"
    theirs = transforms.unit_scale(chain())
    assert theirs[0].weight.std().item() == pytest.approx(1) and theirs(fresh).std() > 100
    assert .9 < transforms.unit_scale(Runs(chain()))(fresh).std() < 1.3, 'inside a module of our own it is converted'


def test_mistake_2_a_root_container_is_not_simulated(fresh):
    "Ours: test_fp8, test_root_containers_are_converted"
    model = chain()
    assert torch.equal(transforms.simulate_fp8(model)(fresh), model(fresh))
    assert not torch.equal(transforms.simulate_fp8(Runs(model))(fresh), model(fresh))


UNKNOWN = dict(relu=torch.relu, tanh=torch.tanh, sigmoid=torch.sigmoid)


@each('name', UNKNOWN)
def test_mistake_3_unknown_functions_stay_as_they_are(fresh, name, recwarn):
    "Ours: test_unit_models, test_refuses_what_it_does_not_know_and_names_it"
    theirs, f = transforms.unit_scale(Then(UNKNOWN[name])), UNKNOWN[name]
    torch.testing.assert_close(theirs(fresh), f(lib.linear(fresh, theirs.lin.weight, None)))
    assert not [w for w in recwarn if 'unit' in str(w.message).lower()]


@each('layer,shape', [(nn.Conv2d(8, 8, 3), (4, 8, 9, 9)), (nn.GroupNorm(2, 8), (4, 8, 9, 9)), (nn.AvgPool1d(4), (4, 8, 16))])
def test_mistake_3_unknown_layers_stay_as_they_are(fresh, layer, shape):
    "Ours converts these three: test_unit_models, test_a_layer_is_torchs_times_factors"
    x = torch.randn(shape)
    torch.testing.assert_close(transforms.unit_scale(Runs(layer))(x), layer(x))


def test_mistake_4_nearest_is_stochastic(fresh):
    "Ours: test_fp8, test_nearest_stays_nearest_in_a_converted_model"
    one = nn.Linear(1, 1, bias=False)
    nn.init.ones_(one.weight)
    theirs = transforms.simulate_format(Runs(one), formats.FPFormat(4, 3, 'nearest'), formats.FPFormat(5, 2, 'nearest'))
    assert theirs(torch.full((400, 1), 1.03125)).unique().tolist() == [1., 1.125]


@each('dtype', [torch.float16, torch.bfloat16])
def test_mistake_5_half_precision_is_read_as_if_it_were_single(dtype):
    "Ours: test_fp8, test_dtypes_come_back and test_half_values_are_those_of_single"
    x = torch.randn(8).to(dtype)
    good = formats.FPFormat(4, 3, 'nearest').quantise(x.float())
    try: theirs = formats.FPFormat(4, 3, 'nearest').quantise(x)
    except RuntimeError: return
    assert not same_bits(theirs.float(), good)
    with pytest.raises(RuntimeError): formats.FPFormat(4, 3, 'nearest').quantise(x[:7])


def test_mistake_5_ties_go_to_zero():
    "Ours: test_fp8, test_nearest_means_nearest_ties_to_even"
    assert formats.FPFormat(4, 3, 'nearest').quantise(torch.tensor([1.0625, 1.1875, -1.1875])).tolist() == [1., 1.125, -1.125]
