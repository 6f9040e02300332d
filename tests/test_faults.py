"What really happens: kills, a full disk, Ctrl-C at any moment, two trainings at once"
import json, os, random, shutil, signal, subprocess, sys, threading, time

import pytest, torch, torch.nn.functional as F
from fastai.basics import Learner
from torch import nn

from mpcourse.callback import autocast_depth, quiet_fit, tensor_dls
from mpcourse.checkpoint import load_training_state, save_training_state
from mpcourse.dynamic import DynamicScaler
from mpcourse.monitor import read_jsonl
from mpcourse.step import MixedStep


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))


def data(n=64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=gen), torch.randint(0, 3, (n,), generator=gen)


# --- a process is killed while it writes what it measured ---

COLLECTS = '''
import sys, torch, torch.nn.functional as F
from torch import nn
from mpcourse.dynamic import DynamicScaler
from mpcourse.monitor import TensorCollector
from mpcourse.step import MixedStep
torch.set_num_threads(1)
model, step = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), MixedStep(DynamicScaler())
x, y = torch.randn(64, 8), torch.randint(3, (64,))
opt = torch.optim.Adam(model.parameters())
with TensorCollector(model, every=1, opt=opt, scaler=step.scaler, writers=[sys.argv[1]]) as c:
    for i in range(10**6):
        step(model, x, y, opt, F.cross_entropy)
        c.step()
        if i == 0: print('started', flush=True)
'''


@pytest.mark.sweep(0)
def test_a_kill_amid_collections_leaves_whole_rows(tmp_path):
    env = os.environ | dict(OMP_NUM_THREADS='1')
    for i in range(3):
        path = tmp_path/f'{i}.jsonl'
        p = subprocess.Popen([sys.executable, '-c', COLLECTS, str(path)], env=env, stdout=subprocess.PIPE, text=True)
        assert p.stdout.readline() == 'started\n'
        time.sleep(random.Random(i).uniform(.2, .6))
        p.kill()
        assert p.wait() == -signal.SIGKILL
        rows = read_jsonl(path)
        steps = sorted({r['step'] for r in (rows.to_dict('records') if hasattr(rows, 'to_dict') else rows)})
        assert steps == list(range(len(steps))) and len(steps) > 1


# --- a full disk ---

@pytest.fixture
def small_disk(tmp_path):
    "A file system of 100 kB"
    folder = tmp_path/'disk'
    folder.mkdir()
    if not shutil.which('mount') or subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=100k', 'tmpfs', folder], capture_output=True).returncode:
        pytest.skip('no file system can be mounted here (test_checkpoint.py limits the size of files instead)')
    yield folder
    subprocess.run(['umount', folder], check=True)


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(small_disk):
    model, scaler = net(), DynamicScaler()
    opt, file = torch.optim.Adam(model.parameters()), small_disk/'run.ckpt'
    save_training_state(file, model, opt, scaler, step=1)
    was, left = file.read_bytes(), shutil.disk_usage(small_disk).free
    (small_disk/'others').write_bytes(b'x'*(left - 4096))
    with pytest.raises(OSError): save_training_state(file, model, opt, scaler, step=2)
    assert file.read_bytes() == was and sorted(p.name for p in small_disk.iterdir()) == ['others', 'run.ckpt']
    assert load_training_state(file, model, opt, scaler) == dict(step=1)


# --- Ctrl-C at any moment ---

def interrupt(*_): raise KeyboardInterrupt


@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='no timers here')
def test_ctrl_c_at_a_hundred_moments_leaves_an_fp32_model_that_trains():
    x, y = data(256)
    dls = tensor_dls((x, y), (x[:32], y[:32]), 32)
    def learner(): return Learner(dls, net(), loss_func=F.cross_entropy, lr=.01).to_mixed(DynamicScaler())
    quiet_fit(learner(), 1)
    def timed(learn, start):
        quiet_fit(learn, 2)
        return time.perf_counter() - start
    whole, draw, stopped = timed(learner(), time.perf_counter()), random.Random(0), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(100):
            learn = learner()
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in learn.model.modules()]
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(.02, 1.)*whole)
                whole = timed(learn, time.perf_counter())   # it was not stopped: the machine is faster now
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt: stopped += 1
            assert all(p.dtype == torch.float32 and p.isfinite().all() for p in learn.model.parameters())
            assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in learn.model.modules()] == hooks
            assert type(learn.model[0]).forward is nn.Linear.forward and 'forward' not in vars(learn.model[0])
            assert torch.is_grad_enabled() and autocast_depth() == 0
            with torch.no_grad(): assert learn.model(x).dtype == torch.float32
            if i % 20 == 0: quiet_fit(learn, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 50


# --- two trainings in one process ---

def steps_of(seed, log, wait=None):
    model, step, (x, y) = net(seed), MixedStep(DynamicScaler(2.**10*2**seed, growth_interval=5)), data(64, seed)
    opt = torch.optim.Adam(model.parameters(), lr=.01)
    def steps():
        for i in range(30):
            if wait: wait.wait()
            out = step(model, x*(1e6 if i == 7 + seed else 1), y, opt, F.cross_entropy)
            log.append((out['loss'].item(), out['scale'].item()))
            yield
    return steps()      # the net is there before the first step: torch's generator is one for all threads


def test_two_trainings_in_turns_are_those_alone():
    alone, turns = ([], []), ([], [])
    for seed in (0, 1):
        for _ in steps_of(seed, alone[seed]): pass
    for _ in zip(steps_of(0, turns[0]), steps_of(1, turns[1])): pass
    assert [len(l) for l in turns] == [30, 30] and json.dumps(turns) == json.dumps(alone)


def test_two_trainings_in_two_threads_are_those_alone():
    alone, both, together = ([], []), ([], []), threading.Barrier(2, timeout=60)
    for seed in (0, 1):
        for _ in steps_of(seed, alone[seed]): pass
    def work(steps):
        torch.set_num_threads(1)
        for _ in steps: pass
    threads = [threading.Thread(target=work, args=(steps_of(seed, both[seed], together),)) for seed in (0, 1)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert json.dumps(both) == json.dumps(alone)
