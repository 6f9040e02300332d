"Chapter 02: every value, midpoint and neighbour of the small formats, against torch, numpy, ml_dtypes and gfloat"
import math

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mpcourse import rounding as R
from mpcourse.formats import FORMATS, FloatFormat, get_format, same_bits
from mpcourse.rounding import OVERFLOWS, quantize

pytestmark = pytest.mark.library

NATIVE = ('fp16', 'bf16', 'e4m3', 'e5m2', 'e4m3fnuz', 'e5m2fnuz')
OTHERS = ('e3m2', 'e2m3', 'e2m1', 'tf32', 'e3m4', 'e6m9', 'e5m0')
THEIRS = dict(fp16=np.float16, bf16=ml_dtypes.bfloat16, e4m3=ml_dtypes.float8_e4m3fn, e5m2=ml_dtypes.float8_e5m2,
              e4m3fnuz=ml_dtypes.float8_e4m3fnuz, e5m2fnuz=ml_dtypes.float8_e5m2fnuz, e3m2=ml_dtypes.float6_e3m2fn,
              e2m3=ml_dtypes.float6_e2m3fn, e2m1=ml_dtypes.float4_e2m1fn, e3m4=ml_dtypes.float8_e3m4, e8m0=ml_dtypes.float8_e8m0fnu)
NANS = torch.tensor([0x7f800001, 0x7fc00000, 0x7fffffff, -1, -0x400000], dtype=torch.int32).view(torch.float32)


def points(fmt):
    "All values of a format, all midpoints and what is next to them in FP32, both signs, and the special ones"
    v = fmt.values() if fmt.bits <= 16 else fmt.decode(torch.randint(0, fmt.max_code, (40_000,), generator=torch.Generator().manual_seed(0)))
    v = v[v >= 0].unique(); mid = (v[1:] + v[:-1])/2
    top = fmt.max + fmt.spacing(fmt.max)*torch.tensor([.25, .5, 1, 1.5, 4], dtype=torch.float64)
    x = torch.cat([v, mid, top, torch.tensor([0., 1e30, 3.4e38, 2.**-149, 1e-40], dtype=torch.float64)]).float()
    bits = x.view(torch.int32)
    x = torch.cat([x, (bits + 1).view(torch.float32), (bits - 1).clamp(min=0).view(torch.float32), torch.tensor([torch.inf])])
    return torch.cat([x, -x]).nan_to_num(0., torch.inf, -torch.inf)


def modes(fmt): return [o for o in OVERFLOWS if o == 'saturate' or getattr(fmt, f'has_{o}')]


def reference(x, fmt, overflow):
    "The scalar road: encode's code, decoded, with the fate of the too large decided from the value itself"
    r = fmt.decode(fmt.encode(x.double()))
    over = (x.double().abs() > fmt.max) & ~(r.abs() == fmt.max) | x.isinf()
    if fmt.over_code == fmt.max_code: over = x.double().abs() > fmt.max
    fate = {'saturate': fmt.max, 'inf': torch.inf, 'nan': torch.nan}[overflow]
    return torch.where(over, torch.tensor(fate, dtype=torch.float64).copysign(x), r).float()


@pytest.mark.parametrize('overflow', OVERFLOWS)
@pytest.mark.parametrize('name', NATIVE + OTHERS)
def test_every_value_midpoint_and_neighbour(name, overflow):
    fmt = get_format(name)
    if overflow not in modes(fmt):
        with pytest.raises(ValueError, match='has no'): quantize(torch.ones(1), fmt, overflow=overflow)
        return
    x = points(fmt)
    got = quantize(x, fmt, overflow=overflow)
    assert same_bits(got, reference(x, fmt, overflow))
    assert same_bits(got, quantize(x.double(), fmt, overflow=overflow).float())    # FP64 is never left to torch's own cast


@pytest.mark.parametrize('name', [n for n in THEIRS if n != 'e8m0'])
def test_like_ml_dtypes_and_numpy(name):
    fmt = get_format(name); x = points(fmt)
    with np.errstate(all='ignore'): theirs = torch.from_numpy(x.numpy().astype(THEIRS[name]).astype(np.float32))
    overflow = 'inf' if fmt.has_inf else 'nan' if fmt.has_nan else 'saturate'
    assert same_bits(quantize(x, fmt, overflow=overflow), theirs)


@pytest.mark.parametrize('name', NATIVE)
def test_like_torch_within_the_range(name):
    fmt = get_format(name); x = points(fmt); x = x[x.abs() <= fmt.max]
    assert same_bits(quantize(x, fmt), x.to(fmt.dtype).float())


@pytest.mark.parametrize('rounding,mode', [('nearest', gfloat.RoundMode.TiesToEven), ('toward_zero', gfloat.RoundMode.TowardZero)])
@pytest.mark.parametrize('name,info', [('fp16', gf.format_info_binary16), ('bf16', gf.format_info_bfloat16), ('e4m3', gf.format_info_ocp_e4m3),
                                       ('e5m2', gf.format_info_ocp_e5m2), ('e3m2', gf.format_info_ocp_e3m2), ('e2m1', gf.format_info_ocp_e2m1)])
def test_like_gfloat(name, info, rounding, mode):
    fmt = get_format(name); x = points(fmt); x = x[::max(1, len(x)//3000)]
    for overflow in modes(fmt):
        if overflow == 'nan' and fmt.has_inf: continue  # gfloat prefers infinity where there is one
        if rounding == 'toward_zero' and overflow == 'nan': continue  # see test_truncation_never_overflows
        theirs = gfloat.round_ndarray(info, x.double().numpy(), mode, sat=overflow == 'saturate')
        assert same_bits(quantize(x, fmt, rounding, overflow), torch.from_numpy(np.asarray(theirs)).float()), overflow


@pytest.mark.parametrize('name', ('fp16', 'e4m3', 'e5m2', 'e4m3fnuz'))
def test_truncation_never_overflows(name):
    fmt = get_format(name); x = torch.tensor([fmt.max*1.01, 1e30, -1e30])
    for o in modes(fmt):
        assert quantize(x, fmt, 'toward_zero', o).abs().eq(fmt.max).all()
        fate = quantize(torch.tensor(torch.inf), fmt, 'toward_zero', o)
        assert same_bits(fate, torch.tensor({'saturate': fmt.max, 'inf': torch.inf, 'nan': torch.nan}[o]))


@pytest.mark.parametrize('name', NATIVE + ('tf32', 'e3m4', 'e8m0'))
@pytest.mark.parametrize('rounding', R.ROUNDINGS)
def test_nans_of_every_payload_stay_nans(name, rounding):
    for x in (NANS, NANS.double(), NANS.half(), NANS.bfloat16()): assert quantize(x, name, rounding).isnan().all()


def test_e8m0():
    fmt = FORMATS['e8m0']; x = torch.tensor([2.**-127, 1.4, 1.5, 3., 6., .75, 1e38, 1.1e-38])
    theirs = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert same_bits(quantize(x, fmt), theirs)
    assert quantize(torch.zeros(1), fmt) == fmt.min and quantize(-torch.ones(1), fmt).isnan() and quantize(torch.tensor([3e38]), fmt) == fmt.max


@pytest.mark.parametrize('name', NATIVE + OTHERS)
def test_signed_zeros(name):
    x = torch.tensor([0., -0., -1e-45, 1e-45]); want = torch.tensor([0., -0., -0., 0.])
    if get_format(name).kind == 'fnuz': want = want.abs()
    if name == 'tf32': x = x[:2]; want = want[:2]
    for r in ('nearest', 'toward_zero'): assert same_bits(quantize(x, name, r), want)


@pytest.mark.parametrize('name', NATIVE + ('e3m4',))
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_every_float_dtype_is_rounded_as_its_value(name, dtype):
    fmt = get_format(name); x = torch.cat([points(fmt)[::7], torch.randn(1000)]).clamp(-1e4, 1e4).to(dtype)
    got, want = quantize(x, fmt), fmt.decode(fmt.encode(x.double().clamp(-fmt.max, fmt.max)))
    assert same_bits(got.double(), want) and got.shape == x.shape
    v = fmt.decode(torch.arange(2**fmt.bits))                 # infinities and NaNs, too
    assert got.dtype == (dtype if same_bits(v.to(dtype).double(), v) else torch.float32)


@pytest.mark.parametrize('dtype,fmt,out', [
    (torch.float16, 'fp16', torch.float16), (torch.float16, 'e4m3', torch.float16), (torch.float16, 'bf16', torch.float32),
    (torch.bfloat16, 'fp16', torch.float32), (torch.bfloat16, 'e5m2', torch.bfloat16), (torch.float64, 'fp32', torch.float64),
    (torch.float32, FloatFormat(10, 3), torch.float64), (torch.float32, FloatFormat(5, 30), torch.float64)])
def test_the_result_has_a_dtype_that_holds_it(dtype, fmt, out):
    assert quantize(torch.tensor([1.], dtype=dtype), fmt).dtype == out


def test_float64_is_rounded_once():
    x = torch.tensor(1.0625 + 2.**-40, dtype=torch.float64)  # a detour through FP32 or FP16 would drop the last bit and then tie to even
    assert quantize(x, 'e4m3') == 1.125 and quantize(float(x), 'e4m3') == 1.125 and quantize(x.float(), 'e4m3') == 1.


@pytest.mark.parametrize('name', NATIVE + ('e3m4', 'e2m1'))
def test_flushing_subnormals(name):
    fmt = get_format(name); x = points(fmt); x = x[x.isfinite()]
    kept, flushed = quantize(x, fmt), quantize(x, fmt, subnormals=False)
    small = (kept.abs() < fmt.tiny)
    assert same_bits(flushed[~small], kept[~small]) and (flushed[small] == 0).all() and small.any()


@pytest.mark.parametrize('name', NATIVE + ('e2m1', 'e3m4', 'tf32'))
def test_stochastic_rounding_takes_a_neighbour_and_is_unbiased(name):
    fmt = get_format(name); g = torch.Generator().manual_seed(1)
    lo_sub, lo_norm = fmt.smallest_subnormal, fmt.tiny
    x = torch.tensor([.3*lo_sub, -.7*lo_sub, 2.6*lo_sub, 1.3*lo_norm, -1., 1. + .3*fmt.eps, 1.9 + .1*fmt.eps, -fmt.max*.77], dtype=torch.float64)
    if name == 'tf32': x = x[3:].float().double()
    n = 20_000; draws = quantize(x.expand(n, -1).contiguous(), fmt, 'stochastic', generator=g)
    below, above = fmt.neighbours(x); on = fmt.decode(fmt.encode(x)) == x
    assert ((draws == below) | (draws == above) | on & (draws == x)).all() and (draws[:, on] == x[on]).all()
    width = torch.where(on, 0, above - below); p = torch.where(on, 0, (x - below)/(above - below))
    assert ((draws.mean(0) - x).abs() <= 4.5*width*(p*(1 - p)/n).sqrt() + 1e-300).all()
    assert (draws.std(0)[~on] > 0).all()


def test_stochastic_rounding_is_seeded_and_obeys_overflow():
    x = torch.full((1000,), 65520.)
    a, b, c = (quantize(x, 'fp16', 'stochastic', 'inf', generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert same_bits(a, b) and not same_bits(a, c) and set(a.tolist()) == {65504., math.inf}
    assert quantize(x, 'fp16', 'stochastic').eq(65504).all()
    sp = torch.tensor([torch.inf, -torch.inf, torch.nan, -0., 0.])
    assert same_bits(quantize(sp, 'fp16', 'stochastic', 'inf'), sp)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.floats(width=32), min_size=0, max_size=20), st.sampled_from(NATIVE + ('tf32', 'e3m4', 'e6m9')), st.sampled_from(R.ROUNDINGS))
def test_properties(xs, name, rounding):
    "Idempotent, odd, monotone, on the grid, and never further than a step"
    fmt, x = get_format(name), torch.tensor(xs, dtype=torch.float32)
    r = quantize(x, fmt, rounding)
    assert same_bits(quantize(r, fmt, rounding), r) and same_bits(r.isnan(), x.isnan())
    fin = r[~r.isnan()].double()
    assert same_bits(fmt.decode(fmt.encode(fin)), fin) and (fin.abs() <= fmt.max).all()
    inside = x.isfinite() & (x.abs() <= fmt.max)
    assert ((r - x)[inside].double().abs() <= fmt.spacing(x[inside].double())).all()
    if rounding != 'stochastic':
        assert (quantize(-x, fmt, rounding) + 0.).equal(-r + 0.) or x.isnan().any()
        s = r[~r.isnan()][x[~x.isnan()].argsort()]
        assert (s.diff().nan_to_num(0.) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(0, 23), st.sampled_from(['ieee', 'fn', 'fnuz', 'finite']), st.integers(0, 2**31))
def test_any_format_agrees_with_encode_and_decode(e, m, kind, seed):
    fmt = FloatFormat(e, m, kind=kind)
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(-fmt.man_bits - 2, 2**e + 2, (2000,), generator=g) - fmt.bias
    x = (torch.randn(2000, generator=g).double()*2.**k.double()).clamp(-fmt.max, fmt.max)
    assert same_bits(quantize(x, fmt) + 0., fmt.decode(fmt.encode(x)) + 0.)


@pytest.mark.parametrize('kwargs,error,words', [
    (dict(fmt='fp17'), ValueError, ["'fp17'"]), (dict(fmt='fp16', rounding='up'), ValueError, ["'up'", 'stochastic']),
    (dict(fmt='fp16', overflow='wrap'), ValueError, ["'wrap'", 'saturate']), (dict(fmt='e4m3', overflow='inf'), ValueError, ['e4m3', 'inf', 'nan']),
    (dict(fmt='e4m3fnuz', overflow='inf'), ValueError, ['e4m3fnuz']), (dict(fmt='e2m1', overflow='nan'), ValueError, ['e2m1', 'saturate'])])
def test_bad_arguments_get_a_sentence(kwargs, error, words):
    with pytest.raises(error) as e: quantize(torch.ones(3), **kwargs)
    assert all(w in str(e.value) for w in words) and str(e.value).endswith('.')


def test_bad_tensors_get_a_sentence():
    for x, word in [(torch.arange(3), 'int64'), (torch.tensor([True]), 'bool'), (torch.ones(2, dtype=torch.complex64), 'complex64'), ('1', "'1'"), (True, 'True')]:
        with pytest.raises(TypeError, match=word): quantize(x, 'fp16')
    with pytest.raises(ValueError, match='NaN'): quantize(torch.tensor([1., torch.nan]), 'e2m1')


def test_shapes_strides_and_input_untouched():
    for shape in [(0,), (), (2, 0, 3), (2, 3, 4)]: assert quantize(torch.ones(shape), 'e3m4').shape == shape and quantize(torch.ones(shape), 'fp16').shape == shape
    x = torch.randn(6, 8)
    for f in ('fp16', 'e3m4'):
        keep = x.clone(); got = quantize(x.t()[::2], f)
        assert same_bits(got, quantize(x.t()[::2].contiguous(), f)) and same_bits(x, keep)


def test_gives_no_gradient():
    assert not quantize(torch.tensor([.1, 500.], requires_grad=True), 'e4m3').requires_grad


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('name', NATIVE + OTHERS)
def test_the_same_bits_on_a_gpu(name):
    fmt = get_format(name); x = points(fmt)
    for o in modes(fmt): assert same_bits(quantize(x.cuda(), fmt, overflow=o).cpu(), quantize(x, fmt, overflow=o))
