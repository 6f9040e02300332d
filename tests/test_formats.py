"Chapter 01: every format against torch, ml_dtypes and gfloat, code by code"
import math

import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mpcourse import formats as F
from mpcourse.formats import FORMATS, FloatFormat, expect, get_format, same_bits

pytestmark = pytest.mark.library

ML = dict(e4m3='float8_e4m3fn', e5m2='float8_e5m2', e4m3fnuz='float8_e4m3fnuz', e5m2fnuz='float8_e5m2fnuz', bf16='bfloat16',
          e3m2='float6_e3m2fn', e2m3='float6_e2m3fn', e2m1='float4_e2m1fn', e8m0='float8_e8m0fnu')
MORE = dict(e3m4=('e3m4', 'float8_e3m4'), ieee_e4m3=(FloatFormat(4, 3), 'float8_e4m3'),
            e4m3b11=(FloatFormat(4, 3, kind='fnuz', bias=11), 'float8_e4m3b11fnuz'))
GF = dict(fp32=gf.format_info_binary32, bf16=gf.format_info_bfloat16, fp16=gf.format_info_binary16,
          e4m3=gf.format_info_ocp_e4m3, e5m2=gf.format_info_ocp_e5m2, e3m2=gf.format_info_ocp_e3m2, e2m3=gf.format_info_ocp_e2m3,
          e2m1=gf.format_info_ocp_e2m1, e8m0=gf.format_info_ocp_e8m0)
SMALL = [f for f in FORMATS.values() if f.bits <= 16]
ids = dict(ids=lambda f: getattr(f, 'name', f))


def ml_values(dtype, bits):
    "All codes of an ml_dtypes type as float64"
    codes = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid='ignore'): return torch.from_numpy(codes.view(getattr(ml_dtypes, dtype)).astype(np.float64))


@pytest.mark.parametrize('fmt,dtype', [(FORMATS[k], v) for k,v in ML.items()] + [(get_format(f), d) for f,d in MORE.values()], **ids)
def test_decodes_every_code_like_ml_dtypes(fmt, dtype):
    assert same_bits(fmt.decode(torch.arange(2**fmt.bits)), ml_values(dtype, fmt.bits))


def test_decodes_every_half_like_torch_and_numpy():
    codes = torch.arange(2**16)
    ours = F.fp16.decode(codes)
    assert same_bits(ours, codes.to(torch.int32).to(torch.int16).view(torch.float16).double())
    assert same_bits(ours, torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)))


@pytest.mark.parametrize('fmt', [f for f in SMALL if f.dtype], **ids)
def test_decodes_every_code_like_torch(fmt):
    codes = torch.arange(2**fmt.bits)
    raw = codes.to(torch.uint8) if fmt.bits == 8 else codes.to(torch.int32).to(torch.int16)
    assert same_bits(fmt.decode(codes), raw.view(fmt.dtype).float().double())


@pytest.mark.parametrize('fmt', [F.fp32, F.tf32], **ids)
def test_decodes_samples_of_the_wide_ones(fmt):
    codes = torch.randint(0, 2**fmt.bits, (100_000,), generator=torch.Generator().manual_seed(0))
    shifted = (codes << 32 - fmt.bits).to(torch.int64)
    raw = torch.where(shifted >= 2**31, shifted - 2**32, shifted).int()
    assert same_bits(fmt.decode(codes), raw.view(torch.float32).double())


@pytest.mark.parametrize('name', GF)
def test_limits_are_gfloats(name):
    ours, theirs = FORMATS[name], GF[name]
    assert ours.max == theirs.max and ours.eps == theirs.eps and ours.has_inf == bool(theirs.num_posinfs)
    assert ours.has_nan == bool(theirs.num_nans)
    if name != 'e8m0': assert ours.tiny == theirs.smallest_normal and ours.smallest_subnormal == theirs.smallest_subnormal


@pytest.mark.parametrize('name', ML)
def test_limits_are_ml_dtypes(name):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(getattr(ml_dtypes, ML[name]))
    assert (ours.bits, ours.max, ours.min, ours.tiny, ours.eps, ours.smallest_subnormal) == tuple(
        float(getattr(theirs, n)) for n in ('bits', 'max', 'min', 'tiny', 'eps', 'smallest_subnormal'))


def test_limits_are_torchs():
    for d in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        ours, theirs = get_format(d), torch.finfo(d)
        assert ours.dtype == d and all(getattr(ours, n) == getattr(theirs, n) for n in ('bits', 'max', 'min', 'tiny', 'eps'))


@pytest.mark.parametrize('fmt', SMALL + [FloatFormat(3, 4), FloatFormat(5, 0), FloatFormat(2, 5, kind='fn'), FloatFormat(6, 1, kind='fnuz')], **ids)
def test_encode_undoes_decode_and_midpoints_go_to_the_even_code(fmt):
    codes = torch.arange(2**fmt.bits)
    v = fmt.decode(codes); live = codes[~v.isnan()]
    assert torch.equal(fmt.encode(v[live]), live)
    pos = torch.arange(fmt.max_code + 1); lo, hi = fmt.decode(pos[:-1]), fmt.decode(pos[1:])
    mid = (lo + hi)/2
    even = torch.where(pos[:-1] % 2 == 0, pos[:-1], pos[1:])
    if fmt.man_bits == 0: even = torch.where(lo > 0, pos[1:], pos[:-1])  # no fraction: a tie goes up, as in ml_dtypes and torch
    assert torch.equal(fmt.encode(mid), even)
    eps = mid*2.**-50
    assert torch.equal(fmt.encode(mid + eps), pos[1:]) and torch.equal(fmt.encode(mid - eps), pos[:-1])


@pytest.mark.parametrize('fmt', [f for f in SMALL if f.kind != 'scale'], **ids)
def test_beyond_the_range(fmt):
    want = math.inf if fmt.has_inf else math.nan if fmt.has_nan else fmt.max
    for x in (fmt.max*1.5, 1e300, math.inf):
        assert same_bits(torch.tensor(fmt.decode(fmt.encode(x))), torch.tensor(want))
        assert same_bits(torch.tensor(fmt.decode(fmt.encode(-x))), torch.tensor(-want))


def test_scale_format_has_no_sign_and_no_zero():
    assert F.e8m0.decode(F.e8m0.encode(0.)) == F.e8m0.min == 2.**-127 and math.isnan(F.e8m0.decode(F.e8m0.encode(-1.)))


@pytest.mark.parametrize('fmt', SMALL, **ids)
def test_neighbours_are_the_values_on_either_side(fmt):
    v = fmt.values()
    below, above = fmt.neighbours(v)
    assert same_bits(below[1:], v[:-1]) and same_bits(above[:-1], v[1:]) and below[0] == -math.inf and above[-1] == math.inf
    mid = (v[:-1] + v[1:])/2
    below, above = fmt.neighbours(mid)
    assert same_bits(below + 0, v[:-1] + 0) and same_bits(above + 0, v[1:] + 0)
    assert fmt.neighbours(1e300) == (fmt.max, math.inf) and fmt.neighbours(-1e300) == (-math.inf, fmt.min)
    normal = mid[(mid.abs() > fmt.tiny)]
    lo, hi = fmt.neighbours(normal)
    assert same_bits(fmt.spacing(normal), hi - lo)


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(SMALL))
def test_nothing_lies_nearer_than_the_encoded_value(x, fmt):
    if fmt.kind == 'scale' and x < 0: return
    v = fmt.values(); x = max(-fmt.max, min(fmt.max, x))
    assert abs(fmt.decode(fmt.encode(x)) - x) == (v - x).abs().min().item()


@pytest.mark.parametrize('call,words', [
    (lambda: FloatFormat(0, 3), ['0 exponent bits', '1 to 10']), (lambda: FloatFormat(11, 3), ['11 exponent bits']),
    (lambda: FloatFormat(4, 53), ['53 fraction bits']), (lambda: FloatFormat(4, -1), ['-1 fraction bits']),
    (lambda: FloatFormat(4.0, 3), ['4.0 exponent bits']), (lambda: FloatFormat(4, 3, kind='ocp'), ["'ocp'", 'fnuz']),
    (lambda: FloatFormat(10, 3, bias=5000), ['5000', 'FP64']), (lambda: FloatFormat(8, 1, kind='scale'), ['a scale has none']),
    (lambda: get_format('fp17'), ["'fp17'", 'bf16', 'eXmY']), (lambda: get_format(torch.int8), ['int8']), (lambda: get_format(None), ['None']),
    (lambda: F.fp16.decode(65536), ['65536', '65535']), (lambda: F.fp16.decode(-1), ['-1']),
    (lambda: F.e2m1.encode(math.nan), ['e2m1', 'NaN', 'nan_to_num']), (lambda: F.fp16.neighbours(math.nan), ['NaN']),
    (lambda: F.fp32.values(), ['fp32', '16 bits']), (lambda: F.parse_number('one'), ["'one'", '1/3']), (lambda: F.parse_number('1/0'), ["'1/0'"]),
    (lambda: F.parse_number(''), ["''"]), (lambda: F.parse_number('9^9999'), ['9^9999'])])
def test_bad_input_gets_a_sentence(call, words):
    with pytest.raises(ValueError) as e: call()
    assert all(w in str(e.value) for w in words) and str(e.value).endswith('.'), str(e.value)


def test_empty_tensors_pass():
    empty = torch.empty(0)
    assert F.fp16.encode(empty).shape == (0,) and F.fp16.decode(empty.long()).shape == (0,) and F.fp16.spacing(empty).shape == (0,)
    assert F.fp16.neighbours(empty)[0].shape == (0,)


def test_shapes_and_scalars():
    x = torch.tensor([[1., 2.], [3., 4.]])
    assert F.fp16.decode(F.fp16.encode(x)).shape == (2, 2) and isinstance(F.fp16.encode(1.), int) and isinstance(F.fp16.decode(0), float)


def test_names_do_not_decide_what_a_format_is():
    assert FloatFormat(5, 10) == F.fp16 and FloatFormat(5, 10).dtype == torch.float16 and FloatFormat(4, 3) != F.e4m3
    assert get_format('FP16') is F.fp16 and get_format('e6m9') == FloatFormat(6, 9)


def test_same_bits_sees_what_closeness_cannot():
    t = torch.tensor
    assert same_bits(t(math.nan), t(math.nan)) and not same_bits(t(0.), t(-0.)) and not same_bits(t(2.**-24), t(0.))
    assert not same_bits(t(1.), t(1., dtype=torch.float64)) and not same_bits(t([1.]), t(1.)) and not same_bits(t(1.), t(math.nan))
    assert same_bits(t([1, 2]), t([1, 2])) and not same_bits(t([1, 2]), t([1, 3]))


def test_expect_accepts_and_rejects():
    expect(lambda a, b: a + b, [((1, 2), 3), ((.5, .25), .75)])
    for f, words in [(lambda x: None, 'stub'), (lambda x: x + 1, 'expected'), (lambda x: 'no', 'expected'), (lambda x: -0., 'expected')]:
        with pytest.raises(AssertionError, match=words): expect(f, [((0.,), 0.)])


def test_bit_html_tells_the_truth():
    h = F.bit_html(0.1, 'fp16')
    assert h.count('<i>') == 16 and '0x2e66' in h and repr(0.0999755859375) in h and '-0.024%' in h
    assert '>overflow<' in F.bit_html(7e4, 'fp16') and 'underflow' in F.bit_html(1e-9, 'fp16') and 'NaN' in F.bit_html(1e9, 'e4m3')
