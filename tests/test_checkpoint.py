"Trainings that end at any moment: what is on the disk then, what goes on from it; kills with SIGKILL are in promises/test_3_resume.py"
import os, random, resource, signal, subprocess, sys, time, warnings, zipfile  # noqa: F401, the code of ranks uses them all
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest, torch, torch.nn as nn, torch.nn.functional as F
from fastai.basics import Adam, BCEWithLogitsLossFlat, Callback, CancelTrainException, CrossEntropyLossFlat, L, Learner, MSELossFlat
from fastai.callback.all import EarlyStoppingCallback, GradientAccumulation, MixUp, SaveModelCallback
from fastai.losses import FocalLossFlat, LabelSmoothingCrossEntropyFlat
from fastai.metrics import accuracy
from fastai.torch_core import TensorBase

from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse import checkpoint
from mpcourse.checkpoint import CheckpointCB, load_training_state, read_training_state, save_training_state, atomic_save
from mpcourse.dynamic import DynamicScaler
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.learner import MonitorCB
from test_callback import At, Climber, assert_clean, at_iter, ctrl_c, fit, inf_grad, learner, same, seed_all, tree, whole

pytestmark = pytest.mark.library
LOSSES = [CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat, FocalLossFlat, MSELossFlat, BCEWithLogitsLossFlat]


def outcome(learn):
    rec, cb = learn.recorder, getattr(learn, 'mixed_precision_cb', None)
    return dict(whole(learn), buffers=tree(dict(learn.model.named_buffers())), losses=tree(list(rec.losses)), lrs=list(map(float, rec.lrs)),
                values=[list(map(float, v)) for v in rec.values], scaler=None if cb is None else tree(cb.scaler.state_dict()), iters=list(rec.iters),
                random=(random.random(), np.random.rand(), torch.rand(()).item()), train_iter=learn.train_iter,
                steps=cb and [cb.history.scales.tolist(), cb.history.skipped.tolist(), getattr(cb.last_outcome, 'number', None)])


def new_life(): checkpoint._fits.clear()             # what a new process knows of its paths


def done(path): return read_training_state(path)['extra']['done']
def differ(a, b): return [k for k in b if not same(a[k], b[k])]
def stop(event, at): return At(event, ctrl_c, order=90, when=lambda l: l.training and l.train_iter == at)


# --- stopped and resumed in one process ---

RUNS = dict(                                            # four batches an epoch, three epochs; with accumulation eight
    every1=dict(every=1, stops=[('after_batch', 6)], method='fit_one_cycle', opt='adam'),
    fused=dict(every=3, stops=[('after_step', 7)], opt='fused', method='fit_one_cycle'),
    wrapped=dict(every=5, stops=[('after_pred', 9)], opt='adamw', method='fit_one_cycle'),
    boundary=dict(every=4, stops=[('after_batch', 9)], opt='adam', method='fit_one_cycle'),
    early=dict(every=5, stops=[('after_batch', 2)]),                        # before the first checkpoint: from the start
    twice=dict(every=2, stops=[('after_batch', 3), ('after_backward', 6), ('before_step', 9)], opt='adam', method='fit_one_cycle'),
    accumulate=dict(every=1, stops=[('after_batch', 9)], opt='adam', bs=4, acc=8),
    accumulate3=dict(every=2, stops=[('before_step', 14)], bs=4, acc=12),
    climber=dict(every=3, stops=[('after_batch', 7)], scaler='climber', opt='fused'),
    overflow=dict(every=2, stops=[('after_batch', 7)], opt='adam', skip=2),
    fp32=dict(every=2, stops=[('after_batch', 7)], opt='adam', scaler=None),
    metric=dict(every=2, stops=[('after_batch', 7)], metrics=accuracy, opt='adam'),
    two_inputs=dict(every=2, stops=[('after_batch', 7)], opt='adam', inputs=2, outputs=2))


def prepare(run, path, cb=None, seed=0):
    "The Learner of a run, with a checkpoint, and perhaps with its end"
    r = dict(opt='sgd', bs=8, inputs=1, outputs=1, scaler='static', skip=None, acc=None, metrics=None) | RUNS[run]
    mixed = dict(static=2.**8, climber=Climber(1.)).get(r['scaler'])
    learn = learner(r['opt'], r['inputs'], r['outputs'], mixed=mixed, drop=.3, bs=r['bs'], seed=seed, lr=.02, metrics=r['metrics'])
    if r['acc']: learn.add_cb(GradientAccumulation(r['acc']))
    if r['skip'] is not None: learn.add_cb(At('after_backward', inf_grad, when=at_iter(r['skip'])))
    if path is not None: learn.add_cb(CheckpointCB(path, every=r['every']))
    return learn if cb is None else learn.add_cb(cb)


def train(learn, run): return fit(learn, 3, method=RUNS[run].get('method', 'fit'))


@pytest.mark.parametrize('run', RUNS)
def test_stopped_and_resumed_is_the_uninterrupted_run_bit_for_bit(run, tmp_path):
    "Other weights and other random numbers, and the same `fit`"
    path, steps = tmp_path/'run.pt', []
    want = outcome(train(prepare(run, None), run))
    for i,end in enumerate(RUNS[run]['stops']):
        with pytest.raises(KeyboardInterrupt): train(prepare(run, path, stop(*end), seed=i), run)
    assert path.exists() == (run != 'early')
    learn = prepare(run, path, At('after_pred', lambda l: steps.append((l.train_iter, l.iter)) if l.training else None), 5 if run != 'early' else 0)
    got, n = outcome(train(learn, run)), len(learn.dls.train)
    assert steps == [(i, i%n) for i in range(steps[0][0], want['train_iter'])] and (steps[0][0] > 0) == (run != 'early')
    assert not differ(got, want)
    assert {*os.listdir(tmp_path)} == {path.name, 'run.pt.lock'} and done(path)
    assert_clean(learn)


def interrupted(file, at=5, every=2, n=3, opt='adam', **kw):
    "A Learner whose fit ended with Ctrl-C, and a checkpoint"
    learn = learner(opt, cbs=[CheckpointCB(file, every=every), stop('after_batch', at)], **kw)
    with pytest.raises(KeyboardInterrupt): fit(learn, n)
    return learn.remove_cb(At)


def test_a_checkpoint_every_so_many_steps(tmp_path):
    seen, path = [], tmp_path/'c.pt'
    learn = learner(cbs=[CheckpointCB(path, every=3), At('after_batch', lambda l: seen.append(path.exists() and path.stat().st_mtime_ns) if l.training else None, order=90)])
    fit(learn, 3)
    assert [bool(a) and a != b for b,a in zip([False] + seen, seen)] == [(i + 1) % 3 == 0 for i in range(12)]
    assert done(path)


@pytest.mark.parametrize('change', ['epochs', 'bs', 'data', 'lr', 'opt', 'wd', 'groups', 'model', 'scaler', 'no scaler'])
def test_other_arguments_are_refused_and_nothing_is_changed(change, tmp_path):
    path = tmp_path/'c.pt'
    interrupted(path)
    bits = path.read_bytes()
    kw = dict(bs=dict(bs=4), data=dict(n=40, bs=10), opt=dict(opt='sgd'), scaler=dict(mixed=Climber(1.)), wd=dict(wd=.3)).get(change, {})
    if change == 'no scaler': kw = dict(mixed=None)
    learn = learner(**(dict(opt='adam') | kw), seed=3, cbs=CheckpointCB(path, every=2))
    if change == 'groups': learn.splitter = lambda m: [[p for p in m.parameters() if p.requires_grad]]
    if change == 'model': learn.model.norm = nn.LayerNorm([8], bias=False)
    learn.create_opt()
    was, rng = whole(learn), (random.getstate(), torch.get_rng_state())
    with pytest.raises(ValueError):
        fit(learn, 2 if change == 'epochs' else 3, lr=.01 if change == 'lr' else None)
    now = whole(learn)
    assert same(now['w'], was['w']) and same(now['opt']['state'], was['opt']['state'])
    assert random.getstate() == rng[0] and torch.equal(torch.get_rng_state(), rng[1])
    assert path.read_bytes() == bits


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path/'c.pt'
    learn = interrupted(path)
    for write in (lambda: save_training_state(path, learn.model, learn.opt, learn.mixed_precision_cb.scaler, step=7),
                  lambda: torch.save(learn.model.state_dict(), path), lambda: path.write_text('hello')):
        write()
        bits, again = path.read_bytes(), learner('adam', seed=3, cbs=CheckpointCB(path, every=2))
        was = tree(dict(again.model.named_parameters()))
        with pytest.raises(ValueError, match='c.pt'): fit(again, 3)
        assert same(tree(dict(again.model.named_parameters())), was) and path.read_bytes() == bits


def test_validating_and_lr_find_leave_a_checkpoint_alone(tmp_path):
    "After Ctrl-C people look at their model: it must not jump back to the checkpoint, nor the checkpoint go"
    path = tmp_path/'c.pt'
    learn = interrupted(path, path=tmp_path)
    was, bits = whole(learn), path.read_bytes()
    with learn.no_bar(), learn.no_logging():
        learn.validate(), learn.get_preds()
        assert same(whole(learn), was) and path.read_bytes() == bits
        learn.lr_find(num_it=6, show_plot=False, suggest_funcs=())
    assert same(whole(learn)['w'], was['w']) and path.read_bytes() == bits


def test_validating_inside_a_fit_does_not_disturb_it(tmp_path):
    path, seen = tmp_path/'c.pt', []
    def look(l):
        if l.lock.locked(): return
        l.validate(); seen.append(path.exists())
        l.get_preds(); seen.append(path.exists())
    learn = learner('adam', cbs=[CheckpointCB(path, every=1), At('after_epoch', look, order=85)])
    plain = learner('adam', cbs=[At('after_epoch', look, order=85)])
    assert same(whole(fit(learn, 2))['w'], whole(fit(plain, 2))['w'])
    assert seen[:4] == [True]*4 and done(path)


def test_resumed_with_a_model_saver(tmp_path):
    "Passing over complete epochs must not upset those who watch the epochs; the best loss so far is callback_state"
    path, best = tmp_path/'c.pt', []
    def make(*cbs, seed=0): return learner('adam', cbs=[SaveModelCallback(), CheckpointCB(path, every=2), *cbs], path=tmp_path, seed=seed)
    def look(l): best.append(l.save_model.best)
    want = whole(fit(make(At('after_epoch', look, 70)), 3))
    with pytest.raises(KeyboardInterrupt): fit(make(stop('after_batch', 9)), 3)
    assert path.exists()
    assert same(whole(fit(make(At('after_epoch', look, 70), seed=4), 3))['w'], want['w'])
    assert best[3:] == best[1:3]


class Sometimes(nn.Module):
    "A layer that is used in the first step only: afterwards its gradient is zero, not None, and weight decay moves it"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(6, 3), nn.Linear(6, 3), 0
    def forward(self, x):
        self.n += self.training
        return self.a(x) + (self.b(x) if self.n == 1 else 0)


def test_resumed_where_a_layer_had_its_gradient_long_ago(tmp_path):
    def make(*cbs, seed=0):
        seed_all(seed)
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g)
        return Learner(tensor_dls((x, y), (x, y), 8), Sometimes(), loss_func=F.cross_entropy, opt_func=Adam, lr=.1, wd=.1, cbs=cbs).to_mixed(StaticScaler())
    want, path = whole(fit(make(), 2)), tmp_path/'c.pt'
    with pytest.raises(KeyboardInterrupt): fit(make(CheckpointCB(path, every=2), stop('after_batch', 4)), 2)
    learn = make(CheckpointCB(path, every=2), seed=2)
    learn.model.n = 9
    assert same(whole(fit(learn, 2)), want)


# --- what may stand in a file ---

def classes(path=None, every=5, loss=CrossEntropyLossFlat, seed=0, rank=0, wrap=lambda m: m, cbs=()):
    "A Learner with dropout and one of fastai's losses; each rank has data of its own; six batches an epoch"
    seed_all(seed)
    net = wrap(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(.3), nn.Linear(16, 3)))
    seed_all(seed + 100*rank)                                           # its own dropout and its own order
    g = torch.Generator().manual_seed(1 + rank)
    x, y = torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g)
    if loss in (MSELossFlat, BCEWithLogitsLossFlat): y = F.one_hot(y, 3).float()
    cbs = [*cbs, *([CheckpointCB(path, every=every)] if path else [])]
    return Learner(tensor_dls((x, y), (x, y), 8), net, loss_func=loss(), lr=.01, wd=.1, cbs=cbs).to_mixed(StaticScaler(2.**8))


@pytest.mark.parametrize('loss', LOSSES)
def test_every_loss_of_fastais_leaves_a_file_that_can_be_read(loss, tmp_path):
    path = tmp_path/'run.pt'
    with pytest.raises(KeyboardInterrupt): quiet_fit(classes(path, loss=loss, cbs=[stop('after_batch', 7)]), 2)
    torch.load(path, weights_only=True)
    assert type(read_training_state(path)['extra']['callback_state']['Recorder'][0]['losses'][0]) is torch.Tensor
    assert same(whole(quiet_fit(classes(path, loss=loss, seed=3), 2)), whole(quiet_fit(classes(loss=loss), 2)))


def test_mixup_on_one_cycle_goes_on_bit_for_bit(tmp_path):
    "What a practitioner has: fastai's loss, MixUp, a schedule"
    def train(path=None, seed=0, cbs=()): return quiet_fit(classes(path, seed=seed, cbs=[MixUp(), *cbs]), 3, .02, method='fit_one_cycle')
    path, want = tmp_path/'run.pt', outcome(train())
    with pytest.raises(KeyboardInterrupt): train(path, cbs=[stop('after_batch', 8)])
    assert path.exists() and not differ(outcome(train(path, seed=3)), want)


class StopsAt3(Callback):
    "Ends an epoch's training right after a step, as `WarnCB` may"
    order = 96

    def after_step(self):
        if (self.epoch, self.iter) == (0, 3): raise CancelTrainException


class KilledInValidation(Callback):
    order = 97

    def after_batch(self):
        if not self.training: raise KeyboardInterrupt


def test_validation_writes_no_checkpoint(tmp_path):
    "A step of the training was complete and a checkpoint due, but the batch is one of validation"
    def train(*cbs): return quiet_fit(classes(cbs=[GradientAccumulation(16), StopsAt3(), *cbs]), 2)
    path, want = tmp_path/'run.pt', outcome(train())
    with pytest.raises(KeyboardInterrupt): train(CheckpointCB(path, every=3), KilledInValidation())
    assert not differ(outcome(train(CheckpointCB(path, every=3))), want)


# --- what callbacks remember ---

class Remembers(Callback):
    "All kinds of containers, which act on the training"
    order, name = 30, 'remembers'
    def __init__(self, shared):
        self.rows, self.kinds, self.means, self.last, self.seen, self.sums, self.some = [], {}, L(), deque(maxlen=3), defaultdict(list), None, set()
        self.count, self.shared = Counter(), shared
    def after_batch(self):
        if not self.learn.training: return
        loss = self.learn.loss.detach().as_subclass(torch.Tensor)
        self.rows.append(loss); self.means.append(float(loss)); self.last.append((self.learn.train_iter, {'a': [loss]})); self.shared.append(1)
        self.kinds[self.learn.train_iter] = {'x': (1, np.float32(2)), 'y': np.arange(3)*self.learn.train_iter}
        self.seen[self.learn.train_iter%2].append(np.float64(loss)); self.some.add(self.learn.train_iter); self.count['n'] += 1
        self.sums = (0. if self.sums is None else self.sums) + np.array([[1., float(loss)]])
        with torch.no_grad(): next(self.learn.model.parameters()).add_(float(np.mean(self.means)) + self.sums.mean() + len(self.last), alpha=1e-3)
    def state(self):
        kinds = {k: (v['x'], v['y'].tolist()) for k,v in self.kinds.items()}
        return tree(dict(rows=self.rows, kinds=kinds, means=list(self.means), last=list(self.last), seen=dict(self.seen), sums=self.sums.tolist(),
                         some=sorted(self.some), count=dict(self.count), shared=self.shared))


def test_what_a_callback_remembers_in_containers_goes_on(tmp_path):
    path, log = tmp_path/'run.pt', []
    want = quiet_fit(classes(cbs=[Remembers([])]), 3)
    with pytest.raises(KeyboardInterrupt): quiet_fit(classes(path, every=4, cbs=[Remembers([]), stop('after_batch', 10)]), 3)
    got = quiet_fit(classes(path, every=4, seed=3, cbs=[Remembers(log)]), 3)
    a, b = got.remembers, want.remembers
    assert same(whole(got)['w'], whole(want)['w']) and same(a.state(), b.state()) and len(log) == 18
    for n in ('rows', 'kinds', 'means', 'last', 'seen', 'sums', 'some', 'count'): assert type(getattr(a, n)) is type(getattr(b, n)), n
    assert a.last.maxlen == 3 and a.seen.default_factory is list and type(a.kinds[1]['y']) is np.ndarray


def test_parameters_stay_those_of_the_model(tmp_path):
    "A callback that holds some of them holds the model's, also after a kill; what no file can hold begins anew"
    class Holds(Callback):
        def before_fit(self): self.some, self.odd = [*self.learn.model.parameters()], [print]
    path = tmp_path/'run.pt'
    with pytest.raises(KeyboardInterrupt): quiet_fit(classes(path, cbs=[Holds(), stop('after_batch', 7)]), 2)
    learn = quiet_fit(classes(path, cbs=[Holds()]), 2)
    assert all(a is b for a, b in zip(learn.holds.some, learn.model.parameters(), strict=True)) and learn.holds.odd == [print]


def test_usual_callbacks_raise_no_warning(tmp_path):
    cbs = [MixUp(), SaveModelCallback(), EarlyStoppingCallback(patience=9), MonitorCB(every=2, writers=tmp_path/'rows.jsonl')]
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        learn = classes(tmp_path/'run.pt', every=2, cbs=cbs)
        learn.path = tmp_path
        quiet_fit(learn, 2, .02, method='fit_one_cycle')


def test_a_checkpoint_has_as_many_parts_late_as_early(tmp_path):
    "One tensor a step would make each file longer to write than the one before"
    path, parts = tmp_path/'run.pt', []
    look = At('after_batch', lambda l: parts.append(len(zipfile.ZipFile(path).namelist())) if l.training else None, 90)
    quiet_fit(classes(path, every=1, cbs=[MixUp(), Remembers([]), look]), 6, .02, method='fit_one_cycle')
    del parts[:6]               # deques and moments fill
    assert max(parts[-6:]) <= max(parts[:6]) + 24*2         # `kinds` of Remembers: an array a step, which are its own
    parts.clear()
    quiet_fit(classes(path, every=1, cbs=[MixUp(), look]), 6, .02, method='fit_one_cycle')
    assert len(parts) == 36 and len(set(parts[2:])) == 1


@pytest.mark.parametrize('cls', [torch.Tensor, TensorBase])
def test_the_second_save_packs_only_what_is_new(cls, tmp_path, monkeypatch):
    "Whatever was done to the list in the meantime, the file holds it as it is now"
    losses, packed, stack, path = [torch.rand(()).as_subclass(cls) for _ in range(1200)], [], torch.stack, tmp_path/'a.pt'
    def save():
        packed.clear()
        with monkeypatch.context() as m:
            m.setattr(torch, 'stack', lambda ts, *a: (packed.append(len(ts)), stack(ts, *a))[1])
            save_training_state(path, *small(), losses=losses)
        assert read_training_state(path)['extra']['losses'] == losses
        return sum(packed)
    assert save() == 1200 and save() == 0
    losses += [torch.rand(()).as_subclass(cls) for _ in range(7)]
    assert save() == 7
    losses[5] = torch.tensor(9.)
    assert save() == 1207
    losses[6].add_(1)
    assert save() == 1207
    del losses[-3:]
    assert save() == 1204
    losses.append(torch.rand((), dtype=torch.float64))          # of two kinds: written one by one
    assert save() == 0
    losses[:] = [torch.rand(()) for _ in range(1300)]
    assert save() == 1300


# --- the end of a fit ---

def test_stopped_by_early_stopping_it_is_complete(tmp_path):
    path = tmp_path/'run.pt'
    learn = quiet_fit(classes(path, cbs=[EarlyStoppingCallback(comp=np.equal)]), 9)
    assert learn.train_iter < 30 and done(path)
    assert quiet_fit(classes(path, cbs=[EarlyStoppingCallback(comp=np.equal)]), 9).train_iter == learn.train_iter


# --- scripts with several fits; kills are in promises/test_3_resume.py ---

def test_ctrl_c_in_the_second_fit(tmp_path):
    "The first is passed over, and looks as it did at its end; no other callback is called in it"
    path, seen = tmp_path/'run.pt', []
    def script(path, seed=0, cbs=()):
        learn = classes(path, seed=seed, cbs=[MixUp(), *cbs])
        quiet_fit(learn, 2, .02, method='fit_one_cycle')
        at_end = outcome(learn)
        at_end['steps'].pop()                       # the last outcome is an object
        between = at_end, learn.validate(), list(map(float, learn.final_record)), learn.recorder.metric_names, len(learn.recorder.hps['lr']), learn.model.training
        quiet_fit(learn, 2, .02, method='fit_one_cycle')
        return between, outcome(learn)
    want, want_last = script(None)
    with pytest.raises(KeyboardInterrupt): script(path, cbs=[At('after_batch', ctrl_c, 90, lambda l: l.training and len(l.mixed_precision_cb.history) == 20)])
    assert {'run.fit2.pt', 'run.pt'} < {*os.listdir(tmp_path)}
    new_life()
    begins = At('before_fit', lambda l: seen.append('fit'), when=lambda l: not l.lock.locked())
    trains = At('after_pred', lambda l: seen.append(len(l.mixed_precision_cb.history)), when=lambda l: l.training)
    with pytest.warns(UserWarning, match='is skipped'):
        got, last = script(path, seed=3, cbs=[begins, trains])
    assert not differ(got[0], want[0]) and got[1:] == want[1:] and not differ(last, want_last)
    assert seen[0] == 'fit' and seen[1:] == list(range(seen[1], 24)) and seen[1] > 12


def test_a_cell_that_is_run_again_after_ctrl_c_says_whose_weights_it_takes(tmp_path, capsys):
    "The same script, or another Learner at its path? And the kernel counts on: a first fit takes the second one's file"
    path = tmp_path/'run.pt'
    def cell(at=None):
        learn = classes(path, every=2)
        if at: learn.add_cb(At('after_batch', ctrl_c, 90, lambda l: l.training and len(l.mixed_precision_cb.history) == at))
        quiet_fit(learn, 2), quiet_fit(learn, 2)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(KeyboardInterrupt): cell(5)
        assert 'goes on from' not in capsys.readouterr().out
        with pytest.raises(KeyboardInterrupt): cell(20)
    assert 'This fit goes on from run.pt, with the weights of one that was stopped' in capsys.readouterr().out
    with pytest.warns(UserWarning, match='goes on from its file, run.fit2.pt, as fit 2') as second: cell()
    assert len(second) == 1 and 'give another path' in str(second[0].message)


def test_a_new_first_fit_makes_the_files_of_later_ones_void(tmp_path):
    path = tmp_path/'run.pt'
    learn = classes(path)
    quiet_fit(learn, 1), quiet_fit(learn, 1), quiet_fit(learn, 1)
    new_life()
    path.unlink()
    assert {'run.fit2.pt', 'run.fit3.pt'} <= set(os.listdir(tmp_path))
    def script(path=None, seed=1):
        learn = classes(path, seed=seed)
        for _ in range(3): quiet_fit(learn, 1)
        return whole(learn)
    assert same(script(path), script())


def test_a_callback_for_each_fit_is_one_for_all(tmp_path):
    "What counts the fits of a script is its path: the second fit does not take the first one's file for its own"
    path = tmp_path/'run.pt'
    def script(cb=lambda: None, seed=0):
        learn = classes(seed=seed)
        for _ in range(3): quiet_fit(learn, 1, cbs=cb())
        return outcome(learn)
    want = script()
    assert not differ(script(lambda: CheckpointCB(path, every=2)), want)
    new_life()
    (tmp_path/'run.fit3.pt').unlink()
    assert not differ(script(lambda: CheckpointCB(path, every=2), seed=3), want)


class Kept(torch.Tensor): "A subclass that weights_only does not know"


def test_tensor_subclasses_are_written_as_tensors(tmp_path):
    net = nn.Linear(2, 2)
    net.register_buffer('b', torch.ones(3).as_subclass(Kept))
    path = save_training_state(tmp_path/'a.pt', net, torch.optim.SGD(net.parameters(), lr=.1), mine=torch.ones(4).as_subclass(Kept)[1:])
    doc = torch.load(path, weights_only=True)
    assert type(doc['model']['b']) is type(doc['rest']['extra']['mine']) is torch.Tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU here')
def test_what_was_on_a_gpu_is_there_again(tmp_path):
    "Else losses of before and after would be of two devices, and could not be stacked"
    net, one = nn.Linear(2, 2).cuda(), torch.ones(3, device='cuda')
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2, device='cuda')).sum().backward(); opt.step()
    path = save_training_state(tmp_path/'a.pt', net, opt, mine=[one, one + 1], one=one, here=torch.ones(2))
    got = load_training_state(path, net, opt)
    assert torch.stack([*got['mine'], got['one']]).is_cuda and torch.equal(got['mine'][1], one + 1) and not got['here'].is_cuda


@pytest.mark.parametrize('bad', [lambda: 1, {1: [print]}, object(), Path('/'), (i for i in ())], ids=lambda b: type(b).__name__)
def test_what_could_not_be_read_back_is_refused_and_the_old_file_stays(bad, tmp_path):
    net, path = nn.Linear(2, 2), tmp_path/'a.pt'
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    bits = save_training_state(path, net, opt, step=1).read_bytes()
    with pytest.raises(TypeError, match='mine'): save_training_state(path, net, opt, mine=bad)
    assert path.read_bytes() == bits and os.listdir(tmp_path) == ['a.pt']


# --- several processes ---

BETWEEN = '''
from test_checkpoint import *
from torch.nn.parallel import DistributedDataParallel as DDP
path, steps, out = f'{folder}/run.pt', [], []
mine = Path(f'{folder}/run.rank{rank}.pt')
want = outcome(quiet_fit(classes(rank=rank, wrap=DDP), 5))
try: quiet_fit(classes(path, rank=rank, wrap=DDP, cbs=[stop('before_backward', 20)]), 5)
except KeyboardInterrupt: pass
there = mine.exists()
if rank: mine.rename(f'{mine}.next')                # killed between the renames: rank 0 has its new file, rank 1 not yet
dist.barrier()
seen = At('after_pred', lambda l: steps.append(l.train_iter) if l.training else None)
got = outcome(quiet_fit(classes(path, rank=rank, seed=3, wrap=DDP, cbs=[seen]), 5))
ends = done(mine)
try: quiet_fit(classes(path, rank=rank, wrap=DDP, cbs=[stop('before_backward', 20)]), 5)
except KeyboardInterrupt: pass
if rank: Path(f'{folder}/run.rank{rank}.fit2.pt').unlink()
dist.barrier()
try: quiet_fit(classes(path, rank=rank, wrap=DDP), 5); said = ''
except ValueError as e: said = str(e)
torch.save((there, steps, ends, differ(got, want), said), f'{folder}/{rank}.pt')
'''


def test_two_ranks_go_on_from_one_step_or_not_at_all(ranks):
    for there, steps, ends, wrong, said in ranks(BETWEEN):
        assert there and steps == list(range(20, 30)) and ends and not wrong
        assert 'rank' in said and '20' in said


SECOND = '''
from test_checkpoint import *
from torch.nn.parallel import DistributedDataParallel as DDP
def script(path=None, seed=0, cbs=()):
    learn = classes(path, rank=rank, seed=seed, wrap=DDP, cbs=cbs)
    quiet_fit(learn, 1)
    drawn = random.random(), whole(learn)["w"]
    quiet_fit(learn, 1)
    return drawn, outcome(learn)
want, steps = script(), []
at = At('before_backward', ctrl_c, when=lambda l: l.training and len(l.mixed_precision_cb.history) == 11)
try: script(f'{folder}/run.pt', cbs=[at])
except KeyboardInterrupt: pass
first = Path(f'{folder}/run.rank{rank}.pt')
if rank: first.rename(f'{first}.next')              # as if killed between the renames of the first fit's end
dist.barrier()
new_life()
got = script(f'{folder}/run.pt', 3, [At('after_pred', lambda l: steps.append(l.train_iter) if l.training else None)])
torch.save((steps, same(got[0][1], want[0][1]) and got[0][0] == want[0][0], differ(got[1], want[1])), f'{folder}/{rank}.pt')
'''


@pytest.mark.sweep(0)
def test_two_ranks_pass_over_the_first_of_two_fits(ranks):
    # the second fit's checkpoint is of its fifth step
    for steps, between, wrong in ranks(SECOND): assert steps == [5] and between and not wrong


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
    assert str(path) in str(e.value) and not seen


def test_a_full_disk_says_so_and_keeps_the_old_file(tmp_path):
    net, path = nn.Linear(200, 200), tmp_path/'a.pt'
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    bits = save_training_state(path, net, opt).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))           # no file may grow beyond: what a full disk does
    try:
        with pytest.raises(OSError) as e: save_training_state(path, net, opt)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(path) in str(e.value) and 'large' in str(e.value)        # what the system said
    assert path.read_bytes() == bits and os.listdir(tmp_path) == ['a.pt']


def die(): os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(f):
    "Call it in a process of its own, which ends like a killed one; its exit status"
    if pid := os.fork(): return os.waitpid(pid, 0)[1]
    try: f()
    finally: os._exit(1)


def test_what_a_killed_writer_leaves_is_written_over(tmp_path, monkeypatch):
    path = tmp_path/'run.pt'
    with monkeypatch.context() as m:
        m.setattr(os, 'replace', lambda *_: die())
        in_a_child(lambda: save_training_state(path, *small()))
    assert os.listdir(tmp_path) == ['run.pt.tmp']
    save_training_state(path, *small(), step=1)
    assert load_training_state(path, *small()) == dict(step=1) and os.listdir(tmp_path) == ['run.pt']


def test_two_processes_never_write_one_file(tmp_path, monkeypatch):
    "Another save of the same path, while the first is about to rename, is refused"
    path, real, told = tmp_path/'run.pt', os.replace, tmp_path/'told'
    def second():
        try: save_training_state(path, *small(1), which='second')
        except BlockingIOError as e: told.write_text(str(e))
    def late(*a):
        monkeypatch.setattr(os, 'replace', real)
        in_a_child(second)
        real(*a)
    monkeypatch.setattr(os, 'replace', late)
    save_training_state(path, *small(), which='first')
    assert str(path) in told.read_text() and load_training_state(path, *small()) == dict(which='first')


def test_a_file_that_was_just_renamed_is_not_written_to(tmp_path, monkeypatch):
    "Opened before the rename, locked after it: it is somebody's checkpoint now"
    import fcntl
    path, real = tmp_path/'run.pt', fcntl.lockf
    def late(f, *a):
        os.replace(f.name, path)
        return real(f, *a)
    monkeypatch.setattr(fcntl, 'lockf', late)
    with pytest.raises(BlockingIOError): save_training_state(path, *small())
    assert path.read_bytes() == b'' and os.listdir(tmp_path) == ['run.pt']


def test_a_link_leads_to_the_checkpoint_and_stays(tmp_path):
    (tmp_path/'big').mkdir()
    path, target = tmp_path/'run.pt', tmp_path/'big'/'run.pt'
    path.symlink_to(target)
    with pytest.raises(KeyboardInterrupt): quiet_fit(classes(path, cbs=[stop('after_batch', 7)]), 2)
    assert path.is_symlink() and not target.is_symlink() and not done(target)
    assert same(whole(quiet_fit(classes(path, seed=3), 2)), whole(quiet_fit(classes(), 2))) and path.is_symlink()


def test_the_file_is_forced_to_the_disk_before_the_rename(tmp_path, monkeypatch):
    path, seen, fsync, replace = tmp_path/'a.pt', [], os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: (seen.append(os.path.isdir(f'/proc/self/fd/{fd}')), fsync(fd)))
    monkeypatch.setattr(os, 'replace', lambda *a: (seen.append('rename'), replace(*a)))
    save_training_state(path, *small())
    assert seen == [False, 'rename']


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path):
    "Both fit on one path; the second says why not, and after a kill the path is free"
    path, told = tmp_path/'run.pt', tmp_path/'told'
    def second():
        try: quiet_fit(classes(path, seed=1), 1)
        except OSError as e: told.write_text(str(e))
    learn = classes(path, every=2, cbs=[At('after_batch', lambda l: in_a_child(second), 90, at_iter(4))])
    assert same(whole(quiet_fit(learn, 2)), whole(quiet_fit(classes(), 2)))
    assert 'another process' in told.read_text().lower() and str(path) in told.read_text()
    path = tmp_path/'other.pt'
    in_a_child(lambda: quiet_fit(classes(path, cbs=[At('after_batch', lambda l: die(), 90, at_iter(8))]), 2))
    assert not done(path)
    assert same(whole(quiet_fit(classes(path, seed=2), 2)), whole(quiet_fit(classes(), 2)))


@pytest.mark.parametrize('make', [folder_of_none, in_a_file, a_folder])
def test_a_missing_folder_is_named(make, tmp_path):
    path = make(tmp_path)
    for write in (lambda: save_training_state(path, *small()), lambda: atomic_save(path, {}), lambda: quiet_fit(classes(path), 1)):
        with pytest.raises(OSError) as e: write()
        assert str(path) in str(e.value)


@pytest.mark.parametrize('wrong', [0, 1, 2])
@pytest.mark.parametrize('f', [save_training_state, load_training_state])
def test_what_has_no_state_is_refused_by_name(f, wrong, tmp_path):
    args = [*small(), StaticScaler()]
    save_training_state(tmp_path/'a.pt', *args)
    for bad in (7.5, None) if wrong < 2 else (7.5,):
        args[wrong] = bad
        with pytest.raises(TypeError, match=str(bad)): f(tmp_path/'a.pt', *args)


@pytest.mark.parametrize('missing', [0, 1])
def test_a_missing_part_is_refused_without_a_scaler_too(missing, tmp_path):
    parts = [*small()]
    parts[missing] = None
    with pytest.raises(TypeError, match='None has no state'): save_training_state(tmp_path/'a.pt', *parts)


class Refuses(nn.Linear):
    "A layer that takes its own state alone"
    def __init__(self, *args):
        super().__init__(*args)
        self.own = self.weight.sum().item()

    def get_extra_state(self): return self.own
    def set_extra_state(self, state):
        if state != self.own: raise ValueError('not this one')


class RefusesAll(torch.optim.Adam):
    "An optimizer that refuses every state"
    def load_state_dict(self, state): raise ValueError('not this one')


@pytest.mark.parametrize('last, opt', [(Refuses, torch.optim.Adam), (nn.Linear, RefusesAll)], ids=['model', 'optimizer'])
def test_where_a_part_refuses_its_state_nothing_has_changed(last, opt, tmp_path):
    "The scaler fits, and so does the first layer; a later part does not"
    def trained(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 4), last(4, 2))
        moves, step = opt(net.parameters()), MixedStep(DynamicScaler(2.**(10 + seed)))
        for _ in range(2): step(net, torch.rand(8, 4), torch.rand(8, 2), moves, F.mse_loss)
        return net, moves, step.scaler
    def bits(parts): return tree([x.state_dict() for x in parts]), random.getstate(), torch.get_rng_state()
    path, parts = save_training_state(tmp_path/'a.pt', *trained(0)), trained(1)
    before = bits(parts)
    with pytest.raises(ValueError, match='not this one'): load_training_state(path, *parts)
    after = bits(parts)
    assert same(before[0], after[0]) and before[1] == after[1] and same(before[2], after[2])


# --- states without a Learner ---

PLAIN = '''
import sys
sys.modules['fastai'] = None
import torch
from mpcourse.checkpoint import load_training_state, save_training_state
from mpcourse.dynamic import DynamicScaler
from mpcourse.step import MixedStep
net = torch.nn.Linear(4, 2)
opt, step = torch.optim.Adam(net.parameters()), MixedStep(DynamicScaler())
losses = [step(net, torch.rand(8, 4), torch.rand(8, 2), opt, torch.nn.functional.mse_loss)['loss'] for _ in range(3)]
path, weights = save_training_state(sys.argv[1], net, opt, step.scaler, losses=losses), net.weight.clone()
torch.nn.init.zeros_(net.weight)
assert load_training_state(path, net, opt, step.scaler)['losses'] == losses and torch.equal(net.weight, weights)
'''


def test_a_plain_loop_needs_no_fastai(tmp_path):
    r = subprocess.run([sys.executable, '-c', PLAIN, str(tmp_path/'a.pt')], capture_output=True, text=True, timeout=200)
    assert r.returncode == 0, r.stderr



def small(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    return net, torch.optim.AdamW(net.parameters(), lr=.01)


def equal(a, b): return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_torchs_own_grad_scaler_is_a_scaler_too(tmp_path):
    (net, opt), (other, there), scaler, new = small(), small(1), torch.amp.GradScaler('cpu', init_scale=2.**7), torch.amp.GradScaler('cpu')
    scaler.scale(torch.ones(1))
    save_training_state(tmp_path/'s.pt', net, opt, scaler)
    load_training_state(tmp_path/'s.pt', other, there, new)
    assert new.get_scale() == 2.**7 and equal(net, other)


def test_a_compiled_model_has_the_same_file(tmp_path):
    (net, opt), (other, there) = small(), small(1)
    save_training_state(tmp_path/'s.pt', torch.compile(net, backend='eager'), opt)
    load_training_state(tmp_path/'s.pt', other, there)
    assert equal(net, other) and all(p.dtype == torch.float32 for p in other.parameters())


class Told(nn.Linear):
    "A module with more state than tensors, and a version"
    _version, rates = 3, ()
    def get_extra_state(self): return dict(rates=self.rates, kinds=['a', (1, 2)])
    def set_extra_state(self, state): self.rates = state['rates']; assert state['kinds'] == ['a', (1, 2)]
    def _load_from_state_dict(self, state, prefix, meta, *args): self.seen = meta.get('version'); super()._load_from_state_dict(state, prefix, meta, *args)


def test_what_a_module_tells_beside_its_tensors_is_there_again(tmp_path):
    net, other = Told(2, 2), Told(2, 2)
    net.rates = [.1, .2, .3]
    save_training_state(tmp_path/'s.pt', net, torch.optim.SGD(net.parameters(), lr=.1))
    load_training_state(tmp_path/'s.pt', other, torch.optim.SGD(other.parameters(), lr=.1))
    assert other.rates == [.1, .2, .3] and other.seen == 3


def test_the_new_file_takes_the_old_ones_place_in_one_move(tmp_path):
    (net, opt), path = small(), tmp_path/'s.pt'
    save_training_state(path, net, opt, step=1)
    old = path.read_bytes()
    with open(path, 'rb') as f:
        save_training_state(path, net, opt, step=2)
        assert f.read() == old and load_training_state(path, net, opt) == dict(step=2)


def test_a_scaler_too_many_or_a_file_too_few(tmp_path):
    net, opt = small()
    save_training_state(tmp_path/'s.pt', net, opt, StaticScaler())
    with pytest.raises(ValueError): load_training_state(tmp_path/'s.pt', net, opt)
    with pytest.raises(FileNotFoundError): load_training_state(tmp_path/'t.pt', net, opt)


class HalfMemory(torch.optim.Optimizer):
    "Momentum kept in a dtype of its own, one of them in a list"
    def __init__(self, params, dtype): super().__init__(params, dict(lr=.05)); self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]['params']:
            s = self.state[p]
            if not s: s.update(m=torch.zeros_like(p, dtype=self.dtype), more=[torch.zeros_like(p, dtype=self.dtype), 7])
            for m in s['m'], s['more'][0]:
                m.copy_(m.float().lerp(p.grad.float(), .1))
                p.copy_(p.float() - .05*m.float())


def adafactor(params, dtype): return pytest.importorskip('transformers.optimization').Adafactor(params, lr=1e-2, scale_parameter=False, relative_step=False)
def eight_bits(params, dtype): return pytest.importorskip('torchao.optim').AdamW8bit(params, lr=1e-2)


@pytest.mark.sweep(3)
@pytest.mark.parametrize('make, weights, state', [
    (HalfMemory, torch.bfloat16, torch.float32), (HalfMemory, torch.float32, torch.bfloat16), (HalfMemory, torch.float32, torch.float64),
    (adafactor, torch.bfloat16, None), (eight_bits, torch.float32, None)])
def test_the_optimizers_state_keeps_its_dtype(make, weights, state, tmp_path):
    "torch gives it the dtype of its weight"
    def life(seed):
        torch.manual_seed(seed)
        net = nn.Linear(128, 64).to(weights)
        return net, make(net.parameters(), state)
    def train(net, opt, xs):
        for x in xs:
            opt.zero_grad()
            net(x).float().square().mean().backward()
            opt.step()
    xs = torch.randn(20, 16, 128, generator=torch.Generator().manual_seed(1)).to(weights)
    (net, opt), (other, there) = life(0), life(1)
    train(net, opt, xs[:10])
    save_training_state(tmp_path/'s.pt', net, opt)
    load_training_state(tmp_path/'s.pt', other, there)
    for one in (net, opt), (other, there): train(*one, xs[10:])
    assert equal(net, other) and not torch.equal(net.weight, life(0)[0].weight)


def test_generators_of_apples_gpus_are_saved(tmp_path, monkeypatch):
    net, opt = small()
    states, asked = [torch.arange(3, dtype=torch.uint8)], []
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(torch.mps, 'get_rng_state', lambda: states[0])
    monkeypatch.setattr(torch.mps, 'set_rng_state', asked.append)
    save_training_state(tmp_path/'s.pt', net, opt)
    load_training_state(tmp_path/'s.pt', net, opt)
    assert torch.equal(asked[0], states[0])
    monkeypatch.undo()
    load_training_state(tmp_path/'s.pt', net, opt)      # on a machine without one


def test_a_kind_of_tensor_that_torch_does_not_load_is_named(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor
    net, opt = small()
    with pytest.raises(TypeError, match='extra.t is a TwoTensor, which torch.load reads only after'):
        save_training_state(tmp_path/'s.pt', net, opt, t=TwoTensor(torch.ones(2), torch.ones(2)))


# --- what a reviewer broke ---

@pytest.mark.parametrize('value', [np.longdouble(1.5), np.datetime64('2020-01-01'), np.timedelta64(3, 's'), np.array(['a']), np.ma.array([1., 2.], mask=[0, 1])], ids=str)
def test_what_numpy_has_and_torch_has_not_is_refused_when_it_is_saved(value, tmp_path):
    net = nn.Linear(2, 1)
    with pytest.raises(TypeError, match='extra.v'): save_training_state(tmp_path/'x', net, torch.optim.SGD(net.parameters(), .1), v=value)


@pytest.mark.parametrize('value', [np.arange(3, dtype='>f4'), [torch.eye(3).to_sparse()]*2, [torch.eye(3).to_sparse_csr()]*2, np.float32(1.5)], ids=['big endian', 'COO', 'CSR', 'scalar'])
def test_odd_layouts_come_back(value, tmp_path):
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), .1)
    save_training_state(tmp_path/'x', net, opt, v=value)
    back = load_training_state(tmp_path/'x', net, opt)['v']
    if isinstance(value, list): assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(back, value))
    else: assert np.array_equal(back, value)


def test_a_callback_with_an_odd_attribute_does_not_end_the_fit(tmp_path):
    class Odd(Callback):
        def before_fit(self):
            self.cycle, self.nested = [], torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
            self.cycle.append(self.cycle)
            self.lists = [self.nested]*2
    learn = learner()
    quiet_fit(learn.add_cbs([CheckpointCB(tmp_path/'x', every=1), Odd()]), 1)
    assert done(tmp_path/'x')


class Halve(Callback):
    order = 0
    def before_fit(self): self.learn.opt.set_hyper('lr', self.learn.opt.hypers[-1]['lr']/2)


def test_a_second_fit_begins_with_loading_as_the_first(tmp_path):
    "So a callback that changes hyper-parameters when a fit begins changes them after the checkpoint has looked"
    learn = learner()
    cb = CheckpointCB(tmp_path/'x', every=1)
    learn.add_cbs([cb, Halve()])
    for _ in range(2):
        quiet_fit(learn, 1)
        assert cb.order == CheckpointCB.order == -100


def test_a_file_of_a_machine_with_more_gpus(monkeypatch):
    set_states = []
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'set_rng_state_all', set_states.extend)
    checkpoint._set_cuda_states(['first', 'second'])
    assert set_states == ['first']
