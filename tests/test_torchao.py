"Every bit beside torchao 0.18: the casts, and the three products of a linear layer"
import logging
from dataclasses import replace

import pytest, torch
from torch import nn

from mpcourse.fourbits import FP4_RECIPES, nvfp4_scale
from mpcourse.fp8 import RECIPES, CastConfig, e8m0_floor, e8m0_ceil, fp8_linear, simulate_fp8
from mpcourse.formats import same_bits

logging.disable(logging.WARNING)        # kernels for GPUs that torchao cannot load
pytest.importorskip('torchao')
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
logging.disable(logging.NOTSET)

pytestmark = pytest.mark.library


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(): torch.manual_seed(0); yield


def r(*shape): return torch.randn(*shape)*torch.logspace(-6, 6, shape[-1], base=2)
def mx(dtype, mode): return lambda t: MXTensor.to_mx(t.contiguous(), dtype, 32, mode).dequantize(torch.float32)
def nvfp4(t):
    one = per_tensor_amax_to_scale(t.abs().max())
    return NVFP4Tensor.to_nvfp4(t.contiguous(), per_tensor_scale=one).dequantize(torch.float32)


E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
CASTS = {'E4M3, up': (CastConfig('e4m3', (1, 32), e8m0_ceil), mx(E4M3, Mode.RCEIL)), 'E4M3, floor': (CastConfig('e4m3', (1, 32), e8m0_floor), mx(E4M3, Mode.FLOOR)),
         'E2M1, up': (CastConfig('e2m1', (1, 32), e8m0_ceil), mx(E2M1, Mode.RCEIL)), 'E2M1, floor': (CastConfig('e2m1', (1, 32), e8m0_floor), mx(E2M1, Mode.FLOOR)),
         'NVFP4': (CastConfig('e2m1', (1, 16), nvfp4_scale), nvfp4)}


@pytest.mark.parametrize('size', [2.**-40, 2.**-20, 1., 2.**20, 2.**40])
@pytest.mark.parametrize('name', CASTS)
def test_casts(name, size):
    (ours, theirs), x = CASTS[name], r(64, 96)*size
    x[3, 32:64] = 0
    x[5, :32] = torch.linspace(440, 520, 32)*size      # around E4M3's largest
    a, b = ours(x), theirs(x)
    if name != 'NVFP4': assert same_bits(a, b)
    else: assert (a != b).sum() <= 1       # on a tie they multiply by the scale's inverse where we divide


RECIPE = {'mx': (RECIPES['mx'], 'E4M3, up'), 'mx_floor': (RECIPES['mx_floor'], 'E4M3, floor'), 'mxfp4_floor': (FP4_RECIPES['mxfp4_floor'], 'E2M1, floor'),
          'mxfp4, nearest': (replace(FP4_RECIPES['mxfp4'], g=FP4_RECIPES['mxfp4'].x), 'E2M1, up'), 'nvfp4_plain': (FP4_RECIPES['nvfp4_plain'], 'NVFP4')}


def three(layer, weight, x, g):
    "y, dx and dw"
    a = x.clone().requires_grad_()
    y = layer(a)
    return [y.detach(), *torch.autograd.grad(y, [a, weight], g)]


@pytest.mark.parametrize('name', RECIPE)
def test_three_products_of_their_casts(name):
    (recipe, cast), x, g, w = RECIPE[name], r(64, 96), r(64, 128)*2.**-20, nn.Parameter(r(128, 96))
    q = CASTS[cast][1]
    w8, wt8 = q(w.detach()), q(w.detach().T)
    want = [q(x) @ w8.T, q(g) @ wt8.T, q(g.T) @ q(x.T).T]
    assert all(map(same_bits, three(lambda a: fp8_linear(a, w, recipe=recipe), w, x, g), want))


@pytest.mark.parametrize('name', ['rowwise', 'tensorwise'])
def test_a_converted_layer(name):
    "Tensorwise they multiply by the scale's inverse where we divide: the last digit of FP32"
    linear, x, g = nn.Linear(96, 48), r(64, 96), r(64, 48)*2.**-20
    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    eight, ours = convert_to_float8_training(nn.Sequential(linear), config=config), simulate_fp8(linear, name)
    for got, want in zip(three(ours, ours.weight, x, g), three(eight, eight[0].weight, x, g)):
        if name == 'rowwise': assert same_bits(got, want)
        else: assert (got - want).norm() < 1e-6*want.norm()


def test_which_layers_they_convert():
    "Linear layers alone; attention's products stay: `attention=False`"
    class Attends(nn.Module):
        def __init__(self): super().__init__(); self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        def forward(self, x): return self.out(nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))
    model, x = Attends(), torch.randn(2, 8, 32)
    ours = simulate_fp8(model, 'rowwise', attention=False)
    eight = convert_to_float8_training(model, config=replace(Float8LinearConfig.from_recipe_name('rowwise'), emulate=True))
    assert same_bits(ours(x), eight(x))
