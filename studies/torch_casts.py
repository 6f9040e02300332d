"""What did torch's casts to eight bits do with numbers beyond the largest, from version to version? (chapter 40)

A row is a version of torch. Its CPU build or CUDA build, on a CPU, casts the hard inputs of each format;
the value is the number of inputs that became NaN, infinite, and the format's largest number, and 1 where one
rule explains all of them. `python studies/torch_casts.py` installs each version into an environment of its
own under the folder of MPCOURSE_CACHE, which takes gigabytes.
"""
import os, subprocess, sys, tempfile
from pathlib import Path

import numpy as np, torch

from mpcourse.conform import conform, save_inputs
from mpcourse.formats import get_format

ROWS = ['2.6.0', '2.7.1', '2.8.0', '2.9.0', '2.10.0', '2.11.0', '2.12.0', '2.13.0']
SEEDS = [0]
FORMATS = dict(e4m3='float8_e4m3fn', e5m2='float8_e5m2', e4m3fnuz='float8_e4m3fnuz')
CAST = '''import sys, numpy as np, torch
x = torch.from_numpy(np.load(sys.argv[1]))
np.save(sys.argv[2], x.to(getattr(torch, sys.argv[3])).float().numpy())'''


def python_with(version):
    "The interpreter of an environment with this torch"
    if torch.__version__.partition('+')[0] == version: return sys.executable
    folder = Path(os.environ.get('MPCOURSE_CACHE', Path.home()/'.cache/mpcourse'))/'torch'/version
    python = folder/'bin/python'
    if not python.exists():
        subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
        subprocess.run([python, '-m', 'pip', 'install', '-q', f'torch=={version}', 'numpy'], check=True)
    return python


def run(row, seed):
    "Counts of what became of the hard inputs, by format"
    found = {}
    with tempfile.TemporaryDirectory() as tmp:
        for fmt, dtype in FORMATS.items():
            save_inputs(f'{tmp}/x.npy', fmt)
            subprocess.run([python_with(row), '-c', CAST, f'{tmp}/x.npy', f'{tmp}/y.npy', dtype], check=True)
            x, y = (torch.from_numpy(np.load(f'{tmp}/{k}.npy')) for k in 'xy')
            beyond = y[x.abs() > 2*get_format(fmt).max]
            found |= {f'{fmt}, NaN': beyond.isnan().sum(), f'{fmt}, infinite': beyond.isinf().sum(),
                      f'{fmt}, largest': (beyond.abs() == get_format(fmt).max).sum(), f'{fmt}, one rule': not conform(y, fmt).differ}
    return found


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
