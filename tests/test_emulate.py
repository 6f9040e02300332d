"""fp32_accumulate and emulate, op by op: against PyTorch's own half, against float64, and against written-out references."""
import copy, io, pickle, threading, warnings
from functools import partial
from pathlib import Path

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from conftest import each
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack as modes
from torch.utils.checkpoint import checkpoint

import mpcourse.zoo  # noqa: F401
from mpcourse.emulate import OP_KINDS, chunked_matmul, emulate_format, no_emulation, exact_loss, is_product, op_kind
from mpcourse.tensorcore import fp32_accumulate, is_composite
from mpcourse.formats import fp16, get_format, same_bits
from mpcourse.rounding import quantize

pytestmark = pytest.mark.library
H, INF, NAN = torch.float16, torch.inf, torch.nan


@pytest.fixture(autouse=True)
def one_thread_and_no_traces():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)
    assert modes() == []


def rand(*shape, seed=0, dtype=H, scale=1.): return (torch.randn(shape,
    generator=torch.Generator().manual_seed(seed))*scale).to(dtype)
def all_halves(): return torch.arange(-2**15, 2**15).to(torch.int16).view(H)


SUMS = '''mm addmm bmm baddbmm addbmm mv addmv dot vdot _addmm_activation _trilinear convolution convolution_backward
    linear matmul conv1d conv2d conv3d _native_multi_head_attention _transformer_encoder_layer_fwd'''.split()


class Spy(TorchDispatchMode):
    "Writes down (op, dtypes of its tensors); put it around another mode to see what that one calls"
    def __init__(self): super().__init__(); self.calls = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, [a.dtype for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))
    @property
    def half_products(self):
        def sums(f): return f._overloadpacket.__name__.rstrip('_') in SUMS or 'attention' in str(f) or 'rnn' in str(f)
        return [f for f, dtypes in self.calls if dtypes[:1] == [H] and sums(f)]


# ---------------------------------------------------------------- fp32_accumulate: elementwise and everything that is no product
UNARY = '''abs neg exp expm1 log log2 log1p sqrt rsqrt sin cos tan tanh sigmoid relu erf floor ceil round trunc
    reciprocal square sign isnan isfinite signbit nan_to_num logical_not'''.split()
FUNCS = {n: getattr(torch, n) for n in UNARY} | dict(
    gelu=F.gelu, silu=F.silu, elu=F.elu, softplus=F.softplus, leaky_relu=F.leaky_relu, hardtanh=F.hardtanh, mish=F.mish,
    add=lambda x: x + x.flip(0), sub=lambda x: x - x.flip(0), mul=lambda x: x*x.flip(0), div=lambda x: x/x.flip(0),
    pow=lambda x: x.abs()**1.5,
    maximum=lambda x: torch.maximum(x, x.flip(0)), where=lambda x: torch.where(x > 0, x, 2*x),
    clamp=lambda x: x.clamp(-1, 1),
    lerp=lambda x: torch.lerp(x, x.flip(0), .3), addcmul=lambda x: torch.addcmul(x, x, x, value=.5),
    scalar=lambda x: 2*x + 1e-4,
    cast=lambda x: x.float()*3, back=lambda x: (x.double()*3).half(), eq=lambda x: x == x.flip(0),
    addr=lambda x: torch.addr(x[:64].view(8, 8), x[:8], x[:8]))


SINGLE = [n for n in FUNCS if n in UNARY or n in 'gelu silu elu softplus leaky_relu hardtanh mish clamp'.split()]
SINGLE = [n for n in SINGLE if n not in ('isfinite', 'square')]                                      # one op each


@each('name', FUNCS)
def test_elementwise_ops_are_pytorchs_own(name):
    with fp32_accumulate(): got = FUNCS[name](all_halves())
    assert same_bits(got, FUNCS[name](all_halves()))


@each('name', SINGLE)
def test_saturating_elementwise_ops_are_pytorchs_own_clipped(name):
    with fp32_accumulate('saturate'): got = FUNCS[name](all_halves())
    want = FUNCS[name](all_halves())
    assert same_bits(got, want.clamp(-65504, 65504) if want.dtype is H else want)


REDUCING = dict(
    sum=lambda x: x.sum(-1), mean=lambda x: x.mean((0, 1)), amax=lambda x: x.amax(1), cumsum=lambda x: x.cumsum(-1),
    var=lambda x: x.var(-1),
    norm=lambda x: x.norm(), logsumexp=lambda x: x.logsumexp(-1), softmax=lambda x: x.softmax(-1),
    log_softmax=lambda x: x.log_softmax(-1),
    layer_norm=lambda x: F.layer_norm(x, x.shape[-1:]), group_norm=lambda x: F.group_norm(x, 2),
    batch_norm=lambda x: F.batch_norm(x, None, None, training=True),
    max_pool=lambda x: F.max_pool2d(x, 2), avg_pool=lambda x: F.avg_pool2d(x, 2),
    adaptive=lambda x: F.adaptive_avg_pool2d(x, 2), pad=lambda x: F.pad(x, (1, 2)),
    cat=lambda x: torch.cat([x, 2*x]), topk=lambda x: x.topk(2)[0],
    gather=lambda x: x.gather(3, torch.zeros(2, 4, 6, 2, dtype=torch.int64)), index=lambda x: x[:, [2, 1]],
    interpolate=lambda x: F.interpolate(x, scale_factor=2, mode='nearest'),
    embedding=lambda x: F.embedding(torch.tensor([1, 0, 1]), x.flatten(1)),
    mse=lambda x: F.mse_loss(x, 0*x), cross_entropy=lambda x: F.cross_entropy(x.flatten(1), torch.tensor([3, 1])),
    view=lambda x: x.permute(3, 2, 1, 0).reshape(6, -1).unfold(1, 3, 2),
    inplace=lambda x: x.clone().mul_(3).add_(x).relu_(),
    setitem=lambda x: x.clone().index_put_((torch.tensor([0]),), torch.ones(1, dtype=H)))


@each('name', REDUCING)
def test_other_ops_and_their_backward_are_pytorchs_own(name):
    f, res = REDUCING[name], []
    for ctx in (torch.enable_grad, fp32_accumulate):
        x = rand(2, 4, 6, 6).requires_grad_()
        with ctx():
            y = f(x)
            y.backward(rand(*y.shape, seed=1))
        res.append((y.detach(), x.grad))
    assert all(map(same_bits, *res))


def test_dropout_draws_the_same():
    x, res = rand(50, 50), []
    for ctx in (torch.enable_grad, fp32_accumulate):
        torch.manual_seed(3)
        with ctx(): res.append(F.dropout(x, .3))
    assert same_bits(*res)


@each('dtype', [torch.float32, torch.float64])
def test_other_dtypes_pass_untouched(dtype):
    a, b = rand(16, 16, dtype=dtype), rand(16, 16, seed=1, dtype=dtype)
    with fp32_accumulate(): y, z = a @ b, F.conv1d(a[None], b[:, :, None])
    assert same_bits(y, a @ b) and same_bits(z, F.conv1d(a[None], b[:, :, None]))


def test_integers_pass_untouched():
    a = torch.arange(16).view(4, 4)
    with fp32_accumulate(): y, k = a @ a, (a > 3).sum()
    assert torch.equal(y, a @ a) and k == 12 and y.dtype == torch.int64


# ---------------------------------------------------------------- fp32_accumulate: products
def case(f, *shapes, k): return f, shapes, k
LINEAR = dict(
    mm=case(torch.mm, (7, 40), (40, 5), k=40), matmul=case(torch.matmul, (3, 7, 40), (40, 5), k=40),
    bmm=case(torch.bmm, (3, 7, 40), (3, 40, 5), k=40),
    addmm=case(torch.addmm, (5,), (7, 40), (40, 5), k=43),
    addmm_ab=case(lambda c, a, b: torch.addmm(c, a, b, alpha=.5, beta=2), (7, 5), (7, 40), (40, 5), k=44),
    baddbmm=case(torch.baddbmm, (3, 7, 5), (3, 7, 40), (3, 40, 5), k=43),
    addbmm=case(torch.addbmm, (7, 5), (3, 7, 40), (3, 40, 5), k=123),
    mv=case(torch.mv, (7, 40), (40,), k=40), addmv=case(torch.addmv, (7,), (7, 40), (40,), k=43),
    dot=case(torch.dot, (40,), (40,), k=40),
    vdot=case(torch.vdot, (40,), (40,), k=40), inner=case(torch.inner, (7, 40), (5, 40), k=40),
    einsum=case(partial(torch.einsum, 'bij,bjk->bik'), (3, 7, 40), (3, 40, 5), k=40),
    tensordot=case(lambda a, b: torch.tensordot(a, b, 2), (7, 4, 10), (4, 10, 5), k=40),
    chain=case(lambda a, b: torch.linalg.multi_dot([a, b]), (7, 40), (40, 5), k=40),
    linear=case(F.linear, (3, 7, 40), (5, 40), (5,), k=43),
    bilinear=case(F.bilinear, (7, 4), (7, 10), (5, 4, 10), k=50),
    conv1d=case(F.conv1d, (3, 4, 12), (6, 4, 5), (6,), k=60),
    conv2d=case(partial(F.conv2d, stride=2, padding=1), (3, 4, 9, 9), (6, 4, 3, 3), (6,), k=200),
    grouped=case(partial(F.conv2d, groups=2, dilation=2), (3, 4, 9, 9), (6, 2, 3, 3), k=200),
    depthwise=case(partial(F.conv1d, groups=4), (3, 4, 12), (4, 1, 5), k=60),
    conv3d=case(F.conv3d, (2, 2, 4, 4, 4), (3, 2, 2, 2, 2), k=120),
    transposed1d=case(partial(F.conv_transpose1d, stride=2), (3, 4, 12), (4, 6, 5), (6,), k=100),
    transposed2d=case(partial(F.conv_transpose2d, stride=2, padding=1, output_padding=1), (3, 4, 5, 5),
                      (4, 6, 3, 3), k=200),
    transposed3d=case(F.conv_transpose3d, (2, 2, 3, 3, 3), (2, 3, 2, 2, 2), k=120))


def run(f, ts, g, ctx=torch.enable_grad):
    "Result and gradients"
    ts = [t.detach().requires_grad_() for t in ts]
    with ctx():
        y = f(*ts)
        y.backward(g(y.shape))
    return [y.detach(), *(t.grad for t in ts)]


@each('name', LINEAR)
def test_products_forward_and_backward_within_the_bound(name):
    f, shapes, k = LINEAR[name]
    xs = [rand(*s, seed=i) for i, s in enumerate(shapes)]
    up = lambda shape: rand(*shape, seed=99)
    with Spy() as spy: got = run(f, xs, up, fp32_accumulate)
    true = run(f, [x.double() for x in xs], lambda s: up(s).double())
    size = run(f, [x.double().abs() for x in xs], lambda s: up(s).double().abs())
    assert not spy.half_products
    for y, t, a in zip(got, true, size):
        assert y.dtype is H and y.shape == t.shape
        err = k*2.**-24*a
        assert ((y.double() - t).abs() <= fp16.spacing(t.abs() + err)/2 + err).all()


@each('name', [n for n in LINEAR if n not in ('bilinear',)])
def test_products_are_fp32_rounded_once(name):
    f, shapes, _ = LINEAR[name]
    xs = [rand(*s, seed=i) for i, s in enumerate(shapes)]
    with fp32_accumulate(): got = f(*xs)
    assert same_bits(got, f(*[x.float() for x in xs]).half())


@each('name', [n for n in LINEAR if n not in ('bilinear',)])
def test_bf16_products_are_fp32_rounded_once(name):
    f, shapes, _ = LINEAR[name]
    xs = [rand(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate(shapes)]
    seen = []
    class Narrow(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, [a.dtype for a in args if isinstance(a, torch.Tensor)][:1]))
            return func(*args, **(kwargs or {}))
    with Narrow(): got = run(f, xs, lambda s: rand(*s, seed=99, dtype=torch.bfloat16), fp32_accumulate)
    assert same_bits(got[0], f(*[x.float() for x in xs]).bfloat16()) and all(g.dtype is torch.bfloat16 for g in got)
    assert not [func for func, dtypes in seen if dtypes == [torch.bfloat16] and func._overloadpacket.__name__.rstrip('_') in SUMS]


def test_bf16_attention_and_writing():
    q, bf = rand(2, 2, 5, 8), torch.bfloat16
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with fp32_accumulate(): out, lse = op(*[q.to(bf)]*3)
    want, stat = op(*[q.to(bf).float()]*3)
    assert same_bits(out, want.to(bf)) and same_bits(lse, stat)
    a, o, e = rand(6, 6, dtype=bf), torch.zeros(6, 6, dtype=bf), torch.empty(0, dtype=bf)
    with fp32_accumulate():
        assert torch.mm(a, a, out=o) is o and torch.mm(a, a, out=e) is e
        assert a.clone().addmm_(a, a).dtype is bf
        with pytest.raises(RuntimeError): a @ a.half()
    assert same_bits(o, (a.float() @ a.float()).to(bf)) and same_bits(o, e)
    with fp32_accumulate('saturate'): assert (torch.full((2, 2), 1e6, dtype=bf) @ torch.ones(2, 2, dtype=bf)).max() > 1e6


def test_the_bound_would_catch_a_half_accumulator():
    x = rand(1, 4096).abs()
    with fp32_accumulate(): good = x @ x.T
    narrow = chunked_matmul(x.float(), x.T.float(), lambda t: t.half().float(), 1)
    true = x.double() @ x.T.double()
    bound = fp16.spacing(true)/2 + 4096*2.**-24*true
    assert (good.double() - true).abs() <= bound < (narrow.double() - true).abs()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 5), k=st.integers(0, 70), m=st.integers(0, 5), seed=st.integers(0, 2**16), t=st.booleans(),
    scale=st.sampled_from([1e-4, 1., 100.]))
def test_mm_any_shape_and_layout(n, k, m, seed, t, scale):
    a, b = rand(n, k, seed=seed, scale=scale), rand(k, m, seed=seed + 1)
    if t: a, b = a.T.contiguous().T, b.T.contiguous().T
    with fp32_accumulate(): y = a @ b
    assert same_bits(y, (a.float() @ b.float()).half()) and y.stride() == (a @ b).stride()


def test_overflow_underflow_and_specials_of_products():
    a = torch.tensor([[300., 2.**-14, INF, NAN, -300.]]).half()
    b = torch.tensor([[300.], [2.**-14], [1.], [1.], [300.]]).half()
    with fp32_accumulate(): y = [(a[:, i:i+1] @ b[i:i+1]).item() for i in range(5)]
    assert y[:3] == [INF, 0., INF] and y[3] != y[3] and y[4] == -INF
    with fp32_accumulate('saturate'): y = [(a[:, i:i+1] @ b[i:i+1]).item() for i in range(5)]
    assert y[:3] == [65504., 0., 65504.] and y[3] != y[3] and y[4] == -65504


# ---------------------------------------------------------------- fp32_accumulate: out=, in place, mixed dtypes
A, B = rand(6, 6), rand(6, 6, seed=1)
WRITING = dict(
    mm_out=lambda o: torch.mm(A, B, out=o), matmul_out=lambda o: torch.matmul(A, B, out=o),
    addmm_out=lambda o: torch.addmm(A, A, B, out=o), bmm_out=lambda o: torch.bmm(A[None], B[None], out=o[None])[0],
    addmm_=lambda o: o.addmm_(A, B, alpha=.5), addmv_=lambda o: o[0].addmv_(A, B[0]),
    baddbmm_=lambda o: o[None].baddbmm_(A[None], B[None]), addbmm_=lambda o: o.addbmm_(A[None], B[None]),
    aliased=lambda o: torch.mm(o, B, out=o.clone()), mv_out=lambda o: torch.mv(A, B[0], out=o[:, 0]))


@each('name', WRITING)
def test_written_arguments(name):
    f, want, got = WRITING[name], rand(6, 6, seed=7), rand(6, 6, seed=7)
    rw = f(want)
    with Spy() as spy, fp32_accumulate(): rg = f(got)
    assert not spy.half_products
    for g, w in ((got, want), (rg, rw)): assert torch.allclose(g.float(), w.float(), rtol=2**-9, atol=2**-8)
    assert rg.shape == rw.shape and rg.stride() == rw.stride()
    assert name == 'aliased' or rg.data_ptr() - got.data_ptr() == rw.data_ptr() - want.data_ptr()


def test_out_is_returned_and_resized():
    o = torch.empty(0, dtype=H)
    with fp32_accumulate(): r = torch.mm(A, B, out=o)
    assert r is o and same_bits(o, (A.float() @ B.float()).half())
    with fp32_accumulate(), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        torch.mm(A, B, out=torch.ones(3, dtype=H))
    assert any('resized' in str(x.message) for x in w)   # as PyTorch itself complains


def test_in_place_bumps_the_version_once_like_native():
    a, b = A.clone(), A.clone()
    a.addmm_(A, B)
    with fp32_accumulate(): b.addmm_(A, B)
    assert a._version == b._version


x4, w4 = rand(1, 2, 5, 5), rand(3, 2, 3, 3)
MIXED = dict(
    mm=lambda: A @ B.float(), mm2=lambda: A.float() @ B, bf16=lambda: A @ B.bfloat16(),
    addmm=lambda: torch.addmm(A.float(), A, B), bmm=lambda: torch.bmm(A[None], B[None].double()),
    mv=lambda: A @ B[0].float(),
    dot=lambda: A[0] @ B[0].float(), linear=lambda: F.linear(A, B.float()), bias=lambda: F.linear(A, B, B[0].float()),
    conv=lambda: F.conv2d(x4, w4.float()), conv_bias=lambda: F.conv2d(x4, w4, torch.ones(3)),
    conv_int=lambda: F.conv2d(x4, w4.long()), integer=lambda: A @ torch.ones(6, 6, dtype=torch.int64),
    out=lambda: torch.mm(A, B, out=torch.empty(6, 6)),
    attention=lambda: F.scaled_dot_product_attention(x4, x4.float(), x4),
    lstm=lambda: nn.LSTM(6, 3).half()(A.float()), layer=lambda: nn.Linear(6, 3)(A), shape=lambda: A @ B[:3],
    conv_shape=lambda: F.conv2d(x4, w4[:, :1]), inplace=lambda: A.clone().addmm_(A, B.float()))


@each('overflow', ['inf', 'saturate'])
@each('name', MIXED)
def test_what_raises_in_pytorch_raises_alike(name, overflow):
    with pytest.raises(Exception) as native: MIXED[name]()
    with pytest.raises(type(native.value)) as inside:
        with fp32_accumulate(overflow): MIXED[name]()
    assert str(inside.value).split('\nException raised')[0] == str(native.value).split('\nException raised')[0]
    assert modes() == []


# ---------------------------------------------------------------- fp32_accumulate: layers
def attention(q, **kw): return F.scaled_dot_product_attention(q, q.flip(-1), 2*q, **kw)
LAYERS = dict(
    rnn=lambda: (nn.RNN(6, 5, 2, batch_first=True), rand(2, 4, 6)),
    lstm=lambda: (nn.LSTM(6, 5, bidirectional=True), rand(2, 4, 6)), gru=lambda: (nn.GRU(6, 5), rand(2, 4, 6)),
    lstm_cell=lambda: (nn.LSTMCell(6, 5), rand(4, 6)),
    mha=lambda: (nn.MultiheadAttention(6, 2, batch_first=True), (rand(2, 4, 6),)*3),
    encoder=lambda: (nn.TransformerEncoderLayer(6, 2, 8, 0., batch_first=True), rand(2, 4, 6)),
    decoder=lambda: (nn.TransformerDecoderLayer(6, 2, 8, 0.), (rand(2, 4, 6),)*2),
    conv=lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)),
    rand(2, 2, 6, 6)),
    embedding=lambda: (nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        torch.tensor([[1, 2], [3, 8]])), bilinear=lambda: (nn.Bilinear(6, 6, 3), (rand(4, 6),)*2),
    bag=lambda: (nn.EmbeddingBag(9, 4), torch.tensor([[1, 2], [3, 8]])),
    attention=lambda: (attention, rand(2, 2, 5, 8)),
    causal=lambda: (partial(attention, is_causal=True), rand(2, 2, 5, 8)),
    mask=lambda: (partial(attention, attn_mask=torch.ones(5, 5).tril().bool()), rand(2, 2, 5, 8)),
    bias=lambda: (partial(attention, attn_mask=rand(5, 5)), rand(2, 2, 5, 8)))


def forward(m, x):
    y = m(*x) if isinstance(x, tuple) else m(x)
    return y[0] if isinstance(y, tuple) else y


@each('how', ['train', 'no_grad', 'inference', 'autocast'])
@each('name', LAYERS)
def test_no_product_of_a_layer_runs_in_native_half(name, how):
    torch.manual_seed(0)
    m, x = LAYERS[name]()
    if isinstance(m, nn.Module):
        m = m.train(how in ('train', 'autocast'))
        if how != 'autocast': m = m.half()
    ctx = dict(train=torch.enable_grad, no_grad=torch.no_grad, inference=torch.inference_mode,
        autocast=partial(torch.autocast, 'cpu', dtype=H))[how]
    if how == 'autocast': x = tuple(t.float() for t in x) if isinstance(x,
        tuple) else x if not x.is_floating_point() else x.float()
    def once():
        if isinstance(m, nn.Module): m.zero_grad()
        with ctx():
            y = forward(m, x)
            if how in ('train', 'autocast') and y.requires_grad: (y.float()*rand(*y.shape, seed=5)).sum().backward()
        return [y.detach()] + [p.grad for p in m.parameters()] if isinstance(m, nn.Module) and how in ('train',
            'autocast') else [y.detach()]
    try: native = once()
    except RuntimeError: pytest.skip('PyTorch itself cannot')
    with Spy() as spy, fp32_accumulate(): got = once()
    assert not spy.half_products
    for a, b in zip(got, native):
        if a is None: assert b is None; continue
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=3e-3*max(1., b.float().abs().max().item()))


def test_attention_gradients_and_statistics():
    q, k, v = (rand(2, 2, 5, 8, seed=s) for s in range(3))
    with Spy() as spy: got = run(F.scaled_dot_product_attention, (q, k, v), lambda s: rand(*s, seed=9), fp32_accumulate)
    true = run(F.scaled_dot_product_attention, (q.double(), k.double(), v.double()),
        lambda s: rand(*s, seed=9).double())
    assert not spy.half_products
    for a, b in zip(got, true): assert a.dtype is H and (a.double() - b).abs().max() < 2e-3
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with fp32_accumulate(): out, lse = op(q, k, v)
    assert (out.dtype, lse.dtype) == tuple(t.dtype for t in op(q, k, v)) == (H, torch.float32)


def test_fused_rnn_op_in_half():
    def call(x, *ws): return torch.ops.aten.mkldnn_rnn_layer(x, *ws, False, [], 2, 5, 1, True, False, False, False)
    xs = [rand(4, 2, 6), rand(20, 6, seed=1), rand(20, 5, seed=2), rand(20, seed=3), rand(20, seed=4),
        rand(1, 2, 5, seed=5), rand(1, 2, 5, seed=6)]
    try: want = call(*[x.float() for x in xs])
    except RuntimeError: pytest.skip('this torch has no oneDNN')
    with fp32_accumulate(): got = call(*xs)
    for g, w in zip(got[:3], want): assert same_bits(g, w.half())


def test_autocast_and_gradscaler_train_below():
    def train():
        torch.manual_seed(0)
        m, x, y = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(32, 8), torch.randint(3,
            (32,))
        opt, scaler, losses = torch.optim.SGD(m.parameters(), .1), torch.amp.GradScaler('cpu', init_scale=2.**10), []
        for _ in range(5):
            with torch.autocast('cpu', dtype=H): loss = F.cross_entropy(m(x), y)
            opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
            losses.append(loss.item())
        return losses
    native = train()
    with Spy() as spy, fp32_accumulate(): got = train()
    assert not spy.half_products and torch.allclose(torch.tensor(got), torch.tensor(native), atol=2e-3)


# ---------------------------------------------------------------- fp32_accumulate: saturation
CLIPPED = dict(
    mul=lambda x: x*300, neg=lambda x: x*-300, exp=torch.exp, sum=lambda x: x.sum(), cast=lambda x: (x.float()*1e6),
    square=torch.square, cumsum=lambda x: x.cumsum(0), add=lambda x: x + x, div=lambda x: x/1e-4,
    clone=torch.clone, cat=lambda x: torch.cat([x, x]), full=lambda x: torch.full_like(x, INF), relu=torch.relu,
    foreach=lambda x: torch._foreach_mul([x, x], 300.)[1], split=lambda x: (x*300).split(2)[0])


@each('name', CLIPPED)
def test_saturating_ops_against_brute_force(name):
    x = torch.tensor([0., -0., 1., 300., -300., 60000., -65504., INF, -INF, NAN]).half()
    f = CLIPPED[name]
    want = f(x).half().clamp(-65504, 65504) if name != 'split' else f(x).clamp(-65504, 65504)
    with fp32_accumulate('saturate'): got = f(x).half()
    assert same_bits(got, want)
    assert x[7] == INF   # the input itself is nobody's result


@pytest.mark.parametrize('f', [lambda x: x.mul_(300), lambda x: torch.mul(x, 300, out=x),
    lambda x: x.copy_(torch.full_like(x, 1e6, dtype=torch.float32)), lambda x: x.exp_(), lambda x: x[2:].add_(65504),
                               lambda x: torch._foreach_mul_([x], 300.), lambda x: x.fill_(INF),
                               lambda x: x.addmm_(x.clone(), x.clone()), lambda x: torch.mm(x, x, out=x.clone()),
                               lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(INF, dtype=H))])
def test_saturating_what_is_written(f):
    brute, got = (rand(4, 4, scale=300.) for _ in range(2))
    f(brute)
    brute.clamp_(-65504, 65504)
    with fp32_accumulate('saturate'): r = f(got)
    assert torch.allclose(got.float(), brute.float(), rtol=2**-9, equal_nan=True) and not got.isinf().any()
    assert not isinstance(r, torch.Tensor) or not r.isinf().any()


def test_saturating_backward():
    x = torch.tensor([1., 2.]).half().requires_grad_()
    w = rand(2, 2).requires_grad_()
    with fp32_accumulate('saturate'):
        y = x*200
        (y @ w).backward(torch.full((2,), 5e4, dtype=H))
    assert x.grad.isfinite().all() and w.grad.isfinite().all()
    g = (w.detach().double() @ torch.full((2,), 5e4, dtype=torch.float64)).clamp(-65504, 65504).half()
    assert same_bits(x.grad, (g.double()*200).clamp(-65504, 65504).half()) and (w.grad == 65504).all()


def test_saturating_sum_of_gradients():
    x = torch.ones(3, dtype=H, requires_grad=True)
    with fp32_accumulate('saturate'):
        (x*1 + x*1).backward(torch.full((3,), 6e4, dtype=H))        # autograd adds 6e4 + 6e4
        assert (x.grad == 65504).all()
        (x*1).backward(torch.full((3,), 6e4, dtype=H))              # and so does the accumulation
    assert (x.grad == 65504).all()


def test_saturating_leaves_views_and_other_dtypes_alone():
    x = torch.full((2, 2), INF, dtype=H)
    with fp32_accumulate('saturate'):
        v = x.view(4), x.T, x[0], x.detach(), x.expand(3, 2, 2), x.split(1)[0], x.unbind()[0]
        f, i = torch.tensor([1e6]).exp(), torch.tensor([70000])*2
    assert all(t.isinf().all() for t in v) and x.isinf().all() and f.isinf() and i == 140000


def test_saturating_lets_odd_tensors_through():
    with fp32_accumulate('saturate'):
        y = rand(4, 4).to_sparse()*2
        z = torch._efficientzerotensor((2,), dtype=H)
    assert y.is_sparse and z._is_zerotensor()


def test_saturating_a_masked_softmax_stays_a_softmax():
    s = rand(4, 4)
    with fp32_accumulate('saturate'): p = s.masked_fill(torch.ones(4, 4).triu(1).bool(), -INF).softmax(-1)
    assert same_bits(p, s.masked_fill(torch.ones(4, 4).triu(1).bool(), -INF).softmax(-1))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(['mul', 'add', 'exp', 'neg', 'square', 'sum']), min_size=1, max_size=6),
    st.integers(0, 2**16))
def test_saturating_chains(ops, seed):
    fs = dict(mul=lambda x: x*50, add=lambda x: x + x.flip(0), exp=lambda x: x.exp(), neg=lambda x: -x,
        square=lambda x: x*x, sum=lambda x: x.sum() + 0*x)
    x = y = rand(8, seed=seed, scale=100.)
    for o in ops:
        if o == 'sum':
            t, z = y.sum().clamp(-65504, 65504), (0*y).clamp(-65504, 65504)
            y = (t + z).clamp(-65504, 65504)
        else: y = fs[o](y).clamp(-65504, 65504)
    with fp32_accumulate('saturate'):
        for o in ops: x = fs[o](x)
    assert same_bits(x, y)


# ---------------------------------------------------------------- both: contexts
CONTEXTS = [fp32_accumulate, partial(fp32_accumulate, 'saturate'), partial(emulate_format, 'e5m2'), no_emulation]


@each('ctx', CONTEXTS)
def test_nothing_stays_after_an_exception(ctx):
    with pytest.raises(ZeroDivisionError):
        with ctx(): 1/0
    assert modes() == []
    m = ctx()
    with m:
        with pytest.raises(RuntimeError): torch.ones(2, 3) @ torch.ones(2, 3)
        y = torch.tensor([1.1])*1                 # after an op that raised the mode still does its work
    assert same_bits(y, quantize(torch.tensor([1.1]), 'e5m2') if isinstance(m, emulate_format) else torch.tensor([1.1]))
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): raise KeyError('bad')
    with pytest.raises(KeyError):
        with ctx(): Bad.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert modes() == []
    assert same_bits(torch.tensor([1.1])*1, torch.tensor([1.1]))


@each('ctx', CONTEXTS)
def test_reentrant_and_usable_again(ctx):
    m, x = ctx(), rand(4, 4)
    with m:
        a = x @ x
        with m: b = x @ x
        c = x @ x
    with m: d = x @ x
    assert same_bits(a, b) and same_bits(a, c) and same_bits(a, d)


@each('ctx', CONTEXTS)
def test_decorator_recursive_and_in_threads(ctx):
    @ctx()
    def f(n):
        assert len({id(m) for m in modes()}) == n + 1
        return f(n + 1) if n < 3 else torch.tensor([1.1])*1
    out = []
    ts = [threading.Thread(target=lambda: out.append(f(0))) for _ in range(4)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert len(out) == 4 and modes() == []
    assert all(same_bits(o, f(0)) for o in out)


def test_a_mode_belongs_to_its_thread():
    seen = {}
    def other(): seen['y'], seen['modes'] = torch.tensor([1.1])*1, len(modes())
    with emulate_format('e4m3'):
        t = threading.Thread(target=other); t.start(); t.join()
        here = torch.tensor([1.1])*1
    assert same_bits(seen['y'], torch.tensor([1.1])) and seen['modes'] == 0 and here == 1.125


@each('ctx', CONTEXTS)
def test_models_are_copied_and_pickled_inside(ctx):
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 1))
    with ctx():
        twin, again = copy.deepcopy(m), pickle.loads(pickle.dumps(m))
        buf = io.BytesIO(); torch.save(m.state_dict(), buf); buf.seek(0)
        loaded = torch.load(buf, weights_only=True)
    for k, v in m.state_dict().items():
        assert same_bits(v, twin.state_dict()[k]) and same_bits(v, again.state_dict()[k]) and same_bits(v, loaded[k])


@each('reentrant', [True, False])
@pytest.mark.parametrize('ctx,dtype', [(fp32_accumulate, H), (partial(fp32_accumulate, 'saturate'), H),
    (partial(emulate_format, 'e5m2'), torch.float32), (partial(emulate_format, 'e4m3', inplace=True), torch.float32)])
def test_checkpointing_changes_nothing(ctx, dtype, reentrant):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.GELU()).to(dtype)
    def inner(x):
        y = m(x)
        y += x                                    # in place: not rounded forward, so not when it is computed again
        return m(y)*y
    res = []
    for f in (inner, lambda x: checkpoint(inner, x, use_reentrant=reentrant)):
        x = rand(5, 8, dtype=dtype).requires_grad_()
        m.zero_grad()
        with ctx(): f(x).square().sum().backward()
        res.append([x.grad] + [p.grad for p in m.parameters()])
    assert all(map(same_bits, *res))


def test_double_backward():
    x = rand(4, 4).requires_grad_()
    with Spy() as spy, fp32_accumulate():
        g, = torch.autograd.grad((x @ x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
    assert x.grad.dtype is H and not spy.half_products


def test_what_is_not_on_a_cpu_passes_untouched():
    a = torch.empty(3, 4, dtype=H, device='meta')
    with Spy() as spy, fp32_accumulate(): y = a @ a.T
    assert y.dtype is H and y.device.type == 'meta' and len(spy.half_products) == 1


def test_fake_tensors_pass():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(), fp32_accumulate(): y = torch.empty(3, 4, dtype=H) @ torch.empty(4, 5, dtype=H)
    assert y.dtype is H and y.shape == (3, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_on_a_gpu():
    a, b = rand(64, 64).cuda().requires_grad_(), rand(64, 64, seed=1).cuda()
    (a @ b).sum().backward(); want, a.grad = a.grad, None
    with Spy() as spy, fp32_accumulate(): (a @ b).sum().backward()
    assert same_bits(a.grad, want) and len(spy.half_products) == 2
    a.grad = None
    with fp32_accumulate('saturate'): (a*200 @ b).backward(torch.full((64, 64), 5e4, dtype=H,
        device='cuda'))   # autograd's own thread
    assert a.grad.isfinite().all() and (a.grad.abs() == 65504).any()
    with emulate_format('e4m3') as m:
        w = b.float().requires_grad_()
        (w @ w).sum().backward()
    assert same_bits(w.grad, m.round(w.grad))


# ---------------------------------------------------------------- emulate: what is rounded
FORMATS = ['fp16', 'bf16', 'e5m2', 'e4m3', 'e4m3fnuz', 'e3m2', 'e8m1']
X, Y = rand(4, 6, dtype=torch.float32), rand(4, 6, seed=1, dtype=torch.float32)
RESULTS = dict(
    exp=lambda: X.exp(), tanh=lambda: X.tanh(), relu=lambda: X.relu(), add=lambda: X + Y, mul=lambda: X*Y,
    scalar=lambda: 3*X, div=lambda: X/Y, sum=lambda: X.sum(), mean=lambda: X.mean(1), softmax=lambda: X.softmax(-1),
    layer_norm=lambda: F.layer_norm(X, (6,)), max=lambda: X.max(1).values, cumsum=lambda: X.cumsum(0),
    norm=lambda: X.norm(), pool=lambda: F.avg_pool1d(X, 2), embedding=lambda: F.embedding(torch.tensor([1, 0]), X),
    gelu=lambda: F.gelu(X), var=lambda: X.var(), lerp=lambda: torch.lerp(X, Y, .3),
    out=lambda: torch.add(X, Y, out=torch.empty(4, 6)), std_mean=lambda: torch.std_mean(X)[0],
    mse=lambda: F.mse_loss(X, Y))


def numbers(fmt): return dict(overflow='saturate', fmt=fmt)


@each('fmt', FORMATS)
@each('name', RESULTS)
def test_results_are_rounded_once(name, fmt):
    f = RESULTS[name]
    with emulate_format(fmt): got = f()
    want = quantize(f(), fmt)
    if name in ('norm', 'var', 'pool'): assert same_bits(got, quantize(got, fmt)) and torch.allclose(got, want,
        rtol=.3)   # several ops in some versions
    else: assert same_bits(got, want)


OPTIONS = [dict(rounding='toward_zero'), dict(subnormals=False), dict(overflow='inf'), dict(overflow='nan'),
    dict(overflow='saturate')]


@each('fmt', ['fp16', 'bf16', 'e5m2', 'e4m3', 'e4m3fnuz', 'fp32', 'e3m2', 'e2m1', 'e5m3'])
@each('opts', OPTIONS)
def test_every_option_of_quantize(fmt, opts):
    x = torch.cat([all_halves().float()*s for s in (1., 2.**-16, 2.**17)])
    f = get_format(fmt)
    if not f.has_nan: x = x[~x.isnan()]
    if (opts.get('overflow') == 'inf' and not f.has_inf) or (opts.get('overflow') == 'nan' and not f.has_nan):
        with pytest.raises(ValueError, match='overflow'): emulate_format(fmt, **opts)
        return
    with emulate_format(fmt, **opts): y = x*1
    assert same_bits(y, quantize(x, fmt, **opts))


KEPT = dict(
    view=[lambda: X.view(6, 4), lambda: X.T, lambda: X[1:], lambda: X.detach(), lambda: X.expand(2, 4, 6),
        lambda: X.unfold(1, 2, 1), lambda: X.split(2)[1], lambda: X.chunk(2, 1)[0]],
    copy=[lambda: X.clone(), lambda: torch.view_copy(X, (6, 4)), lambda: X.T.contiguous(),
        lambda: torch.empty(4, 6).copy_(X), lambda: X.double(),
        lambda: X.half().float(), lambda: X.T.reshape(-1), lambda: torch.zeros(4, 6).fill_(.3)],
    move=[lambda: torch.cat([X, Y]), lambda: torch.stack([X, Y]), lambda: X[[2, 0]], lambda: X[X > 0],
        lambda: X.gather(1, torch.zeros(4, 1, dtype=torch.int64)), lambda: X.flip(0), lambda: torch.where(X > 0, X, Y),
          lambda: X.masked_fill(X > 0, -INF), lambda: F.pad(X, (1, 1)), lambda: X.roll(1), lambda: X.tril(),
          lambda: X.repeat(2, 1)],
    random=[lambda: torch.randn(4, 6), lambda: torch.rand_like(X), lambda: torch.empty(4, 6).uniform_()],
    factory=[lambda: torch.full((2,), .3), lambda: torch.linspace(0, 1, 7), lambda: torch.ones_like(X)*1,
        lambda: X.new_tensor([.3, .7]), lambda: torch.tensor([.3])],
    discrete=[lambda: X > Y, lambda: X.argmax(), lambda: X.sort().indices, lambda: (X > 0).sum(), lambda: X.isnan(),
        lambda: torch.arange(5)*3],
    foreach=[lambda: torch._foreach_mul([X, Y], .3)[0], lambda: torch._foreach_norm([X])[0],
        lambda: (t := [X.clone()], torch._foreach_add_(t, .1))[0][0]],
    inplace=[lambda: X.clone().mul_(.3), lambda: X.clone().add_(Y, alpha=.1), lambda: X.clone().sigmoid_(),
        lambda: X.clone().addcdiv_(X, Y), lambda: X.clone().lerp_(Y, .1)])


@each('kind,i', [(k, i) for k, fs in KEPT.items() for i in range(len(fs))])
def test_what_is_not_rounded(kind, i):
    f = KEPT[kind][i]
    torch.manual_seed(0); want = f()
    torch.manual_seed(0)
    with emulate_format('e3m2'): got = f()
    assert same_bits(got, want)


def test_other_dtypes_are_not_rounded_and_the_first_one_warns():
    for dtype in (torch.float64, torch.bfloat16, H, torch.complex64):
        x = rand(5, 5, dtype=dtype)
        with emulate_format('e4m3'), pytest.warns(UserWarning, match=f'is {dtype}, and only float32 is rounded to e4m3') as told: y, z = x*1.1, x @ x
        assert len(told) == 1
        assert same_bits(y, x*1.1) and same_bits(z, x @ x)
    with emulate_format('e4m3'), torch.autocast('cpu', dtype=torch.bfloat16): y = X @ X.T
    with torch.autocast('cpu', dtype=torch.bfloat16): assert same_bits(y,
        X @ X.T)     # autocast's dtype is its own rounding


def test_inplace_option():
    with emulate_format('e4m3', inplace=True): y = X.clone().mul_(.3)
    assert same_bits(y, quantize(X*.3, 'e4m3'))
    with emulate_format('e4m3', inplace=True): z = torch.zeros(4, 4).addmm_(X, Y.T)
    assert same_bits(z, quantize(quantize(X, 'e4m3') @ quantize(Y, 'e4m3').T, 'e4m3'))
    with emulate_format('e4m3'): z = torch.zeros(4, 4).addmm_(X, Y.T)
    assert same_bits(z, quantize(X, 'e4m3') @ quantize(Y, 'e4m3').T)


def test_gradients_are_summed_on_the_grid():
    x = torch.ones(1, requires_grad=True)
    with emulate_format('e4m3'):
        (x*1.125 + x*17).backward()                     # autograd's own sum: 18.125, between 18 and 20
        assert x.grad.item() == 18
        (x*1.125).backward()                            # the accumulation: 19.125
    assert x.grad.item() == 20


@each('inputs', [True, False])
@each('fmt', ['fp16', 'e5m2', 'e4m3', 'e3m2'])
def test_a_net_against_a_reference_written_out(fmt, inputs):
    q = partial(quantize, fmt=fmt)
    qi = q if inputs else lambda t: t
    w1, b1, w2 = rand(8, 6, seed=2, dtype=torch.float32), rand(8, seed=3, dtype=torch.float32), rand(3, 8, seed=4,
        dtype=torch.float32)
    # forward
    pre = q(torch.addmm(qi(b1), qi(X), qi(w1).T))
    hid = q(pre.tanh())
    out = q(qi(hid) @ qi(w2).T)
    sq = q(out*out)
    # backward of sum(out*out)
    g = q(torch.ones_like(out)*out)
    g_out = q(g + g)
    g_w2 = q(qi(g_out).T @ qi(hid))
    g_hid = q(qi(g_out) @ qi(w2))
    g_pre = q(torch.ops.aten.tanh_backward(g_hid, hid))
    g_w1, g_b1, g_x = q(qi(g_pre).T @ qi(X)), q(g_pre.sum(0)), q(qi(g_pre) @ qi(w1))
    ps = [t.clone().requires_grad_() for t in (X, w1, b1, w2)]
    with emulate_format(fmt, inputs=inputs):
        y = F.linear(F.linear(ps[0], ps[1], ps[2]).tanh(), ps[3])
        z = y*y
        z.sum().backward()
    assert same_bits(y.detach(), out) and same_bits(z.detach(), sq)
    for p, want in zip(ps, (g_x, g_w1, g_b1, g_w2)): assert same_bits(p.grad, want)


def test_a_convolution_against_a_reference_written_out():
    q = partial(quantize, fmt='e4m3')
    x, w, b = rand(2, 3, 6, 6, dtype=torch.float32), rand(4, 3, 3, 3, seed=1, dtype=torch.float32), rand(4, seed=2,
        dtype=torch.float32)
    g = q(rand(2, 4, 4, 4, seed=3, dtype=torch.float32))
    ps = [t.clone().requires_grad_() for t in (x, w, b)]
    with emulate_format('e4m3'):
        y = F.conv2d(*ps)
        y.backward(g)
    assert same_bits(y.detach(), q(F.conv2d(q(x), q(w), q(b))))
    assert same_bits(ps[0].grad, q(torch.nn.grad.conv2d_input(x.shape, q(w), g)))
    assert same_bits(ps[1].grad, q(torch.nn.grad.conv2d_weight(q(x), w.shape, g))) and same_bits(ps[2].grad,
        q(g.sum((0, 2, 3))))


def test_emulated_fp16_is_native_half_where_both_round_once():
    x = rand(5, 7)
    for f in (torch.exp, torch.tanh, lambda t: t*t, lambda t: t.sum(0), lambda t: t/3, lambda t: t.softmax(0)):
        with emulate_format('fp16', overflow='inf'): y = f(x.float())
        assert (y.half() - f(x)).abs().max() <= fp16.spacing(y.abs().max().item()) and torch.allclose(y, f(x).float(),
            rtol=2**-10)
    a, b = rand(9, 33), rand(33, 9, seed=1)
    with emulate_format('fp16', overflow='inf'): y = a.float() @ b.float()
    with fp32_accumulate(): assert same_bits(y.half(), a @ b)


def test_attention_against_a_reference_written_out():
    q, fmt = partial(quantize, fmt='e4m3'), 'e4m3'
    xs, g = [rand(1, 2, 5, 8, seed=i).float() for i in range(3)], q(rand(1, 2, 5, 8, seed=9).float())
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(*map(q, xs))
    want = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(g, *map(q, xs), q(out), lse, 0., False)
    with emulate_format(fmt): got, stat = op(*xs)
    assert same_bits(got, q(out)) and same_bits(stat, lse) and not same_bits(lse, q(lse))
    ps = [x.clone().requires_grad_() for x in xs]
    with emulate_format(fmt): F.scaled_dot_product_attention(*ps).backward(g)
    for p, w in zip(ps, want): assert same_bits(p.grad, q(w))


def test_norm_statistics_stay_fp32_and_their_results_do_not():
    bn, ln = nn.BatchNorm1d(6), nn.LayerNorm(6)
    with emulate_format('e4m3') as m: y, z = bn(X), ln(X)
    assert same_bits(y.detach(), m.round(y)) and same_bits(z.detach(), m.round(z))
    other = nn.BatchNorm1d(6); other(X)
    assert same_bits(bn.running_mean, other.running_mean) and same_bits(bn.running_var, other.running_var)
    with emulate_format('e4m3'): out, mean, rstd = torch.ops.aten.native_layer_norm(X, [6], None, None, 1e-5)
    want = torch.ops.aten.native_layer_norm(X, [6], None, None, 1e-5)
    assert same_bits(mean, want[1]) and same_bits(rstd, want[2]) and same_bits(out, quantize(want[0], 'e4m3'))


@each('how', ['train', 'no_grad', 'inference'])
@each('name', [n for n in LAYERS if n not in ('lstm',)])
def test_layers_land_on_the_grid(name, how):
    torch.manual_seed(0)
    m, x = LAYERS[name]()
    x = tuple(t.float() for t in x) if isinstance(x, tuple) else x.float() if x.is_floating_point() else x
    if name == 'bias': m = partial(attention, attn_mask=rand(5, 5, dtype=torch.float32))
    if isinstance(m, nn.Module): m.train(how == 'train')
    ctx = dict(train=torch.enable_grad, no_grad=torch.no_grad, inference=torch.inference_mode)[how]
    with emulate_format('e5m2', inplace=True) as e, ctx():
        y = forward(m, x)
        if how == 'train' and y.requires_grad: y.square().sum().backward()
    assert same_bits(y.detach(), e.round(y).detach())
    for p in m.parameters() if isinstance(m, nn.Module) and how == 'train' else ():
        if p.grad is not None: assert same_bits(p.grad, e.round(p.grad))


def test_a_fused_lstm_is_refused_with_its_cure():
    lstm, x = nn.LSTM(6, 5), rand(3, 2, 6, dtype=torch.float32)
    with Spy() as spy: lstm(x)
    if any('mkldnn_rnn' in str(f) for f, _ in spy.calls):
        with pytest.raises(NotImplementedError, match='mkldnn.flags'):
            with emulate_format('e4m3'): lstm(x)
    with emulate_format('e4m3', inplace=True) as m, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with torch.backends.mkldnn.flags(enabled=False): y = lstm(x)[0]
    assert same_bits(y.detach(), m.round(y).detach())


# ---------------------------------------------------------------- emulate: kinds
def test_every_op_has_a_kind():
    names = [n[6:].partition('.') for n in torch._C._dispatch_get_all_op_names() if n.startswith('aten::')]
    kinds = {op_kind(getattr(getattr(torch.ops.aten, n), o or 'default')) for n, _, o in names if 'dtype' not in o}
    assert kinds == set(OP_KINDS)


EXPECTED_KINDS = {
    'product': """mm addmm bmm baddbmm convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu
        _trilinear dot mv addmm_""",
    'result': """add mul exp relu sum mean _softmax _log_softmax native_layer_norm embedding native_batch_norm gelu
        max_pool2d_with_indices threshold_backward tanh_backward native_layer_norm_backward embedding_dense_backward
        mse_loss native_dropout cumsum scatter_add index_add""",
    'in-place': 'add_ mul_ relu_ sigmoid_ addcdiv_ lerp_ scatter_add_ index_add_ clamp_',
    'foreach': '_foreach_add_ _foreach_mul_ _foreach_norm _fused_adam_ _amp_update_scale_',
    'view': 'view t transpose slice detach expand unbind split as_strided', 'copy': 'clone copy_ _to_copy fill_ zero_',
    'move': 'cat stack index gather masked_fill where index_put_ scatter_', 'discrete': 'eq lt argmax nonzero isnan',
    'random': 'randn uniform_ bernoulli normal_ multinomial', 'factory': 'zeros full empty_like new_zeros arange eye',
    'opened': 'linear matmul conv2d einsum layer_norm _transformer_encoder_layer_fwd',
    'sealed': 'mkldnn_rnn_layer _cudnn_rnn'}


@each('kind', EXPECTED_KINDS)
def test_kinds(kind):
    there = set(torch._C._dispatch_get_all_op_names())          # not those of TorchScript, for lists of ints
    def odd(f): return f.name() not in there or f.name().endswith(('dtype', 'dtype_out', 'linear.out'))
    for n in EXPECTED_KINDS[kind].split():
        p = getattr(torch.ops.aten, n)
        kinds = {op_kind(f) for f in (getattr(p, o) for o in p.overloads()) if not odd(f)}
        assert kind in kinds and kinds <= {kind, 'opened'}, n


def test_a_custom_op_is_a_result():
    lib = torch.library.Library('mptest', 'FRAGMENT')
    lib.define('pieces(Tensor x) -> Tensor[]')
    lib.impl('pieces', lambda x: [x/3, x/5], 'CPU')
    with emulate_format('e4m3'): ys = torch.ops.mptest.pieces(X)
    assert len(ys) == 2 and same_bits(ys[0], quantize(X/3, 'e4m3')) and same_bits(ys[1], quantize(X/5, 'e4m3'))
    lib.define('third(Tensor x) -> Tensor')
    lib.impl('third', lambda x: x/3, 'CPU')
    with emulate_format('e4m3'): y = torch.ops.mptest.third(X)
    assert same_bits(y, quantize(X/3, 'e4m3'))


# ---------------------------------------------------------------- emulate: every product
def operands(func):
    "How many tensors the op reads"
    args = func._schema.arguments
    reads = [a for a in args if a.alias_info is None or not a.alias_info.is_write or a.name == 'self']
    return sum('Tensor' in str(a.type) for a in reads) + any('List[Tensor]' in str(a.type) for a in reads)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason='the list of ops that are no products is of torch 2.13')
def test_every_op_of_aten_that_reads_two_tensors_is_a_product_or_known_to_be_none():
    "An op that a new version of torch brings is in neither list: look at it, and put it into one"
    harmless, unknown = {*(Path(__file__).parent/'golden/no_products.txt').read_text().split()}, set()
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition('::')
        name, _, overload = name.partition('.')
        if space != 'aten' or name in harmless or name.startswith(('_foreach', '_fused_ad', '_fused_sgd')): continue
        func = getattr(getattr(torch.ops.aten, name), overload or 'default')
        opened = is_composite(func) or torch.Tag.pointwise in func.tags
        if operands(func) > 1 and not opened and not is_product(func, [X]*7): unknown.add(name)
    assert not unknown


OFFS, ROWS = torch.tensor([2, 6], dtype=torch.int32), torch.tensor([[0, 1], [2, 3]])
A8, B8 = rand(6, 8, dtype=torch.float32), rand(2, 8, 8, seed=1, dtype=torch.float32)
RARE = dict(grouped=lambda q: F.grouped_mm(q(A8), q(B8), offs=OFFS), cdist=lambda q: torch.cdist(q(A8), q(B8[0])), cdist_mm=lambda q: torch.cdist(q(A8).repeat(9, 1), q(A8)),
            bag=lambda q: F.embedding_bag(ROWS, q(A8), mode='sum', per_sample_weights=q(A8[:2, :2])))


@each('name', RARE)
def test_rare_products_round_what_goes_in_and_have_no_sum_of_few_bits(name):
    q, f = partial(quantize, fmt='e4m3'), RARE[name]
    if name == 'grouped' and not hasattr(F, 'grouped_mm'): pytest.skip('torch 2.10')
    with emulate_format('e4m3'): got = f(lambda t: t)
    assert same_bits(got, q(f(q))) and not same_bits(got, q(f(lambda t: t)))
    with emulate_format('e4m3', accumulate='e8m13'), pytest.raises(NotImplementedError, match='cannot look into aten'): f(lambda t: t)


def test_a_bag_without_weights_is_no_product():
    with emulate_format('e4m3', accumulate='e8m13'): got = F.embedding_bag(ROWS, A8, mode='sum')
    assert same_bits(got, quantize(F.embedding_bag(ROWS, A8, mode='sum'), 'e4m3'))


def test_sparse_tensors_are_refused_in_a_sentence():
    for f in (lambda: A8.to_sparse() @ A8.T, lambda: torch.sparse.mm(A8.to_sparse(), A8.T), lambda: A8.to_sparse_csr() @ A8.T):
        with emulate_format('e4m3'), pytest.raises(ValueError, match='to_dense'): f()


# ---------------------------------------------------------------- emulate: nesting, exact, the loss
def test_the_inner_format_wins():
    for outer, inner in (('e3m2', 'fp16'), ('fp16', 'e3m2')):
        with emulate_format(outer):
            a = X*1
            with emulate_format(inner): b, p = X*1, X @ Y.T
            c = X*1
        assert same_bits(a, quantize(X, outer)) and same_bits(b, quantize(X, inner)) and same_bits(c, a)
        q = partial(quantize, fmt=inner)
        assert same_bits(p, q(q(X) @ q(Y).T))
    with emulate_format('e3m2'):
        with no_emulation():
            d = X*1
            with emulate_format('fp16'): e = X*1
    assert same_bits(d, X) and same_bits(e, quantize(X, 'fp16'))


def test_fast_half_around_and_inside():
    x = rand(6, 6)
    for order in ((fp32_accumulate, partial(emulate_format, 'e4m3')), (partial(emulate_format, 'e4m3'), no_emulation, fp32_accumulate)):
        from contextlib import ExitStack
        with ExitStack() as s:
            for c in order: s.enter_context(c())
            y = x @ x
        assert same_bits(y, (x.float() @ x.float()).half())
    with fp32_accumulate('saturate'), fp32_accumulate(): y = x*1e5
    with fp32_accumulate(), fp32_accumulate('saturate'): z = x*1e5
    assert y.isfinite().all() and same_bits(y, z)          # a saturating machine around or inside saturates


def loss_parts():
    z = rand(64, 5, dtype=torch.float32)
    y = torch.arange(64) % 5
    return z, y


def test_exact_loss_rounds_only_the_gradient():
    z, y = loss_parts()
    ref = z.clone().requires_grad_(); want = F.cross_entropy(ref, y, label_smoothing=.1); want.backward()
    got = z.clone().requires_grad_()
    with emulate_format('e5m2') as m:
        loss = exact_loss(F.cross_entropy, got, y, label_smoothing=.1)
        loss.backward()
    assert same_bits(loss.detach(), want.detach()) and same_bits(got.grad,
        m.round(ref.grad)) and not same_bits(ref.grad, got.grad)
    inside = z.clone().requires_grad_()
    with emulate_format('e5m2'): bad = F.cross_entropy(inside, y, label_smoothing=.1); bad.backward()
    assert not same_bits(bad.detach(), want.detach()) and not same_bits(inside.grad, got.grad)


def test_exact_loss_outside_is_the_loss():
    z, y = loss_parts()
    a, b = (z.clone().requires_grad_() for _ in range(2))
    l = exact_loss(F.cross_entropy, a, y); l.backward()
    F.cross_entropy(b, y).backward()
    assert same_bits(a.grad, b.grad) and l.requires_grad
    with torch.no_grad(): assert not exact_loss(F.cross_entropy, a, y).requires_grad
    assert not exact_loss(F.cross_entropy, z, y).requires_grad


def test_exact_loss_reaches_parameters_of_the_loss():
    z, y = loss_parts()
    temp = nn.Parameter(torch.tensor(1.3))
    a = z.clone().requires_grad_()
    with emulate_format('e4m3'): exact_loss(lambda s: F.cross_entropy(s*temp, y), a).backward()
    got, temp.grad = temp.grad.clone(), None
    b = z.clone().requires_grad_()
    F.cross_entropy(b*temp, y).backward()
    assert same_bits(got, temp.grad) and same_bits(a.grad, quantize(b.grad, 'e4m3'))


def test_exact_loss_in_half():
    z, y = loss_parts()
    a = z.half().requires_grad_()
    with fp32_accumulate(): exact_loss(lambda s: F.cross_entropy(s.float(), y), a).backward()
    b = z.half().requires_grad_()
    F.cross_entropy(b.float(), y).backward()
    assert same_bits(a.grad, b.grad)


def test_optimizers():
    def train(opt_of, where, **kw):
        torch.manual_seed(0)
        m, x, y = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(16, 8), torch.randint(3,
            (16,))
        opt = opt_of(m.parameters())
        for _ in range(3):
            with emulate_format('e4m3'):
                opt.zero_grad(); exact_loss(F.cross_entropy, m(x), y).backward()
                if where == 'inside': opt.step()
                if where == 'exact':
                    with no_emulation(): opt.step()
            if where == 'outside': opt.step()
        return [p.detach() for p in m.parameters()]
    for opt_of in (partial(torch.optim.SGD, lr=.1, momentum=.9), partial(torch.optim.Adam, lr=.01),
        partial(torch.optim.Adam, lr=.01, foreach=True), partial(torch.optim.AdamW, lr=.01, fused=True)):
        outside = train(opt_of, 'outside')
        assert all(map(same_bits, outside, train(opt_of, 'exact')))
        if opt_of.func is torch.optim.SGD: assert all(map(same_bits, outside,
            train(opt_of, 'inside')))     # writes in place only
        assert not all(same_bits(p, quantize(p,
            'e4m3')) for p in outside)                                  # FP32 masters


def test_no_grad_is_rounded_too():
    with emulate_format('e4m3'), torch.no_grad(): y = X*Y
    with torch.no_grad(), emulate_format('e4m3'): z = X*Y
    assert same_bits(y, quantize(X*Y, 'e4m3')) and same_bits(z, y)


def test_stochastic_rounding_is_seeded_and_unbiased():
    x = torch.full((40_000,), 1.03)
    def go(seed):
        with emulate_format('e4m3', rounding='stochastic', generator=torch.Generator().manual_seed(seed)): return x*1
    a = go(0)
    assert same_bits(a, go(0)) and not same_bits(a, go(1)) and set(a.tolist()) == {1.,
        1.125} and abs(a.mean() - 1.03) < .002
    g = torch.Generator().manual_seed(0)
    @emulate_format('e4m3', rounding='stochastic', generator=g)
    def f(): return x*1
    assert not same_bits(f(), f())                                          # the generator goes on


# ---------------------------------------------------------------- emulate: accumulators
def brute_matmul(a, b, fmt, chunk):
    out = torch.zeros(a.shape[0], b.shape[1])
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            acc = 0.
            for s in range(0, a.shape[1], chunk):
                part = sum((a[i, t].double()*b[t, j].double() for t in range(s, min(s + chunk, a.shape[1]))),
                    torch.zeros((), dtype=torch.float64))
                acc = quantize((torch.tensor(acc, dtype=torch.float32) + part.float()), fmt).item()
            out[i, j] = acc
    return out


@each('chunk', [1, 3, 16, 100])
def test_chunked_matmul_against_a_loop(chunk):
    a, b = rand(2, 20).float(), rand(20, 2, seed=1).float()
    for fmt in ('fp16', 'e5m2'): assert torch.allclose(chunked_matmul(a, b, partial(quantize, fmt=fmt), chunk),
        brute_matmul(a, b, fmt, chunk), rtol=get_format(fmt).eps*1.01*(chunk > 1))


def test_chunked_matmul_edges():
    rnd = partial(quantize, fmt='fp16')
    assert chunked_matmul(torch.ones(2, 0), torch.ones(0, 3), rnd).tolist() == [[0, 0, 0]]*2
    assert chunked_matmul(torch.ones(0, 4), torch.ones(4, 3), rnd).shape == (0, 3)
    a = rand(3, 2, 9).float()
    assert chunked_matmul(a, a.mT, rnd, 4).shape == (3, 2, 2)


@each('chunk', [1, 4, 16])
@each('fmt', ['fp16', 'bf16', 'e4m3'])
def test_a_sum_of_ones_stops(chunk, fmt):
    stop, top = 2**(get_format(fmt).man_bits + 1)*chunk, get_format(fmt).max
    n = 2*stop
    with emulate_format('fp32', accumulate=fmt, chunk=chunk): s = (torch.ones(1, n) @ torch.ones(n, 1)).item()
    assert s == min(stop, top)
    with emulate_format('fp32'): assert (torch.ones(1, n) @ torch.ones(n, 1)).item() == n


@each('kernel,chunk,width', [(1, 1, 1), (1, 4, 4), (2, 4, 2), (2, 16, 8), (4, 1, 1)])
def test_where_a_convolutions_sums_of_ones_stop(kernel, chunk, width):
    "A piece is chunk // kernel channels, at least one; the weight's gradient takes one sample at a time"
    n = 512*width
    with emulate_format('fp32', accumulate='bf16', chunk=chunk):
        y = F.conv1d(torch.ones(1, n, kernel), torch.ones(1, n, kernel))
        x = torch.ones(1, 1, kernel, requires_grad=True)
        F.conv1d(x, torch.ones(n, 1, kernel)).backward(torch.ones(1, n, 1))
        w, b = torch.ones(1, 1, kernel, requires_grad=True), torch.zeros(1, requires_grad=True)
        F.conv1d(torch.ones(300, 1, kernel), w, b).backward(torch.ones(300, 1, 1))
    assert y.item() == 256*width*kernel and (x.grad == 256*width).all() and (w.grad == 256).all() and b.grad == 256


@each('name', [n for n in LINEAR if n not in ('bilinear',)])
def test_every_product_accumulates_narrowly(name):
    f, shapes, k = LINEAR[name]
    xs = [rand(*s, seed=i).float() for i, s in enumerate(shapes)]
    up = lambda s: rand(*s, seed=9).float()
    plain, wide = run(f, xs, up, partial(emulate_format, 'fp32')), run(f, xs, up, partial(emulate_format, 'fp32', accumulate='fp32'))
    for p, w in zip(plain, wide): assert p.shape == w.shape and torch.allclose(p, w, rtol=1e-4,
        atol=1e-4)      # the cuts fit together
    size = run(f, [x.abs() for x in xs], lambda s: up(s).abs())
    for p, n, a in zip(plain, run(f, xs, up, partial(emulate_format, 'fp32', accumulate='fp16', chunk=1)), size):
        assert p.shape == n.shape and ((p - n).abs() <= k*2.**-11*a + 1e-6).all()
    ones = [torch.ones_like(x)*64 for x in xs]
    narrow = run(f, ones, lambda s: torch.ones(s), partial(emulate_format, 'fp32', accumulate='e3m2', chunk=1))[0]
    # no running sum beyond E3M2's largest
    assert narrow.max() <= 28 + 64*('linear' in name or 'add' in name or len(shapes) == 3)*2


@each('name', [n for n in WRITING if n != 'aliased'])
def test_written_arguments_accumulate(name):
    global A, B
    a, b = A, B
    try:
        A, B = A.float(), B.float()
        want, got = torch.zeros(6, 6), torch.zeros(6, 6)
        WRITING[name](want)
        with emulate_format('fp32', accumulate='fp32'): r = WRITING[name](got)
        assert torch.allclose(got, want, atol=1e-5) and r.shape == WRITING[name](want).shape
    finally: A, B = a, b


def test_zero_beta_forgets_even_nan():
    c = torch.full((4, 4), NAN)
    with emulate_format('fp16', accumulate='fp16'): y = torch.addmm(c, X, Y.T, beta=0)
    assert y.isfinite().all()


def test_what_cannot_be_accumulated_is_refused():
    q = rand(1, 2, 5, 8).float()
    with pytest.raises(NotImplementedError, match='SDPBackend.MATH'):
        with emulate_format('fp16', accumulate='fp16'): F.scaled_dot_product_attention(q, q, q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with emulate_format('fp16', accumulate='fp16'): y = F.scaled_dot_product_attention(q, q, q)
    assert torch.allclose(y, F.scaled_dot_product_attention(q, q, q), atol=1e-2)


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize('make,words', [
    (lambda: fp32_accumulate('clip'), "no overflow 'clip'.*saturate"), (lambda: emulate_format('fp17'), "no format 'fp17'"),
    (lambda: emulate_format('fp16', rounding='up'), "no rounding 'up'"),
    (lambda: emulate_format('fp16', overflow='wrap'), "no overflow 'wrap'"),
    (lambda: emulate_format('e4m3', overflow='inf'), 'e4m3 has no inf'),
    (lambda: emulate_format('fp16', accumulate='half?'), "no format 'half"),
    (lambda: emulate_format('fp16', accumulate='fp16', chunk=0), 'chunk=0'),
    (lambda: emulate_format('fp16', chunk=1.5), 'chunk=1.5')])
def test_bad_arguments_get_a_sentence(make, words):
    with pytest.raises(ValueError, match=words): make()


def test_round():
    p = nn.Parameter(X.clone())
    m = emulate_format('fp16')
    with emulate_format('e3m2'): y = m.round(p)                        # its own format, whatever is around it
    assert same_bits(y, quantize(X, 'fp16')) and not y.requires_grad
    assert m.round(3) == 3 and m.round(None) is None and m.round(X.double()).dtype is torch.float64


def test_repr_tells_the_options():
    assert repr(fp32_accumulate('saturate')) == "fp32_accumulate(overflow='saturate')" and 'e4m3' in repr(emulate_format('e4m3'))


# ---------------------------------------------------------------- training
def curve(toy, ctx, seed, lr=.1, steps=120, dtype=H):
    from mpcourse.toys import batches, digits, fit, get_toy
    m = get_toy(toy).model(seed=seed).to(dtype)
    with ctx(): return torch.tensor(fit(m, batches(digits(), 64, steps, seed, dtype),
        torch.optim.SGD(m.parameters(), lr))['loss'])


@each('toy', ['relu_mlp', 'cnn'])
def test_training_curves_agree_with_native_half(toy):
    pytest.importorskip('sklearn')
    for seed in (1, 2):
        native, fast = curve(toy, torch.enable_grad, seed), curve(toy, fp32_accumulate, seed)
        assert (native - fast).abs().mean() < 3e-3 and native[-10:].mean() < native[:10].mean()


@pytest.mark.sweep(0)
def test_convergence_counts_of_the_deep_sigmoid_net_agree():
    pytest.importorskip('sklearn')
    from mpcourse.toys import half_pass, train_toy
    def learns(ctx, scale, seed, steps):
        with ctx(): return train_toy('deep_sigmoid', half_pass(scale=scale), seed=seed, steps=steps).loss < 2.
    for ctx in (fp32_accumulate, torch.enable_grad):
        assert not learns(ctx, 1., 0, 200) and not learns(ctx, 2.**24, 0, 20)
        assert any(learns(ctx, 2.**10, seed, 300) for seed in (0, 1, 2))            # when a seed breaks out is chance


def test_a_nested_tensor_is_refused_in_a_sentence():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with emulate_format('fp16'), pytest.raises(ValueError, match='pad it'): nested*2
