"""What does the guard against large losses cost where rare examples matter? (chapter 29)

A regression on 8 numbers. One example in 500 has an event: a ninth number is 1, and its target is 30 higher.
Batches of 64, 1,000 steps of Adam. The guard leaves out a batch whose loss is more than ten times the median of the last
twenty; most batches that hold an event are such batches.
"""
from statistics import median

import torch
from torch import nn

from mpcourse.toys import seeded

ROWS = ['no guard', 'guard']
SEEDS = range(10)


def examples(n, rare, gen):
    "Inputs and targets; `rare` says how many of a thousand have the event"
    x = torch.randn(n, 9, generator=gen)
    x[:, 8] = torch.rand(n, generator=gen) < rare
    return x, x[:, :8].sum(1, keepdim=True).sin() + 30*x[:, 8:]


def run(row, seed):
    "Error on examples with the event and on others; batches with an event, and how many of them were left out"
    gen = torch.Generator().manual_seed(seed)
    with seeded(seed): net = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    opt, losses, held, left = torch.optim.Adam(net.parameters(), lr=1e-3), [], 0, 0
    for _ in range(1000):
        x, y = examples(64, .002, gen)
        loss = (net(x) - y).square().mean()
        out = row == 'guard' and len(losses) >= 20 and loss.item() > 10*median(losses[-20:])
        losses.append(loss.item())
        event = bool(x[:, 8].any())
        held, left = held + event, left + (event and out)
        if out: continue
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad(): error = {rare: (net((xy := examples(2000, rare, gen))[0]) - xy[1]).abs().mean().item() for rare in (1., 0.)}
    return dict(rare=error[1.], common=error[0.], held=held, left_out=left)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
