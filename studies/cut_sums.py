"""Which trainings notice that a tensor core cuts its sums? (chapter 23)

`readout n`: the body of `char_lm`, trained in FP32 as the toy says, is frozen. Its readout is
trained on for 40 steps of n characters; only the sum of its weight's gradient, over n products, is
the row's. `loss` is that of the valid text, `before` the same before these 40 steps; `rare` is the
probability that the readout gives to characters of frequency below 1/1000, `true` their share in
the training text, `off` the error of the first gradient. `constant rate`: the same for a body that
was trained without the toy's schedule, and reached a lower loss. `optimum`: a readout of one
constant feature that begins at the frequencies of the characters, 60 steps of 65,536. `loss` is in
nats above the entropy. `ReLU net`: 400 steps in FP16 under `as_gpu`; `same` says after how many
steps the weights first differ from H100's. `GPT`: 60 steps of all of `char_lm`. Operands are E4M3
and gradients E5M2, each tensor with one scale, apart from rows that say FP32 or FP16; `rounded` is
the H100 with its thirteen bits rounded to nearest.
"""
from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F

from mpcourse.formats import get_format
from mpcourse.rounding import quantize
from mpcourse.tensorcore import Core, as_gpu, gpu_matmul
from mpcourse.toys import batches, evaluate, fit, get_toy

H100 = Core(32, 13, 13)
ROUNDED = Core(32, 13, 13, rounding='nearest')
SUMS = {'casts alone': None, 'H100': ('H100',), 'H100, FP32 each 128': ('H100', 128),
        'H100, rounded': (ROUNDED,)}
ROWS = [f'readout 65536: {s}' for s in ('FP32', 'FP32, only the cut', *SUMS)]
ROWS += [f'constant rate 65536: {s}' for s in ('FP32', 'casts alone', 'H100')]
ROWS += [f'readout {n}: {s}' for n in (16384, 4096) for s in ('FP32', 'casts alone', 'H100')]
ROWS += [f'readout 16384: {s}' for s in ('FP16', 'FP16, FP16 sums')]
ROWS += [f'optimum: {s}'
         for s in ('FP32', 'FP32, only the cut', 'casts alone', 'H100', 'H100, FP32 each 128')]
ROWS += [f'ReLU net: {s}' for s in ('FP32 sums', 'V100', 'A100', 'H100', 'B200')]
ROWS += [f'GPT: {s}' for s in ('FP32', 'casts alone', 'H100')]
SEEDS = range(5)


def scaled(x, fmt):
    "Entries on the format's grid, and the scale that divided them"
    scale = x.abs().max()/get_format(fmt).max
    return quantize(x/scale, fmt), scale


def product(g, x, sums):
    "gᵀ @ x with the sums of a row"
    if sums == 'FP32': return g.T @ x
    if sums == 'FP32, only the cut': return gpu_matmul(g.T, x, H100, 'fp32')
    if sums.startswith('FP16'):         # the gradient is scaled to one: a sum in FP16 ends at 65504
        scale = g.abs().max()
        a, b = quantize(g.T/scale, 'fp16'), quantize(x, 'fp16')
        if sums == 'FP16': return a @ b*scale
        return gpu_matmul(a, b, 'A100', 'fp16', acc='fp16')*scale
    (a, sa), (b, sb) = scaled(g.T, 'e5m2'), scaled(x, 'e4m3')
    if SUMS[sums] is None: return a @ b*(sa*sb)
    gpu, *promote = SUMS[sums]
    return gpu_matmul(a, b, gpu, ('e5m2', 'e4m3'), *promote)*(sa*sb)


class Readout(torch.autograd.Function):
    "x @ wᵀ in FP32; the sum of the weight's gradient is the row's"
    @staticmethod
    def forward(ctx, x, w, sums):
        ctx.save_for_backward(x)
        ctx.sums = sums
        return x @ w.T
    @staticmethod
    def backward(ctx, g): return None, product(g, ctx.saved_tensors[0], ctx.sums), None


@lru_cache(1)
def body(seed, constant):
    "Features and targets of the training and of the valid text, and the readout"
    toy = get_toy('char_lm')
    model, data = toy.model(seed), toy.data()
    schedule = None if constant else toy.schedule(300)
    fit(model, batches(data, toy.bs, 300, seed), toy.opt(model.parameters()), schedule=schedule)
    @torch.no_grad()
    def features(x, y):
        seen = []
        for part in x.split(256):
            seen.append(model.ln(model.blocks(model.tok(part) + model.pos.weight)).flatten(0, 1))
        return torch.cat(seen), y.flatten()
    gen = torch.Generator().manual_seed(seed)
    i = torch.randint(len(data.train[0]), (4096,), generator=gen)
    return features(data.train[0][i], data.train[1][i]), features(*data.valid), model.head


def readout(n, sums, seed, constant=False):
    (x, y), (xv, yv), head = body(seed, constant)
    w, b = head.weight.detach().clone().requires_grad_(), head.bias.detach().clone().requires_grad_()
    true = torch.bincount(y, minlength=96)/len(y)
    rare = true < 1e-3
    @torch.no_grad()
    def judged():
        z = F.linear(xv, w, b)
        return F.cross_entropy(z, yv).item(), z.softmax(1).mean(0)[rare].sum().item()
    before, _ = judged()
    opt = torch.optim.SGD([w, b], 1.)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    off = None
    for step in range(40):
        part = slice(step*n % len(x), step*n % len(x) + n)
        if off is None:
            exact, = torch.autograd.grad(F.cross_entropy(F.linear(x[part], w, b), y[part]), w)
        opt.zero_grad()
        F.cross_entropy(Readout.apply(x[part], w, sums) + b, y[part]).backward()
        if off is None: off = ((w.grad - exact).norm()/exact.norm()).item()
        opt.step()
        schedule.step()
    loss, share = judged()
    return dict(loss=loss, before=before, rare=share, true=true[rare].sum().item(), off=off)


def optimum(sums, seed):
    data = get_toy('char_lm').data()
    ids = torch.cat([data.train[1][::64].flatten(), data.valid[1].flatten()])
    counts = torch.bincount(ids, minlength=96)
    ids = ((counts > 0).cumsum(0) - 1)[ids]
    p = (counts[counts > 0]/len(ids)).double()
    w = p.log().float()[:, None].requires_grad_()
    opt = torch.optim.SGD([w], 10.)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
    gen, x = torch.Generator().manual_seed(seed), torch.ones(65536, 1)
    for _ in range(60):
        y = ids[torch.randint(len(ids), (65536,), generator=gen)]
        opt.zero_grad()
        F.cross_entropy(Readout.apply(x, w, sums), y).backward()
        opt.step()
        schedule.step()
    q = w.detach().double()[:, 0].softmax(0)
    return dict(loss=(p*(p/q).log()).sum().item(),
                rare=(q[p < 1e-3].sum()/p[p < 1e-3].sum()).item())


def fp16_steps(gpu, seed):
    "Losses, and the weights after each step, of 400 steps in FP16 with FP32 masters"
    toy = get_toy('relu_mlp')
    model, weights = toy.model(seed), []
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        with as_gpu(gpu, 'fp16'):
            loss = loss_func(model(xb), yb)
            (256*loss).backward()
        for p in model.parameters(): p.grad /= 256
        opt.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return loss.detach()
    losses = fit(model, batches(toy.data(), toy.bs, 400, seed), toy.opt(model.parameters()),
        toy.loss_func, step)['loss']
    return losses, torch.stack(weights), evaluate(model, toy.data(), toy.loss_func)['acc']


@lru_cache(1)
def on_h100(seed): return fp16_steps('H100', seed)


def relu_net(gpu, seed):
    losses, weights, accuracy = fp16_steps(None if gpu == 'FP32 sums' else gpu, seed)
    others, reference, _ = on_h100(seed)
    apart = (weights != reference).any(1).nonzero()
    parted = [i for i, (a, b) in enumerate(zip(losses, others)) if a != b]
    distance = ((weights - reference).norm(dim=1)/reference.norm(dim=1)).tolist()
    return dict(loss=sum(losses[-20:])/20, accuracy=accuracy,
                same=apart[0].item() if len(apart) else 400,
                same_loss=parted[0] if parted else 400, after_10=distance[9],
                after_400=distance[-1])


def gpt(sums, seed):
    toy = get_toy('char_lm')
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        with nullcontext() if sums == 'FP32' else as_gpu(*(SUMS[sums] or (None,)), 'e4m3'):
            loss = loss_func(model(xb), yb)
            loss.backward()
        opt.step()
        return loss.detach()
    model = toy.model(seed)
    losses = fit(model, batches(toy.data(), toy.bs, 60, seed), toy.opt(model.parameters()),
        step=step)['loss']
    return dict(loss=sum(losses[-10:])/10)


def run(row, seed):
    "What the first lines of this file name"
    what, sums = row.split(': ')
    if what == 'optimum': return optimum(sums, seed)
    if what == 'ReLU net': return relu_net(sums, seed)
    if what == 'GPT': return gpt(sums, seed)
    return readout(int(what.split()[-1]), sums, seed, what.startswith('constant'))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
