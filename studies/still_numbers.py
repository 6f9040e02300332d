"""Which numbers stand still in BF16, or must not become zero in INT8? (chapter 29)

`norms`: digits, a net of frozen random layers, Adam; only the norms' weights are trained, and they
are stored in a format after each step. `average`: an average of a net's weights with decay .999
over 3,000 steps. `v`: Adam's second moment, with twenty batches of thirty times the loss and 2,380
good ones behind them. `states`: Adam's states of the course's GPT in blocks of 256 numbers, sixty
steps. `heads`: v of the net that reads and draws (chapter 03's for the page, in FP32), 150 steps;
`dynamic` are the 256 numbers of bitsandbytes (equal in every bit to those of 0.50.2), whose steps
grow with the number. `integrator`: a recurrent net whose state moves by a 600th to a 2,400th of
what comes, for 256 steps; it learns the mean of its input. Everything else computes in FP32.
"""
import math

import numpy as np, torch
import torch.nn.functional as F
from torch import nn

from mpcourse.rounding import quantize
from mpcourse.toys import _page_score, _PageNet, batches, char_text, char_transformer, cross_entropy, digits, mlp, seed, seeded

def nearest(dtype): return lambda x, g: x.to(dtype).float()
def exact(x, g): return x.clone()
def by_chance(x, g): return quantize(x, 'bf16', rounding='stochastic', generator=g)
BF16, FP16 = nearest(torch.bfloat16), nearest(torch.float16)

NORMS = {
    'FP32': {}, 'BF16': dict(store=BF16), 'activations BF16': dict(acts=BF16), 'FP16': dict(store=FP16),
    'BF16, rounded by chance': dict(store=by_chance), 'BF16, 1 + w': dict(store=BF16, start=0.),
    'BF16, rate .005': dict(store=BF16, lr=5e-3), 'FP32, rate .005': dict(lr=5e-3)}
AVERAGES = {
    'FP32': {}, 'BF16': dict(store=BF16), 'weights BF16': dict(read=BF16), 'FP16': dict(store=FP16),
    'BF16, rounded by chance': dict(store=by_chance), 'BF16, Kahan': dict(store=BF16, kahan=True),
    'BF16, every 20th step': dict(store=BF16, every=20)}
MOMENTS = {
    'FP32': {}, 'BF16': dict(v=BF16), 'm BF16': dict(m=BF16), 'BF16, rounded by chance': dict(v=by_chance),
    'BF16, beta2 .95': dict(v=BF16, beta2=.95), 'FP32, beta2 .95': dict(beta2=.95),
    'FP32, no bad batches': dict(spike=1.), 'BF16, no bad batches': dict(v=BF16, spike=1.),
    'BF16, beta2 .95, no bad batches': dict(v=BF16, beta2=.95, spike=1.),
    'FP32, beta2 .95, no bad batches': dict(beta2=.95, spike=1.)}
STATES = {
    'FP32': {}, 'v INT8': dict(v='int8'), 'm INT8': dict(m='int8'), 'E4M3': dict(m='e4m3', v='e4m3'),
    'INT8 of the root of v': dict(m='int8', v='int8', root=True),
    'INT8, epsilon 1e-4': dict(m='int8', v='int8', eps=1e-4), 'FP32, epsilon 1e-4': dict(eps=1e-4)}
INTEGRATOR = {
    'FP32': {}, 'BF16 state': dict(state=BF16), 'BF16 but for the state': dict(rest=BF16), 'FP16 state': dict(state=FP16),
    'BF16 state, rounded by chance': dict(state=by_chance), 'BF16 state without its start': dict(state=BF16, shifted=True)}
HEADS = {
    'FP32': {}, 'INT8': dict(v='int8'), 'INT8 of the root of v': dict(v='int8', root=True), 'E4M3': dict(v='e4m3'),
    'E4M3 of the root of v': dict(v='e4m3', root=True), 'dynamic': dict(v='dynamic'),
    'INT8, epsilon 1e-4': dict(v='int8', eps=1e-4), 'FP32, epsilon 1e-4': dict(eps=1e-4)}
KINDS = dict(norms=NORMS, average=AVERAGES, v=MOMENTS, states=STATES, heads=HEADS,
             integrator=INTEGRATOR)
ROWS = {f'{kind}: {name}': (kind, kw) for kind, rows in KINDS.items() for name, kw in rows.items()}
SEEDS = range(10)


class Rounded(torch.autograd.Function):
    "A cast with a straight-through gradient"
    @staticmethod
    def forward(ctx, x, f): return f(x, None)
    @staticmethod
    def backward(ctx, g): return g, None


def accuracy(logits, y): return (logits.argmax(1) == y).float().mean().item()


def norms(number, store=exact, acts=exact, start=1., lr=1e-3, steps=1500):
    "Accuracy, and the share of the norms' weights that are where they started"
    g = torch.Generator().manual_seed(seed(number))
    def layer(n, m): return torch.randn(n, m, generator=g)*n**-.5
    layers, readout = [layer(64, 256), layer(256, 256), layer(256, 256)], layer(256, 10)
    scales = [torch.full((256,), start).requires_grad_() for _ in layers]
    opt = torch.optim.Adam(scales, lr)
    def net(x):
        x = x.flatten(1)
        for w, a in zip(layers, scales):
            x = F.layer_norm(x @ w, (256,))*(1 - start + a)
            x = Rounded.apply(x, acts).relu()
        return x @ readout
    data = digits()
    for x, y in batches(data, 64, steps, number):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            for a in scales: a.copy_(store(a, g))
    x, y = data.valid
    with torch.no_grad():
        still = (torch.cat(scales) == start).float().mean().item()
        return dict(accuracy=accuracy(net(x), y), still=still)


def average(number, store=exact, read=exact, every=1, kahan=False, decay=.999, steps=3000):
    "Accuracy of a net's averaged weights, and of the weights themselves"
    g = torch.Generator().manual_seed(seed(number))
    net, data = mlp([64, 32, 32, 10], seed=number), digits()
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    def weights(): return torch.cat([p.detach().flatten() for p in net.parameters()])
    mean = store(weights(), g)
    rest = torch.zeros_like(mean)
    for i, (x, y) in enumerate(batches(data, 32, steps, number)):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        if i % every: continue
        step = (1 - decay**every)*(read(weights(), g) - mean) - rest
        new = store(mean + step, g)
        if kahan: rest = store(new - mean - step, g)
        mean = new
    x, y = data.valid
    found = dict(own=accuracy(net(x), y))
    torch.nn.utils.vector_to_parameters(mean, net.parameters())
    return dict(found, accuracy=accuracy(net(x), y))


def v(number, v=exact, m=exact, beta2=.999, lr=2e-4, steps=2500, spike=30.):
    "Loss on new digits, and the size of the first v at the end over its size after the bad batches"
    g = torch.Generator().manual_seed(seed(number))
    net, data = mlp([64, 32, 32, 10], seed=number), digits()
    ps = list(net.parameters())
    states = [[torch.zeros_like(p), torch.zeros_like(p)] for p in ps]
    for t, (x, y) in enumerate(batches(data, 64, steps, number), 1):
        loss = F.cross_entropy(net(x), y)
        grads = torch.autograd.grad(loss*(spike if 100 < t <= 120 else 1.), ps)
        with torch.no_grad():
            for p, grad, s in zip(ps, grads, states):
                s[0] = m(.9*s[0] + .1*grad, g)
                s[1] = v(beta2*s[1] + (1 - beta2)*grad**2, g)
                p -= lr*(s[0]/(1 - .9**t))/((s[1]/(1 - beta2**t)).sqrt() + 1e-8)
        if t == 120: peak = states[0][1].sum().item()
    x, y = data.valid
    with torch.no_grad():
        return dict(loss=F.cross_entropy(net(x), y).item(), v_end=states[0][1].sum().item()/peak)


def dynamic_numbers():
    "0, 1, and in each of seven decades twice as many numbers as in the one below"
    found = [torch.tensor([0., 1.])]
    for k in range(7):
        edges = torch.linspace(.1, 1, 2**(k + 1) + 1)
        found.append((edges[1:] + edges[:-1])/2*10.**(k - 6))
    return torch.cat(found).sort().values


DYNAMIC = dynamic_numbers()


def in_blocks(t, fmt, size=256):
    "A tensor in a format, with one scale for each block"
    blocks = F.pad(t.flatten(), (0, -t.numel() % size)).view(-1, size)
    top = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    if fmt == 'int8': blocks = (blocks/top*127).round()/127*top
    elif fmt == 'dynamic': blocks = DYNAMIC[torch.bucketize(blocks/top, (DYNAMIC[1:] + DYNAMIC[:-1])/2)]*top
    else: blocks = quantize(blocks/top*448, fmt)/448*top
    return blocks.flatten()[:t.numel()].view_as(t)


def states(number, m=None, v=None, root=False, eps=1e-8, steps=60):
    "Mean loss of the last ten steps; infinite where it was not finite"
    net = char_transformer(seed=number)
    ps = list(net.parameters())
    kept, losses = [[torch.zeros_like(p), torch.zeros_like(p)] for p in ps], []
    for t, (x, y) in enumerate(batches(char_text(), 32, steps, number), 1):
        loss = cross_entropy(net(x), y)
        losses.append(loss.item())
        if not loss.isfinite(): return dict(loss=float('inf'))
        grads = torch.autograd.grad(loss, ps)
        with torch.no_grad():
            for p, grad, s in zip(ps, grads, kept):
                first = .9*s[0] + .1*grad
                second = .999*(s[1]**2 if root else s[1]) + .001*grad**2
                p -= 3e-3*(first/(1 - .9**t))/((second/(1 - .999**t)).sqrt() + eps)
                if root: second = second.sqrt()
                s[0] = in_blocks(first, m) if m else first
                s[1] = in_blocks(second, v) if v else second
    return dict(loss=sum(losses[-10:])/10)


@np.errstate(over='ignore', invalid='ignore')
def heads(number, v=None, root=False, eps=1e-8, steps=150):
    "Accuracy, the drawings' error, and the steps skipped because a gradient was not finite"
    net, skipped = _PageNet('fp32', seed=seed(number), exact=False), 0
    states = {name: [torch.zeros(w.shape), torch.zeros(w.shape)] for name, w in net.weights.items()}
    for _ in range(steps):
        x, y = net.batch()
        grads = net.backward(net.weights, net.forward(net.weights, x), y, 1.)
        if not all(np.isfinite(g).all() for g in grads.values()):
            skipped += 1
            continue
        net.steps += 1
        for name, s in states.items():
            g = torch.from_numpy(grads[name])
            s[0].mul_(.9).add_(.1*g)
            s[1].mul_(.999).add_(.001*g*g)
            move = s[0]/(1 - .9**net.steps)/((s[1]/(1 - .999**net.steps)).sqrt() + eps)
            net.weights[name] -= net.lr*move.numpy()
            if v: s[1] = in_blocks(s[1].sqrt(), v)**2 if root else in_blocks(s[1], v)
    accuracy, error = _page_score(net)
    return dict(accuracy=accuracy, error=error if math.isfinite(error) else math.inf,
                skipped=skipped)


def integrator(number, state=exact, rest=exact, shifted=False, length=256, width=16, steps=60):
    "Squared error on new sequences; guessing gives a third"
    g = torch.Generator().manual_seed(seed(number))
    with seeded(number):
        enter, out = nn.Linear(2, width), nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 1))
    rate = nn.Parameter(-torch.linspace(math.log(600.), math.log(2400.), width))
    start = nn.Parameter(torch.ones(width))
    opt = torch.optim.Adam([*enter.parameters(), *out.parameters(), rate, start], 1e-2)
    def cast(x, f): return Rounded.apply(x, lambda t, _: f(t, g))
    def net(x):
        u, k = cast(enter(x), rest), cast(rate.exp(), rest)
        begin = start
        # the state is what h has moved
        if shifted: u, begin = u - start, torch.zeros(width)
        h = begin.expand(len(x), width)
        for t in range(length): h = cast(h + k*(u[:, t] - h), state)
        return out(cast(h - begin, rest)*8)[:, 0]
    def data(n):
        mean = torch.rand(n, 1, 1, generator=g)*2 - 1
        noisy = mean*.5 + .1*torch.randn(n, length, 1, generator=g)
        return torch.cat([noisy, torch.ones(n, length, 1)], 2), mean[:, 0, 0]
    for _ in range(steps):
        x, y = data(16)
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
    x, y = data(256)
    with torch.no_grad(): return dict(error=F.mse_loss(net(x), y).item())


def run(row, seed):
    "The numbers of its kind, one training"
    kind, kw = ROWS[row]
    kinds = dict(norms=norms, average=average, v=v, states=states, heads=heads,
                 integrator=integrator)
    return kinds[kind](seed, **kw)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
