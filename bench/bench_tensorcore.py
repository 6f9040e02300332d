"""The price of a named GPU's sums in whole training steps: forward, backward and plain SGD, `as_gpu` beside FP32."""
from contextlib import nullcontext
from functools import partial

import torch
from harness import medians, ratio
from mpcourse.tensorcore import as_gpu
from mpcourse.toys import batches, char_transformer, cross_entropy, drawings, heads_loss, two_heads

GPUS = {'fp32': nullcontext, 'casts alone': partial(as_gpu, None, 'e4m3'),
        'H100 FP8': partial(as_gpu, 'H100', 'e4m3'),
        'H100 FP8 each 128': partial(as_gpu, 'H100', 'e4m3', promote=128), 'RTX 4090 FP8': partial(as_gpu, 'RTX 4090', 'e4m3'),
        'B200 FP8': partial(as_gpu, 'B200', 'e4m3'), 'H100 FP16': partial(as_gpu, 'H100', 'fp16'),
        'A100 FP16': partial(as_gpu, 'A100', 'fp16'), 'V100 FP16': partial(as_gpu, 'V100', 'fp16')}


def step(model, x, y, loss_func, ctx):
    "A training step as a function without arguments"
    opt = torch.optim.SGD(model.parameters(), .01)
    def run():
        opt.zero_grad()
        with ctx(): loss_func(model(x), y).backward()
        opt.step()
    return run


def rows(title, make, x, y, loss_func, bounds):
    "A ratio to FP32 for each GPU"
    t = medians({name: step(make(), x, y, loss_func, ctx) for name, ctx in GPUS.items()}, repeats=5)
    return [ratio(f'{title}: {name} / fp32', t, name, 'fp32', at_most=bounds.get(name))
            for name in list(GPUS)[1:]]


def bench_transformer():
    "The course's character transformer: 64 features, 2 blocks, 16 windows of 64 characters; 370 million products"
    x = torch.randint(96, (16, 64), generator=torch.Generator().manual_seed(0))
    return rows('transformer', char_transformer, x, x, cross_entropy, BOUND)


def bench_two_heads():
    "The net with two heads on 64 drawings"
    x, y = next(iter(batches(drawings(), 64, 1)))
    return rows('two heads', two_heads, x, y, heads_loss, {})


# CPU time: 20 times FP32's; three passes over each product and Python's calls bound it
BOUND = {'H100 FP8': 25}
