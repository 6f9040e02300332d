"""Does the course's GPT train with every product in E4M3, and what cures it? (chapter 27)

`char_lm` of chapter 03, 80 steps. The loss is the mean of the last ten. All three products of a
layer take E4M3 operands; in some rows gradients are E5M2, as in Micikevicius et al. (2022).
"""
from mpcourse.fp8 import CastConfig, Recipe, fp32_scale, simulate_fp8
from mpcourse.toys import batches, fit, get_toy

ROWS = ['FP32', 'no scale', 'no scale, E5M2 gradients', 'loss scale 2^8', 'loss scale 2^12', 'loss scale 2^16',
        'loss scale 2^20', 'a scale for each tensor',
        *(f'E5M2 gradients, loss scale 2^{k}' for k in (4, 8, 12, 16, 20))]
SEEDS = range(10)
STEPS = 80


def scaled_step(scale):
    "A step with a loss scale, taken out of the gradients in FP32"
    def step(model, xb, yb, opt, loss_func):
        loss = loss_func(model(xb), yb)
        opt.zero_grad()
        (loss*scale).backward()
        for p in model.parameters(): p.grad /= scale
        opt.step()
        return loss.detach()
    return step


def train(recipe, seed, scale=1., **how):
    "Mean of the last ten training losses; recipe None is FP32; `how` is for `simulate_fp8`"
    toy = get_toy('char_lm')
    model = toy.model(seed)
    if recipe: model = simulate_fp8(model, recipe, **how)
    data = batches(toy.data(), toy.bs, STEPS, seed)
    losses = fit(model, data, toy.opt(model.parameters()), step=scaled_step(scale))['loss']
    return dict(loss=sum(losses[-10:])/10)


def run(row, seed):
    "Mean of the last ten training losses"
    if row == 'FP32': return train(None, seed)
    scale = {} if 'each' not in row else dict(scale=fp32_scale)
    gradients = 'e5m2' if 'E5M2' in row else 'e4m3'
    recipe = Recipe(*[CastConfig(fmt, **scale) for fmt in ('e4m3', 'e4m3', gradients)])
    return train(recipe, seed, 2.**int(row.partition('2^')[2] or 0))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
