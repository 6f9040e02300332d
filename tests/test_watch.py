"`mpcourse watch` and `mpcourse scan`: unchanged scripts of several kinds, checkpoints of two"
import importlib.util, json, os, subprocess, sys
from pathlib import Path

import pytest, torch
from torch import nn

from mpcourse.watch import scan_checkpoint, watch_script

pytestmark = pytest.mark.library

BASE = '''
import sys, torch, torch.nn.functional as F
from torch import nn
bad = 'bad' in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if bad: nn.init.constant_(net[4].bias, 700.)
X, y = torch.randn(512, 32), torch.randint(10, (512,))
opt = torch.optim.AdamW(net.parameters(), 1e-3)
def bf16(): return torch.autocast('cpu', torch.bfloat16)
'''
LOOP = '''
for i in range(8):
    with bf16(): pred = model(X[64*i:64*i + 64])
    loss = F.cross_entropy(pred.float(), y[64*i:64*i + 64])
    opt.zero_grad()
    loss.backward()
    opt.step()
'''
SCRIPTS = {
    'a loop': 'model = net' + LOOP,
    'reentrant checkpoints': 'from torch.utils.checkpoint import checkpoint\nmodel = lambda x: net[4](checkpoint(net[:4], x.requires_grad_(), use_reentrant=True))' + LOOP,
    'checkpoints': 'from torch.utils.checkpoint import checkpoint\nmodel = lambda x: net[4](checkpoint(net[:4], x, use_reentrant=False))' + LOOP,
    'compiled': 'model = torch.compile(net, backend="aot_eager")' + LOOP,
    'workers': '''
from torch.utils.data import DataLoader, TensorDataset
if __name__ == '__main__':
    for x, t in DataLoader(TensorDataset(X, y), 64, num_workers=2):
        with bf16(): pred = net(x)
        opt.zero_grad()
        F.cross_entropy(pred.float(), t).backward()
        opt.step()
''',
    'two players': '''
G, D = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32)), nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(.2), nn.Linear(64, 1))
if bad: nn.init.constant_(G[2].bias, 700.)
first, second = (torch.optim.Adam(m.parameters(), 1e-3) for m in (D, G))
for i in range(8):
    with bf16():
        fake = G(torch.randn(64, 8))
        wrong = F.softplus(-D(X[:64]).float()).mean() + F.softplus(D(fake.detach()).float()).mean()
    first.zero_grad()
    wrong.backward()
    first.step()
    with bf16(): fooled = F.softplus(-D(fake).float()).mean()
    second.zero_grad()
    fooled.backward()
    second.step()
''',
    'inner derivatives': '''
net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
if bad: nn.init.constant_(net[2].bias, 700.)
opt = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(8):
    x = torch.rand(64, 2, requires_grad=True)
    with bf16(): u = net(x).float()
    slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
    bend, = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    opt.zero_grad()
    (bend[:, 0] + u[:, 0] - 1).square().mean().backward()
    opt.step()
''',
    'fastai': '''
from fastai.basics import DataLoader, DataLoaders, Learner
from mpcourse.callback import *
dl = DataLoader(list(zip(X, y)), bs=64)
learn = Learner(DataLoaders(dl, dl), net, loss_func=lambda p, t: F.cross_entropy(p.float(), t)).to_mixed()
with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
''',
    'lightning': '''
import lightning, logging, warnings
from torch.utils.data import DataLoader, TensorDataset
logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
warnings.simplefilter('ignore')
class Plain(lightning.LightningModule):
    def __init__(self): super().__init__(); self.net = net
    def training_step(self, batch, i): return F.cross_entropy(self.net(batch[0]).float(), batch[1])
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), 1e-3)
trainer = lightning.Trainer(accelerator='cpu', precision='bf16-mixed', max_epochs=1, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Plain(), DataLoader(TensorDataset(X, y), 64))
''',
    'accelerate': '''
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
acc = Accelerator(mixed_precision='bf16', cpu=True)
net, opt, dl = acc.prepare(net, opt, DataLoader(TensorDataset(X, y), 64))
for x, t in dl:
    acc.backward(F.cross_entropy(net(x), t))
    opt.step()
    opt.zero_grad()
'''}


def write(folder, text, name='train.py'):
    (folder/name).write_text(BASE + text)
    return folder/name


@pytest.mark.sweep(2)
@pytest.mark.parametrize('name', SCRIPTS)
def test_unchanged_scripts(name, tmp_path, request):
    "Eight steps: healthy ones are not accused, and logits around 700 are named in both steps"
    if name == 'lightning': request.getfixturevalue('lightning')
    if name in ('fastai', 'accelerate') and importlib.util.find_spec(name) is None: pytest.skip(f'{name} is missing')
    path = write(tmp_path, SCRIPTS[name])
    fine, bad = watch_script(path, [], [2, 5]), watch_script(path, ['bad'], [2, 5])
    assert not fine.found and fine.report.rows and fine.steps == bad.steps == 8 and fine.report.steps == [2, 5], str(fine)
    assert [2, 5] in [f.steps for f in bad.report.findings if f.kind == 'a large offset'], str(bad)
    assert not torch._C._len_torch_dispatch_stack() and not nn.modules.module._global_forward_hooks


RANKS = '''
import torch.distributed as dist
dist.init_process_group('gloo')
if 'ddp' in sys.argv: model = nn.parallel.DistributedDataParallel(net)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
    mesh = init_device_mesh('cpu', (2,))
    for m in (net[0], net[2], net[4], net): fully_shard(m, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model = net
opt = torch.optim.AdamW(model.parameters(), 1e-3)
X, y = X.roll(100*dist.get_rank(), 0), y.roll(100*dist.get_rank(), 0)
''' + LOOP + '\ndist.destroy_process_group()\n'


@pytest.mark.sweep(2)
@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_ranks_watch_the_same_steps(kind, tmp_path):
    path, out = write(tmp_path, RANKS), tmp_path/'found.json'
    def run(*args):
        command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--master-port', '0', '--rdzv-backend', 'c10d', '--rdzv-endpoint', 'localhost:0',
                   Path(sys.executable).with_name('mpcourse'), 'watch', '--at', '2,5', '--json', out, path, kind, *args]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count('8 steps') == 1                # rank 0 prints
        return [json.loads(p.read_text())['report'] for p in (out, Path(f'{out}.1'))]
    for report in run(): assert report['steps'] == [2, 5] and report['findings'] == []
    for report in run('bad'): assert report['findings'][0]['kind'] == 'a large offset'


def test_an_error_of_the_script_is_told_beside_what_was_found(tmp_path, capsys):
    watched = watch_script(write(tmp_path, 'model = net' + LOOP + '\nraise KeyError("mine")'), ['bad'], [2])
    assert watched.error == "KeyError: 'mine'" and watched.report.findings and "raise KeyError(" in capsys.readouterr().err
    assert watch_script(write(tmp_path, 'sys.exit(0)')).error == '' and watch_script(write(tmp_path, 'sys.exit(2)')).error == 'SystemExit: 2'
    with pytest.raises(ValueError, match='There is no script'): watch_script(tmp_path/'none.py')


@pytest.mark.parametrize('end, error, code', [('sys.exit(7)', 'SystemExit: 7', 7), ('raise KeyboardInterrupt', 'KeyboardInterrupt', 130), ('sys.exit(0)', '', 0)])
def test_how_a_script_ends_is_kept_beside_the_report(end, error, code, tmp_path):
    watched = watch_script(write(tmp_path, 'model = net' + LOOP + end), ['bad'], [2])
    assert (watched.error, watched.code) == (error, code) and watched.report.findings


def test_a_script_sees_what_python_shows_it(tmp_path, monkeypatch):
    (tmp_path/'part.py').write_text('import os, sys\nfrom pathlib import Path\n'
                                    'Path(os.environ["SEEN"]).write_text(repr((__name__, os.path.isabs(__file__), sys.argv[1:], sys.path[0])))')
    monkeypatch.setenv('SEEN', str(tmp_path/'seen'))
    monkeypatch.chdir(tmp_path)
    watch_script('part.py', ['--lr', '1'])
    assert eval((tmp_path/'seen').read_text()) == ('__main__', True, ['--lr', '1'], str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    watched = watch_script('part', ['2'], module=True)
    assert eval((tmp_path/'seen').read_text())[:3] == ('__main__', True, ['2']) and 'nothing was examined' in str(watched)


def test_an_infinity_is_told_though_the_next_step_is_nan(tmp_path):
    text = '''
for i in range(4):
    big = net(X[:64])*40
    e = big.half().exp()
    loss = -(e/e.sum(-1, keepdim=True)).float().log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
'''
    watched = watch_script(write(tmp_path, text), at=[1, 2, 3])
    assert watched.report.worst.kind == 'overflow' and watched.report.worst.steps[0] == 1 and str(watched.report).startswith('1. Overflow')


def test_alarms_ask_for_the_next_step(tmp_path):
    text = '''
scaler = torch.amp.GradScaler('cpu', 2.**16)
for i in range(40):
    with torch.autocast('cpu', torch.float16): pred = net(X[:64])
    opt.zero_grad()
    scaler.scale(F.cross_entropy(pred.float(), y[:64])*(float('inf') if 5 <= i < 25 else 1)).backward()
    scaler.step(opt)
    scaler.update()
'''
    watched = watch_script(write(tmp_path, text), at=[1])
    assert [a.code for a in watched.alarms] == ['many skipped', 'scale collapsed'] and watched.skipped == 20 and watched.steps == 40
    assert watched.report.steps[0] == 1 and watched.report.steps[1:] == [a.step + 1 for a in watched.alarms]
    said = json.loads(json.dumps(watched.to_dict()))
    assert said['schema'] == 'mpcourse.watch/1' and said['scales'] == [2.**16, 2.**-4, 2.**-4] and {'code', 'where', 'evidence', 'first_try', 'step'} == set(said['alarms'][0])


@pytest.mark.parametrize('suffix', ['.pt', '.safetensors'])
def test_a_checkpoint_is_scanned(suffix, tmp_path):
    state = {'w': torch.full((10,), 1.), 'v': torch.tensor([7e4, 1.]), 'small': torch.tensor([1e-9, 1e-9, 1.]), 'n': torch.arange(3)}
    path = tmp_path/f'net{suffix}'
    if suffix == '.pt': torch.save({'model': state, 'step': 3}, path)
    else: pytest.importorskip('safetensors.torch').save_file(state, path)
    scan = scan_checkpoint(path, 1e-3)
    by_name = {t.name.removeprefix('model.'): t for t in scan.tensors}
    assert set(by_name) == {'w', 'v', 'small'} and {t.name.removeprefix('model.') for t in scan.bad} == {'v', 'small'}
    assert by_name['v'].overflows == .5 and by_name['small'].flushed == pytest.approx(2/3) and by_name['w'].stands_still == 1
    assert scan_checkpoint(path, .1).tensors[0].stands_still == 0
    assert len(scan.table()) == 3 and json.dumps(scan.to_dict())


def test_what_cannot_be_scanned(tmp_path):
    (tmp_path/'x.pt').write_bytes(b'no checkpoint')
    torch.save(nn.Linear(2, 2), tmp_path/'whole.pt')
    for path, said in (('gone.pt', 'There is no file'), ('x.pt', 'cannot be read'), ('whole.pt', 'state_dict')):
        with pytest.raises(ValueError, match=said): scan_checkpoint(tmp_path/path)
    torch.save({'a': 1}, tmp_path/'none.pt')
    with pytest.raises(ValueError, match='holds no tensor'): scan_checkpoint(tmp_path/'none.pt')
    torch.save({'w': torch.tensor([1., float('nan')]), 'optim': {'exp_avg_sq': torch.ones(6)}}, tmp_path/'nan.pt')
    scan = scan_checkpoint(tmp_path/'nan.pt')
    assert [t.name for t in scan.bad] == ['w'] and 'the 2 weights' in str(scan) and '50.0% is NaN' in str(scan)
    with pytest.raises(ValueError, match='rate=0 cannot work'): scan_checkpoint(tmp_path/'whole.pt', 0)


def test_every_dtype_is_scanned_and_fp64_is_not_narrowed(tmp_path):
    from mpcourse.watch import scan_checkpoint
    ones = torch.full((64,), .999)
    kinds = dict(bf16=ones.bfloat16(), half=ones.half(), e4m3=ones.to(torch.float8_e4m3fn), large=torch.tensor([1e300], dtype=torch.float64), sparse=torch.eye(3).to_sparse(), none=torch.empty(0))
    torch.save(kinds, tmp_path/'x.pt')
    found = {t.name: t for t in scan_checkpoint(tmp_path/'x.pt', 3e-3).tensors}
    assert found.keys() == kinds.keys() and not any(t.nan for t in found.values()) and found['none'].largest == 0
    exact = scan_checkpoint(tmp_path/'x.pt', 2.**-9 - 1e-6), scan_checkpoint(tmp_path/'x.pt', 2.**-9 + 1e-6)       # half a spacing below 1
    assert [[t.stands_still for t in scan.tensors if t.name == 'half'] for scan in exact] == [[1.], [0.]]
