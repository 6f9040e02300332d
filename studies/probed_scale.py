"""Does a loss scale that a probe chooses train better than one measured once, or than a guess of 16?
(chapter 16)

A row is a net and a way to choose its scale on the first batch. `probed` is the smallest power of
two at which no layer's gradient loses 1 %, `measured` that of `StaticScaler.measured`. The GPT's
loss is divided by 512, as in a step of half a million tokens. `score` is the error of the drawings,
and the GPT's loss; `head 40` is the share that the logits' gradient loses at step 40.
"""
from math import log2

import torch

from mpcourse.scaler import StaticScaler
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, drawings, fit, get_toy, half_pass, heads_loss, heads_score, two_heads
from mpcourse.underflow import probe_flushed

NETS, WAYS, SEEDS, LOOKS = ('two heads', 'GPT'), ('scale 1', 'scale 16', 'probed', 'measured'), range(5), (0, 20, 40, 60)
ROWS = [f'{net}: {how}' for net in NETS for how in WAYS]


def choose(how, *case):
    "The scale"
    if how == 'measured': return StaticScaler.measured(*case).scale.item()
    if how != 'probed': return float(how.split()[1])
    for k in range(25):
        found = probe_flushed(*case, scale=2.**k)
        if max(z.share for z in found.values()) < .01: return 2.**k


def heads(how, seed):
    "The scale, and the error of the drawings after 100 steps"
    data, model = [*batches(drawings(), 256, 100, seed)], two_heads(seed)
    scale = choose(how, model, data[0], heads_loss)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    fit(model, data, opt, heads_loss, half_pass(torch.float16, scale))
    return dict(log2_scale=log2(scale), score=heads_score(model, drawings())[1])


def text(how, seed):
    "The scale, the loss of the GPT after 80 steps, and what is lost on the way"
    toy = get_toy('char_lm')
    data, model = [*batches(toy.data(), toy.bs, 80, seed)], toy.model(seed)
    def loss_func(pred, y): return toy.loss_func(pred, y)/512
    scale = choose(how, model, data[0], loss_func)
    step, lost = half_pass(torch.float16, scale/512), {}
    def look(model, *batch):
        if len(lost) < len(LOOKS) and look.steps == LOOKS[len(lost)]:
            found = probe_flushed(model, batch[:2], loss_func, scale=scale)
            lost[f'head {look.steps}'] = found['head', 'activation_grad'].share.item()
        look.steps += 1
        return step(model, *batch)
    look.steps = 0
    losses = fit(model, data, toy.opt(model.parameters()), toy.loss_func, look)['loss']
    return dict(log2_scale=log2(scale), score=sum(losses[-20:])/20, **lost)


def run(row, seed):
    "Train with one scale"
    net, how = row.split(': ')
    with fp32_accumulate(): return (text if net == 'GPT' else heads)(how, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
