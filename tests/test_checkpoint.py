"Trainings that end at any moment: what is on the disk then, what goes on from it, and what is left in the model"
import os, resource, signal, subprocess, sys, time  # noqa: F401, the code of ranks uses them all
from pathlib import Path

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import BCEWithLogitsLossFlat, CrossEntropyLossFlat, Learner, MSELossFlat
from fastai.losses import FocalLossFlat, LabelSmoothingCrossEntropyFlat

from mpcourse.als import ALSScaler
from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.checkpoint import CheckpointCB, save_training_state
from mpcourse.scaler1 import StaticScaler
from test_callback import At, Hooking, at_iter, ctrl_c, fit, hooks_in, learner, outcome, same, seed_all, whole

pytestmark = pytest.mark.library
LOSSES = [CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat, FocalLossFlat, MSELossFlat, BCEWithLogitsLossFlat]


def classes(path=None, every=5, loss=CrossEntropyLossFlat, mixed=True, seed=0, rank=0, wrap=lambda m: m, cbs=()):
    "A Learner with dropout and one of fastai's losses; each rank has data of its own; six batches an epoch"
    seed_all(seed)
    net = wrap(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3)))
    seed_all(seed + 100*rank)                                           # its own dropout and its own order
    g = torch.Generator().manual_seed(1 + rank)
    x, y = torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g)
    if loss in (MSELossFlat, BCEWithLogitsLossFlat): y = F.one_hot(y, 3).float()
    cbs = [*cbs, *([CheckpointCB(path, every=every)] if path else [])]
    learn = Learner(tensor_dls((x, y), (x, y), 8), net, loss_func=loss(), lr=.01, wd=.1, cbs=cbs)
    return learn.to_mixed(StaticScaler(2.**8)) if mixed else learn


def kill(event, at): return At(event, lambda l: os.kill(os.getpid(), signal.SIGKILL), order=90, when=at_iter(at))


# --- what fastai's losses leave in the recorder ---

KILL = '''
import sys; sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
from test_checkpoint import *
quiet_fit(classes({path!r}, mixed={mixed}, cbs=[kill('after_batch', 20)]), 5)
'''


@pytest.mark.parametrize('mixed', [True, False])
def test_with_fastais_own_loss_killed_at_step_20_and_resumed_bit_for_bit(mixed, tmp_path):
    path = tmp_path/'run.pt'
    code = KILL.format(tests=str(Path(__file__).parent), path=str(path), mixed=mixed)
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=200)
    assert p.returncode == -signal.SIGKILL and path.exists(), p.stderr[-2000:]
    want, steps = outcome(quiet_fit(classes(mixed=mixed), 5)), []
    learn = classes(path, mixed=mixed, seed=3, cbs=[At('after_pred', lambda l: steps.append(l.train_iter) if l.training else None)])
    got = outcome(quiet_fit(learn, 5))
    assert steps == list(range(20, 30)) and not path.exists()
    assert all(same(got[k], want[k]) for k in want), [k for k in want if not same(got[k], want[k])]


@pytest.mark.parametrize('loss', LOSSES)
def test_every_loss_of_fastais_leaves_a_file_that_can_be_read(loss, tmp_path):
    path = tmp_path/'run.pt'
    with pytest.raises(KeyboardInterrupt): quiet_fit(classes(path, loss=loss, cbs=[At('after_batch', ctrl_c, order=90, when=at_iter(7))]), 2)
    assert type(torch.load(path, weights_only=True)['extra']['log']['losses'][0]) is torch.Tensor
    assert same(whole(quiet_fit(classes(path, loss=loss, seed=3), 2)), whole(quiet_fit(classes(loss=loss), 2)))


class Kept(torch.Tensor): "A subclass that weights_only does not know"


def test_tensor_subclasses_are_written_as_tensors(tmp_path):
    net = nn.Linear(2, 2)
    net.register_buffer('b', torch.ones(3).as_subclass(Kept))
    path = save_training_state(tmp_path/'a.pt', net, torch.optim.SGD(net.parameters(), lr=.1), mine=[torch.ones(4).as_subclass(Kept)[1:]])
    doc = torch.load(path, weights_only=True)
    assert type(doc['model']['b']) is type(doc['extra']['mine'][0]) is torch.Tensor


def test_what_cannot_be_read_back_is_refused_when_it_is_saved_and_the_old_file_stays(tmp_path, monkeypatch):
    import mpcourse.checkpoint as M
    net, path = nn.Linear(2, 2), tmp_path/'a.pt'
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    bits = save_training_state(path, net, opt, step=1).read_bytes()
    monkeypatch.setattr(M, '_plain', lambda x, where: x)                # as if a kind of value had been overlooked
    with pytest.raises(ValueError, match='a.pt'): save_training_state(path, net, opt, mine=torch.ones(2).as_subclass(Kept))
    assert path.read_bytes() == bits and os.listdir(tmp_path) == ['a.pt']


# --- several processes ---

RANKS = '''
from test_checkpoint import *
from torch.nn.parallel import DistributedDataParallel as DDP
path = f'{folder}/run.pt'
'''
KILLED = RANKS + '''
def die(l):
    "Both are here, then both are gone: neither waits for the other"
    Path(folder, f'here{rank}').touch()
    while not all(Path(folder, f'here{r}').exists() for r in range(2)): time.sleep(.01)
    os.kill(os.getpid(), signal.SIGKILL)
quiet_fit(classes(path, rank=rank, wrap=DDP, cbs=[At('before_backward', die, order=90, when=at_iter(20))]), 5)
'''
RESUMED = RANKS + '''
steps = []
seen = At('after_pred', lambda l: steps.append(l.train_iter) if l.training else None)
got = outcome(quiet_fit(classes(path, rank=rank, seed=3, wrap=DDP, cbs=[seen]), 5))
mine = os.path.exists(f'{folder}/run.rank{rank}.pt')
want = outcome(quiet_fit(classes(rank=rank, wrap=DDP), 5))
torch.save((steps, mine, got, want), f'{folder}/{rank}.pt')
'''


@pytest.mark.parametrize('between', [False, True], ids=['killed', 'killed between the renames'])
def test_two_ranks_killed_at_step_20_resume_bit_for_bit(between, ranks, tmp_path):
    ranks(KILLED, ends=-signal.SIGKILL)
    assert sorted(p.name for p in tmp_path.glob('*run*')) == ['run.rank0.pt', 'run.rank1.pt']
    if between:                                                         # rank 0 has its new file, rank 1 not yet
        new = tmp_path/'run.rank1.pt'
        new.rename(tmp_path/'run.rank1.pt.next')
    (a, b) = ranks(RESUMED)
    for steps, mine, got, want in (a, b):
        assert steps == list(range(20, 30)) and not mine
        assert all(same(got[k], want[k]) for k in want), [k for k in want if not same(got[k], want[k])]
    assert same(a[2]['w'], b[2]['w']) and not same(a[2]['losses'], b[2]['losses'])      # one model, data of each rank's own
    assert not list(tmp_path.glob('*run*'))


APART = RANKS + '''
cb = classes(path, rank=rank, wrap=DDP)
if rank == 0: os.remove(f'{folder}/run.rank0.pt')
dist.barrier()
try: quiet_fit(cb, 5); said = ''
except ValueError as e: said = str(e)
torch.save((said, os.path.exists(f'{folder}/run.rank1.pt')), f'{folder}/{rank}.pt')
'''


def test_ranks_whose_files_are_of_different_steps_all_refuse(ranks):
    ranks(KILLED, ends=-signal.SIGKILL)
    for said, there in ranks(APART): assert 'run.pt' in said and '20' in said and there


def test_one_process_keeps_the_plain_name(tmp_path):
    cb = CheckpointCB(tmp_path/'run.pt')
    assert cb.file == tmp_path/'run.pt'


# --- disks and folders ---

def folder_of_none(tmp): return tmp/'nowhere'/'run.pt'
def in_a_file(tmp): (tmp/'file').write_text('x'); return tmp/'file'/'run.pt'
def a_folder(tmp): (tmp/'run.pt').mkdir(); return tmp/'run.pt'
def read_only(tmp): return Path('/proc/run.pt')


@pytest.mark.parametrize('make', [folder_of_none, in_a_file, a_folder, read_only])
def test_a_bad_folder_is_found_before_the_first_step(make, tmp_path):
    path, seen = make(tmp_path), []
    learn = classes(path, cbs=[At('after_pred', seen.append)])
    with pytest.raises((ValueError, OSError)) as e: quiet_fit(learn, 1)
    assert str(path) in str(e.value) and len(str(e.value).split()) > 6 and not seen


def test_a_full_disk_says_so_and_keeps_the_old_file(tmp_path):
    net, path = nn.Linear(200, 200), tmp_path/'a.pt'
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    bits = save_training_state(path, net, opt).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))           # no file may grow beyond: what a full disk does
    try:
        with pytest.raises(OSError) as e: save_training_state(path, net, opt)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(path) in str(e.value) and 'free' in str(e.value)
    assert path.read_bytes() == bits and os.listdir(tmp_path) == ['a.pt']


def test_a_killed_writers_temporary_file_is_swept(tmp_path, monkeypatch):
    "Killed while it writes, a process leaves its temporary file; the next fit, and the next save, take it away"
    path = tmp_path/'run.pt'
    with monkeypatch.context() as m:
        m.setattr(os, 'replace', lambda *a: (_ for _ in ()).throw(SystemExit()))
        m.setattr(Path, 'unlink', lambda *a, **k: None)
        with pytest.raises(SystemExit): quiet_fit(classes(path), 1)
    assert len(os.listdir(tmp_path)) == 1 and not path.exists()
    seen = []
    learn = classes(path, every=100, cbs=[At('after_pred', lambda l: seen.extend(os.listdir(tmp_path)), when=at_iter(1))])
    quiet_fit(learn, 1)
    assert seen == [] and os.listdir(tmp_path) == []


# --- hooks ---

def boom(l): raise RuntimeError('stop')


@pytest.mark.parametrize('exit', [boom, ctrl_c], ids=lambda f: f.__name__)
@pytest.mark.parametrize('order', [5, 15])
@pytest.mark.parametrize('event', ['before_epoch', 'before_train', 'before_batch', 'after_batch', 'after_train',
                                   'before_validate', 'after_validate', 'after_epoch', 'after_fit'])
@pytest.mark.parametrize('scaler', [lambda: Hooking(2.**10), lambda: ALSScaler()], ids=['hooking', 'als'])
def test_hooks_are_gone_after_any_exit(scaler, event, order, exit):
    when = lambda l: l.train_iter >= 3
    learn = learner(mixed=scaler(), cbs=At(event, exit, order, when))
    during = []
    learn.add_cb(At('after_pred', lambda l: during.append(hooks_in(l.model))))
    with pytest.raises((RuntimeError, KeyboardInterrupt)): fit(learn, 3)
    assert max(during) > 0 and hooks_in(learn.model) == 0 and learn.mixed_precision_cb._hooks is None
