"The doctor: it asks without importing, and its advice follows from what it found"
import json, os, subprocess, sys
from dataclasses import replace

import pytest
import torch

from mpcourse import doctor as M

pytestmark = pytest.mark.library
HERE = M.Report('3.12', {'torch': '2.13', 'torchvision': 'not installed'}, 2, 2, [], {'fp16': True, 'e8m0': False}, .1, .9, 'off', '')
GPU = replace(HERE, devices=['cuda:0'])


def python(code, **kw): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, **kw)


def test_doctor_examines_without_importing_torchvision():
    code = ("import sys, mpcourse.doctor as m; r = m.doctor(); assert r.formats['fp16'] and r.advice and r.cores > 0; "
            "assert not {'torchvision', 'fastai', 'nbclient'} & set(sys.modules)")
    r = python(code)
    assert r.returncode == 0 and 'FP16 matmul' in r.stdout and 'torch' in r.stdout, r.stderr


def test_doctor_reports_a_broken_package(tmp_path):
    (tmp_path/'broken_vision.py').write_text('raise RuntimeError("operator nms does not exist")')
    r = python("import mpcourse.doctor as m; print(m.imports('broken_vision'))", env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert r.stdout.strip() == 'RuntimeError: operator nms does not exist'


@pytest.mark.parametrize('report, words', [
    (HERE, 'fp32_accumulate'), (replace(HERE, bf16_speed=3.), 'torch.autocast'), (replace(GPU, fp16_speed=8., bf16_speed=8.), 'start with it'),
    (replace(GPU, fp16_speed=8., bf16_speed=.3), 'FP16 with a loss scaler'), (GPU, 'train in FP32 unless memory is short'),
    (replace(HERE, torchvision='RuntimeError: nms'), '`from fastai.vision.all import *` cannot work: install the build that matches torch 2.13')])
def test_advice(report, words): assert any(words in s for s in M.recommend(report)) and all(s.endswith('.') for s in M.recommend(report))


def test_table_names_what_is_there_and_what_is_not():
    rows = dict(M.report_rows(HERE))
    assert rows['casts to'] == 'fp16' and rows['lacks'] == 'e8m0' and rows['FP16 matmul'] == '10.0 times slower than FP32'
    assert rows['devices'] == 'no accelerator' and 'does not import, E' in dict(M.report_rows(replace(HERE, torchvision='E')))['torchvision']


@pytest.mark.parametrize('name', list(M.TORCH_NAMES.values()))
def test_a_format_counts_as_there_if_torch_casts_to_it_and_back(name):
    try: ok = torch.tensor([2.]).to(getattr(torch, name)).float().item() == 2
    except Exception: ok = False
    assert M.casts(name) == ok and not M.casts('float3')


def test_speed_of_what_cannot_multiply_is_nan(monkeypatch):
    def refuse(dtype, *args): raise RuntimeError('not implemented')
    monkeypatch.setattr(M, 'step_seconds', refuse)
    assert M.in_words(M.speed_ratio(torch.float16)) == 'cannot multiply'


# --- which sums a GPU computes; a row stands for the GPU ---

SAME = {'V100': {'V100'}, 'A100': {'A100', 'RTX 4090'}, 'RTX 4090': {'A100', 'RTX 4090'}, 'H100': {'H100', 'B200'}, 'B200': {'H100', 'B200'}}


@pytest.mark.parametrize('gpu', list(SAME))
def test_a_row_is_recognised_by_its_bits(gpu):
    found = M.matching_cores(lambda a, b, fmt: M.gpu_matmul(a, b, gpu, fmt))
    for fmt, rows in found.items():
        if (gpu, fmt, 'fp32') not in M.CORES: assert rows is None
        elif fmt == 'e4m3': assert rows == [gpu]
        else: assert set(rows) == {g for g in SAME[gpu] if (g, fmt, 'fp32') in M.CORES}


def test_sums_that_are_in_no_row_and_formats_that_cannot_be_multiplied():
    def exact(a, b, fmt):
        if fmt == 'e4m3': raise RuntimeError('no FP8 on this device')
        return (a.double() @ b.double()).float()
    found = M.matching_cores(exact)
    assert found == dict(fp16=[], bf16=[], tf32=[], e4m3=None)
    words = M.core_report(found)
    assert 'no row' in words[0] and 'cannot multiply' in words[3] and all(s.endswith('.') for s in words)


def test_without_a_gpu_the_command_says_so():
    if torch.cuda.is_available(): pytest.skip('there is a GPU')
    r = subprocess.run([sys.executable, '-c', "import sys; from mpcourse.cli import main; sys.exit(main(['doctor', '--gpu']))"], capture_output=True, text=True)
    assert r.returncode == 2 and 'sees no NVIDIA GPU' in r.stdout + r.stderr


def test_the_command_prints_what_the_gpu_is(monkeypatch, capsys):
    from mpcourse import cli
    monkeypatch.setattr(M, 'has_cuda', lambda: True)
    monkeypatch.setattr(M, 'doctor', lambda: None)
    monkeypatch.setattr(M, 'examine', lambda: HERE)
    monkeypatch.setattr(M, 'matching_cores', lambda: dict(e4m3=['H100']))
    assert cli.main(['doctor', '--gpu']) == 0
    said = capsys.readouterr().out
    assert 'E4M3: every bit is that of H100' in said
    assert json.loads(said.splitlines()[-1])['cores_like']['e4m3'] == ['H100']
