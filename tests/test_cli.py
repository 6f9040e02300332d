"""`mpcourse replay` and `mpcourse compare`: what they print and write, and a sentence for each thing that cannot be."""
import subprocess, sys, warnings
from pathlib import Path

import pytest

from mpcourse.cli import main
from mpcourse.simulator import overflow_burst, save_trace

pytestmark = [pytest.mark.library, pytest.mark.filterwarnings('ignore::DeprecationWarning')] # other packages' own


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    "`replay` writes replay.png into the current folder"
    monkeypatch.chdir(tmp_path_factory.mktemp('here'))


def out_of(capsys, *argv):
    "(exit code, printed, complained)"
    code = main(list(argv))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_replay_prints_the_story(capsys):
    code, out, err = out_of(capsys, 'replay', '--start', '2^16', '--policies', 'torch, megatron,metaseq')
    rows = {l.split()[0]: l.split() for l in out.splitlines() if l.startswith(('torch', 'mega', 'meta'))}
    assert code == 0 and not err and '610 steps, 10 of them bad' in out
    assert rows['torch'][1:5] == ['16', '6', '6', '10'] and rows['megatron'][3] == '7' and rows['metaseq'][3] == '16'


def test_replay_flies_all_policies_from_their_own_start(capsys):
    from mpcourse.policies import RULES
    code, out, _ = out_of(capsys, 'replay', '--storm', '0010')
    assert code == 0 and all(f'\n{name} ' in out for name in RULES)


@pytest.mark.parametrize('argv, steps', [(('--storm', '0110'), '4 steps, 2'), (('--storm', 'hard', '--bad', '3', '--before', '5', '--after', '0'), '8 steps, 3'),
                                         (('--storm', 'random', '--rate', '1', '--steps', '50'), '50 steps, 50')])
def test_storms(argv, steps, capsys):
    code, out, _ = out_of(capsys, 'replay', *argv, '--policies', 'torch')
    assert code == 0 and steps in out


def test_a_finite_factor_and_a_recorded_trace(tmp_path, capsys):
    code, out, _ = out_of(capsys, 'replay', '--storm', '1'*30, '--factor', '2^14', '--policies', 'torch', '--start', '65536')
    assert code == 0 and ['torch', '16', '11', '11', '5'] in [l.split()[:5] for l in out.splitlines()]
    save_trace(overflow_burst(4, 2, 2), tmp_path/'t.pt')
    code, out, _ = out_of(capsys, 'replay', '--storm', str(tmp_path/'t.pt'), '--policies', 'torch')
    assert code == 0 and '8 steps, 4 of them bad' in out


@pytest.mark.parametrize('name', ['storm.png', 'storm.svg'])
def test_replay_draws(name, tmp_path, capsys):
    code, out, _ = out_of(capsys, 'replay', '--storm', '0'*20 + '1'*5, '--policies', 'torch', '--out', str(tmp_path/name))
    assert code == 0 and (tmp_path/name).stat().st_size > 5000 and name in out


def test_replay_draws_into_the_current_folder_unless_told_otherwise(tmp_path, capsys):
    code, out, _ = out_of(capsys, 'replay', '--storm', '001', '--policies', 'torch', '--out', str(tmp_path/'x.png'))
    assert code == 0 and not Path('replay.png').exists() and out.endswith('x.png.\n')
    code, out, _ = out_of(capsys, 'replay', '--storm', '001', '--policies', 'torch')
    assert code == 0 and Path('replay.png').stat().st_size > 5000 and out.endswith('The plot is in replay.png.\n')
    assert out_of(capsys, 'replay', '--storm', '001', '--policies', 'torch', '--out', 'bare')[1].endswith('The plot is in bare.png.\n') and Path('bare.png').exists()


def test_a_policy_that_gives_up_is_named(capsys):
    code, out, _ = out_of(capsys, 'replay', '--storm', '011', '--policies', 'deepspeed', '--start', '1')
    assert code == 3 and 'deepspeed gave up at step 2: ' in out


@pytest.mark.parametrize('argv, says', [
    (('--storm', 'hurricane'), "There is no storm 'hurricane': take hard, random, a script"), (('--storm', ''), "There is no storm ''"),
    (('--policies', 'torch,nobody'), 'nobody'), (('--start', '0'), 'A loss scale of 0'), (('--start', 'high'), "'high' is not a number"),
    (('--factor', '3'), 'cannot be 3 times as large'), (('--factor', 'x'), "'x' is not a number"), (('--storm', 'random', '--rate', '2'), 'a probability'),
    (('--storm', '01', '--policies', 'torch', '--out', '/nowhere/x.png'), "The plot cannot be written to '/nowhere/x.png' (No such file or directory): name another file with --out."),
    (('--storm', '01', '--policies', 'torch', '--out', '.'), "'.' (it is a folder): name another"), (('--storm', '01', '--policies', 'torch', '--out', 'x.abc'), 'abc')])
def test_replay_refuses_in_a_sentence(argv, says, capsys):
    code, _, err = out_of(capsys, 'replay', *argv)
    assert code == 2 and says in err and err.count('\n') == 1 and 'Traceback' not in err


def test_a_file_that_is_no_trace(tmp_path, capsys):
    (tmp_path/'x.json').write_text('{"a": 1}')
    code, _, err = out_of(capsys, 'replay', '--storm', str(tmp_path/'x.json'))
    assert code == 2 and 'is not a whole trace' in err and err.count('\n') == 1


@pytest.mark.parametrize('argv', [('replay', '--bad', '-1'), ('replay', '--steps', '0'), ('compare', 'relu_mlp', '--seeds', '0'), ('compare', 'relu_mlp', '--seeds', 'x')])
def test_numbers_that_are_none(argv, capsys):
    with pytest.raises(SystemExit) as e: main(list(argv))
    assert e.value.code == 2 and 'is not a whole number' in capsys.readouterr().err


def test_compare_prints_and_keeps(tmp_path, capsys):
    argv = ('compare', 'relu_mlp', '--steps', '3', '--schemes', 'FP32,FP16 torch', '--seeds', '2', '--store', 'runs')
    code, out, _ = out_of(capsys, *argv)
    assert code == 0 and 'verdict' in out and 'FP16 torch' in out and 'kept in runs' in out
    before = Path('runs').read_text()
    assert len(before.splitlines()) == 4 and out_of(capsys, *argv)[:2] == (0, out) and Path('runs').read_text() == before


SCRIPT = """
import torch
from mpcourse.compare import Training
def make(seed):
    torch.manual_seed(seed)
    x = torch.randn(32, 4)
    return Training(torch.nn.Linear(4, 1), lambda ps: torch.optim.SGD(ps, .1), torch.nn.functional.mse_loss, lambda: [(x, x[:, :1])]*25)
def nothing(seed): return 3
"""


def test_compare_writes_a_page(tmp_path, capsys):
    line = ['compare', 'relu_mlp', '--schemes', 'BF16', '--seeds', '1', '--steps', '3', '--html']
    assert main([*line, str(tmp_path/'page.html')]) == 0
    page = (tmp_path/'page.html').read_text(encoding='utf-8')
    assert '<table' in page and 'BF16' in page and f'The page is {tmp_path/"page.html"}' in capsys.readouterr().out
    assert main([*line, str(tmp_path/'no'/'page.html')]) == 2 and 'No such file' in capsys.readouterr().err


def test_compare_trains_a_net_of_ones_own(capsys):
    Path('mine.py').write_text(SCRIPT)
    code, out, _ = out_of(capsys, 'compare', 'mine.py:make', '--schemes', 'BF16', '--seeds', '2')
    assert code == 0 and 'BF16' in out and 'kept' not in out


@pytest.mark.parametrize('argv, says', [(('chess',), "There is no toy 'chess'"), (('relu_mlp', '--schemes', 'FP32,magic'), "There is no scheme 'magic'"),
                                        (('mine.py:none',), "defines no function 'none'"), (('mine.py:nothing',), 'return a Training'), (('no.py:f',), 'no.py')])
def test_compare_refuses_in_a_sentence(argv, says, capsys):
    Path('mine.py').write_text(SCRIPT)
    code, _, err = out_of(capsys, 'compare', *argv)
    assert code == 2 and says in err and err.count('\n') == 1 and 'Traceback' not in err


def test_a_warning_is_one_sentence_and_the_process_keeps_its_own_way_of_warning(capsys):
    before = warnings.showwarning
    code, _, err = out_of(capsys, 'replay', '--start', '1000', '--policies', 'torch,fastai', '--storm', '010')
    assert code == 0 and err == 'A loss scale of 1000 is not a power of two, so it rounds each gradient once more: 512 would not.\n'
    assert warnings.showwarning is before


def test_replay_flies_automatic_loss_scaling_too(capsys, tmp_path):
    code, out, _ = out_of(capsys, 'replay', '--policies', 'als,torch', '--start', '2^10', '--out', str(tmp_path/'r.png'))
    rows = {l.split()[0]: l.split()[1:] for l in out.splitlines() if l.startswith(('als', 'torch'))}
    assert code == 0 and rows['als'][:3] == ['10', '10', '22'] and rows['torch'][2] == '0'


@pytest.mark.parametrize('out', ['x.exe', 'no/such/folder/x.png', '.'])
def test_a_plot_that_cannot_be_written_is_refused_before_the_work(out, capsys, monkeypatch):
    from mpcourse import simulator
    monkeypatch.setattr(simulator, 'replay', lambda *a: pytest.fail('the work was done'))
    code, said, err = out_of(capsys, 'replay', '--out', out)
    assert code and not said and out in err and '--out' in err


def test_a_reader_that_has_seen_enough_is_no_traceback(tmp_path):
    "As with `| head`: the other end of the pipe is closed before anything is written"
    argv = ['replay', '--storm', '0010']
    p = subprocess.Popen([sys.executable, '-c', f'import sys; from mpcourse.cli import main; input(); sys.exit(main({argv}))'], cwd=tmp_path,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdout.close()
    _, err = p.communicate('go\n', timeout=120)
    assert p.returncode == 141 and err == ''


# --- for programs ---

@pytest.mark.parametrize('argv, keys', [
    (('replay', '--storm', '001', '--policies', 'torch'), {'trace', 'policies', 'stopped'}), (('probe', 'relu_mlp', '--schemes', 'bf16,TENSORWISE'), {'bf16', 'TENSORWISE'}),
    (('advise', 'relu_mlp', '--steps', '2', '--schemes', 'bf16'), {'verdicts', 'seen', 'remarks', 'settings', 'tracebacks'}),
    (('compare', 'relu_mlp', '--steps', '3', '--seeds', '1', '--schemes', 'mx'), {'schemes', 'runs'}), (('doctor',), {'python', 'versions', 'formats', 'advice'})])
def test_json_is_all_that_is_printed(argv, keys, capsys):
    import json
    code, out, _ = out_of(capsys, *argv, '--json')
    assert code in (0, 3) and keys <= json.loads(out, parse_constant=pytest.fail).keys() and not Path('replay.png').exists()


def test_a_fault_has_an_exit_code_and_plain_fields(tmp_path, capsys):
    import json
    (tmp_path/'s.py').write_text("""
import torch, torch.nn.functional as F
from torch import nn
from mpcourse.compare import Training
class Offset(nn.Module):
    def __init__(self): super().__init__(); self.f = nn.Linear(4, 4)
    def forward(self, x): return (self.f(x) + 1e4) - 1e4
def make(seed):
    torch.manual_seed(seed)
    return Training(Offset(), lambda ps: torch.optim.SGD(ps, .1), F.mse_loss, lambda: iter([(torch.randn(32, 4), torch.randn(32, 4))]))
""")
    code, out, _ = out_of(capsys, 'probe', f'{tmp_path}/s.py:make', '--json')
    fault = json.loads(out)['bf16']['findings'][0]
    assert code == 3 and fault['line'] == 7 and fault['code'].endswith('- 1e4') and fault['first_try'] and isinstance(fault['error'], float | str)


def test_what_is_missing_is_named_with_the_extra(monkeypatch, capsys):
    for package in ('pandas', 'matplotlib', 'matplotlib.pyplot'): monkeypatch.setitem(sys.modules, package, None)
    code, _, err = out_of(capsys, 'compare', 'relu_mlp')
    assert code == 2 and err == "`mpcourse compare` needs pandas, which is missing: pip install 'mpcourse[cli]'\n"
    assert out_of(capsys, 'probe', 'relu_mlp')[0] == 0, 'it draws nothing'
