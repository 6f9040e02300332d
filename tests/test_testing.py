"assert_rounded passes what right arithmetic gives, and names what is wrong (chapter 39)"
import subprocess, sys

import pytest, torch, torch.nn.functional as F

from mpcourse.rounding import quantize
from mpcourse.tensorcore import gpu_matmul
from mpcourse.testing import assert_rounded, rounding_bound

DTYPES = torch.float32, torch.bfloat16, torch.float16
HALF = torch.randint(512, (64,), generator=torch.Generator().manual_seed(5))
UNARY = dict(softmax=lambda x: x.softmax(-1), log_softmax=lambda x: x.log_softmax(-1), silu=F.silu, gelu=F.gelu,
             tanh=torch.tanh, sum=lambda x: x.sum(-1), mean=lambda x: x.mean(-1), cast=lambda x: x,
             cross_entropy=lambda x: F.cross_entropy(x, HALF))


def draw(*shape, dtype=torch.float32, s=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(s)).to(dtype)
def verdict(*args, **how):
    try: assert_rounded(*args, **how)
    except AssertionError as e: return str(e)
    return ''


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('op', UNARY)
def test_torchs_own_operations_and_gradients_pass(op, dtype):
    for s in range(5):
        x = (3*draw(64, 512, s=s)).to(dtype)
        more = [HALF] if op == 'cross_entropy' else []
        inner = x.float().requires_grad_()
        y = UNARY[op](inner)
        assert_rounded(y.detach().to(dtype), op, x, *more)
        if op not in ('softmax', 'log_softmax', 'cross_entropy'): continue
        g = draw(*y.shape, s=s + 9) if y.dim() else torch.tensor(1.)
        grad, = torch.autograd.grad(y, inner, g)
        assert_rounded(grad.to(dtype), op, x, *more, grad=g)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_layers_with_weights_and_all_their_gradients_pass(dtype):
    for s in range(3):
        x, w, b, wide = draw(4, 16, 64, s=s), draw(64, s=s + 1), draw(64, s=s + 2), draw(32, 64, s=s + 3)
        q, k, v = (draw(2, 3, 48, 32, s=s + i) for i in range(3))
        cases = [('linear', F.linear, (x, wide, draw(32, s=s)), {}), ('matmul', torch.matmul, (q, k.mT), {}),
                 ('layer_norm', lambda *a: F.layer_norm(a[0], (64,), *a[1:]), (x, w, b), {}),
                 ('rms_norm', lambda x, w: F.rms_norm(x, (64,), w, 1e-6), (x, w), {}),
                 ('attention', lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), (q, k, v), dict(causal=True))]
        for op, f, inputs, how in cases:
            inputs = [t.to(dtype) for t in inputs]
            leaves = [t.float().requires_grad_() for t in inputs]
            y = f(*leaves)
            assert_rounded(y.detach().to(dtype), op, *inputs, **how)
            g = draw(*y.shape, s=s + 7)
            for i, grad in enumerate(torch.autograd.grad(y, leaves, g)):
                assert_rounded(grad.to(dtype), op, *inputs, grad=g, wrt=i, **how)


def test_the_bound_holds_in_any_order_and_is_not_idle():
    a, b = draw(1, 512), draw(512, 1)
    (ref,), (err,) = (t[0] for t in rounding_bound('matmul', a, b, order='nearest'))
    products, worst = (a[0]*b[:, 0]), 0.
    for s in range(300):
        total = torch.zeros(())
        for p in products[torch.randperm(512, generator=torch.Generator().manual_seed(s))].unbind(): total = total + p
        worst = max(worst, abs(total.double() - ref).item())
    assert err/50 < worst < err


@pytest.mark.parametrize('gpu, fmt', [('V100', 'fp16'), ('A100', 'bf16'), ('RTX 4090', 'bf16'), ('H100', 'bf16'), ('B200', 'bf16')])
def test_tensor_cores_sums_pass(gpu, fmt):
    dtype = dict(fp16=torch.float16, bf16=torch.bfloat16)[fmt]
    for k in (64, 1024):
        for positive in (False, True):
            a, b = draw(32, k, dtype=dtype), draw(k, 32, dtype=dtype, s=1)
            if positive: a, b = a.abs(), b.abs()
            out = gpu_matmul(a.float(), b.float(), gpu, fmt)
            assert_rounded(out.to(dtype), 'matmul', a, b)
            assert_rounded(out, 'matmul', a, b)


def test_a_gpu_that_keeps_thirteen_bits_has_to_be_named():
    a, b = (quantize(draw(*shape), 'e4m3').to(torch.float8_e4m3fn) for shape in ((32, 2048), (2048, 32)))
    out = gpu_matmul(a.float(), b.float(), 'H100', 'e4m3').bfloat16()
    assert 'fewer bits' in verdict(out, 'matmul', a, b)
    assert_rounded(out, 'matmul', a, b, order='H100')


def cut(x): return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
def one_row(x): return torch.cat([x[:3], 1.05*x[3:4], x[4:]])


@pytest.mark.parametrize('spoil, word', [
    (cut, 'truncation'), (lambda x: (1.01*x).bfloat16(), '1.01 times'), (lambda x: one_row(x).bfloat16(), 'row 3'),
    (lambda x: x.where(x < 30, torch.inf).bfloat16(), 'infinite'), (lambda x: x.where(x < 30, torch.nan).bfloat16(), 'NaN'),
    (lambda x: x.bfloat16() + .5*draw(*x.shape, s=8).sign().bfloat16(), 'both signs')])
def test_the_message_says_what_it_looks_like(spoil, word):
    a, b = draw(64, 256, dtype=torch.bfloat16), draw(256, 64, dtype=torch.bfloat16, s=1)
    assert word in verdict(spoil(a.float() @ b.float()), 'matmul', a, b)
    assert_rounded((a.float() @ b.float()).bfloat16(), 'matmul', a, b)


def test_errors_that_do_not_cancel_are_found_where_each_is_small():
    a, b = (torch.rand(*shape, generator=torch.Generator().manual_seed(s)) for s, shape in ((1, (64, 32)), (2, (32, 64))))
    total = torch.zeros(64, 64, dtype=torch.float64)
    for k in range(32): total = quantize(total + a[:, k:k+1].double()*b[k].double(), 'fp32', 'toward_zero')
    assert 'do not cancel' in verdict(total.float(), 'matmul', a, b)
    assert not verdict(a @ b, 'matmul', a, b)


def test_nan_is_right_only_where_fp64_has_it():
    x = draw(4, 16)
    x[1, 3] = torch.inf
    y = x.softmax(-1)
    assert y[1].isnan().all()
    assert_rounded(y, 'softmax', x)
    assert 'infinity or NaN' in verdict(y.nan_to_num(0.), 'softmax', x)
    hidden = torch.zeros(4, 16).masked_fill(torch.arange(16) > 9, -torch.inf)
    assert_rounded((draw(4, 16) + hidden).softmax(-1), 'softmax', draw(4, 16) + hidden)


def test_scales_multiply_rows_and_blocks():
    a, b = quantize(draw(8, 64), 'e4m3'), quantize(draw(64, 8, s=1), 'e4m3')
    rows, blocks = 2.**torch.randint(-3, 3, (8, 1)), 2.**torch.randint(-3, 3, (2, 8))
    out = (a*rows) @ (b*blocks.repeat_interleave(32, 0))
    assert_rounded(out, 'matmul', a, b, scales=(rows, blocks))
    assert verdict(out, 'matmul', a, b, scales=(rows, blocks.flip(0)))
    assert_rounded(2*(a @ b), 'matmul', a, b, scales=(2., None))


def test_what_is_rounded_on_the_way_has_to_be_told():
    q, k, v = (draw(2, 48, 32, dtype=torch.bfloat16, s=s) for s in range(3))
    shares = (q.float() @ k.float().mT/32**.5).softmax(-1).bfloat16().float()
    out = (shares @ v.float()).bfloat16()
    assert verdict(out, 'attention', q, k, v)
    assert_rounded(out, 'attention', q, k, v, inner='bf16')


def test_a_function_takes_the_place_of_a_name():
    def f(x): return x.sin()*x.exp()
    x = draw(64, 64, dtype=torch.bfloat16)
    assert_rounded(f(x.float()).bfloat16(), f, x)
    assert 'truncation' in verdict(cut(f(x.float())), f, x)


@pytest.mark.parametrize('call, says', [
    (lambda x: assert_rounded(x, 'softmux', x), "There is no operation 'softmux'"),
    (lambda x: assert_rounded(x, 'softmax', x, order='H1000'), "There is no order 'H1000'"),
    (lambda x: assert_rounded(x[0], 'softmax', x), r'the shape \(8,\)'),
    (lambda x: assert_rounded(x, 'silu', x, grad=x), 'has no gradient here'),
    (lambda x: assert_rounded(x, 'add', x.long(), x.long()), 'None of the inputs'),
    (lambda x: assert_rounded(x, 'softmax', x, dim=0), "not 'dim'"), (lambda x: assert_rounded(x, 'layer_norm', x, (8,)), r'not \(8,\)'),
    (lambda x: assert_rounded(x, 'softmax', x, grad=x, wrt=3), 'wrt=3'),
    (lambda x: assert_rounded(x.sum(), 'cross_entropy', x, torch.full((4,), -100)), 'not among 0 to 7'),
    (lambda x: assert_rounded(x @ x.T, 'matmul', x, x.T, scales=(torch.ones(4, 7), None)), '7 scales for 8')])
def test_bad_input_gets_a_sentence(call, says):
    with pytest.raises((ValueError, TypeError), match=says): call(draw(4, 8))


def test_it_needs_torch_and_numpy_alone():
    code = 'import sys, mpcourse.testing, mpcourse.conform; print([m for m in ("pandas", "matplotlib", "fastai", "IPython") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'


def in_parts(x, w, step=7): return sum(x[:, i::step] @ w[i::step] for i in range(step))
def begins_with_bias(x, w, b):
    total = b.expand(len(x), len(w)).clone()
    for k in range(x.shape[1]): total = total + x[:, k:k+1]*w[:, k]
    return total
def by_powers_of_two(x):
    e = ((x - x.amax(-1, True))*1.4426950408889634).exp2()
    return e/e.sum(-1, True)
def last_block_is_short(a, b, s):
    return sum(a[:, i:i+128] @ b[i:i+128]*s[:, i//128, None] for i in range(0, a.shape[1], 128))


@pytest.mark.parametrize('kernel', range(10))
def test_right_kernels_that_a_stranger_wrote_pass(kernel):
    "Each failed once: what their results share, tails of blocks, subnormal products, masked rows"
    for s in range(3):
        a, b, scale, causal = draw(16, 300, s=s), draw(300, 24, s=s + 1), draw(16, 3, s=s).abs() + .1, torch.ones(20, 20).bool()
        causal[0] = False
        same, q, k = torch.full((64, 512), .3), draw(1, 20, 64, s=s), draw(1, 50, 64, s=s + 1)
        x, w, bias, wide = .03*draw(16, 512, s=s), draw(16, 512, s=s + 1), 300*draw(16, s=s), 10*draw(4096, 128, s=s)
        f, m = lambda x, w, u: F.silu(x @ w)*(x @ u), (draw(64, 4097, s=s), draw(4097, 1, s=s + 1)/64, draw(4097, 1, s=s + 2)/64)
        cases = [
            (last_block_is_short(a, b, scale), 'matmul', (a, b), dict(scales=(scale, None))),
            (F.silu(torch.tensor([-88., -89., -95.])), 'silu', (torch.tensor([-88., -89., -95.]),), {}),
            (same @ same.T, 'matmul', (same, same.T), {}), (a[:1].expand(16, -1) @ b, 'matmul', (a[:1].expand(16, -1), b), {}),
            (F.rms_norm(1e-9*w, (512,), eps=1e-6), 'rms_norm', (1e-9*w,), {}), (by_powers_of_two(wide), 'softmax', (wide,), {}),
            (1e-22*a @ (1e-22*b), 'matmul', (1e-22*a, 1e-22*b), {}), (begins_with_bias(x, w, bias), 'linear', (x, w, bias), {}),
            (F.scaled_dot_product_attention(q, k, k, is_causal=True), 'attention', (q, k, k), dict(causal=True)),
            (F.scaled_dot_product_attention(q, q, q, attn_mask=causal), 'attention', (q, q, q), dict(mask=causal))]
        out, op, inputs, how = cases[kernel]
        assert_rounded(out, op, *inputs, **how)
        assert_rounded(F.silu(in_parts(*m[:2]))*in_parts(m[0], m[2]), f, *m)


@pytest.mark.parametrize('eps', [0., 1e-6, 2e-5])
def test_a_wrong_epsilon_is_seen_in_short_rows(eps):
    x = draw(256, 256)
    assert_rounded(F.layer_norm(x, (256,)), 'layer_norm', x)
    assert verdict(F.layer_norm(x, (256,), eps=eps), 'layer_norm', x)


def test_a_gradient_of_a_function():
    x, g = draw(32, 64).requires_grad_(), draw(32, 64, s=1)
    grad, = torch.autograd.grad(F.silu(x), x, g)
    assert_rounded(grad, F.silu, x.detach(), grad=g)
    assert verdict(1.001*grad, F.silu, x.detach(), grad=g)


def test_what_is_rounded_by_chance_adds_up_to_less():
    "Else the shares' rounding would hide a scale that is 1 % off, over a thousand keys"
    q, k, v = (draw(2, n, 64, dtype=torch.bfloat16, s=s) for s, n in enumerate((100, 1000, 1000)))
    shares = (q.float() @ k.float().mT/8).softmax(-1).bfloat16().float()
    assert_rounded((shares @ v.float()).bfloat16(), 'attention', q, k, v, inner='bf16')
    assert verdict((1.01*(shares @ v.float())).bfloat16(), 'attention', q, k, v, inner='bf16')
