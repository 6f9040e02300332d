"""What does a net lose if the gradients of 1,024 micro-batches are added up in sixteen bits? (chapter 21)

A net of four layers reads digits, 60 steps, each the mean over 1,024 pictures. A picture is a
micro-batch: its gradient is computed in FP32, rounded to the row's format, and added to a sum in
that format, in order. "Two levels": sums of 32, added up. Kahan: a second number of 16 bits keeps
what the sum cut off. "Slow" is a third of SGD's rate, "x 1.025" a rate that is so much higher; noise is a random vector
of a fifth of the sum's length. "GPT" is the char_lm of chapter 03 with Adam, 128 texts a step. The
values: the last loss, over all pictures (of the GPT: over 512 other texts); the accuracy on new
digits or texts; and the error of the first step's sum, as a share of its norm.
"""
import torch, torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from mpcourse.rounding import quantize
from mpcourse.toys import batches, digits, evaluate, get_toy, relu_mlp

PARTS, STEPS, SEEDS = 1024, 60, range(10)
TEXTS = 128
FORMATS = {'fp16': torch.float16, 'bf16': torch.bfloat16}
def sgd(rate): return lambda ps: torch.optim.SGD(ps, lr=rate, momentum=.9)
OPTS = {'SGD': sgd(.1), 'Adam': lambda ps: torch.optim.Adam(ps, lr=2e-3)}
OTHERS = {'SGD slow': sgd(.03), 'SGD x 1.025': sgd(.1025), 'GPT': get_toy('char_lm').opt}
SUMS = 'FP32', 'FP16', 'BF16', 'BF16, two levels', 'BF16, stochastic', 'BF16, Kahan'
ROWS = [f'{opt}: {how}' for opt in OPTS for how in SUMS]
ROWS += ['SGD slow: FP32', 'SGD slow: BF16', 'SGD x 1.025: FP32', 'SGD: FP32 and noise', 'GPT: FP32', 'GPT: BF16']


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
    exact = parts.sum(0)
    if how == 'FP32': return exact
    if how == 'FP32 and noise':
        noise = torch.randn(exact.shape, generator=generator)
        return exact + .2*noise*exact.norm()/noise.norm()
    fmt = how[:4].lower()
    def nearest(x): return x.to(FORMATS[fmt]).float()
    parts = nearest(parts)
    if 'Kahan' in how: return compensated(parts, nearest)
    if 'stochastic' in how: return in_order(parts, lambda x: quantize(x, fmt, 'stochastic', generator=generator))
    if 'levels' in how: return in_order([in_order(some, nearest) for some in parts.split(32)], nearest)
    return in_order(parts, nearest)


def gradients(model, x, y):
    "The gradient of each example, divided by their number, flat: (examples, weights)"
    params = dict(model.named_parameters())
    def loss(params, a, b): return F.cross_entropy(functional_call(model, params, a[None]).flatten(0, -2), b[None].flatten())/len(x)
    found = vmap(grad(loss), (None, 0, 0))({n: p.detach() for n, p in params.items()}, x, y)
    return torch.cat([found[n].flatten(1) for n in params], 1)


def task(name, seed):
    "Model, batches, and what is measured at the end"
    if name != 'GPT':
        model, data = relu_mlp(seed), digits()
        def scores():
            x, y = data.train
            return dict(loss=F.cross_entropy(model(x), y), accuracy=evaluate(model, data)['acc'])
        return model, batches(data, PARTS, STEPS, seed), scores
    toy = get_toy('char_lm')
    model, data = toy.model(seed), toy.data()
    def scores():
        x, y = (t[:512] for t in data.valid)
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        return dict(loss=loss, accuracy=(model(x).argmax(-1) == y).float().mean())
    return model, batches(data, TEXTS, STEPS, seed), scores


def run(row, seed):
    "Train a net whose gradients are added up so"
    name, how = row.split(': ')
    model, data, scores = task(name, seed)
    opt, generator = (OPTS | OTHERS)[name](model.parameters()), torch.Generator().manual_seed(seed)
    first = None
    for x, y in data:
        parts = gradients(model, x, y)
        total = added(parts, how, generator)
        if first is None: first = (total - parts.sum(0)).norm()/parts.sum(0).norm()
        for p, g in zip(model.parameters(), total.split([p.numel() for p in model.parameters()])): p.grad = g.view_as(p)
        opt.step()
    with torch.no_grad(): return dict(**scores(), error=first)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
