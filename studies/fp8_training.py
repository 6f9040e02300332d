"""Which forms of the pre-norm transformer train with their products in eight bits? (chapter 27)

A row is a form and the length of the loss's mean (`long mean` divides the loss by 1,024). A training has
150 steps of 16 windows of 32 characters. `floor` is the OCP specification's rounding of a block's scale.
"""
import torch

from mpcourse.als import ALSScaler
from mpcourse.fp8 import FP8Recipe, simulate_fp8
from mpcourse.gradscaler import GradScaler
from mpcourse.scaler import StaticScaler
from mpcourse.toys import batches, char_text, cross_entropy, fit, seeded, warmup_cosine
from mpcourse.unit import unit_cross_entropy
from mpcourse.unit_models import CharModel

# unit-scaled, unit-scaled loss, recipe (None: FP32), loss scale
FORMS = {'regular FP32': (False, False, None, 1.), 'regular FP8': (False, False, FP8Recipe(), 1.),
         'regular FP8, loss scale 2^11': (False, False, FP8Recipe(), 2.**11),
         'regular FP8, ALS': (False, False, FP8Recipe(), 'als'),
         'regular FP8, current amax': (False, False, FP8Recipe('current'), 1.),
         'regular FP8, delayed amax': (False, False, FP8Recipe('delayed', history=16), 1.),
         'regular FP8, MX': (False, False, FP8Recipe('mx'), 1.),
         'regular FP8, MX floor': (False, False, FP8Recipe('mx', scale_rounding='floor'), 1.),
         'regular FP8, MX all E4M3': (False, False, FP8Recipe('mx', backward='e4m3'), 1.),
         'regular FP8, MX all E4M3 floor': (False, False, FP8Recipe('mx', backward='e4m3', scale_rounding='floor'), 1.),
         'regular FP8, unit loss': (False, True, FP8Recipe(), 1.),
         'unit FP32': (True, True, None, 1.), 'unit FP8': (True, True, FP8Recipe(), 1.)}
MEANS = {'mean over 512': 1., 'long mean': 2.**-10}
ROWS = [f'{form}: {mean}' for form in FORMS for mean in MEANS if 'FP32' not in form or 'long' not in mean]
SEEDS = range(3)


def scaled_step(scaler, factor):
    "A step whose loss is multiplied by a factor and scaled; both are taken out in FP32"
    def step(model, xb, yb, opt, loss_func):
        loss = loss_func(model(xb), yb)
        opt.zero_grad()
        scaler.scale(loss*factor).backward()
        scaler.unscale_(opt)
        for p in model.parameters(): p.grad /= factor
        scaler.step(opt)
        scaler.update()
        return loss.detach()
    return step


def train(unit, unit_loss, recipe, scale, factor, seed, steps=150):
    "Final loss, and the share of zeros in the last weight gradients. The options are those of `FORMS`"
    with seeded(seed): model = CharModel('pre-norm', unit, context=32)
    if recipe: model = simulate_fp8(model, recipe)
    loss_func = unit_cross_entropy if unit_loss else cross_entropy
    policy = ALSScaler(activations=False) if scale == 'als' else StaticScaler(scale)
    scaler = GradScaler(policy, model=model)
    opt = torch.optim.Adam(model.parameters(), lr=.05 if unit else .01, betas=(.9, .99))
    hist = fit(model, batches(char_text(32), 16, steps, seed), opt, loss_func, scaled_step(scaler, factor),
               warmup_cosine(steps, 20))
    ps = [p for p in model.body.parameters() if p.dim() > 1]
    zeros = sum((p.grad == 0).sum().item() for p in ps)/sum(p.numel() for p in ps)
    return dict(loss=sum(hist['loss'][-20:])/20, zeros=zeros)


def run(row, seed):
    "Final loss, share of zeros in the weight gradients"
    form, mean = row.split(': ')
    return train(*FORMS[form], MEANS[mean], seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
