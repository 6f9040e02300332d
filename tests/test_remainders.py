"FP32 as BF16 and sixteen more bits"
import pytest, torch

from mpcourse.formats import same_bits
from mpcourse.remainders import join_bits, split_bits

pytestmark = pytest.mark.library


def test_every_bit_comes_back():
    "All upper halves that are finite, with lower halves at both ends, at the tie and beside it"
    high = torch.arange(-2**15, 2**15, dtype=torch.int32) << 16
    for low in (0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234):
        w = (high + low).view(torch.float32)
        w = w[w.isfinite() & (w.abs() < 3.38e38)]              # beyond, the nearest BF16 is infinite
        half, rest = split_bits(w)
        assert same_bits(join_bits(half, rest), w)
        assert (half.double() - w).abs().le((w.bfloat16().double() - w).abs()).all()


def test_shapes_and_refusals():
    w = torch.randn(3, 4).T
    half, rest = split_bits(w)
    assert half.shape == rest.shape == w.shape and (half.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    assert same_bits(join_bits(half, rest), w.contiguous())
    with pytest.raises(ValueError, match='torch.float64'): split_bits(w.double())
