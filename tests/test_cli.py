"""The console command: what it prints and writes, and a sentence for each thing that cannot be."""
import subprocess, sys, warnings
from pathlib import Path

import pytest

from mpcourse.cli import main

pytestmark = [pytest.mark.library, pytest.mark.filterwarnings('ignore::DeprecationWarning')] # other packages' own


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp('here'))


def out_of(capsys, *argv):
    "(exit code, printed, complained)"
    code = main(list(argv))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize('argv', [('advise', 'relu_mlp', '--seed', '-1'), ('advise', 'relu_mlp', '--steps', '0'), ('compare', 'relu_mlp', '--seeds', '0'), ('compare', 'relu_mlp', '--seeds', 'x')])
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
    assert '<table' in page and 'BF16' in page and f'The page is {tmp_path/"page.html"}' in capsys.readouterr().err
    assert main([*line, str(tmp_path/'no'/'page.html')]) == 2 and 'No such file' in capsys.readouterr().err


def test_compare_trains_a_net_of_ones_own(capsys):
    Path('mine.py').write_text(SCRIPT)
    code, out, _ = out_of(capsys, 'compare', 'mine.py:make', '--schemes', 'BF16', '--seeds', '2')
    assert code == 0 and 'BF16' in out and 'kept' not in out


@pytest.mark.parametrize('command', ['compare', 'advise', 'probe'])
def test_a_script_that_does_not_exist(command, capsys):
    code, _, err = out_of(capsys, command, 'no.py:f')
    assert code == 2 and "There is no script 'no.py'" in err and err.count('\n') == 1


@pytest.mark.parametrize('argv, says', [(('chess',), "There is no toy 'chess'"), (('relu_mlp', '--schemes', 'FP32,magic'), "There is no scheme 'magic'"),
                                        (('mine.py:none',), "defines no function 'none'"), (('mine.py:nothing',), 'return a Training')])
def test_compare_refuses_in_a_sentence(argv, says, capsys):
    Path('mine.py').write_text(SCRIPT)
    code, _, err = out_of(capsys, 'compare', *argv)
    assert code == 2 and says in err and err.count('\n') == 1 and 'Traceback' not in err


def test_a_warning_is_one_sentence_and_the_process_keeps_its_own_way_of_warning(capsys, monkeypatch):
    before = warnings.showwarning
    def twice(seed):
        for _ in range(2): warnings.warn('A loss scale of 1000 is not a power of two')
        raise ValueError('No such net')
    monkeypatch.setattr('mpcourse.cli.training_from', lambda *a: twice)
    code, _, err = out_of(capsys, 'advise', 'relu_mlp')
    assert code == 2 and err.count('A loss scale of 1000 is not a power of two\n') == 1 and 'UserWarning' not in err
    assert warnings.showwarning is before


def test_a_reader_that_has_seen_enough_is_no_traceback(tmp_path):
    "As with `| head`: the other end of the pipe is closed before anything is written"
    argv = ['doctor', '--json']
    p = subprocess.Popen([sys.executable, '-c', f'import sys; from mpcourse.cli import main; input(); sys.exit(main({argv}))'], cwd=tmp_path,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdout.close()
    _, err = p.communicate('go\n', timeout=120)
    assert p.returncode == 141 and err == ''


# --- for programs ---

@pytest.mark.parametrize('argv, keys', [
    (('probe', 'relu_mlp', '--schemes', 'bf16,TENSORWISE'), {'bf16', 'TENSORWISE'}),
    (('advise', 'relu_mlp', '--steps', '2', '--schemes', 'bf16'), {'verdicts', 'seen', 'remarks', 'settings', 'tracebacks'}),
    (('compare', 'relu_mlp', '--steps', '3', '--seeds', '1', '--schemes', 'mx'), {'schemes', 'runs'}), (('doctor',), {'python', 'versions', 'formats', 'advice'})])
def test_json_is_all_that_is_printed(argv, keys, capsys):
    import json
    code, out, _ = out_of(capsys, *argv, '--json')
    assert code in (0, 3) and keys <= json.loads(out, parse_constant=pytest.fail).keys()


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


def test_results_of_another_net_are_refused(capsys):
    argv = ['compare', 'relu_mlp', '--steps', '3', '--schemes', 'BF16', '--seeds', '1', '--store', 'runs']
    assert main(argv) == 0 and main(argv) == 0
    code, _, err = out_of(capsys, *argv[:3], '4', *argv[4:])
    assert code == 2 and 'runs has results of' in err and "'steps': 3" in err


@pytest.mark.parametrize('argv', [('probe', 'relu_mlp', '--schemes', ''), ('watch', '--at', '', 'x.py'), ('watch', '--modules', ',', 'x.py'), ('compare', 'relu_mlp', '--schemes', ','),
                                  ('probe', 'relu_mlp', '--scale', '0')])
def test_an_option_that_names_nothing(argv, capsys):
    Path('x.py').write_text('')
    code, _, err = out_of(capsys, *argv)
    assert code == 2 and err.count('\n') == 1


def test_a_script_imports_its_neighbours(capsys):
    Path('neighbour.py').write_text(SCRIPT)
    Path('mine.py').write_text('from neighbour import make')
    assert out_of(capsys, 'probe', 'mine.py:make')[0] in (0, 3)
    Path('other.py').write_text('import nobody_has_this')
    code, _, err = out_of(capsys, 'probe', 'other.py:make')
    assert code == 2 and err == '`mpcourse probe` needs nobody_has_this, which is missing.\n'


def test_a_script_without_a_batch(capsys):
    Path('mine.py').write_text(SCRIPT.replace('[(x, x[:, :1])]*25', 'iter(())'))
    code, _, err = out_of(capsys, 'probe', 'mine.py:make')
    assert code == 2 and 'has no batch' in err


def test_the_text_of_an_exit_is_printed(capsys):
    Path('mine.py').write_text("import sys\nsys.exit('give --data')")
    code, _, err = out_of(capsys, 'watch', 'mine.py')
    assert code == 1 and 'give --data' in err


@pytest.mark.parametrize('old, new', [('lambda ps: torch.optim.SGD(ps, .1)', '3'), ('lambda: [(x, x[:, :1])]*25', '[(x, x)]')])
def test_a_training_of_what_cannot_be_called(old, new, capsys):
    Path('mine.py').write_text(SCRIPT.replace(old, new))
    code, _, err = out_of(capsys, 'probe', 'mine.py:make')
    assert code == 2 and 'of this Training is a' in err and err.count('\n') == 1
    code, _, err = out_of(capsys, 'probe', 'mine.py')
    assert code == 2 and "give mine.py:make" in err


def test_a_script_without_a_step_is_told(capsys):
    Path('mine.py').write_text('x = 1')
    code, _, err = out_of(capsys, 'watch', 'mine.py')
    assert code == 0 and 'no step was seen' in err
