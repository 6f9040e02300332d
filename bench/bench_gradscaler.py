"The drop-in GradScaler against torch's own, with the optimizer's step in it, and how often the host reads from the device."
import statistics, time
import torch, torch.nn as nn
from harness import Row
from torch.utils._python_dispatch import TorchDispatchMode
from mpcourse.gradscaler import GradScaler

SETS = {'60 tensors, 5 M': [(408, 408), (408,)]*30, '160 tensors, 25 M': [(558, 558), (558,)]*80}
OPTS = {'SGD': dict(cls=torch.optim.SGD, lr=1e-9), 'Adam': dict(cls=torch.optim.Adam, lr=1e-9)}
# tensors times turns: the smaller set is noisier and gets more
TURNS = 7200


class Reads(TorchDispatchMode):
    "Counts what makes a host wait for its GPU: a number read from a tensor"
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default,
                               torch.ops.aten.is_nonzero.default)
        return func(*args, **kwargs or {})


class Training:
    "Parameters with gradients and an optimizer; `step` is one iteration without its backward pass, with any scaler"
    def __init__(self, shapes, cls, fused, device, **kwargs):
        self.params = [nn.Parameter(torch.randn(s, device=device)) for s in shapes]
        self.given = [torch.randn_like(p) for p in self.params]
        for p,g in zip(self.params, self.given): p.grad = g.clone()
        self.opt, self.loss = cls(self.params, fused=fused, **kwargs), torch.ones((), device=device)

    def step(self, scaler):
        scaler.scale(self.loss)
        scaler.step(self.opt)
        scaler.update()

    def refill(self):
        "Gradients as they were: unscaled ones get smaller with every step"
        torch._foreach_copy_([p.grad for p in self.params], self.given)


def alternate(training, scalers, done):
    "Seconds of an iteration with each scaler, in turn, on the same parameters; who goes first takes turns too"
    times = {k: [] for k in scalers}
    for i in range(TURNS//len(training.params) + 3):
        for k,scaler in list(scalers.items())[::1 - 2*(i % 2)]:
            # once untimed: none pays for what the other left in the caches
            training.refill(); training.step(scaler); done()
            start = time.perf_counter()
            training.step(scaler); done()
            if i >= 3: times[k].append(time.perf_counter() - start)
    return times


def bench_step():
    "scale, step and update, gradients given: 5 M and 25 M parameters, SGD and Adam, fused or not. Judged by the minimum"
    device, rows = 'cuda' if torch.cuda.is_available() else 'cpu', []
    done = torch.cuda.synchronize if device == 'cuda' else lambda: None
    for label,shapes in SETS.items():
        for name,o in OPTS.items():
            for fused in (False, True):
                t = alternate(Training(shapes, fused=fused, device=device, **o),
                              {'ours': GradScaler(device), 'theirs': torch.amp.GradScaler(device)}, done)
                ms = {k: round(min(v)*1e3, 4) for k,v in t.items()}
                ms |= {f'{k}, median': round(statistics.median(v)*1e3, 4) for k,v in t.items()}
                rows.append(Row(f'{label}, {name}{" fused" if fused else ""}: ours / torch\'s',
                                min(t['ours'])/min(t['theirs']), at_most=1.05, ms=ms))
    return rows


def bench_reads():
    "Numbers that the host reads from the device in a step, beside those of the optimizer: each waits for a GPU"
    device, rows, n = 'cuda' if torch.cuda.is_available() else 'cpu', [], 12
    for name,o in OPTS.items():
        for fused,most in ((False, 1), (True, 0)):
            t, scaler = Training([(8, 8)]*4, fused=fused, device=device, **o), GradScaler(device)
            t.step(scaler)
            with Reads() as own:
                for _ in range(n): t.opt.step()
            with Reads() as all_:
                for _ in range(n): t.step(scaler)
            what = f'{name}{" fused" if fused else ""}: reads of the host per step'
            rows.append(Row(what, (all_.count - own.count)/n, at_most=most, unit='reads'))
    return rows
