"""Do deep sigmoid nets need more than another initialisation to learn in FP16 without a scale?
(chapters 03, 04, 20, 26)

A row is a depth and an initialisation: PyTorch's own, or Xavier's with a gain of 4. There biases
are zero, or, where it says *centred*, such that a sigmoid's mean of 1/2 adds nothing. Ordinary
ops, FP16 with loss scale 1 or FP32, 300 steps of Adam.
"""
import torch
from torch import nn

from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, cross_entropy, deep_sigmoid, digits, evaluate, fit, plain_step, seeded

ROWS = ['8 layers, default', '8 layers, Xavier', '16 layers, default', '16 layers, Xavier, centred',
        '8 layers, default, FP32', '8 layers, Xavier, FP32', '24 layers, Xavier, centred', '24 layers, Xavier, centred, FP32']
SEEDS = range(5)


@torch.no_grad()
def initialise(model, seed, centred):
    "Xavier's weights, four times as large; biases zero, or centred"
    with seeded(seed):
        for i, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
            nn.init.xavier_normal_(layer.weight, gain=4)
            layer.bias.copy_(layer.weight.sum(1)*(-.5 if centred and i else 0.))


def run(row, seed):
    "Mean of the last 20 losses, accuracy on new digits"
    depth, init = int(row.split()[0]), row.split(', ')[1:]
    model = deep_sigmoid(seed, depth=depth)
    if 'Xavier' in init: initialise(model, seed, 'centred' in init)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = plain_step if 'FP32' in init else MixedStep(StaticScaler(1.))
    losses = fit(model, batches(digits(), 128, 300, seed), opt, cross_entropy, step)['loss']
    return dict(loss=sum(losses[-20:])/20, accuracy=evaluate(model, digits())['acc'])


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
