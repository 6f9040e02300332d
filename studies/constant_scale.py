"""Is a scale that was measured better than a constant one? (chapter 08)

Six nets of the course, each with its own optimizer and batch size, 150 steps under autocast with
FP16. A row is a net and a scale: measured on the first batch, or the same for all nets. FP32
stands beside them.
"""
import torch

import mpcourse.zoo  # noqa: F401
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, drawings, fit, get_toy, heads_loss, heads_score, plain_step, train_toy, two_heads

NETS = 'relu_mlp', 'cnn', 'deep_sigmoid', 'char_lm', 'two_towers', 'two_heads'
SCALES = {'FP32': None, 'BF16': None, 'measured': 'measured', '1': 1., '2^12': 2.**12, '2^16': 2.**16}
ROWS = [f'{net}: {scale}' for net in NETS for scale in SCALES]
SEEDS = range(5)


def train_heads(step, seed):
    "The net that reads and draws: the error of its drawings, and the record of each step"
    net, data = two_heads(seed), drawings()
    history = fit(net, batches(data, 256, 150, seed), torch.optim.Adam(net.parameters(), lr=3e-3),
                  heads_loss, step)
    return heads_score(net, data)[1], history


def train_other(name, step, seed):
    "A toy of chapter 03: the mean of the last twenty losses, and the record of each step"
    run = train_toy(name, step, seed, steps=150)
    return run.loss, run.history


def measured(name, seed):
    "The scale for a net, from its first batch"
    if name == 'two_heads': net, data, size, loss_func = two_heads(seed), drawings(), 256, heads_loss
    else:
        toy = get_toy(name)
        net, data, size, loss_func = toy.model(seed=seed, device='cpu'), toy.data(), toy.bs, toy.loss_func
    return StaticScaler.measured(net, next(batches(data, size, 1, seed)), loss_func).scale.item()


def run(row, seed):
    "Loss at the end (of two_heads the error of the drawings), the share of skipped steps, and the scale"
    net, _, name = row.partition(': ')
    scale = measured(net, seed) if name == 'measured' else SCALES[name]
    if scale: step = MixedStep(StaticScaler(scale))
    elif name == 'BF16': step = MixedStep(StaticScaler(1.), torch.bfloat16)
    else: step = plain_step
    with fp32_accumulate():
        if net == 'two_heads': loss, history = train_heads(step, seed)
        else: loss, history = train_other(net, step, seed)
    return dict(loss=loss, skipped=sum(map(float, history.get('skipped', [0.])))/150,
                scale=scale or 0.)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
