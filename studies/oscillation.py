"""Do four-bit weights swing between two values, and does it cost anything? (chapter 28)

The opening's net with plain NVFP4 and the readout in FP32, 200 steps: at a constant rate, at one that
falls to zero, and at a constant one of which a tenth is left for the last fifty steps. In these fifty
steps, `flips` is the share of the body's weights whose four-bit value changes in a step, and `back` the
share of these that are back at the old value one step later. The loss is that on other text.
"""
import torch, torch.nn.functional as F
from torch import nn

from four_scales import net
from mpcourse.fourbits import FP4_RECIPES
from mpcourse.fp8 import simulate_fp8
from mpcourse.toys import char_text, fit

SCHEDULES = {'constant': lambda i: 1., 'falls to zero': lambda i: 1 - i/200, 'a tenth at the end': lambda i: 1. if i < 150 else .1}
ROWS = [f'{form}: {name}' for form in ('FP32', 'NVFP4') for name in SCHEDULES]
SEEDS = range(10)
CAST = FP4_RECIPES['nvfp4_plain'].w


def values(model):
    "Four-bit entries of the body's weights, one after the other"
    body = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.out_features != 96]
    return torch.cat([CAST.parts(w)[0].flatten() for w in body])


def run(row, seed):
    "Loss on other text, and how the four-bit values of the weights move"
    form, _, name = row.partition(': ')
    model = net(seed)
    if form == 'NVFP4': model = simulate_fp8(model, FP4_RECIPES['nvfp4_plain'], keep='8')
    data, gen, seen = char_text(9), torch.Generator().manual_seed(seed), []
    windows, other = data.train[0], data.valid[0][:2048]
    def drawn():
        for _ in range(200):
            w = windows[torch.randint(len(windows), (64,), generator=gen)]
            yield w[:, :8], w[:, 8]
    def look(i, record):
        if i >= 148: seen.append(values(model))
    fit(model, drawn(), torch.optim.Adam(model.parameters(), .01), F.cross_entropy, schedule=SCHEDULES[name], on_step=look)
    moved = [a != b for a, b in zip(seen, seen[1:])]
    flips = torch.stack(moved).float().mean()
    back = sum(int((m & (a == c)).sum()) for m, a, c in zip(moved, seen, seen[2:]))/max(1, sum(int(m.sum()) for m in moved[:-1]))
    with torch.no_grad(): loss = F.cross_entropy(model(other[:, :8]), other[:, 8])
    return dict(loss=loss.item(), flips=flips.item(), back=back)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
