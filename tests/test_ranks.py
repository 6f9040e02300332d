"Many processes: groups, hooks, uneven data, a rank that dies, what all ranks measured"
import ast, os, signal, subprocess, sys, time

import pytest, torch, torch.distributed as dist, torch.nn.functional as F
from conftest import ROOT
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from mpcourse.accumulate import running_mean
from mpcourse.callback import Learner, quiet_fit, tensor_dls
from mpcourse.checkpoint import CheckpointCB, choose_common_step, read_training_state, save_training_state
from mpcourse.ranks import gather_frames, run_ranks, running_mean_hook, stochastic_hook
from mpcourse.dynamic import DynamicScaler
from mpcourse.fp8 import CastConfig, Recipe, reduce_amax, simulate_fp8
from mpcourse.gradscaler import GradScaler
from mpcourse.monitor import TensorCollector
from mpcourse.policies import get_policy
from mpcourse.step import MixedStep
from tools.fingerprints import code_cells

try: import cloudpickle
except ImportError: from joblib.externals import cloudpickle    # before joblib 1.6
cloudpickle.register_pickle_by_value(sys.modules[__name__])     # the processes cannot import this file


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(i, rank=0):
    gen = torch.Generator().manual_seed(100*i + rank)
    return torch.randn(8, 4, generator=gen), torch.randint(0, 3, (8,), generator=gen)


def weights(model): return nn.utils.parameters_to_vector(model.parameters()).detach()


# --- who decides together ---

def in_groups(size):
    "An infinity on rank 3 alone; no DDP, so each rank's gradients are its own"
    model, group = net(), dist.new_subgroups(size)[0]
    step, opt = MixedStep(DynamicScaler(skip_nonfinite_loss=False), group=group), torch.optim.SGD(model.parameters(), lr=.1)
    skipped = []
    for i in range(4):
        x, y = batch(i, dist.get_rank())
        if dist.get_rank() == 3 and i == 2: x[0, 0] = torch.inf
        skipped.append(bool(step(model, x, y, opt, F.cross_entropy)['skipped']))
    return skipped, step.scaler.scale.item()


@pytest.mark.parametrize('size', [1, 2, 4])
def test_a_group_decides_together_and_nobody_else(size):
    told = run_ranks(in_groups, 4, size)
    bad, fine = ([False, False, True, False], 2.**15), ([False]*4, 2.**16)
    assert told == [fine]*(4 - size) + [bad]*size


# --- hooks ---

def through(grads, hook, seed=None):
    model = nn.Linear(grads.shape[1], 1, bias=False)
    ddp = DDP(model)
    own = () if seed is None else torch.Generator().manual_seed(seed + dist.get_rank())
    ddp.register_comm_hook((ddp.process_group, own) if own else ddp.process_group, hook)
    ddp(grads[dist.get_rank()][None]).sum().backward()
    return model.weight.grad[0]


def twenty_times(grads): return [through(grads, stochastic_hook, 10*i) for i in range(20)]


@pytest.fixture(scope='module')
def grads():
    gen = torch.Generator().manual_seed(1)
    g = torch.randn(3, 4000, generator=gen)*2.**torch.linspace(-30, 14, 4000)
    g[1, :3] = torch.tensor([torch.inf, torch.nan, 7e4])
    return g


def test_the_running_mean_is_that_of_the_half_gradients_and_equal_on_all_ranks(grads):
    told = run_ranks(through, 3, grads, running_mean_hook)
    want = running_mean(grads.half()).float()
    for got in told: assert torch.equal(got.nan_to_num(9e9, 8e9), want.nan_to_num(9e9, 8e9))
    assert not told[0][:3].isfinite().any() and told[0][3:].isfinite().all()


def test_no_mean_is_larger_than_the_largest_gradient(grads):
    big = grads[:, 3:].sign()*65000
    got = run_ranks(through, 3, big, running_mean_hook)[0]
    assert got.isfinite().all() and got.abs().max() <= big.half().abs().max()
    assert not (big.half().sum(0)/3).isfinite().all(), 'a sum would have done'


def test_stochastic_rounding_is_within_its_bound_without_bias_and_keeps_infinities(grads):
    runs = run_ranks(twenty_times, 3, grads)[0]
    assert not torch.stack(runs)[:, :3].isfinite().any()
    runs, g = torch.stack(runs)[:, 3:].double(), grads[:, 3:].double()
    step = (g.abs()*2.**-10).clamp(min=2.**-24)
    assert ((runs - g.mean(0)).abs() <= step.mean(0)).all()
    small = g.abs().amax(0) < 2.**-25
    assert small.sum() > 200 and (g[:, small].float().half() == 0).all()
    # the mean of 20 runs over all small ones, in units of its standard deviation (at most a step, times 1/2)
    off = (runs - g.mean(0))[:, small].mean().item()
    assert abs(off) < 4*2.**-25/(3*20*small.sum().item())**.5
    assert (runs[:, small] != 0).any() and not torch.equal(runs[0], runs[1])


def hooked(hook):
    model = net()
    ddp, step = DDP(model), MixedStep(DynamicScaler())
    if hook: ddp.register_comm_hook(None, hook)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    for i in range(10): step(ddp, *batch(i, dist.get_rank()), opt, F.cross_entropy)
    return weights(model)


def test_a_training_with_half_gradients_stays_near_the_one_without():
    (a, b), (plain, _) = run_ranks(hooked, 2, running_mean_hook), run_ranks(hooked, 2, None)
    assert torch.equal(a, b) and not torch.equal(a, plain)
    assert (a - plain).abs().max() < .01*(plain - weights(net())).abs().max()


# --- two groups of two: each collective is of the group that it serves ---

def half_mean(hook):
    "Gradients 1, 2 and 3, 4"
    model, own = nn.Linear(1, 1, bias=False), torch.Generator().manual_seed(dist.get_rank())
    ddp = DDP(model, process_group=dist.new_subgroups(2)[0])
    ddp.register_comm_hook(ddp.process_group if hook is running_mean_hook else (ddp.process_group, own), hook)
    ddp(torch.full((1, 1), dist.get_rank() + 1.)).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize('hook', [running_mean_hook, stochastic_hook])
def test_a_hook_averages_over_the_ranks_of_its_model(hook): assert run_ranks(half_mean, 4, hook) == [1.5, 1.5, 3.5, 3.5]


def with_a_generator_alone():
    ddp = DDP(nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(torch.Generator(), stochastic_hook)
    try: ddp(torch.ones(1, 1)).sum().backward()
    except Exception as e: return str(e)


def test_a_hook_that_cannot_know_its_group_says_so(): assert all('process_group' in e for e in run_ranks(with_a_generator_alone))


def gathered():
    model, group = net(), dist.new_subgroups(2)[0]
    with TensorCollector(model, every=1, kinds=['activation']) as collector:
        model(batch(0)[0])
        collector.step()
    frame = gather_frames(collector, group)
    return None if frame is None else sorted({*frame['rank']})


def test_frames_are_gathered_in_a_group(): assert run_ranks(gathered, 4) == [[0, 1], None, [2, 3], None]


def largest():
    eight = simulate_fp8(nn.Linear(4, 4), Recipe(CastConfig(), CastConfig(), CastConfig('e5m2'), history=1))
    ddp = DDP(eight, process_group=dist.new_subgroups(2)[0])
    ddp(torch.full((1, 4), 2.**dist.get_rank())).sum().backward()
    reduce_amax(ddp)
    return eight.fp8_casts['x'].history.item()


def test_a_delayed_scale_is_that_of_its_group(): assert run_ranks(largest, 4) == [2, 2, 8, 8]


def resumed(folder, steps):
    "Each rank's files are of these steps: the older one, and the one that was being written"
    model, group, rank = net(), dist.new_subgroups(2)[0], dist.get_rank()
    file, opt = folder/f'{rank}.ckpt', torch.optim.SGD(model.parameters(), lr=.1)
    for path, i in zip((file, folder/f'{rank}.ckpt.next'), steps[rank]): save_training_state(path, model, opt, train_iter=i, done=False)
    choose_common_step(file, group)
    return read_training_state(file)['extra']['train_iter']


def test_a_group_resumes_from_a_step_that_its_ranks_have(tmp_path):
    assert run_ranks(resumed, 4, tmp_path, [(4, 8), (4,), (8, 12), (8, 12)]) == [4, 4, 12, 12]


def fitted(folder):
    "The second group trains twice as long"
    x, y = batch(0, dist.get_rank())
    model = DDP(net(), process_group=dist.new_subgroups(2)[0])
    learn = Learner(tensor_dls((x, y), (x, y), 4), model, loss_func=F.cross_entropy, cbs=CheckpointCB(folder/'run.ckpt', 1))
    quiet_fit(learn, 1 + dist.get_rank()//2)
    return learn.train_iter


def test_no_group_waits_for_another_ones_checkpoint(tmp_path): assert run_ranks(fitted, 4, tmp_path, timeout=20) == [2, 2, 4, 4]


# --- uneven data ---

def uneven(way):
    "Rank 1 has six batches, rank 0 four; how many steps did the model take?"
    model, n = net(), 4 + 2*dist.get_rank()
    group = dist.new_subgroups(1)[0] if way == 'no sum' else None
    scaler, ddp = GradScaler(skip_nonfinite_loss=False, group=group), DDP(model)
    opt, steps = torch.optim.SGD(model.parameters(), lr=.1), 0
    try:
        with ddp.join(throw_on_early_termination=way == 'all end'):
            for i in range(n):
                x, y = batch(i, dist.get_rank())
                scaler.scale(F.cross_entropy(ddp(x), y)).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                steps += 1
    except RuntimeError as e:
        if 'exhausted' not in str(e): raise
    return steps, weights(model)


@pytest.mark.parametrize('way, steps', [('all end', [4, 4]), ('no sum', [4, 6])])
def test_uneven_data(way, steps):
    told = run_ranks(uneven, 2, way)
    assert [n for n, _ in told] == steps
    assert torch.equal(told[0][1], told[1][1])


def equal_gradients():
    "After DDP's average nobody has to be told: a scaler that does not hold, and is alone"
    told = []
    for size in (1, 2):
        model = net()
        scaler, ddp = GradScaler(skip_nonfinite_loss=False, group=dist.new_subgroups(size)[0]), DDP(model)
        opt = torch.optim.Adam(model.parameters())
        for i in range(6):
            x, y = batch(i, dist.get_rank())
            if i == 3 and dist.get_rank() == 1: x[0] = torch.nan
            scaler.scale(F.cross_entropy(ddp(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        told.append((scaler.get_scale(), weights(model)))
    return told


def test_no_sum_is_needed_where_gradients_are_averaged():
    for (alone, w), (both, v) in run_ranks(equal_gradients): assert alone == both == 2.**15 and torch.equal(w, v)


# --- where one rank has less to do than the others: a group's timeout makes a hang an error ---

def joined(host):
    "Rank 0 has two batches more, within torch's Join; what ended each rank"
    model, scaler = DDP(net()), DynamicScaler()
    opt, step = torch.optim.SGD(model.parameters(), lr=.1), MixedStep(scaler)
    known = dict(ddp=model, compiled=torch.compile(model, backend='eager'), bare=model.module).get(host)
    gs = GradScaler(model=known)
    with Join([model]):
        for i in range(4 - 2*dist.get_rank()):
            x, y = batch(i, dist.get_rank())
            try:
                if host == 'step': step(model, x, y, opt, F.cross_entropy)
                else:
                    gs.scale(F.cross_entropy(model(x), y)).backward()
                    gs.step(opt)
                    gs.update()
            except Exception as e: return i, type(e).__name__, 'Join' in str(e)


@pytest.mark.parametrize('host', ['unknown', 'ddp', 'compiled', 'bare', 'step'])
def test_join_is_refused_on_all_ranks(host): assert run_ranks(joined, 2, host, timeout=10) == [(0, 'ValueError', True)]*2


def without_gradients(policy, n_opts, fused, unscales):
    "Rank 1 uses the second layer, or any, in batches 0 and 3 alone; rank 0 overflows in batch 2"
    parts, gs = [nn.Linear(4, 3), nn.Linear(3, 3)], GradScaler(get_policy(policy))
    opts = [torch.optim.Adam(m.parameters(), lr=.01, fused=fused) for m in parts][2 - n_opts:]
    seen = []
    for i in range(4):
        x, y = batch(i, dist.get_rank())
        unused = dist.get_rank() == 1 and i in (1, 2)
        h = parts[0](x)
        gs.scale(F.cross_entropy(h if unused else parts[1](h), y)).backward()
        if dist.get_rank() == 0 and i == 2: parts[1].weight.grad[0, 0] = torch.inf
        if unscales: [gs.unscale_(o) for o in opts]
        for o in opts: gs.step(o)
        gs.update()
        for m in parts: m.zero_grad()
        seen.append((gs.get_scale(), bool(gs.last_outcome.found_inf)))
    return seen


@pytest.mark.parametrize('unscales', [False, True])
@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('n_opts', [1, 2])
@pytest.mark.parametrize('policy', ['dynamic', 'logmax'])
def test_nobody_waits_for_an_optimizer_without_gradients(policy, n_opts, fused, unscales):
    first, second = run_ranks(without_gradients, 2, policy, n_opts, fused, unscales, timeout=10)
    assert first == second and [bad for _, bad in first] == [False, False, True, False]


# --- faults ---

KILLED = '''
import os, signal, sys, warnings
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn.functional as F
from fastai.basics import Callback
from mpcourse.callback import quiet_fit, tensor_dls, Learner
from mpcourse.checkpoint import CheckpointCB
from mpcourse.dynamic import DynamicScaler
warnings.simplefilter('ignore')
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group('gloo', f'file://{folder}/meet', timedelta(seconds=20), rank=rank, world_size=2)
class Die(Callback):
    order = 200
    def after_batch(self):
        if self.training and rank == 1 and self.train_iter == 8: os.kill(os.getpid(), signal.SIGKILL)
gen = torch.Generator().manual_seed(rank)
x, y = torch.randn(160, 4, generator=gen), torch.randint(0, 3, (160,), generator=gen)
torch.manual_seed(0)
learn = Learner(tensor_dls((x, y), (x[:16], y[:16]), 16), torch.nn.Linear(4, 3), loss_func=F.cross_entropy,
                cbs=[CheckpointCB(f'{folder}/run.ckpt', 5), Die()]).to_mixed(DynamicScaler())
quiet_fit(learn, 2)
'''


@pytest.mark.sweep(0)
def test_a_rank_is_killed_and_the_other_ends_with_an_error(tmp_path):
    start = time.monotonic()
    env = os.environ | dict(OMP_NUM_THREADS='1')
    procs = [subprocess.Popen([sys.executable, '-c', KILLED, str(r), str(tmp_path)], env=env, text=True, stderr=subprocess.PIPE)
             for r in range(2)]
    errs = [p.communicate(timeout=200)[1] for p in procs]
    assert procs[1].returncode == -signal.SIGKILL and procs[0].returncode not in (0, -signal.SIGKILL)
    assert 'Error' in errs[0], errs[0][-1000:]
    files = sorted(p.name for p in tmp_path.iterdir())
    assert {'run.rank0.ckpt', 'run.rank1.ckpt'} <= set(files), (files, time.monotonic() - start)
    for r in range(2): torch.load(tmp_path/f'run.rank{r}.ckpt', weights_only=True)


def dies():
    if dist.get_rank(): os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.sweep(0)
def test_run_ranks_ends_when_a_process_does():
    with pytest.raises(Exception, match='terminated'): run_ranks(dies)
    assert run_ranks(in_groups, 4, 1)[0][1] == 2.**16, 'and works again'


@pytest.mark.sweep(0)
@pytest.mark.chapters('22_ranks')
def test_torchrun_runs_the_chapters_script(tmp_path):
    script, = [s for _, _, s in code_cells(ROOT/'nbs'/'22_ranks.ipynb') if s.startswith('script = ')]
    file = tmp_path/'train.py'
    file.write_text(ast.literal_eval(script.removeprefix('script = ')))
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2', str(file)]
    done = subprocess.run(launch, capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count('skipped') == 1 and 'Step 40' in done.stdout and done.stdout.strip().endswith('scale 4096')


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='fastai distributes over GPUs alone')
def test_distrib_ctx(tmp_path):
    script = tmp_path/'train.py'
    script.write_text('''
import torch, torch.nn.functional as F
from fastai.distributed import *
from mpcourse.callback import Learner, quiet_fit, tensor_dls
from mpcourse.dynamic import DynamicScaler
x, y = torch.randn(160, 4), torch.randint(0, 3, (160,))
learn = Learner(tensor_dls((x, y), (x[:16], y[:16]), 16), torch.nn.Linear(4, 3), loss_func=F.cross_entropy).to_mixed(DynamicScaler())
with learn.distrib_ctx(in_notebook=False): quiet_fit(learn, 1)
w = torch.cat([p.detach().flatten() for p in learn.model.parameters()]).cuda()
both = [torch.empty_like(w) for _ in range(2)]
torch.distributed.all_gather(both, w)
assert torch.equal(*both) and w.isfinite().all()
''')
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2', str(script)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
