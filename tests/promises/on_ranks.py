"What each of two ranks does for test_4_ranks.py; every function returns what is to be compared"
import random
import warnings
from datetime import timedelta
from functools import partial

import torch, torch.distributed as dist, torch.nn.functional as F
from fastai.basics import Callback, OptimWrapper
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import adapter as A

POLICIES = dict(dynamic=dict(growth_interval=3), hysteresis=dict(growth_interval=3), megatron=dict(growth_interval=3),
                logmax={}, als={}, als_weights=dict(activations=False))
STEPS = 16


def scaler(name): return A.make_scaler(name.removesuffix('_weights'), init_scale=2.**10, **POLICIES[name])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(rank, i, bad=True):
    "Other data on each rank; rank 1 alone sees an infinity in batches 4, 5 and 9, and its gradients are larger"
    g = torch.Generator().manual_seed(10*i + rank)
    x, y = torch.randn(8, 4, generator=g)*(1 + 5*rank), torch.randint(0, 3, (8,), generator=g)
    if bad and rank == 1 and i in (4, 5, 9): x[0, 0] = torch.inf
    return x, y


def told(model, trace): return dict(trace=trace, weights=[p.detach().clone() for p in model.parameters()])


def by_step(rank, policy):
    model, s = net(), scaler(policy)
    inner, opt = DDP(model), torch.optim.Adam(model.parameters(), lr=.01)
    step = A.make_step(s, group=dist.group.WORLD)
    got = A.train(step, inner, [data(rank, i) for i in range(STEPS)], opt, F.cross_entropy)
    return told(model, [(s, k) for _,s,k in got])


def by_step_alone(rank, policy):
    "Without DDP"
    model, s = net(), scaler(policy)
    step = A.make_step(s, group=dist.group.WORLD)
    got = A.train(step, model, [data(rank, i) for i in range(STEPS)], torch.optim.SGD(model.parameters(), lr=.01), F.cross_entropy)
    return dict(trace=[(s, k) for _,s,k in got], weights=[])


def alike(model): return model      # in the place of DDP: the ranks' gradients differ, and the decision is one all the same


def by_gradscaler(rank, policy, fused=False, wrap=DDP):
    model = net()
    s = A.make_gradscaler(scaler(policy), group=dist.group.WORLD, model=model)
    inner, opt, trace = wrap(model), torch.optim.AdamW(model.parameters(), lr=.01, fused=fused), []
    for i in range(STEPS):
        x, y = data(rank, i)
        s.scale(F.cross_entropy(inner(x), y)).backward(); s.step(opt); s.update(); opt.zero_grad()
        trace.append(s.get_scale())
    return told(model, trace)


def sees_all(rank):
    "The largest gradient is that of all ranks, whichever has it: 2^14 on rank 1, then on rank 0, then nowhere"
    s, p, out = A.make_gradscaler(A.make_scaler('als', init_scale=2.**4, activations=False), group=dist.group.WORLD), nn.Parameter(torch.zeros(3)), []
    opt = torch.optim.SGD([p], lr=0.)
    for who in (1, 0, None):
        s.scale(torch.ones(())); p.grad = torch.full((3,), 2.**14 if rank == who else 1.)
        s.step(opt); s.update(); out.append(s.get_scale())
    return dict(trace=out, weights=[])


class Trace(Callback):
    order = 200
    def __init__(self): self.seen = []
    def after_batch(self):
        if self.learn.training: self.seen.append(A.scale_of(self.learn))


def by_learner(rank, policy, wrap=DDP):
    xs, ys = map(torch.cat, zip(*[data(rank, i) for i in range(STEPS)]))
    # the loader shuffles: all of rank 1's bad examples come at other places on each rank
    model = net()
    learn = A.make_learner(wrap(model), (xs, ys), (xs[:8], ys[:8]), scaler(policy), loss_func=F.cross_entropy,
                           opt_func=partial(OptimWrapper, opt=torch.optim.SGD), lr=.01)
    trace = Trace()
    torch.manual_seed(rank)
    learn.dls.train.shuffle = False
    with learn.no_logging(): learn.fit(1, cbs=trace)
    return told(model, trace.seen)


def first_batch_bad(rank):
    "Rank 1's first loss is NaN: whatever happens, it happens on both"
    group = dist.new_group(timeout=timedelta(seconds=5))
    model, s, out = net(), scaler('dynamic'), []
    step, opt = A.make_step(s, group=group), torch.optim.SGD(model.parameters(), lr=.1)
    x, y = data(rank, 0)
    if rank == 1: x[0, 0] = torch.nan              # the loss too; an infinity would end in the tanh
    for x,y in ((x, y), data(rank, 1)):
        try: out.append((float(step(model, x, y, opt, F.cross_entropy)['scale']), None))
        except Exception as e: out.append((None, type(e).__name__)); break
    return dict(trace=out, weights=[])


def sharded(rank, policy):
    from torch.distributed.fsdp import fully_shard
    model = net()
    for m in (model[0], model[2], model): fully_shard(m)
    s, opt, trace = A.make_gradscaler(scaler(policy), group=dist.group.WORLD), torch.optim.Adam(model.parameters(), lr=.01), []
    try:
        for i in range(8):
            x, y = data(rank, i)
            s.scale(F.cross_entropy(model(x), y)).backward(); s.step(opt); s.update(); opt.zero_grad()
            trace.append(s.get_scale())
    except Exception as e: trace.append(f'{type(e).__name__}: {e}'[:200])
    return dict(trace=trace, weights=[])


def no_gradients_on_one(rank, host):
    "A layer that rank 1 does not use in batches 1 and 2 has an optimizer of its own; rank 0 overflows in batch 2"
    a, b, s = nn.Linear(4, 3), nn.Linear(3, 3), scaler('dynamic')
    gs, step, trace = A.make_gradscaler(s, group=dist.group.WORLD), A.make_step(s, group=dist.group.WORLD), []
    opts = [torch.optim.SGD(m.parameters(), lr=.1) for m in (a, b)]
    if host == 'step': b.unused = a     # a part of the model, which its forward does not call
    for i in range(4):
        x, y = data(rank, i, False)
        bad = rank == 0 and i == 2
        if bad and host == 'step': x[0, 0] = torch.inf
        unused = rank == 1 and i in (1, 2)
        if host == 'step': trace.append(bool(step(b, x[:, :3]*(not unused), y, opts[0] if unused else opts[1], F.cross_entropy)['skipped']))
        else:
            h = a(x)
            gs.scale(F.cross_entropy(h if unused else b(h), y)).backward()
            if bad: a.weight.grad[0, 0] = torch.inf
            if i == 0: gs.unscale_(opts[1])
            for opt in opts: gs.step(opt)
            gs.update()
            for opt in opts: opt.zero_grad()
            trace.append(gs.get_scale())
    return dict(trace=trace, weights=[])


def buffers_go_back(rank):
    "Rank 1's second batch overflows, and both ranks skip: what each has written into BatchNorm's statistics goes back"
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), []
    step, opt = A.make_step(A.make_scaler('static', init_scale=2.), group=dist.group.WORLD), torch.optim.SGD(model.parameters(), lr=.1)
    for i in range(3):
        x, y = data(rank, i, False)
        if rank == 1 and i == 1: x[0] = 1e6
        step(model, x, y, opt, F.cross_entropy)
        seen.append(torch.cat([b.flatten().double() for b in model.buffers()]))
    return dict(trace=[torch.equal(seen[1], seen[0]), torch.equal(seen[2], seen[1]), bool(seen[2].isfinite().all())], weights=[])


def joined(rank, host):
    "Rank 0 has one batch more, within torch's Join"
    inner, s, trace = DDP(net()), scaler('dynamic'), []
    opt = torch.optim.SGD(inner.parameters(), lr=.1)
    step, gs = A.make_step(s), A.make_gradscaler(scaler('dynamic'), model=inner)
    with Join([inner]):
        for i in range(3 - rank):
            x, y = data(rank, i, False)
            try:
                if host == 'step': step(inner, x, y, opt, F.cross_entropy)
                else:
                    gs.scale(F.cross_entropy(inner(x), y)).backward()
                    gs.step(opt)
            except ValueError as e: trace.append('Join' in str(e)); break
    return dict(trace=trace, weights=[])


class Stop(Callback):
    order = 200
    def __init__(self, at): self.at = at
    def after_batch(self):
        if self.learn.training and self.learn.train_iter == self.at: raise KeyboardInterrupt


def resumed(rank, folder):
    "A fit on each rank with other data, dropout and shuffles, the same path on both: stopped, run again, and once whole"
    xs, ys = map(torch.cat, zip(*[data(rank, i, False) for i in range(16)]))
    def fit(path, seed, stop=None):
        torch.manual_seed(seed + rank); random.seed(seed + rank)        # fastai shuffles with Python's generator
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(.3), nn.Linear(16, 3))
        learn = A.make_learner(model, (xs, ys), (xs[:8], ys[:8]), scaler('dynamic'), loss_func=F.cross_entropy, cbs=[A.checkpoint(path, 5)])
        try:
            with learn.no_logging(): learn.fit(1, .01, cbs=[Stop(stop)] if stop else [])
        except KeyboardInterrupt: pass
        return [p.detach().clone() for p in model.parameters()]
    whole = fit(f'{folder}/whole.ckpt', 0); dist.barrier()
    fit(f'{folder}/x.ckpt', 0, 12); dist.barrier()
    try: again = fit(f'{folder}/x.ckpt', 5)
    except Exception as e: again = repr(e)
    dist.barrier()
    return dict(whole=whole, again=again)


def everything(rank, folder):
    warnings.simplefilter('ignore')
    out = {}
    for p in POLICIES:
        out['gradscaler', p] = by_gradscaler(rank, p)
        out['step', p] = by_step(rank, p)
    out['fused', 'dynamic'] = by_gradscaler(rank, 'dynamic', True)
    for p in ('dynamic', 'als'): out['learner', p], out['alone', p] = by_learner(rank, p), by_step_alone(rank, p)
    for p in ('dynamic', 'logmax', 'als_weights'): out['sharded', p] = sharded(rank, p)
    out['gradscaler alone', 'dynamic'] = by_gradscaler(rank, 'dynamic', wrap=alike) | dict(weights=[])
    out['learner alone', 'dynamic'] = by_learner(rank, 'dynamic', wrap=alike) | dict(weights=[])
    out['sees all', 'als'], out['buffers', 'static'] = sees_all(rank), buffers_go_back(rank)
    for h in ('step', 'gradscaler'): out['no gradients', h], out['join', h] = no_gradients_on_one(rank, h), joined(rank, h)
    out['refusal', 'dynamic'] = first_batch_bad(rank)
    dist.barrier()
    out['resumed', 'dynamic'] = resumed(rank, folder)
    return out
