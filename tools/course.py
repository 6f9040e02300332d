"""Run the chapters and write their pages; a cell that fails does not stop its chapter.

    python -m tools.course                all chapters, to _course/
    python -m tools.course 02 rounding    some of them
"""
import argparse, asyncio, importlib.metadata, json, os, re, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbconvert.filters.ansi import strip_ansi
from nbformat.v4 import new_notebook, new_output
from tqdm import tqdm

from mpcourse.doctor import has_cuda
from tools.fingerprints import ROOT, code_hash, digest, read_text
from tools.pages import MAKERS, directives, error_of, index_html, page_html
from tools.warm import warm

THREADS = [f'{v}_NUM_THREADS' for v in ('OMP', 'MKL', 'OPENBLAS', 'NUMEXPR')]
# a page shows the lighter one; slides and cards take the png
FIGURES = "--InlineBackend.figure_formats={'png', 'svg'}"
PARTS = { # number of the first chapter -> heading
    0: '',
    1: 'Part I · Sixteen bits',
    5: 'Part II · Training in FP16',
    13: 'Part III · Watching',
    23: 'Part IV · Few bits',
    29: 'Part V · What breaks today',
    33: 'Part VI · Deciding',
    36: 'Part VII · A real model',
    39: 'Part VIII · Kernels and casts',
    81: 'Appendix'}


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
    main: bool = True # does it belong to the main line? Its opening says where not

    @property
    def stem(self) -> str:
        "The name that notebook and page share"
        return self.path.stem

    @property
    def part(self) -> str:
        "The heading of the part in which it stands"
        return PARTS[max(first for first in PARTS if first <= int(self.number))]


def first_match(
    pattern: str,   # with one group
    texts: list,
    default: str='',
) -> str: # its group in the first text that has it
    "Look for a pattern in one text after the other"
    for text in texts:
        found = re.search(pattern, text, re.M)
        if found: return found[1]
    return default


def read_chapter(
    path: Path, # a notebook
) -> Chapter: # its number, title, promise, module and minutes
    "Read a notebook's number from its name, the rest from its first cells"
    nb = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in nb.cells]
    opening = next((cell.source for cell in nb.cells if cell.cell_type == 'markdown'), '')
    return Chapter(
        path,
        number=first_match(r'^(\d+)_', [path.name], path.stem),
        title=first_match(r'^# +(.+)$', [opening], path.stem),
        promise=' '.join(re.findall(r'^> *(.*)$', opening, re.M)),
        module=first_match(r'\A#\| *default_exp +([\w.]+)', sources),
        minutes=first_match(r'(\d+) minutes to read', sources),
        main=not first_match('(; not on the main line)', sources))


def chapters(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> list: # a `Chapter` for each, the index first
    "The chapters of the course in their order"
    found = [p for p in Path(nbs).resolve().glob('*.ipynb') if re.match(r'\d+_|index\.', p.name)]
    if not found:
        sys.exit(f'There are no numbered notebooks in {nbs}: '
                 'name the folder that holds them with --nbs.')
    found.sort(key=lambda path: (path.stem != 'index', path.name))
    return list(map(read_chapter, found))


def names_of(ch):
    "What a chapter may be called: '02', '2', '02_rounding', 'rounding', '02_rounding.ipynb'"
    return {ch.number, ch.number.lstrip('0'), ch.stem, ch.stem.split('_', 1)[-1], ch.path.name}


def select(
    chs: list,      # all chapters
    wanted: str='', # numbers or names, with spaces or commas between; '' for all
) -> list: # the chapters asked for, in the course's order
    "Pick chapters by number ('02', '2'), name ('rounding') or file ('02_rounding')"
    asked = set(re.split(r'[\s,]+', wanted.strip())) - {''}
    if not asked: return chs
    unknown = asked - set().union(*map(names_of, chs))
    if unknown:
        numbers = ', '.join(map(attrgetter('number'), chs))
        sys.exit(f'There is no chapter {min(unknown)!r}: there are {numbers}.')
    return [ch for ch in chs if names_of(ch) & asked]


# --- executed copies ---

def code_cells(nb):
    "Its cells of code"
    return [cell for cell in nb.cells if cell.cell_type == 'code']


def source_hash(
    nb: dict, # a notebook
) -> str: # twelve hexadecimal digits
    "A fingerprint of what its cells say, whatever they printed"
    return digest(json.dumps([[cell.cell_type, cell.source] for cell in nb.cells]))


def program_hash(
    nb: dict, # a notebook
) -> str: # twelve hexadecimal digits
    "A fingerprint of what its cells call, and of Python and torch"
    sources = [cell.source for cell in code_cells(nb)]
    return digest(code_hash(sources, ROOT), sys.version, importlib.metadata.version('torch'))


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
    present = nbformat.read(ch.path, as_version=4)
    return nb.metadata.get('mpcourse', {}).get('source') == source_hash(present)


def is_unchanged(
    ch: Chapter, # a chapter
    out: Path,   # the folder of executed copies
) -> bool: # whether to run it again would show nothing new
    "Did the chapter run without an error, with the same source and the same code?"
    nb = executed(ch, out)
    if nb is None: return False
    run = nb.metadata.get('mpcourse', {})
    return run.get('status') == 'ok' and is_fresh(nb, ch) and run.get('code') == program_hash(nb)


def write_text(
    path: Path, # the file
    text: str,  # its content
):
    "Write a file in one step: it is there whole, or not at all"
    tmp = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    tmp.write_text(text, encoding='utf-8')
    os.replace(tmp, path)


# --- one chapter ---

def reason_to_skip(
    source: str, # of a code cell
) -> str: # '' for a cell that runs
    "Why a cell is not run here"
    options = directives(source)[0]
    if options.get('eval') is False: return 'not run here: shown to be read'
    if 'cuda' in options and not has_cuda(): return 'not run here: needs an NVIDIA GPU'
    return ''


def prepare(
    nb: dict, # a notebook; changed in place
):
    "Drop outputs, and tag cells that are not to be run here"
    for cell in code_cells(nb):
        cell.outputs = []
        cell.execution_count = None
        reason = reason_to_skip(cell.source)
        if reason: cell.metadata.update(tags=['skip-execution'], mpcourse={'skipped': reason})


def kernel_env(
    folder: str, # the kernel's own, for IPython's files
) -> dict: # environment variables
    "One thread unless the environment says otherwise; the rest, as MPCOURSE_SEED, is handed on"
    threads = dict.fromkeys(THREADS, os.environ.get('OMP_NUM_THREADS', '1'))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return {**threads, **os.environ, 'PYTHONPATH': path, 'IPYTHONDIR': f'{folder}/.ipython',
            'MPCOURSE_PAGES': '1', 'TQDM_DISABLE': '1'}


def make_client(
    nb: dict,        # a prepared notebook; outputs are put into it
    kernel,          # an `AsyncKernelManager`
    folder: str,     # in which it runs
    arguments=(),    # for the kernel
    **more,          # for the client
) -> NotebookClient:
    "What runs a notebook, and goes on after a cell that fails"
    return NotebookClient(
        nb, km=kernel, allow_errors=True, interrupt_on_timeout=True, startup_timeout=180,
        record_timing=False, resources={'metadata': {'path': folder}},
        extra_arguments=['--log-level=ERROR', '--HistoryManager.enabled=False',
                         '--IPKernelApp.extra_extensions=tools.asserts', *arguments], **more)


def add_error(
    cell: dict, # that was stopped
    name: str,  # of the exception
    value: str, # what it says
):
    "Note what stopped a cell; the traceback of an interrupt stays"
    if error_of(cell) is None: cell.outputs.append(new_output('error', traceback=[]))
    error = error_of(cell)
    error.update(ename=name, evalue=value, traceback=[*error.traceback, f'{name}: {value}'])


async def execute_cell(
    client: NotebookClient,
    cell: dict,
    index: int,   # its place in the notebook
    timeout: int, # seconds
):
    "Run one cell"
    start = time.perf_counter()
    # nbclient interrupts a slow cell again and again; what ignores that is given up with its kernel
    await asyncio.wait_for(client.async_execute_cell(cell, index), 3*timeout)
    if time.perf_counter() - start >= timeout:
        add_error(cell, 'TimeoutError', f'stopped after {timeout} s')


async def execute(
    nb: dict,     # a prepared notebook; outputs are put into it
    timeout: int, # seconds for one cell
    tick,         # called after each cell
    prepared,     # of `warm`
):
    "Run all cells in a fresh kernel of this interpreter; only the kernel's death ends it early"
    if not code_cells(nb): return
    last = code_cells(nb)[0]
    with tempfile.TemporaryDirectory() as folder:
        specs = KernelSpecManager(kernel_dirs=[])
        kernel = prepared(AsyncKernelManager(kernel_spec_manager=specs, kernel_name='python3'))
        client = make_client(nb, kernel, folder, [FIGURES], timeout=timeout)
        client.reset_execution_trackers()
        try:
            async with client.async_setup_kernel(env=kernel_env(folder), cleanup_kc=True):
                for index, cell in enumerate(nb.cells):
                    if cell.cell_type == 'code': last = cell
                    await execute_cell(client, cell, index, timeout)
                    tick()
        except Exception as e: add_error(last, type(e).__name__, str(e).strip().split('\n')[-1])
        client.set_widgets_metadata()


def describe(
    cell: dict,  # a code cell with an error
    number: int, # that Jupyter gives it
) -> dict: # cell, line, code, error
    "Which cell failed, at which of its lines, and why"
    error = error_of(cell)
    frame = rf'Cell In\[{cell.execution_count}\], line (\d+)'
    frames = re.findall(frame, strip_ansi('\n'.join(error.traceback)))
    if frames:
        line = int(frames[-1])
        code = cell.source.split('\n')[line - 1]
    else:
        line = None
        code = directives(cell.source)[1].strip().split('\n')[0]
    what = strip_ansi(f'{error.ename}: {error.evalue}').strip(': \n').split('\n')[0]
    return dict(cell=number, line=line, code=code.strip(), error=what)


def status_of(failed):
    "'ok', 'missed' if only claims did not hold, or 'failed'"
    if not failed: return 'ok'
    for cell in failed:
        if not cell['error'].startswith('AssertionError'): return 'failed'
    return 'missed'


def record(
    nb: dict,       # a notebook that was run
    seconds: float, # it took
    source: str,    # the fingerprint of its source
) -> dict: # status, seconds, cells, skipped, failed, source; kept in the notebook's metadata
    "How a run went; a failed cell notes its number and line, one that was not reached says so"
    failed = []
    ran = skipped = 0
    for cell in code_cells(nb):
        if error_of(cell):
            number = cell.execution_count or ran + 1
            failed.append(describe(cell, number))
            cell.metadata['mpcourse'] = dict(failed=number, line=failed[-1]['line'])
        elif 'mpcourse' in cell.metadata: skipped += 1
        elif cell.execution_count is None and cell.source.strip():
            cell.metadata['mpcourse'] = {'skipped': 'not reached'}
        ran += cell.execution_count is not None
    nb.metadata['mpcourse'] = dict(
        status=status_of(failed), seconds=round(seconds, 1), cells=ran, skipped=skipped,
        failed=failed, source=source, code=program_hash(nb))
    return nb.metadata['mpcourse']


@dataclass
class Outcome:
    "How a chapter's run went"
    chapter: Chapter # which
    status: str      # 'ok', 'missed' or 'failed'
    seconds: float   # it took
    cells: int       # code cells that ran
    failed: list     # of dicts: cell, line, code, error

    @property
    def errors(self) -> list: # a sentence and the line that failed, for each failed cell
        "Every failed cell by name"
        sentences = []
        for failed in self.failed:
            where = f'{self.chapter.path.name}, cell [{failed["cell"]}]'
            if failed['line']: where += f', line {failed["line"]}'
            sentences.append(f'{where}: {failed["error"]}\n    {failed["code"]}')
        return sentences


async def run_chapter(
    ch: Chapter,  # which
    out: Path,    # folder for the executed notebook
    timeout: int, # seconds for one cell
    tick,         # called after each cell
    prepared,     # of `warm`
) -> Outcome: # how it went
    "Run a notebook and write the executed copy"
    start = time.perf_counter()
    nb = nbformat.read(ch.path, as_version=4)
    source = source_hash(nb)
    prepare(nb)
    await execute(nb, timeout, tick, prepared)
    run = record(nb, time.perf_counter() - start, source)
    write_text(out/ch.path.name, nbformat.writes(nb))
    return Outcome(ch, run['status'], run['seconds'], run['cells'], run['failed'])


# --- the course ---

def progress_bar(total, unit):
    "A bar that a log of CI shows in a few lines"
    return tqdm(total=total, unit=unit, mininterval=.3 if sys.stderr.isatty() else 10)


async def run_all(
    chs: list,    # the chapters to be run
    out: Path,    # folder for the executed notebooks
    workers: int, # so many at a time
    timeout: int, # seconds for one cell
) -> list: # an `Outcome` for each, in order
    "Run chapters, some at a time, under one progress bar that names those that are running"
    gate = asyncio.Semaphore(workers)
    running = {} # stem -> cells that have run
    total = {ch.stem: len(nbformat.read(ch.path, as_version=4).cells) for ch in chs}
    bar = progress_bar(sum(total.values()), 'cell')
    async def run_one(ch):
        def tick():
            running[ch.stem] += 1
            states = [f'{stem}[{done}/{total[stem]}]' for stem, done in running.items()]
            bar.set_postfix_str(' '.join(states), refresh=False)
            bar.update()
        async with gate:
            running[ch.stem] = 0
            try: return await run_chapter(ch, out, timeout, tick, prepared)
            finally: bar.update(total[ch.stem] - running.pop(ch.stem))
    with bar, warm(len(chs), kernel_env('')) as prepared:
        return await asyncio.gather(*map(run_one, chs))


def page_hash(
    copy: Path,   # an executed notebook
    ch: Chapter,  # its chapter
    made: list,   # the chapters that have a page
    fresh: bool,  # was the copy made from the notebook as it is?
) -> str: # twelve hexadecimal digits
    "A fingerprint of a page and of the code that makes it. No repr: fastcore changes a path's"
    shown = [ch.stem, ch.title, ch.promise, ch.module, ch.minutes, str(fresh)]
    for other in made: shown += [other.stem, other.title]
    return digest(read_text(copy), *shown, *map(read_text, MAKERS))


def write_page(
    ch: Chapter, # a numbered one
    made: list,  # those that have an executed copy
    out: Path,   # the folder of executed copies
) -> dict: # ch, part, run (None without a copy) and fresh, for the list of chapters
    "Make the page of a chapter that has an executed copy, unless it is there as it would be"
    nb = executed(ch, out)
    if nb is None: return dict(ch=ch, part=ch.part, run=None)
    fresh = is_fresh(nb, ch)
    steps = [None, *made, None]
    at = steps.index(ch)
    stems = {'index', *map(attrgetter('stem'), made)}
    page = out/f'{ch.stem}.html'
    stamp = f'<!-- {page_hash(out/ch.path.name, ch, made, fresh)} -->'
    if not page.exists() or not read_text(page).endswith(stamp):
        html = page_html(nb, ch, stems, prev=steps[at-1], next=steps[at+1], fresh=fresh)
        write_text(page, html + stamp)
    return dict(ch=ch, part=ch.part, run=nb.metadata.mpcourse, fresh=fresh)


def write_pages(
    chs: list, # all chapters of the course
    out: Path, # the folder of executed copies
):
    "Make the page of every executed copy in a folder, and the list of chapters"
    index = Chapter(Path('index.ipynb'), 'index', 'mpcourse', '')
    numbered = chs
    if chs[0].number == 'index': index, *numbered = chs
    made = [ch for ch in numbered if (out/ch.path.name).exists()]
    rows = [write_page(ch, made, out) for ch in numbered]
    nb = executed(index, out) or new_notebook()
    write_text(out/'index.html', index_html(nb, index, rows))


ROW = '{:>5}  {:<38}{:>6}{:>9}  {}'


def summary(
    outcomes: list, # an `Outcome` per chapter
    seconds: float, # that the whole run took
    out: Path,      # the folder of pages
) -> str: # some lines
    "The table that a run prints at its end, and every failed cell"
    lines = [ROW.format('no.', 'chapter', 'cells', 'seconds', 'status')]
    for outcome in outcomes:
        ch = outcome.chapter
        numbers = outcome.cells, outcome.seconds, outcome.status
        lines.append(ROW.format(ch.number, ch.title[:38], *numbers))
    lines.append('')
    for outcome in outcomes:
        for error in outcome.errors: lines.append(f'{outcome.status.upper()} {error}')
    lines.append(last_line(outcomes, seconds, out))
    return '\n'.join(lines)


def last_line(outcomes, seconds, out):
    "How many chapters ran, how many claims were missed, and where to read"
    ok = missed = 0
    for outcome in outcomes:
        ok += outcome.status == 'ok'
        if outcome.status == 'missed': missed += len(outcome.failed)
    text = f'{ok} of {len(outcomes)} chapters ran in {seconds:.0f} s'
    if missed: text += f', and {missed} claim(s) did not hold on this machine (marked MISSED)'
    if 0 < ok < len(outcomes): text += f'; the other {ok} chapters are fine'
    return f'{text}. Read them in {out/"index.html"}'


def run_async(coroutine):
    "Run a coroutine in another thread: the caller may have an event loop, as browser tests have"
    with ThreadPoolExecutor(1) as pool: return pool.submit(asyncio.run, coroutine).result()


def make_folder(out):
    "The folder of pages, or one sentence and the end"
    try: out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        sys.exit(f'The folder {str(out)!r} cannot be made ({e.strerror}): name another with --out.')
    if not os.access(out, os.W_OK):
        sys.exit(f'The folder {str(out)!r} cannot be written: name another with --out.')


def run_course(
    wanted: str='',                # chapters, such as '02 05'; '' for all
    out: str|Path=ROOT/'_course',  # folder for notebooks and pages
    nbs: str|Path=ROOT/'nbs',      # folder of the notebooks
    workers: int=os.cpu_count() or 2, # chapters at a time
    timeout: int=1200,             # seconds for one cell
    changed: bool=False,           # only those whose text or code has changed since
) -> list: # an `Outcome` for each chapter that was run
    "Run the course, write its pages and print a summary"
    start = time.perf_counter()
    out = Path(out).resolve()
    chs = chapters(nbs)
    todo = select(chs, wanted)
    make_folder(out)
    if changed: todo = [ch for ch in todo if not is_unchanged(ch, out)]
    try: outcomes = run_async(run_all(todo, out, workers, timeout))
    finally: write_pages(chs, out)
    print(summary(outcomes, time.perf_counter() - start, out))
    return outcomes


def main():
    "The command line; 1 if a chapter failed by more than a claim about a training, or has no page"
    p = argparse.ArgumentParser(prog='python -m tools.course', description=__doc__.split('\n')[0])
    p.add_argument('chapters', nargs='*',
                   help='numbers or names, such as 02 rounding; by default all')
    p.add_argument('--out', default=ROOT/'_course',
                   help='the folder for pages and executed notebooks (%(default)s)')
    p.add_argument('--nbs', default=ROOT/'nbs', help='folder of the notebooks (%(default)s)')
    p.add_argument('--workers', type=int, default=os.cpu_count() or 2,
                   help='how many chapters run at a time (%(default)s)')
    p.add_argument('--timeout', type=int, default=1200,
                   help='the limit for one cell, in seconds (%(default)s)')
    args = p.parse_args()
    wanted = ' '.join(args.chapters)
    try: outcomes = run_course(wanted, args.out, args.nbs, args.workers, args.timeout)
    except KeyboardInterrupt: sys.exit('Stopped; the chapters that had ended are kept.')
    for outcome in outcomes:
        page = Path(args.out)/f'{outcome.chapter.stem}.html'
        if outcome.status == 'failed' or not page.exists(): return 1
    return 0


if __name__ == '__main__': sys.exit(main())
