"""What it costs that a skipped step can put the buffers back: a net with as many BatchNorms and weights as a ResNet-50, with and without, and the copies alone."""
from contextlib import nullcontext

import torch, torch.nn as nn
from harness import Row, medians
from mpcourse.scaler import StaticScaler
from mpcourse.step import BufferSnapshot, MixedStep
from mpcourse.toys import cross_entropy

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


def net():
    "53 convolutions, each with BatchNorm: 25 million weights, 159 buffers"
    def block(i):
        return [nn.Conv2d(i, 230, 3, padding=1, bias=False), nn.BatchNorm2d(230), nn.ReLU()]
    layers = block(3) + [m for _ in range(52) for m in block(230)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(230, 10)).to(DEVICE)


def steps(x, y, kept):
    "One step after the other in BF16, on the device's own kernels"
    model = net()
    opt = torch.optim.SGD(model.parameters(), 1e-3, momentum=.9)
    mixed = MixedStep(StaticScaler(1.), 'bf16', nullcontext)
    mixed.begin(model)
    if not kept: mixed.controller.buffers = BufferSnapshot()
    def step():
        mixed(model, x, y, opt, cross_entropy)
        if DEVICE == 'cuda': torch.cuda.synchronize()
    return step


def copies():
    "Keep and put back, and nothing else"
    buffers, found = BufferSnapshot(net()), torch.zeros((), device=DEVICE)
    def go():
        buffers.save(); buffers.restore(found); buffers.clear()
        if DEVICE == 'cuda': torch.cuda.synchronize()
    return go


def bench_buffers():
    "A small batch: the larger, the cheaper is a copy beside it"
    bs, size = (64, 32) if DEVICE == 'cuda' else (16, 4)
    x, y = torch.randn(bs, 3, size, size, device=DEVICE), torch.randint(10, (bs,), device=DEVICE)
    t = medians({'kept': steps(x, y, True), 'not kept': steps(x, y, False), 'copies': copies()}, 9,
                warm=1)
    ms = {k: round(v*1e3, 3) for k, v in t.items()}
    return [Row('a step that keeps 159 buffers / one that does not', t['kept']/t['not kept'],
                ms=ms),
            Row('the copies alone / the step', t['copies']/t['not kept'], at_most=.02, ms=ms)]
