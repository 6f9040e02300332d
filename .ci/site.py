"""What `make site` runs: the Quarto site from the executed notebooks of `make course`, so that it carries their plots.

nbdev works in a copy of the project whose notebooks are the executed ones, so nothing under nbs/ changes.
"""
import os, shutil, subprocess, sys, tempfile
from pathlib import Path

import nbformat
from mpcourse.course import chapters, executed, is_fresh, run_course
from mpcourse.pages import PageRenderer, widget_view

ROOT = Path(__file__).resolve().parent.parent
VIEW, STATE = 'application/vnd.jupyter.widget-view+json', 'application/vnd.jupyter.widget-state+json'
NO_QUARTO = ('The site is built with Quarto, and there is no `quarto` on the PATH: install it from '
             'https://quarto.org/docs/get-started/ and run `make site` again; `make course` makes pages without it.')


def stale(out):
    "The chapters without an executed copy of their present source"
    def is_good(ch, nb): return nb is not None and is_fresh(nb, ch) and nb.metadata['mpcourse']['status'] == 'ok'
    return [ch for ch in chapters(ROOT/'nbs') if not is_good(ch, executed(ch, out))]


def plain_output(out, state):
    "An output whose widget is reduced to the html that it shows"
    view = out.get('data', {}).get(VIEW)
    if view is None: return out
    html = out['data'].get('text/html') or widget_view(view['model_id'], PageRenderer(), state)
    as_it_is = ''.join(html).replace('<table', '<table data-quarto-disable-processing="true"')
    return nbformat.v4.new_output('display_data', {'text/html': as_it_is})


def for_site(nb):
    "An executed notebook without live widgets, with a note beside each cell that was not run"
    state = nb.metadata.pop('widgets', {}).get(STATE, {}).get('state', {})
    nb.metadata.pop('mpcourse', None)
    for c in nb.cells:
        if c.cell_type != 'code': continue
        c.outputs = [plain_output(o, state) for o in c.outputs]
        note = c.metadata.pop('mpcourse', {}).get('skipped')
        if note: c.outputs = [nbformat.v4.new_output('display_data', {'text/html': f'<p class="not-run">{note}</p>'})]
    return nb


def html_alone(nb):
    "The front page in one format: Quarto loses the Markdown twin of an index that has figures and a name from nbdev"
    nb.cells[0].source += '\n\n- format: html'
    return nb


def copy_project(tmp, out):
    "The project with its executed notebooks"
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', '_quarto.yml', 'LICENSE'): shutil.copy(ROOT/f, tmp)
    shutil.copytree(ROOT/'mpcourse', tmp/'mpcourse', ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copytree(ROOT/'nbs', tmp/'nbs', symlinks=True, ignore=shutil.ignore_patterns('*.ipynb', '.ipynb_checkpoints', '_proc'))
    for ch in chapters(ROOT/'nbs'):
        nb = for_site(executed(ch, out))
        nbformat.write(html_alone(nb) if ch.path.name == 'index.ipynb' else nb, tmp/'nbs'/ch.path.name)
    shutil.copy(ROOT/'README.md', tmp)  # after the notebooks: nbdev then leaves it alone


def build(out):
    "Build the site in a copy, then put it in place of the old one"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp).resolve()
        copy_project(tmp, out)
        nbdev = Path(sys.executable).parent/'nbdev_docs'
        code = subprocess.run([nbdev], cwd=tmp, env={**os.environ, 'OMP_NUM_THREADS': '1'}).returncode
        if code or not (tmp/'_docs'/'index.html').exists(): return f'Quarto did not finish (exit code {code}): its messages stand above.'
        shutil.rmtree(ROOT/'_docs', ignore_errors=True)
        shutil.move(tmp/'_docs', ROOT/'_docs')
    return ''


def main():
    if not shutil.which('quarto'): return NO_QUARTO
    out = ROOT/'_course'
    if todo := stale(out):
        outcomes = run_course(' '.join(c.stem for c in todo), out, ROOT/'nbs')
        if any(o.status != 'ok' for o in outcomes): return 'The site is not built, because chapters failed: their errors stand above.'
    if problem := build(out): return problem
    print(f'The site is in {ROOT/"_docs"/"index.html"}')


if __name__ == '__main__': sys.exit(main())
