"""Does a training need a master copy, or FP32 arithmetic? Graphcore's table, in small (chapter 21)

Three layers on the digits, plain SGD with a batch of 4 and a small learning rate. A row is
`arithmetic | storage` of the weights. 'FP16': each result is rounded to FP16, products are summed
in FP32; 'FP16 sums': the running sum inside a product is FP16, too, and rounded after every four
terms. The update itself is computed in FP32.
"""
from contextlib import nullcontext
from functools import partial

import torch
from torch.func import functional_call

from mpcourse.accumulate import NoMasterWeights
from mpcourse.emulate import emulate_format, exact_loss
from mpcourse.toys import batches, cross_entropy, digits, evaluate, relu_mlp

ARITHMETIC = {'FP32': nullcontext, 'FP16': partial(emulate_format, 'fp16', overflow='inf'),
              'FP16 sums': partial(emulate_format, 'fp16', overflow='inf', accumulate='fp16',
                                   chunk=4)}
STORAGE = {'FP32': (torch.float32, None), 'FP16': (torch.float16, 'nearest'),
           'FP16 + SR': (torch.float16, 'stochastic'),
           'FP16 + Kahan': (torch.float16, 'kahan'), 'BF16': (torch.bfloat16, 'nearest'),
           'BF16 + SR': (torch.bfloat16, 'stochastic'), 'BF16 + Kahan': (torch.bfloat16, 'kahan')}
TABLE = [(a, s) for a in ('FP32', 'FP16', 'FP16 sums') for s in ('FP32', 'FP16', 'FP16 + SR')]
EXTRA = [('FP32', s) for s in ('FP16 + Kahan', 'BF16', 'BF16 + SR', 'BF16 + Kahan')]
ROWS = {f'{a} | {s}': (a, s) for a, s in (*TABLE, *EXTRA)}
SEEDS = range(5)
STEPS, SCALE = 6000, 2.**10


def one_batch(model, storage, arithmetic, opt, xb, yb):
    "Gradients in one arithmetic, for weights in one storage; returns the loss"
    weights = {n: p.detach().float().requires_grad_() for n, p in model.named_parameters()}
    with arithmetic():
        loss = exact_loss(cross_entropy, functional_call(model, weights, xb), yb)
        grads = torch.autograd.grad(loss*SCALE, list(weights.values()))
    with storage.wide() if storage else nullcontext():
        for p, g in zip(model.parameters(), grads): p.grad = g/SCALE
        opt.step()
    return loss.item()


def run(row, seed):
    "Training loss at the end, loss and accuracy on new digits"
    a, s = ROWS[row]
    dtype, rounding = STORAGE[s]
    data, model = digits(), relu_mlp(seed, depth=3).to(dtype)
    opt, generator = torch.optim.SGD(model.parameters(), lr=1e-3), torch.Generator().manual_seed(seed)
    storage = NoMasterWeights(model.parameters(), rounding, generator) if rounding else None
    losses = [one_batch(model, storage, ARITHMETIC[a], opt, *b)
              for b in batches(data, 4, STEPS, seed)]
    end = evaluate(model.float(), data)
    return dict(loss=sum(losses[-500:])/500, valid=end['loss'], acc=end['acc'])


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
