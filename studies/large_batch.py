"""Does a mean over many tokens keep a GPT from learning in FP16? (chapters 05 and 08)

The loss of a step is a mean over its tokens, so each token's gradient is smaller the more there
are. To try half a million tokens in seconds, all micro-batches of a step are here one and the
same: their gradients are equal, so a step needs one of them, of 1,024 tokens, whose loss is
divided by the number of micro-batches and whose gradient is multiplied by it.
`studies/half_million.py` does the same with different micro-batches, and takes an hour.
"""
from dataclasses import replace

import torch

from mpcourse.scaler import StaticScaler
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, get_toy, half_pass, train_toy
from two_heads import flush_gradients

TOKENS = 1024
PARTS = {f'FP16, {k*TOKENS:,} tokens': k for k in (1, 16, 64, 128, 256, 512)}
MEASURED = 'FP16, 524,288 tokens, measured scale'
ROWS = ['FP32', *PARTS, 'FP16, 524,288 tokens, scale 2^15', 'FP32, only the flush, 524,288 tokens',
        MEASURED]
SEEDS = range(10)


def flushing(toy):
    "The control: the toy with a net in which nothing is rounded, but gradients behind a layer's output are flushed"
    def model(seed, device):
        net = toy.model(seed=seed, device=device)
        flush_gradients(net)
        return net
    return replace(toy, model=model)


def measured(toy, seed):
    "The scale for a loss that is divided by 512, from the first batch"
    def divided(pred, y): return toy.loss_func(pred, y)/512
    first = next(batches(toy.data(), toy.bs, 1, seed))
    return StaticScaler.measured(toy.model(seed), first, divided).scale.item()


def run(row, seed):
    "Mean of the last 20 losses"
    toy, dtype, scale = get_toy('char_lm'), torch.float16, 1/PARTS.get(row, 512)
    if row.startswith('FP32'): dtype = torch.float32
    if row == 'FP32': scale = 1.
    if row == MEASURED: scale *= measured(toy, seed)
    elif 'scale' in row: scale *= 2.**15
    if 'flush' in row: toy = flushing(toy)
    with fp32_accumulate():
        return dict(loss=train_toy(toy, half_pass(dtype, scale), seed, steps=100).loss)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
