"""What does a net lose if the gradients of 1,024 micro-batches are added up in sixteen bits? (chapter 21)

A net of four layers reads digits, 60 steps, each the mean over 1,024 pictures. A picture is a
micro-batch: its gradient is computed in FP32, rounded to the row's format, and added to a sum in
that format, in order. "Two levels": 32 sums of 32. Kahan: a second number of 16 bits keeps what
the sum cut off. The values: the last loss, over all pictures; the accuracy on new digits; and the
error of the first step's sum, as a share of its norm.
"""
import torch, torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from mpcourse.rounding import quantize
from mpcourse.toys import batches, digits, evaluate, relu_mlp

PARTS, STEPS, SEEDS = 1024, 60, range(10)
OPTS = {'SGD': lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9), 'Adam': lambda ps: torch.optim.Adam(ps, lr=2e-3)}
SUMS = 'FP32', 'FP16', 'BF16', 'BF16, two levels', 'BF16, stochastic', 'BF16, Kahan'
ROWS = [f'{opt}: {how}' for opt in OPTS for how in SUMS]


def in_order(parts, cast):
    "The sum of parts (n, …), each partial sum cast"
    total = torch.zeros_like(parts[0])
    for part in parts: total = cast(total + part)
    return total


def compensated(parts, cast):
    "Kahan's sum, both numbers cast"
    total, rest = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
    for part in parts:
        wanted = part + rest
        new = cast(total + wanted)
        rest = cast(wanted - (new - total))
        total = new
    return total


def added(parts, how, generator):
    "The sum of the parts as a row says"
    if how == 'FP32': return parts.sum(0)
    fmt = how[:4].lower()
    def nearest(x): return quantize(x, fmt)
    parts = nearest(parts)
    if 'Kahan' in how: return compensated(parts, nearest)
    if 'stochastic' in how: return in_order(parts, lambda x: quantize(x, fmt, 'stochastic', generator=generator))
    if 'levels' in how: return in_order([in_order(some, nearest) for some in parts.split(32)], nearest)
    return in_order(parts, nearest)


def gradients(model, x, y):
    "The gradient of each picture, a 1,024th of it, flat: (pictures, weights)"
    params = dict(model.named_parameters())
    def loss(params, x, y): return F.cross_entropy(functional_call(model, params, x[None]), y[None])/PARTS
    found = vmap(grad(loss), (None, 0, 0))({n: p.detach() for n, p in params.items()}, x, y)
    return torch.cat([found[n].flatten(1) for n in params], 1)


def run(row, seed):
    "Train a net whose gradients are added up so"
    name, how = row.split(': ')
    model, data, first = relu_mlp(seed), digits(), None
    opt, generator = OPTS[name](model.parameters()), torch.Generator().manual_seed(seed)
    for x, y in batches(data, PARTS, STEPS, seed):
        parts = gradients(model, x, y)
        total = added(parts, how, generator)
        if first is None: first = (total - parts.sum(0)).norm()/parts.sum(0).norm()
        for p, g in zip(model.parameters(), total.split([p.numel() for p in model.parameters()])): p.grad = g.view_as(p)
        opt.step()
    x, y = data.train
    with torch.no_grad(): loss = F.cross_entropy(model(x), y)
    return dict(loss=loss, accuracy=evaluate(model, data)['acc'], error=first)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
