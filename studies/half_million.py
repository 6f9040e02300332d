"""A GPT with half a million tokens a step: does it learn in FP16 without a scale? (chapters 05 and
08)

As in nanoGPT, a step adds up the gradients of many micro-batches, and the loss of each is divided
by their number. Here a step has 512 different micro-batches of 16 windows of 64 symbols, and a
training 100 such steps: a quarter of an hour of one core for each row. `studies/large_batch.py`
has ten seeds of a shortcut.
"""
import torch
from torch.func import functional_call

from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, fit, get_toy

PASSES = {'FP32': (torch.float32, 1.), 'FP16, scale 1': (torch.float16, 1.),
          'FP16, scale 2^15': (torch.float16, 2.**15)}
ROWS = list(PASSES)
SEEDS = range(1)
STEPS, PARTS = 100, 512


def accumulate(dtype, scale):
    "A step for `fit`: one forward and backward pass for each of the micro-batches, weights and gradients in FP32"
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        total = torch.zeros(())
        for x, y in zip(xb.chunk(PARTS), yb.chunk(PARTS)):
            low = {n: p.to(dtype) for n, p in model.named_parameters()}
            loss = loss_func(functional_call(model, low, (x,)).float(), y)/PARTS
            (loss*scale).backward()
            total += loss.detach()
        for p in model.parameters(): p.grad /= scale
        opt.step()
        return total
    return step


def run(row, seed):
    "Losses after 25 and 50 steps, and the mean of the last 20"
    toy = get_toy('char_lm')
    model = toy.model(seed=seed, device='cpu')
    data = batches(toy.data(device='cpu'), 16*PARTS, STEPS, seed)
    with fp32_accumulate():
        losses = fit(model, data, toy.opt(model.parameters()), toy.loss_func,
            accumulate(*PASSES[row]), toy.schedule(STEPS))['loss']
    return dict(after_25=losses[24], after_50=losses[49], loss=sum(losses[-20:])/20)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
