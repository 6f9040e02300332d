"""Trainings that are killed with SIGKILL at a point, and resumed by another process; called by test_3_resume.py.

One process forks a child for each life of each training: it has imported everything and trained nothing."""
import os, random, signal, sys, warnings
from functools import partial
from pathlib import Path

import numpy as np, torch, torch._dynamo, torch.nn.functional as F     # optimizers import _dynamo at their first step
from fastai.basics import Callback, OptimWrapper
from torch import nn

import adapter as A

torch.set_num_threads(1)
STEPS, KILL = 12, 7


def die(): os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.drop, self.two = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(.3), nn.Linear(8, 3)
        self.die_in = None
    def forward(self, x):
        h = self.drop(self.norm(self.one(x)))
        if self.die_in == 'forward' and self.training: die()
        if self.die_in == 'backward' and self.training: h.register_hook(lambda g: die())
        return self.two(h.relu())


def data(n=96):
    g = torch.Generator().manual_seed(3)
    return torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)


def seed(n): torch.manual_seed(n); random.seed(n); np.random.seed(n)


def die_in_writes(where, nth):
    "The nth write of this process dies: with half the bytes out, when they are forced to the disk, or before the rename"
    count, real = [0], dict(save=torch.save, fsync=os.fsync, replace=os.replace)
    def counted(name):
        def f(*args, **kw):
            if name == 'save': count[0] += 1
            if count[0] == nth and where == name:
                if name == 'save':
                    real['save'](*args, **kw)
                    f = args[1]
                    if hasattr(f, 'truncate'): f.flush(); f.truncate(f.tell()//2)
                die()
            return real[name](*args, **kw)
        return f
    torch.save, os.fsync, os.replace = counted('save'), counted('fsync'), counted('replace')


def loop(folder, die_at, seeded):
    "A plain loop that saves after each third step"
    seed(seeded)
    model, (x, y), scaler = Net(), data(), A.make_scaler('hysteresis', init_scale=2.**14, growth_interval=2)
    opt = torch.optim.AdamW(model.parameters(), lr=.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, .02, total_steps=STEPS)
    step, path, start, rows, order = A.make_step(scaler), folder/'loop.ckpt', 0, [], torch.randperm(96)
    if path.exists():
        more = A.load(path, model, opt, scaler)
        start, rows, order = more['step'], list(more['rows']), more['order']
        sched.load_state_dict(more['sched'])
    if die_at and die_at not in ('forward', 'backward', 'opt'): die_in_writes(die_at, 2)
    for i in range(start, STEPS):
        if die_at in ('forward', 'backward') and i == KILL: model.die_in = die_at
        if die_at == 'opt' and i == KILL: opt.step = lambda *a, **k: die()
        idx = order[8*i:8*i+8]
        big = 2.**20 if i in (2, 8) else 1.                     # its gradients overflow
        r = step(model, x[idx], y[idx], opt, lambda out, y: F.cross_entropy(out, y)*big)
        sched.step()
        rows.append((float(r['loss']), float(r['scale']), bool(r['skipped']), random.random(), np.random.rand()))
        if i%3 == 2: A.save(path, model, opt, scaler, step=i + 1, rows=rows, order=order, sched=sched.state_dict())
    return dict(model=model.state_dict(), opt=opt.state_dict(), rows=rows, scale=A.scale_of(scaler))


class Killer(Callback):
    order = 200
    def __init__(self, event): setattr(self, event, self.go)
    def go(self):
        if self.learn.training and self.learn.train_iter == 16: die()


def fit(folder, die_at, seeded, loss_func=None):
    "A fit with one-cycle, two epochs of twelve batches, a checkpoint each five steps"
    seed(seeded)
    x, y = data()
    path, scaler = folder/'fit.ckpt', A.make_scaler('dynamic', init_scale=2.**14, growth_interval=4)
    learn = A.make_learner(Net(), (x, y), (x[:16], y[:16]), scaler, loss_func=loss_func or F.cross_entropy,
                           opt_func=partial(OptimWrapper, opt=torch.optim.Adam), cbs=[A.checkpoint(path, 5)])
    dl = learn.dls.train                # an order that is drawn from the loader's own numbers and from torch's
    dl.shuffle_fn = lambda idxs: dl.rng.sample([idxs[i] for i in torch.randperm(len(idxs))], len(idxs))
    in_write = die_at in ('save', 'fsync', 'replace')
    if in_write: die_in_writes(die_at, 3)
    with learn.no_logging(): learn.fit_one_cycle(2, .02, cbs=[Killer(die_at)] if die_at and not in_write else [])
    losses = [float(l) for l in learn.recorder.losses]
    return dict(model=learn.model.state_dict(), opt=learn.opt.state_dict(), scale=A.scale_of(learn), rows=losses,
                values=[list(map(float, v[:2])) for v in learn.recorder.values])


def flat_loss(folder, die_at, seeded):
    "The same with fastai's own loss"
    from fastai.losses import CrossEntropyLossFlat
    return fit(folder, die_at, seeded, CrossEntropyLossFlat())


def fits(script, folder, die_at, seeded):
    "A script with several fits; between them it looks at the model, and draws"
    seed(seeded)
    (x, y), steps, rows = data(), [0], []
    def count():
        steps[0] += 1
        if steps[0] == die_at: die()
    learn = A.make_learner(Net(), (x, y), (x[:16], y[:16]), A.make_scaler('dynamic', init_scale=2.**14, growth_interval=4), loss_func=F.cross_entropy,
                           splitter=lambda m: [list(m.one.parameters()), [p for l in (m.norm, m.two) for p in l.parameters()]], cbs=[A.checkpoint(folder/'run.ckpt', 5)])
    def between(n):
        rows.extend(map(float, learn.recorder.losses))
        rows.append((list(map(float, learn.validate())), random.random(), torch.rand(()).item(), A.scale_of(learn)))
        if die_at == n: die()
    hook = learn.model.norm.register_forward_hook(lambda *_: count() if isinstance(die_at, int) and learn.model.training else None)
    with learn.no_logging(): script(learn, between)
    hook.remove()
    return dict(model=learn.model.state_dict(), opt=learn.opt.state_dict(), rows=rows, last=random.random())


def twice(learn, between):
    learn.fit(1, .01); between('between')
    learn.fit(1, .01); between('end')


def often(learn, between):
    for i in range(3): learn.fit(1, .01); between(f'after {i}')


def tune(learn, between):
    learn.fine_tune(1, .02); between('end')


def thaw(learn, between):
    learn.freeze(); learn.fit_one_cycle(1, slice(.02)); between('between')
    learn.unfreeze(); learn.fit_one_cycle(1, slice(.002, .01)); between('end')


SCRIPTS = dict(twice=(twice, (8, 'between', 14, 20, 'end')), often=(often, (20, 'after 1', 33)), tune=(tune, (8, 15, 22)), thaw=(thaw, (8, 'between', 20)))
RUNS = dict(loop=(loop, (None, 'forward', 'backward', 'opt', 'save', 'replace')),
            fit=(fit, (None, 'after_pred', 'after_step', 'replace')),
            flat_loss=(flat_loss, ('after_pred',)),                     # its whole run is that of `fit`
            **{n: (partial(fits, f), (None, *points)) for n,(f, points) in SCRIPTS.items()})       # a number: in that forward pass


def alive(f, folder, die_at, seeded, out):
    "One life in a child of its own; its exit status"
    pid = os.fork()
    if pid: return os.waitpid(pid, 0)[1]
    try:
        torch.save(f(folder, die_at, seeded), out)
        os._exit(0)
    except BaseException as e:
        print(f'{folder.name} {die_at}: {type(e).__name__}: {e}', file=sys.stderr, flush=True)
        os._exit(1)


def main(root):
    A.make_step(A.make_scaler('hysteresis')); A.checkpoint(root/'x', 5)        # what they need is imported once
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        A.make_learner(Net(), data(), data(), A.make_scaler('dynamic'), loss_func=F.cross_entropy)
    for name, (f, points) in RUNS.items():
        for die_at in points:
            folder = root/f'{name}-{die_at}'; folder.mkdir()
            first = alive(f, folder, die_at, 0, folder/'whole.pt')
            left = sorted(p.name for p in folder.iterdir())
            second = None if die_at is None else alive(f, folder, None, 1, folder/'resumed.pt')  # other weights, other draws
            end = sorted(p.name for p in folder.iterdir())
            torch.save(dict(first=first, second=second, left=left, end=end), folder/'said.pt')


if __name__ == '__main__': main(Path(sys.argv[1]))
