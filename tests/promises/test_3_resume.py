"Promise 3: a training killed at any moment resumes bit for bit; a file is whole or not there; what could not be read back is refused when it is saved"
import os, random, signal, subprocess, sys
from pathlib import Path

import pytest, torch, torch.nn.functional as F
from fastai.basics import Callback
from torch import nn

import adapter as A, killed

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(1200)              # the first test waits for all lives


def equal(a, b):
    "The same bits, in any nesting"
    if isinstance(a, torch.Tensor): return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(equal, a, b))
    return a == b or a != a and b != b


@pytest.fixture(scope='module')
def graves(tmp_path_factory):
    "All the killed and resumed trainings, in one process and its children"
    root = tmp_path_factory.mktemp('graves')
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([os.environ.get('PYTHONPATH', ''), os.getcwd()]))
    p = subprocess.run([sys.executable, HERE/'killed.py', root], env=env, text=True, capture_output=True)
    assert p.returncode == 0, p.stderr[-3000:]
    return root, p.stderr


LIVES = [(r, k) for r,(_, ks) in killed.RUNS.items() for k in ks if k]


@pytest.mark.sweep(2)
@pytest.mark.parametrize('run, point', LIVES)
def test_killed_there_and_resumed_is_the_uninterrupted_run(run, point, graves):
    root, err = graves
    said = torch.load(root/f'{run}-{point}'/'said.pt')
    assert os.WTERMSIG(said['first']) == signal.SIGKILL and 'whole.pt' not in said['left'], err[-2000:]
    assert said['second'] == 0, err[-2000:]
    whole = torch.load(root/f'{"fit" if run == "flat_loss" else run}-None'/'whole.pt', weights_only=False)
    resumed = torch.load(root/f'{run}-{point}'/'resumed.pt', weights_only=False)
    assert len(set(map(str, whole['rows']))) > 10
    for k in whole: assert equal(whole[k], resumed[k]), f'{k} differs: {whole[k]} and {resumed[k]}'


def test_the_runs_do_skip_steps_and_move_the_scale(graves):
    "Else a resumed scale would prove little"
    whole = torch.load(graves[0]/'loop-None'/'whole.pt', weights_only=False)
    assert any(r[2] for r in whole['rows']) and len({r[1] for r in whole['rows']}) > 2




@pytest.mark.parametrize('run, point', [('loop', 'save'), ('loop', 'replace'), ('fit', 'replace')])
def test_a_killed_writer_leaves_nothing_for_ever(run, point, graves):
    said = torch.load(graves[0]/f'{run}-{point}'/'said.pt')
    assert said['second'] == 0 and [n for n in said['end'] if not n.endswith(('.pt', '.lock'))] in ([], [f'{run}.ckpt'])


def parts(scaler='dynamic'):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.Adam(model.parameters(), lr=.01), A.make_scaler(scaler, init_scale=2.**9)


def trained(n=3, scaler='dynamic'):
    model, opt, s = parts(scaler)
    x, y = killed.data()
    A.train(A.make_step(s), model, [(x[8*i:8*i+8], y[8*i:8*i+8]) for i in range(n)], opt, F.cross_entropy)
    return model, opt, s


def fastai_tensor():
    from fastai.torch_core import TensorBase
    return torch.ones(2).as_subclass(TensorBase)


@pytest.mark.parametrize('what', ('function', 'set', 'object', 'tensor', 'nested tensor'))
def test_what_cannot_be_read_back_is_refused_when_it_is_saved_or_it_is_read_back(what, tmp_path):
    values = {'function': lambda: len, 'set': lambda: {1}, 'object': object, 'tensor': fastai_tensor,
              'nested tensor': lambda: dict(log=[1., [fastai_tensor()]])}
    m, o, s = trained(); path = tmp_path/'x.ckpt'
    A.save(path, m, o, s, step=3)
    old = path.read_bytes()
    try: A.save(path, m, o, s, mine=values[what]())
    except (ValueError, TypeError) as e:
        assert 'mine' in str(e) and path.read_bytes() == old and os.listdir(tmp_path) == ['x.ckpt']
    else: A.load(path, *parts())


def test_every_file_is_read_with_weights_only(tmp_path):
    m, o, s = trained()
    A.save(tmp_path/'x.ckpt', m, o, s, step=3, rows=[1., (2, 'a', None)], order=torch.arange(3))
    torch.load(tmp_path/'x.ckpt', weights_only=True)
    assert A.load(tmp_path/'x.ckpt', *parts())['step'] == 3


@pytest.mark.parametrize('scaler', ('static', 'dynamic', 'hysteresis', 'megatron', 'fairseq', 'metaseq', 'deepspeed', 'logmax', 'als'))
def test_each_policy_goes_on_where_it_was(scaler, tmp_path):
    kw = {} if scaler in ('static', 'logmax', 'als') else dict(growth_interval=3)
    if scaler == 'als': kw = dict(activations=False)
    found = [bool(int(c)) for c in '010010001100' + '0001000100101000']
    a, b = (A.make_scaler(scaler, init_scale=2.**10, **kw) for _ in range(2))
    m, o, _ = parts()
    top = [2.**(i%5 + 8) for i in range(28)]
    before = A.next_scales(a, found[:11], top[:11])
    A.save(tmp_path/'x.ckpt', m, o, a)
    A.load(tmp_path/'x.ckpt', m, o, b)
    assert A.scale_of(a) == A.scale_of(b)
    after = A.next_scales(a, found[11:], top[11:])
    assert after == A.next_scales(b, found[11:], top[11:])
    assert scaler == 'static' or len(set(before + after)) > 1


def test_everything_that_draws_goes_on_and_other_parameters_keep_their_group(tmp_path):
    m, o, s = trained()
    A.save(tmp_path/'x.ckpt', m, o, s)
    want = torch.rand(3), random.random()
    n, p, t = parts()
    torch.manual_seed(9); random.seed(9)
    A.load(tmp_path/'x.ckpt', n, p, t)
    assert torch.equal(torch.rand(3), want[0]) and random.random() == want[1]
    assert equal(m.state_dict(), n.state_dict()) and equal(o.state_dict(), p.state_dict())


def test_masters_are_in_the_file(tmp_path):
    "A half model on masters: its own weights are rounded, those of the optimizer are not"
    def make():
        model = parts()[0]
        groups, masters = A.convert('masters', [list(model.parameters())], True)
        A.convert('half', model)
        return model, masters, torch.optim.SGD(masters[0], lr=.1)
    model, masters, opt = make()
    with torch.no_grad(): masters[0][0].add_(1e-5)
    A.save(tmp_path/'x.ckpt', model, opt)
    other, theirs, opt2 = make()
    A.load(tmp_path/'x.ckpt', other, opt2)
    assert torch.equal(masters[0][0], theirs[0][0]) and theirs[0][0].dtype == torch.float32


class Evil:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)


@pytest.mark.parametrize('how', ('cut', 'flipped', 'empty', 'other model', 'other optimizer', 'pickle', 'other scaler'))
def test_a_file_that_does_not_fit_is_refused_and_nothing_changes(how, tmp_path):
    m, o, s = trained(); path = tmp_path/'x.ckpt'
    A.save(path, m, o, s, step=3)
    raw, (n, p, t) = path.read_bytes(), parts()
    if how == 'cut': path.write_bytes(raw[:-200])
    if how == 'empty': path.write_bytes(b'')
    if how == 'flipped':
        at = raw.index(m[0].weight.detach().numpy().tobytes()[:16])
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at+1:])
    if how == 'pickle': torch.save(dict(format='mpcourse training state', x=Evil(tmp_path/'ran')), path)
    if how == 'other model':
        n = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)); p = torch.optim.Adam(n.parameters())
    if how == 'other optimizer': p = torch.optim.SGD(n.parameters(), lr=1.)
    if how == 'other scaler': t = A.make_scaler('metaseq')
    before = [{k: v.clone() for k,v in n.state_dict().items()}, str(p.state_dict()), A.scale_of(t), torch.get_rng_state()]
    with pytest.raises(ValueError): A.load(path, n, p, t)
    assert equal(before, [n.state_dict(), str(p.state_dict()), A.scale_of(t), torch.get_rng_state()])
    assert not (tmp_path/'ran').exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    m, o, s = trained(); path = tmp_path/'x.ckpt'
    A.save(path, m, o, s, step=1)
    old = path.read_bytes()
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError): A.save(path, m, o, s, step=2)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ['x.ckpt']


def test_an_old_file_without_a_scaler_warns_and_goes_on(tmp_path):
    m, o, _ = trained()
    A.save(tmp_path/'x.ckpt', m, o)
    n, p, t = parts()
    with pytest.warns(UserWarning): A.load(tmp_path/'x.ckpt', n, p, t)
    assert equal(m.state_dict(), n.state_dict())




@pytest.mark.parametrize('where', ('missing/x.ckpt', 'folder'))
def test_a_path_that_cannot_be_is_found_before_the_first_step(where, tmp_path):
    (tmp_path/'folder').mkdir()
    x, y = killed.data(); steps = []
    class Count(Callback):
        def after_batch(self): steps.append(1)
    learn = A.make_learner(killed.Net(), (x, y), (x[:8], y[:8]), A.make_scaler('dynamic', init_scale=2.**8), loss_func=F.cross_entropy,
                           cbs=[A.checkpoint(tmp_path/where, 3), Count()])
    with pytest.raises((OSError, ValueError)), learn.no_logging(): learn.fit(1)
    assert not steps
