"""The price of `fp32_accumulate` and `emulate_format`, in training steps: forward, backward, and plain SGD outside it."""
from contextlib import nullcontext
from functools import partial

import torch
from harness import Row, medians, ratio
from mpcourse.emulate import emulate_format, exact_loss
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import char_transformer, cross_entropy, relu_mlp


def step(make, x, y, ctx, dtype=torch.float32):
    "A training step of a fresh model, as a function without arguments"
    model = make().to(dtype)
    opt, x = torch.optim.SGD(model.parameters(), .01), x.to(dtype) if x.is_floating_point() else x
    def loss_of(z, y): return cross_entropy(z.float(), y)
    def run():
        opt.zero_grad()
        with ctx(): exact_loss(loss_of, model(x), y).backward()
        opt.step()
    return run


def steps(make, x, y):
    "The same step on each machine"
    half = partial(step, make, x, y, dtype=torch.float16)
    full = partial(step, make, x, y)
    return {'fp32': full(nullcontext), 'native half': half(nullcontext),
            'fp32_accumulate': half(fp32_accumulate),
            'saturating': half(partial(fp32_accumulate, 'saturate')), 'emulate fp16': full(partial(emulate_format, 'fp16')),
            'emulate e5m2': full(partial(emulate_format, 'e5m2')), 'emulate e4m3': full(partial(emulate_format, 'e4m3'))}


def bench_mlp():
    "relu_mlp, 512 wide, on 256 digits: where FP16 is for"
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(256, 1, 8, 8, generator=g), torch.randint(10, (256,), generator=g)
    t = medians(steps(partial(relu_mlp, width=512), x, y), few={'native half': 3})
    return [ratio('MLP 512: native half / fp32_accumulate', t, 'native half', 'fp32_accumulate',
                  at_least=10),
            ratio('MLP 512: fp32_accumulate / fp32', t, 'fp32_accumulate', 'fp32', at_most=1.5),
            ratio('MLP 512: saturating fp32_accumulate / fp32', t, 'saturating', 'fp32', at_most=2),
            ratio('MLP 512: emulate fp16 / fp32', t, 'emulate fp16', 'fp32', at_most=3),
            ratio('MLP 512: emulate e5m2 / fp32', t, 'emulate e5m2', 'fp32'),
            ratio('MLP 512: emulate e4m3 / fp32', t, 'emulate e4m3', 'fp32')]


def bench_transformer():
    "The course's character transformer: 64 features, 2 blocks, 16 windows of 64 characters"
    x = torch.randint(96, (16, 64), generator=torch.Generator().manual_seed(0))
    t = medians(steps(char_transformer, x, x), few={'native half': 3})
    return [ratio('transformer: native half / fp32_accumulate', t, 'native half',
                  'fp32_accumulate'),
            ratio('transformer: fp32_accumulate / fp32', t, 'fp32_accumulate', 'fp32', at_most=2.5),
            ratio('transformer: saturating fp32_accumulate / fp32', t, 'saturating', 'fp32', at_most=2.5),
            ratio('transformer: emulate fp16 / fp32', t, 'emulate fp16', 'fp32', at_most=3),
            ratio('transformer: emulate e5m2 / fp32', t, 'emulate e5m2', 'fp32'),
            ratio('transformer: emulate e4m3 / fp32', t, 'emulate e4m3', 'fp32')]


def bench_overhead():
    "What a context adds to one small op, in microseconds"
    x = torch.randn(8, 8).half()
    def under(ctx, f):
        def run():
            with ctx():
                for _ in range(100): f()
        return run
    ctxs = {'plain': nullcontext, 'fp32_accumulate': fp32_accumulate,
            'emulate fp16': partial(emulate_format, 'fp16')}
    rows = []
    for name, f in {'relu': x.relu, 'view': lambda: x.view(64)}.items():
        t = medians({k: under(c, f) for k, c in ctxs.items()}, repeats=31)
        rows += [Row(f'{name}: added by {k}', (t[k] - t['plain'])*1e4, unit='µs')
                 for k in list(ctxs)[1:]]
    return rows
