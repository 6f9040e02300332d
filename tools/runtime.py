"""Notebooks for a fresh runtime, as Colab's: `python -m tools.runtime OUT` writes copies that
install the course first.

The deploy job keeps them on the branch `runtime`, where the site's links lead. To try one here,
in an empty environment with Jupyter:
`MPCOURSE_REPO=$PWD jupyter execute OUT/02_rounding.ipynb`.
"""
import re, sys
from pathlib import Path
from textwrap import indent

import nbformat
from nbformat.v4 import new_code_cell

from tools.course import chapters

COLAB = 'https://colab.research.google.com/github/mpcourse/mpcourse'
BINDER = 'https://mybinder.org/v2/gh/mpcourse/mpcourse'
INSTALL = '''# the course, with its library and its stored results: a minute or two, once
import os, subprocess, sys

repo = os.environ.get('MPCOURSE_REPO', 'https://github.com/mpcourse/mpcourse')
if not os.path.isdir('mpcourse/nbs'):
    subprocess.run(['git', 'clone', '-q', '--depth', '1', repo, 'mpcourse'], check=True)
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '-e', './mpcourse[course]',
                    'ml_dtypes'], check=True)
sys.path.insert(0, os.path.abspath('mpcourse'))'''


def links(
    ch, # a chapter
) -> str: # Markdown
    "Where a chapter can be run without installing anything"
    colab = f'{COLAB}/blob/runtime/{ch.stem}.ipynb'
    binder = f'{BINDER}/main?labpath=nbs/{ch.stem}.ipynb'
    return f'Run it now: [Colab]({colab}) · [Binder]({binder})'


def where_it_runs(
    source: str, # of a cell
) -> str: # the same, or guarded
    "What needs a GPU runs where there is one: a runtime without one goes on behind it"
    if not re.search(r'^#\| *cuda', source, re.M): return source
    return 'import torch\nif torch.cuda.is_available():\n' + indent(source, '    ')


def write(
    out: Path, # a folder
):
    "All notebooks, each with the install cell in front of its first code"
    out.mkdir(parents=True, exist_ok=True)
    for ch in chapters():
        nb = nbformat.read(ch.path, as_version=4)
        for cell in nb.cells: cell.source = where_it_runs(cell.source)
        nb.cells.insert(1, new_code_cell(INSTALL, id='install'))
        nbformat.write(nb, out/ch.path.name)


if __name__ == '__main__': write(Path(sys.argv[1]))
