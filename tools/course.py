"""Run the chapters and write their pages; a cell that fails does not stop its chapter.

    python -m tools.course                all chapters, to _course/
    python -m tools.course 02 rounding    some of them
"""
import argparse, asyncio, hashlib, importlib.metadata, json, os, re, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbconvert.filters.ansi import strip_ansi
from nbformat.v4 import new_notebook, new_output
from tqdm import tqdm

from mpcourse.doctor import has_cuda
from tools.notebooks import ROOT, code_hash, digest
from tools.pages import directives, index_html, page_html

THREADS = [f'{v}_NUM_THREADS' for v in ('OMP', 'MKL', 'OPENBLAS', 'NUMEXPR')]
FIGURES = "--InlineBackend.figure_formats={'png', 'svg'}"    # a page shows the lighter one; slides and cards take the png
PARTS = {0: '', 1: 'Part I · Numbers and failures', 5: 'Part II · Training in FP16', 13: 'Part III · Choosing and watching',
         23: 'Part IV · Few bits', 29: 'Part V · What breaks today', 33: 'Part VI · Deciding', 85: 'Appendix'}


# --- chapters ---

@dataclass(frozen=True)
class Chapter:
    "What the first cells of a notebook say about it"
    path: Path       # the notebook
    number: str      # '03', or 'index'
    title: str       # its heading
    promise: str     # the quoted sentence under the heading
    module: str = '' # the module that it exports, if any
    minutes: str = '' # to read it, if it says so

    @property
    def stem(self) -> str: return self.path.stem # the name that notebook and page share

    @property
    def part(self) -> str: return PARTS[max(n for n in PARTS if n <= int(self.number))] # in which it stands


def read_chapter(
    path: Path, # a notebook
) -> Chapter: # its number, title, promise, module and minutes
    "Read a notebook's number from its name, the rest from its first cells"
    nb = nbformat.read(path, as_version=4)
    first = next((c.source for c in nb.cells if c.cell_type == 'markdown'), '')
    title = re.search(r'^# +(.+)$', first, re.M)
    promise = ' '.join(re.findall(r'^> *(.*)$', first, re.M))
    module = next((m[1] for c in nb.cells if (m := re.match(r'#\| *default_exp +([\w.]+)', c.source))), '')
    number = re.match(r'(\d+)_', path.name)
    minutes = next((m[1] for c in nb.cells if (m := re.search(r'(\d+) minutes to read', c.source))), '')
    return Chapter(path, number[1] if number else path.stem, title[1] if title else path.stem, promise, module, minutes)


def chapters(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> list: # a `Chapter` for each, the index first
    "The chapters of the course in their order"
    found = [p for p in Path(nbs).resolve().glob('*.ipynb') if re.match(r'\d+_|index\.', p.name)]
    if not found: sys.exit(f'There are no numbered notebooks in {nbs}: name the folder that holds them with --nbs.')
    return sorted(map(read_chapter, found), key=lambda ch: (ch.number != 'index', ch.path.name))


def select(
    chs: list,      # all chapters
    wanted: str='', # numbers or names, with spaces or commas between; '' for all
) -> list: # the chapters asked for, in the course's order
    "Pick chapters by number ('02', '2'), name ('rounding') or file ('02_rounding')"
    def names(ch): return {ch.number, ch.number.lstrip('0'), ch.stem, ch.stem.split('_', 1)[-1], ch.path.name}
    asked = set(re.split(r'[\s,]+', wanted.strip())) - {''}
    unknown = asked - set().union(*map(names, chs))
    if unknown: sys.exit(f'There is no chapter {min(unknown)!r}: there are {", ".join(ch.number for ch in chs)}.')
    return [ch for ch in chs if not asked or asked & names(ch)]


# --- executed copies ---

def source_hash(
    nb: dict, # a notebook
) -> str: # twelve hexadecimal digits
    "A fingerprint of what its cells say, whatever they printed"
    said = json.dumps([[c.cell_type, c.source] for c in nb.cells])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def program_hash(
    nb: dict, # a notebook
) -> str: # twelve hexadecimal digits
    "A fingerprint of what its cells call, and of Python and torch"
    code = code_hash([c.source for c in nb.cells if c.cell_type == 'code'], ROOT)
    return digest(code, sys.version, importlib.metadata.version('torch'))


def executed(
    ch: Chapter, # a chapter
    out: Path,   # the folder of executed copies
) -> dict|None: # its executed copy, or None
    "Read the executed copy of a chapter, if there is one"
    path = Path(out)/ch.path.name
    return nbformat.read(path, as_version=4) if path.exists() else None


def is_fresh(
    nb: dict,    # an executed notebook
    ch: Chapter, # its chapter
) -> bool: # whether its source is still the same
    "Whether an executed copy was made from the notebook as it is now"
    return nb.metadata.get('mpcourse', {}).get('source') == source_hash(nbformat.read(ch.path, as_version=4))


def is_unchanged(
    ch: Chapter, # a chapter
    out: Path,   # the folder of executed copies
) -> bool: # whether to run it again would show nothing new
    "Did the chapter run without an error, with the same source and the same code?"
    nb = executed(ch, out)
    meta = nb.metadata.get('mpcourse', {}) if nb else {}
    return bool(meta) and meta['status'] == 'ok' and is_fresh(nb, ch) and meta.get('code') == program_hash(nb)


def write_text(
    path: Path, # the file
    text: str,  # its content
):
    "Write a file in one step: it is there whole, or not at all"
    tmp = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    tmp.write_text(text, encoding='utf-8')
    os.replace(tmp, path)


# --- one chapter ---

def prepare(
    nb: dict, # a notebook; changed in place
):
    "Drop outputs, and tag cells that are not to be run here"
    for c in nb.cells:
        if c.cell_type != 'code': continue
        c.outputs, c.execution_count, d = [], None, directives(c.source)[0]
        why = ('not run here: shown to be read' if d.get('eval') is False else
               'not run here: needs an NVIDIA GPU' if 'cuda' in d and not has_cuda() else '')
        if why: c.metadata.update(tags=['skip-execution'], mpcourse={'skipped': why})


def kernel_env(
    folder: str, # the kernel's own, for IPython's files
) -> dict: # environment variables
    "One thread unless the environment says otherwise; MPCOURSE_SEED and the rest reach the kernel as they are"
    threads = dict.fromkeys(THREADS, os.environ.get('OMP_NUM_THREADS', '1'))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return {**threads, **os.environ, 'PYTHONPATH': path, 'MPCOURSE_PAGES': '1', 'IPYTHONDIR': f'{folder}/.ipython',
            'TQDM_DISABLE': '1'}


def add_error(
    cell: dict, # that was stopped
    name: str,  # of the exception
    value: str, # what it says
):
    "Note what stopped a cell; the traceback of an interrupt stays"
    error = next((o for o in cell.outputs if o.output_type == 'error'), None)
    if error is None: cell.outputs.append(error := new_output('error', traceback=[]))
    error.update(ename=name, evalue=value, traceback=[*error.traceback, f'{name}: {value}'])


async def execute(
    nb: dict,     # a prepared notebook; outputs are put into it
    timeout: int, # seconds for one cell
    tick,         # called after each cell
):
    "Run all cells in a fresh kernel of this interpreter, in an empty folder; only the kernel's death ends it early"
    at = next((c for c in nb.cells if c.cell_type == 'code'), None)
    if at is None: return
    with tempfile.TemporaryDirectory() as folder:
        km = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), kernel_name='python3')
        client = NotebookClient(nb, km=km, timeout=timeout, interrupt_on_timeout=True, allow_errors=True,
                                startup_timeout=180, record_timing=False, resources={'metadata': {'path': folder}},
                                extra_arguments=['--log-level=ERROR', '--HistoryManager.enabled=False', FIGURES])
        client.reset_execution_trackers()
        try:
            async with client.async_setup_kernel(env=kernel_env(folder), cleanup_kc=True):
                for i, cell in enumerate(nb.cells):
                    at, start = cell if cell.cell_type == 'code' else at, time.perf_counter()
                    # nbclient interrupts a slow cell again and again; what ignores that is given up with its kernel
                    await asyncio.wait_for(client.async_execute_cell(cell, i), 3*timeout)
                    if time.perf_counter() - start >= timeout: add_error(cell, 'TimeoutError', f'stopped after {timeout} s')
                    tick()
        except Exception as e: add_error(at, type(e).__name__, str(e).strip().split('\n')[-1])
        client.set_widgets_metadata()


def describe(
    cell: dict, # a code cell with an error
    i: int,     # its number, from 1
) -> dict: # cell, line, code, error
    "Which cell failed, at which of its lines, and why"
    error = next(o for o in cell.outputs if o.output_type == 'error')
    frames = re.findall(rf'Cell In\[{cell.execution_count}\], line (\d+)', strip_ansi('\n'.join(error.traceback)))
    line = int(frames[-1]) if frames else None
    code = cell.source.split('\n')[line - 1] if line else directives(cell.source)[1].strip().split('\n')[0]
    what = strip_ansi(f'{error.ename}: {error.evalue}').strip(': \n').split('\n')[0]
    return dict(cell=i, line=line, code=code.strip(), error=what)


def record(
    nb: dict,       # a notebook that was run
    seconds: float, # it took
    source: str,    # the fingerprint of its source
) -> dict: # status, seconds, cells, skipped, failed, source; kept in the notebook's metadata
    "How a run went; each failed cell notes its number and line, each cell that was not reached says so"
    code, failed = [(i, c) for i, c in enumerate(nb.cells, 1) if c.cell_type == 'code'], []
    for i, c in code:
        if any(o.output_type == 'error' for o in c.outputs):
            failed.append(describe(c, i))
            c.metadata['mpcourse'] = dict(failed=i, line=failed[-1]['line'])
        elif c.execution_count is None and c.source.strip() and 'mpcourse' not in c.metadata:
            c.metadata['mpcourse'] = {'skipped': 'not reached'}
    ran = sum(c.execution_count is not None for _, c in code)
    skipped = sum(c.metadata.get('mpcourse', {}).get('skipped', '').startswith('not run') for _, c in code)
    nb.metadata['mpcourse'] = dict(status='failed' if failed else 'ok', seconds=round(seconds, 1), cells=ran,
                                   skipped=skipped, failed=failed, source=source, code=program_hash(nb))
    return nb.metadata['mpcourse']


@dataclass
class Outcome:
    "How a chapter's run went"
    chapter: Chapter # which
    status: str      # 'ok' or 'failed'
    seconds: float   # it took
    cells: int       # code cells that ran
    skipped: int     # code cells not run here
    failed: list     # of dicts: cell, line, code, error

    @property
    def errors(self) -> list: # a sentence and the line that failed, for each failed cell
        "Every failed cell by name"
        return [f'{self.chapter.path.name}, cell {f["cell"]}{", line %d" % f["line"] if f["line"] else ""}: '
                f'{f["error"]}\n    {f["code"]}' for f in self.failed]


async def run_chapter(
    ch: Chapter,  # which
    out: Path,    # folder for the executed notebook
    timeout: int, # seconds for one cell
    tick,         # called after each cell
) -> Outcome: # how it went
    "Run a notebook and write the executed copy"
    nb, start = nbformat.read(ch.path, as_version=4), time.perf_counter()
    source = source_hash(nb)
    prepare(nb)
    await execute(nb, timeout, tick)
    res = record(nb, time.perf_counter() - start, source)
    write_text(out/ch.path.name, nbformat.writes(nb))
    return Outcome(ch, *(res[k] for k in ('status', 'seconds', 'cells', 'skipped', 'failed')))


# --- the course ---

async def run_all(
    chs: list,    # the chapters to be run
    out: Path,    # folder for the executed notebooks
    workers: int, # so many at a time
    timeout: int, # seconds for one cell
) -> list: # an `Outcome` for each, in order
    "Run chapters, some at a time, under one progress bar that names those that are running"
    gate, running = asyncio.Semaphore(workers), {}
    total = {ch.stem: len(nbformat.read(ch.path, as_version=4).cells) for ch in chs}
    bar = tqdm(total=sum(total.values()), unit='cell', mininterval=.3 if sys.stderr.isatty() else 10)
    def show(stem):
        running[stem] += 1
        bar.set_postfix_str(' '.join(f'{k}[{n}/{total[k]}]' for k, n in running.items()), refresh=False)
        bar.update()
    async def one(ch):
        async with gate:
            running[ch.stem] = 0
            try: return await run_chapter(ch, out, timeout, lambda: show(ch.stem))
            finally: bar.update(total[ch.stem] - running.pop(ch.stem))
    with bar: return await asyncio.gather(*map(one, chs))


def write_pages(
    chs: list, # all chapters of the course
    out: Path, # the folder of executed copies
):
    "Make the page of every executed copy in a folder, and the list of chapters"
    index = next((ch for ch in chs if ch.number == 'index'), None) or Chapter(Path('index.ipynb'), 'index', 'mpcourse', '')
    runs = []
    for ch in chs:
        if ch.number == 'index': continue
        nb = executed(ch, out)
        runs.append(dict(ch=ch, nb=nb, run=nb and nb.metadata.mpcourse, part=ch.part, fresh=nb and is_fresh(nb, ch)))
    made = [r for r in runs if r['nb']]
    pages = {'index': True, **{r['ch'].stem: True for r in made}}
    steps = [None, *(r['ch'] for r in made), None]
    for r, prev, next_ in zip(made, steps, steps[2:]):
        html = page_html(r['nb'], r['ch'], pages, prev=prev, next=next_, fresh=r['fresh'])
        write_text(out/f'{r["ch"].stem}.html', html)
        del r['nb']
    write_text(out/'index.html', index_html(executed(index, out) or new_notebook(), index, runs))


def summary(
    outcomes: list, # an `Outcome` per chapter
    seconds: float, # that the whole run took
    out: Path,      # the folder of pages
) -> str: # some lines
    "The table that a run prints at its end, and every failed cell"
    def row(*cells): return '{:>5}  {:<38}{:>6}{:>9}  {}'.format(*cells)
    lines = [row(o.chapter.number, o.chapter.title[:38], o.cells, o.seconds, o.status) for o in outcomes]
    failed, ok = [f'FAILED {e}' for o in outcomes for e in o.errors], sum(o.status == 'ok' for o in outcomes)
    total = f'{ok} of {len(outcomes)} chapters ran in {seconds:.0f} s. Read them in {out/"index.html"}'
    return '\n'.join([row('no.', 'chapter', 'cells', 'seconds', 'status'), *lines, '', *failed, total])


def run_async(coro):
    "Run a coroutine in another thread, since the caller may have an event loop already, as browser tests have"
    with ThreadPoolExecutor(1) as pool: return pool.submit(asyncio.run, coro).result()


def run_course(
    wanted: str='',                # chapters, such as '02 05'; '' for all
    out: str|Path=ROOT/'_course',  # folder for notebooks and pages
    nbs: str|Path=ROOT/'nbs',      # folder of the notebooks
    workers: int=2,                # chapters at a time
    timeout: int=1200,             # seconds for one cell
    changed: bool=False,           # only those whose text or code is not that of their executed copy
) -> list: # an `Outcome` for each chapter that was run
    "Run the course, write its pages and print a summary"
    chs, out, start = chapters(nbs), Path(out).resolve(), time.perf_counter()
    todo = select(chs, wanted)
    try: out.mkdir(parents=True, exist_ok=True)
    except OSError as e: sys.exit(f'The folder {str(out)!r} cannot be made ({e.strerror}): name another with --out.')
    if not os.access(out, os.W_OK): sys.exit(f'The folder {str(out)!r} cannot be written: name another with --out.')
    if changed: todo = [ch for ch in todo if not is_unchanged(ch, out)]
    try: outcomes = run_async(run_all(todo, out, workers, timeout))
    finally: write_pages(chs, out)
    print(summary(outcomes, time.perf_counter() - start, out))
    return outcomes


def main():
    p = argparse.ArgumentParser(prog='python -m tools.course', description=__doc__.split('\n')[0])
    p.add_argument('chapters', nargs='*', help='numbers or names, such as 02 rounding; by default all')
    p.add_argument('--out', default=ROOT/'_course', help='the folder for pages and executed notebooks (%(default)s)')
    p.add_argument('--nbs', default=ROOT/'nbs', help='folder of the notebooks (%(default)s)')
    p.add_argument('--workers', type=int, default=2, help='how many chapters run at a time (%(default)s)')
    p.add_argument('--timeout', type=int, default=1200, help='the limit for one cell, in seconds (%(default)s)')
    args = p.parse_args()
    try: outcomes = run_course(' '.join(args.chapters), args.out, args.nbs, args.workers, args.timeout)
    except KeyboardInterrupt: sys.exit('Stopped; the chapters that had ended are kept.')
    return int(any(o.status != 'ok' for o in outcomes))


if __name__ == '__main__': sys.exit(main())
