"What automatic loss scaling costs: its two bins over the weights' gradients, and a training step with all of it."
import torch
from harness import medians, ratio
from mpcourse.als import ALSScaler
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep, grad_statistic
from mpcourse.toys import batches, get_toy

SHAPES = [(408, 408), (408,)]*30
PAIRS = 60                                # steps of each kind, in turn


def device(): return 'cuda' if torch.cuda.is_available() else 'cpu'


def wait(): return torch.cuda.synchronize() if torch.cuda.is_available() else None


def synced(f):
    def run():
        res = f()
        wait()
        return res
    return run


def bench_bins():
    "Two bins over 60 gradients, 5 M numbers: fused passes against torch.histc tensor by tensor"
    rows = []
    for dtype in (torch.float32, torch.float16):
        gs = [torch.randn(s, device=device()).to(dtype) for s in SHAPES]
        required_stats = [w for w in ALSScaler().required_stats if w != 'found_inf']
        t = medians({'count': synced(lambda: [grad_statistic(w, gs, device()) for w in required_stats]),
                     'histc': synced(lambda: [torch.histc(g.float().abs(), 2, 0, 65504) for g in gs])}, repeats=21)
        name = str(dtype).removeprefix('torch.')
        rows.append(ratio(f'two bins, {name}: count / histc', t, 'count', 'histc', at_most=.5))
    return rows


class Steps:
    "A toy's training, one step at a time, on batches that are drawn beforehand"
    def __init__(self, name, scaler):
        toy = get_toy(name)
        self.toy, self.model, self.step = toy, toy.model(device=device()), MixedStep(scaler)
        self.opt = toy.opt(self.model.parameters())
        self.batches, self.i = list(batches(toy.data(device=device()), toy.bs, 8)), 0

    def __call__(self):
        self.i += 1
        self.step(self.model, *self.batches[self.i % 8], self.opt, self.toy.loss_func)
        wait()


def bench_step():
    "A step of the character transformer: ALS on weights and activations beside a static scale"
    kinds = {'static': StaticScaler(2.**16), 'ALS': ALSScaler(2.**16),
             'ALS, weights': ALSScaler(2.**16, activations=False)}
    runs = {k: Steps('char_lm', s) for k,s in kinds.items()}
    for r in runs.values():
        for _ in range(12): r()
    t = medians(runs, repeats=PAIRS)
    most = 1.03 if device() == 'cuda' else 1.25
    return [ratio(f'character transformer, {k} / static', t, k, 'static',
                  at_most=most if k == 'ALS' else None)
            for k in kinds if k != 'static']
