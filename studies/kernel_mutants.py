"""Which tests let a wrong kernel pass, and fail a right one? (chapter 39)

Kernels of six operations, with operands and results in BF16 (the second matrix product has E4M3
operands with a scale for each 32). *Right* ones sum in FP32 or FP64, in any order, or as a GPU's
tensor cores do, and round once. A seed draws the inputs; each rule says whether the result passes.
The rules: torch's default for BF16; Triton's tutorial on matrix products (atol .01); vLLM's tests of
scaled products (rtol .01, atol .15; others rtol and atol .1); a test of Liger-Kernel's RMS norm (atol
5); DeepGEMM's one minus 2xy/(xx + yy) below .001; FlashAttention's twice the largest error of torch's own
BF16 operation; and `assert_rounded`.
"""
from functools import partial

import torch, torch.nn.functional as F

from mpcourse.fp8 import CastConfig, e8m0_ceil
from mpcourse.rounding import quantize
from mpcourse.tensorcore import gpu_matmul
from mpcourse.testing import assert_rounded, rounding_bound

BLOCK = 32
MX = CastConfig('e4m3', (1, BLOCK), e8m0_ceil)


def bf(x): return x.bfloat16()
def cut(x): return (x.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
def twice(x): return bf(x.half().float())
def row(x): return torch.cat([x[..., :-1, :], x[..., -1:, :]*1.05], -2)
def turned(x):
    "One block of sixteen is written transposed"
    x = x.clone()
    x[..., :16, :16] = x[..., :16, :16].mT.clone()
    return x


ENDS = {'truncates': cut, 'rounds twice': twice, 'scale 1 % off': lambda x: bf(x*1.01),
        'one row 5 % off': lambda x: bf(row(x)), 'a block transposed': lambda x: bf(turned(x))}


def parts(a, b, size, keep=lambda x: x):
    "A product in parts of the sum, which is kept in a format"
    total = torch.zeros(a.shape[0], b.shape[1])
    for x, y in zip(a.split(size, 1), b.split(size, 0)): total = keep(total + x @ y)
    return total


def half(x): return x.half().float()
def bfloat(x): return x.bfloat16().float()


MATMUL = {'one sum': lambda a, b: a @ b, 'split 4': lambda a, b: parts(a, b, a.shape[1]//4),
          'split 64': lambda a, b: parts(a, b, a.shape[1]//64), 'one by one': partial(parts, size=1),
          'reversed': lambda a, b: a.flip(1) @ b.flip(0), 'FP64': lambda a, b: (a.double() @ b.double()).float()}
for _gpu in ('A100', 'RTX 4090', 'H100', 'B200'): MATMUL[_gpu] = partial(gpu_matmul, gpu=_gpu, fmt='bf16')
MATMUL['V100'] = partial(gpu_matmul, gpu='V100', fmt='fp16')
WRONG_MATMUL = {'sums in FP16': partial(parts, size=16, keep=half), 'sums in BF16': partial(parts, size=16, keep=bfloat),
                'drops the last product': lambda a, b: a[:, :-1] @ b[:-1]}


def scaled(a, sa, b, sb): return (a*sa.repeat_interleave(BLOCK, 1)) @ (b*sb.repeat_interleave(BLOCK, 0))
def by_block(a, sa, b, sb):
    "Each block's sum, then its scales"
    n = sa.shape[1]
    return sum((a[:, BLOCK*i:BLOCK*i+BLOCK] @ b[BLOCK*i:BLOCK*i+BLOCK])*sa[:, i:i+1]*sb[i:i+1] for i in range(n))
def by_core(a, sa, b, sb, promote=True):
    "Each block's sum as a B200 adds it, and their sum in FP32; or this one in thirteen bits"
    total = torch.zeros(len(a), b.shape[1])
    for i in range(sa.shape[1]):
        now = slice(BLOCK*i, BLOCK*i + BLOCK)
        total = total + gpu_matmul(a[:, now], b[now], 'B200', 'e4m3')*sa[:, i:i+1]*sb[i:i+1]
        if not promote: total = quantize(total, 'e8m13', 'toward_zero')
    return total


BLOCKS = {'one sum': scaled, 'by block': by_block, 'FP64': lambda *x: scaled(*(t.double() for t in x)).float(),
          "B200's blocks, summed in FP32": by_core}
WRONG_BLOCKS = {"the next block's scale": lambda a, sa, b, sb: scaled(a, sa.roll(1, 1), b, sb),
                'a stale scale': lambda a, sa, b, sb: scaled(a, torch.where(torch.arange(len(a))[:, None] == 5, 2*sa, sa), b, sb),
                'E5M2 for E4M3': lambda a, sa, b, sb: scaled(quantize(a, 'e5m2'), sa, b, sb),
                'thirteen bits, no promotion': partial(by_core, promote=False)}


def online(x, size=64):
    "Softmax in one pass over blocks, rescaled where a larger number comes"
    high, total = torch.full_like(x[:, :1], -torch.inf), torch.zeros_like(x[:, :1])
    for block in x.split(size, 1):
        new = torch.maximum(high, block.amax(1, True))
        total = total*(high - new).exp() + (block - new).exp().sum(1, True)
        high = new
    return (x - high).exp()/total


def shares_in(x, keep):
    e = keep((x - x.amax(-1, True)).exp())
    return e/keep(e.sum(-1, True))


def by_powers(x):
    e = ((x - x.amax(-1, True))*1.4426950408889634).exp2()
    return e*(1/e.sum(-1, True))


SOFTMAX = {'torch': lambda x: x.softmax(-1), 'online': online, 'FP64': lambda x: x.double().softmax(-1).float(),
           'powers of two': by_powers}
WRONG_SOFTMAX = {'exp in FP16': partial(shares_in, keep=half), 'exp in BF16': partial(shares_in, keep=bfloat),
                 'sum without the last': lambda x: (x - x.amax(-1, True)).exp()/(x - x.amax(-1, True)).exp()[:, :-1].sum(-1, True)}


def norm(x, w, b=None, eps=1e-5, centre=True, keep=lambda x: x, fewer=0):
    if centre: x = x - keep(x.mean(-1, True))
    var = keep((x*x).sum(-1, True)/(x.shape[-1] - fewer))
    y = x*(var + eps).rsqrt()*w
    return y if b is None else y + b
def moments(x, w, b):
    "Variance as a difference"
    mean = x.mean(-1, True)
    return (x - mean)*((x*x).mean(-1, True) - mean**2 + 1e-5).rsqrt()*w + b


LAYER = {'torch': lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 'two passes': norm, 'moments': moments,
         'FP64': lambda *x: norm(*(t.double() for t in x)).float()}
WRONG_LAYER = {'statistics in BF16': partial(norm, keep=bfloat), 'divides by n - 1': partial(norm, fewer=1),
               'the next weight': lambda x, w, b: norm(x, w.roll(1), b)}
rms = partial(norm, eps=1e-6, centre=False)
RMS = {'torch': lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 'by hand': rms, 'FP64': lambda x, w: rms(x.double(), w.double()).float()}
WRONG_RMS = {'statistics in BF16': partial(rms, keep=bfloat), 'divides by n - 1': partial(rms, fewer=1),
             'the next weight': lambda x, w: rms(x, w.roll(1))}


def attend(q, k, v, offset=0, scale=1., keep=lambda x: x, drop=False):
    s = keep(q @ k.mT*scale/q.shape[-1]**.5)
    seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(offset)
    if drop: seen[-1, 0] = False
    return s.masked_fill(~seen, -torch.inf).softmax(-1) @ v


ATTENTION = {'by hand': attend, 'torch': partial(F.scaled_dot_product_attention, is_causal=True),
             'FP64': lambda *x: attend(*(t.double() for t in x)).float()}
WRONG_ATTENTION = {'mask off by one': partial(attend, offset=1), 'scores in BF16': partial(attend, keep=bfloat),
                   'one key of the last query lost': partial(attend, drop=True)}

OPS = {'matrix product': (MATMUL, WRONG_MATMUL, dict(op='matmul')), 'matrix product, long': (MATMUL, WRONG_MATMUL, dict(op='matmul')),
       'matrix product, positive': (MATMUL, WRONG_MATMUL, dict(op='matmul')),
       'E4M3 with scales': (BLOCKS, WRONG_BLOCKS, dict(op='matmul')), 'softmax': (SOFTMAX, WRONG_SOFTMAX, dict(op='softmax')),
       'layer norm': (LAYER, WRONG_LAYER, dict(op='layer_norm')), 'RMS norm': (RMS, WRONG_RMS, dict(op='rms_norm')),
       'attention': (ATTENTION, WRONG_ATTENTION, dict(op='attention', causal=True))}
ROWS = []
for _op, (_right, _wrong, _) in OPS.items():
    ROWS += [f'{_op}: right: {k}' for k in _right] + [f'{_op}: wrong: {k}' for k in (*_wrong, *ENDS)]
SEEDS = range(20)


def inputs_of(op, gen):
    "Numbers of BF16 that FP16 has, too"
    def draw(*shape): return bfloat(half(torch.randn(*shape, generator=gen)))
    if op == 'E4M3 with scales':
        a, b = MX.parts(draw(64, 512)), MX.parts(draw(64, 512))
        entries = [t.flatten(-4, -3).flatten(-2) for t, _ in (a, b)]
        scales = [s.reshape(64, -1) for _, s in (a, b)]
        return entries[0], scales[0], entries[1].mT.contiguous(), scales[1].mT.contiguous()
    if op.startswith('matrix'):
        a, b = draw(64, 4096 if 'long' in op else 256), draw(4096 if 'long' in op else 256, 64)
        return (a.abs(), b.abs()) if 'positive' in op else (a, b)
    if op == 'softmax': return bfloat(3*draw(64, 512)),
    if op == 'layer norm': return draw(64, 512), draw(512), draw(512)
    if op == 'RMS norm': return draw(64, 512), draw(512)
    return draw(2, 4, 96, 64), draw(2, 4, 96, 64), draw(2, 4, 96, 64)


def close(rtol, atol):
    "torch's comparison with the FP64 result, rounded"
    return lambda out, ref, own: bool(torch.isclose(out.float(), bf(ref).float(), rtol, atol).all())
def deepgemm(out, ref, own):
    x, y = out.double(), bf(ref).double()
    return bool(1 - 2*(x*y).sum()/(x*x + y*y).sum() < .001)
def flash(out, ref, own): return bool((out.double() - ref).abs().max() <= 2*(own.double() - ref).abs().max())


RULES = {"torch's default": close(1.6e-2, 1e-5), 'Triton': close(0, .01), 'vLLM': close(.01, .15), 'vLLM, wide': close(.1, .1),
         'Liger': close(1e-5, 5.), 'DeepGEMM': deepgemm, 'FlashAttention': flash}


def own_bf16(op, inputs):
    "torch's operation in BF16"
    if op == 'E4M3 with scales':
        a, sa, b, sb = inputs
        return bf(a*sa.repeat_interleave(BLOCK, 1)) @ bf(b*sb.repeat_interleave(BLOCK, 0))
    x = list(map(bf, inputs))
    if op.startswith('matrix'): return x[0] @ x[1]
    if op == 'softmax': return x[0].softmax(-1)
    if op == 'layer norm': return F.layer_norm(x[0], (512,), *x[1:])
    if op == 'RMS norm': return F.rms_norm(x[0], (512,), x[1], 1e-6)
    return F.scaled_dot_product_attention(*x, is_causal=True)


def run(row, seed):
    "For each rule: does the kernel's result pass?"
    op, kind, name = row.split(': ', 2)
    right, wrong, how = OPS[op]
    inputs = inputs_of(op, torch.Generator().manual_seed(seed))
    ours = list(map(bf, inputs))
    if op == 'E4M3 with scales':
        a, sa, b, sb = inputs
        ours, how = [bf(a), bf(b)], how | dict(scales=(sa, sb))
    kernel, end = (right | wrong).get(name), bf
    if name in ENDS: kernel, end = next(iter(right.values())), ENDS[name]
    out = end(kernel(*inputs))
    ref, _ = rounding_bound(how['op'], *ours, **{k: v for k, v in how.items() if k != 'op'})
    own = own_bf16(op, inputs)
    result = {rule: float(f(out, ref, own)) for rule, f in RULES.items()}
    try: assert_rounded(out, how['op'], *ours, **{k: v for k, v in how.items() if k != 'op'})
    except AssertionError: return result | {'assert_rounded': 0.}
    return result | {'assert_rounded': 1.}


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
