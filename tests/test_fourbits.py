"""Four bits: scales, rotation and recipes by hand"""
import math

import pytest, torch

from mpcourse.formats import get_format
from mpcourse.fourbits import FP4_RECIPES, hadamard, nvfp4_scale, rotate16
from mpcourse.fp8 import CastConfig, fp8_matmul
from mpcourse.rounding import quantize

pytestmark = pytest.mark.library
SIZES = [0., .5, 1., 1.5, 2., 3., 4., 6.]


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(): torch.manual_seed(0); yield


def r(*shape, **kw): return torch.randn(*shape, **kw)
def off(a, b): return ((a - b).norm()/b.norm()).item()


@pytest.mark.parametrize('size', [2.**-40, 1., 2.**40])
def test_the_scale_of_a_block_by_hand(size):
    "As NVIDIA writes it: the tensor's largest number to 448·6, each block's scale in E4M3"
    x = r(4, 48)*torch.logspace(-3, 3, 48, base=2)*size
    entries, scale = CastConfig('e2m1', (1, 16), nvfp4_scale).parts(x)
    one = x.abs().max().item()/(448*6)
    for i in range(4):
        for j in range(3):
            block = x[i, 16*j:16*j + 16].tolist()
            s = max(quantize(max(map(abs, block))/6/one, 'e4m3'), 2.**-6)*one
            assert math.isclose(scale[i, 0, j, 0], s, rel_tol=1e-5)
            for v, e in zip(block, entries[i, 0, j].tolist()):
                assert abs(e) in SIZES and e*v >= 0 and abs(abs(e) - abs(v/s)) <= min(abs(z - abs(v/s)) for z in SIZES) + 1e-4


def test_small_tensors_keep_their_digits():
    x, cast = r(8, 64), CastConfig('e2m1', (1, 16), nvfp4_scale)
    for k in (-60, -20, 20): assert torch.equal(cast(x*2.**k), cast(x)*2.**k)


def test_a_block_with_an_infinity_is_nan():
    for recipe in FP4_RECIPES.values():
        for bad in (math.inf, math.nan):
            x = r(32, 64)
            x[3, 5] = bad
            got = recipe.x(x)
            assert got[3, :16].isnan().all() and got.isnan().sum() in (16, 32) and recipe.w(x).isnan().any() and recipe.g(x)[3, 5].isnan()


@pytest.mark.parametrize('name', FP4_RECIPES)
def test_nothing_times_a_weight_has_a_gradient_of_zeros(name):
    w = r(8, 8, requires_grad=True)
    y = fp8_matmul(torch.zeros(0, 8), w, FP4_RECIPES[name])
    assert y.shape == (0, 8) and not torch.autograd.grad(y.sum(), w)[0].any()


@pytest.mark.parametrize('n', [1, 2, 16, 64])
def test_hadamard_is_orthogonal(n):
    h = hadamard(n)
    assert torch.allclose(h @ h.T, torch.eye(n), atol=1e-6) and torch.allclose(h.abs(), torch.full((n, n), n**-.5))


@pytest.mark.parametrize('k', [16, 40, 7])
def test_a_rotated_product_is_the_product(k):
    a, b = r(5, k), r(6, k)
    torch.testing.assert_close(rotate16(a) @ rotate16(b).T, a @ b.T, rtol=1e-4, atol=1e-4)
    assert rotate16(a).shape[-1] % 16 == 0
    spike = torch.zeros(1, 16)
    spike[0, 2] = 8
    assert torch.allclose(rotate16(spike).abs(), torch.full((1, 16), 2.))


def test_the_recipe_has_nvidias_parts():
    "Stochastic rounding for gradients alone, square tiles for the weight, the rotation in the weight's gradient alone"
    full = FP4_RECIPES['nvfp4']
    assert [getattr(full, k).rounding for k in 'xwg'] == ['nearest', 'nearest', 'stochastic']
    assert full.w.tile == (16, 16) and full.x.tile == full.g.tile == (1, 16)
    a, b, g = r(64, 32, requires_grad=True), r(32, 48, requires_grad=True), r(64, 48)
    y = fp8_matmul(a, b, full)
    torch.manual_seed(1)
    ga, gb = torch.autograd.grad(y, (a, b), g)
    torch.manual_seed(1)
    assert torch.equal(y, full.x(a) @ full.w(b.mT).mT) and torch.equal(ga, full.g(g) @ full.w(b).mT)
    assert torch.equal(gb, full.x(rotate16(a.mT)) @ full.g(rotate16(g.mT)).mT)


def test_stochastic_gradients_are_right_on_average():
    g = torch.rand(64, 96)**12            # few large, many small
    want = g.sum()
    for name, right in (('nvfp4', True), ('mxfp4', True), ('nvfp4_plain', False)):
        cast = FP4_RECIPES[name].g
        mean = torch.stack([cast(g) for _ in range(200)]).mean(0).sum()
        assert (abs(mean/want - 1) < .01) == right, name


def test_the_formats_rank_as_their_bits():
    a, b = r(64, 128), r(128, 32)
    error = {n: off(fp8_matmul(a, b, f), a @ b) for n, f in FP4_RECIPES.items()}
    assert error['nvfp4_plain'] < error['mxfp4'] < .25 and error['nvfp4_plain'] > .1
    assert get_format('e2m1').max == 6
