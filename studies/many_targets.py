"""Does a larger batch ruin a training in eight bits without a scale? (chapter 25)

A net predicts the next letter from eight: an embedding, a linear layer, one residual block, a
readout; Adam, 80 steps. The products of its linear layers have operands in E4M3 and gradients in
E5M2; no scale anywhere. A row is a form and the number of targets over which the loss is a mean.
*Times one constant*: the loss is multiplied by n·V/√(V - 1), for n targets and V letters, with
which the logits' gradient has size one. *Only the flush*: FP32, in which the gradients of the
linear layers' outputs that E5M2 would round to zero become zero. *Unit-scaled*: two factors for
each op, no scale.
"""
import torch, torch.nn.functional as F
from torch import nn

from mpcourse.rounding import quantize
from mpcourse.toys import char_text, seeded
from mpcourse.unit import residual_add, residual_split, scaled, unit_cross_entropy, unit_embedding, unit_gelu

FORMS = ('FP32', 'FP8', 'FP8, times one constant', 'FP32, only the flush', 'unit-scaled FP32',
         'unit-scaled FP8')
SIZES = (32, 512, 4096)
ROWS = [f'{form}: {n}' for form in FORMS for n in SIZES]
SEEDS = range(10)
V, D = 96, 32


class Product8(torch.autograd.Function):
    "x @ w.T with operands in E4M3 and its gradient in E5M2"
    @staticmethod
    def forward(ctx, x, w):
        x, w = quantize(x, 'e4m3'), quantize(w, 'e4m3')
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        (x, w), g = ctx.saved_tensors, quantize(g, 'e5m2')
        return g @ w, g.T @ x


class Flushed(torch.autograd.Function):
    "x @ w.T in FP32; of its gradient what E5M2 would round to zero becomes zero"
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        (x, w), g = ctx.saved_tensors, torch.where(g.abs() <= 2.**-17, 0., g)
        return g @ w, g.T @ x


def full(x, w): return x @ w.T


class Regular(nn.Module):
    "Ordinary ops; initial weights as PyTorch's layers have them"
    def __init__(self, product):
        super().__init__()
        self.product, self.table = product, nn.Embedding(V, 8)
        self.layers = nn.ModuleList(nn.Linear(i, o)
                                    for i, o in ((64, D), (D, 2*D), (2*D, D), (D, V)))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))

    def forward(self, ids):
        def linear(i, x): return self.product(x, self.layers[i].weight) + self.layers[i].bias
        x = linear(0, self.table(ids).flatten(1))
        x = x + linear(2, F.gelu(linear(1, self.norms[0](x))))
        return linear(3, self.norms[1](x))


class Unit(nn.Module):
    "The same net of unit-scaled ops: weights of variance one, factors from the shapes"
    def __init__(self, product):
        super().__init__()
        self.product, self.table = product, nn.Parameter(torch.randn(V, 8))
        self.ws = nn.ParameterList(torch.randn(o, i)
                                   for i, o in ((64, D), (D, 2*D), (2*D, D), (D, V)))

    def forward(self, ids):
        def linear(i, x, a=None):
            w = self.ws[i]
            # one factor, forward and backward; the weight has its own
            a = a or (w.shape[0]*w.shape[1])**-.25
            return scaled(self.product(x, scaled(w, 1., len(x)**-.5/a)), a, a)
        x = linear(0, unit_embedding(ids, self.table).flatten(1))
        branch, skip = residual_split(x, .5)
        branch = linear(2, unit_gelu(linear(1, F.layer_norm(branch, (D,)))))
        return linear(3, F.layer_norm(residual_add(branch, skip, .5), (D,)), D**-.5)


def make(form, n):
    "Model, loss, learning rate"
    product = {'FP8': Product8.apply, 'flush': Flushed.apply}.get(form.split()[-1], full)
    if 'constant' in form: product = Product8.apply
    if 'unit' in form: return Unit(product), unit_cross_entropy, .15
    factor = n*V/(V - 1)**.5 if 'constant' in form else 1.
    return Regular(product), lambda pred, y: F.cross_entropy(pred, y)*factor, .02


def run(row, seed):
    "Loss on new text"
    form, n = row.split(': ')
    data, gen = char_text(9), torch.Generator().manual_seed(seed)
    (x, _), (new, _) = data.train, data.valid
    with seeded(seed): model, loss_func, lr = make(form, int(n))
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(80):
        windows = x[torch.randint(len(x), (int(n),), generator=gen)]
        loss = loss_func(model(windows[:, :8]), windows[:, 8])
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad(): return dict(loss=F.cross_entropy(model(new[:2048, :8]), new[:2048, 8]))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
