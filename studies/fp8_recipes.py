"""Which toy parts the recipes for eight bits, and which does not? (chapter 27; on text:
`fp8_text.py`)

`plain` and `outlier`: a small residual net learns what a fixed net computes, 400 steps, its error
on new inputs; in `outlier` one input in sixteen is 2^16 times larger (or as it says), and a norm
behind the first layer takes that out again. The last layer of this net stays in FP32. `unit` is
the unit-scaled transformer of chapter 26, with a learning rate of its own: compare it with its own
FP32. No net here but `unit` has attention; there its products are converted too.
"""
import torch, torch.nn.functional as F
from torch import nn

from mpcourse.fp8 import CastConfig, Recipe, simulate_fp8
from mpcourse.toys import batches, char_text, fit, seeded

E4M3 = Recipe(g=CastConfig('e4m3'))
PLAIN = {'FP32': None, 'E4M3, no scale': E4M3, 'tensorwise': 'tensorwise', 'mx': 'mx',
         'mx_floor': 'mx_floor'}
OUTLIER = {'FP32': None} | {k: k
                            for k in ('tensorwise', 'delayed', 'rowwise', 'block', 'mx',
                                      'mx_floor')}
UNIT = {'FP32': None, 'E4M3, no scale': E4M3}
SOME = {'FP32': None, 'tensorwise': 'tensorwise', 'mx': 'mx'}
TASKS = dict(plain=PLAIN, outlier=OUTLIER, unit=UNIT)
TASKS |= {f'outlier 2^{k}': SOME for k in (8, 12, 14)}
ROWS = [f'{task}: {name}' for task, recipes in TASKS.items() for name in recipes]
SEEDS = range(5)


class Student(nn.Module):
    "64 numbers to 16, with two residual blocks"
    def __init__(self, norm):
        super().__init__()
        sizes = (64, 128), (128, 128), (128, 128), (128, 16)
        self.layers = nn.ModuleList([nn.Linear(i, o, bias=False) for i, o in sizes])
        for m in self.layers: nn.init.normal_(m.weight, std=m.in_features**-.5)
        self.norm = nn.LayerNorm(128, elementwise_affine=False) if norm else nn.Identity()

    def forward(self, x):
        x = F.gelu(self.norm(self.layers[0](x)))
        for m in self.layers[1:-1]: x = x + F.gelu(m(F.layer_norm(x, (128,))))
        return self.layers[-1](x)


def student(recipe, outlier, seed, steps=400):
    "Error on new inputs of a net that learns what another one computes"
    gen = torch.Generator().manual_seed(seed)
    def draw(*shape): return torch.randn(*shape, generator=gen)
    teacher = draw(64, 64)*.19, draw(64, 64)*.19, draw(64, 16)/8
    def batch(n):
        x = draw(n, 64)
        y = ((x @ teacher[0]).tanh() @ teacher[1]).tanh() @ teacher[2]
        x[::16] *= outlier
        return x, y
    with seeded(seed): model = Student(outlier > 1)
    if recipe: model = simulate_fp8(model, recipe, keep='layers.3')
    opt = torch.optim.Adam(model.parameters(), 3e-3, betas=(.9, .98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        x, y = batch(64)
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
        schedule.step()
    x, y = batch(2048)
    with torch.no_grad(): return dict(loss=F.mse_loss(model.eval()(x), y).item())


def unit_scaled(recipe, seed, steps=80):
    "Mean of the last ten training losses of the unit-scaled transformer"
    from mpcourse.unit import unit_cross_entropy
    from unit_sweep import CharModel
    with seeded(seed): model = CharModel('pre-norm', True, context=32)
    if recipe: model = simulate_fp8(model, recipe)
    opt = torch.optim.Adam(model.parameters(), lr=.05, betas=(.9, .99))
    losses = fit(model, batches(char_text(32), 16, steps, seed), opt, unit_cross_entropy)['loss']
    return dict(loss=sum(losses[-10:])/10)


def run(row, seed):
    "A training loss (unit), or an error on new inputs"
    task, name = row.split(': ')
    recipe = TASKS[task][name]
    if task == 'unit': return unit_scaled(recipe, seed)
    return student(recipe, 2.**int(task.partition('^')[2] or 16) if 'outlier' in task else 1., seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
