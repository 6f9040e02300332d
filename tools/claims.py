"""Claims should hold on every machine: run the chapters under other seeds, threads, instruction sets and interpreters.

    python tools/claims.py                                        run everything that changed since the stored table
    python tools/claims.py --chapters 10 16 --seeds 0-9 --only seeds
    python tools/claims.py --python ../other/bin/python --only pythons
    python tools/claims.py --table                                print the stored table, and run nothing

One run is a chapter in a fresh kernel under one variation. A cell that fails does not stop the run, and all failed cells
are named. A run is repeated when the chapter's code, a module that it imports or the machine has changed.
The table is studies/claims.json. Its red cells may only become fewer. If a cell is red that the table does not list,
the exit code is 1 and the table stays as it is (--accept stores the cell anyway).
"""
import argparse, asyncio, json, os, re, subprocess, sys, tempfile, time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from tqdm import tqdm

from tools.course import run_async
from tools.notebooks import ROOT, NOT_RUN, code_cells, code_hash, digest

STORE = ROOT/'studies'/'claims.json'
WANTED = 'Python 3.10', 'Python 3.11', 'Python 3.14', 'torch 2.6', 'torch 2.13'  # oldest and newest; the table names those not run
LIMIT = 600        # seconds for one cell: a slow machine does not miss it


# --- what is varied ---

@dataclass(frozen=True)
class Variation:
    "A way to run a chapter"
    name: str                   # the column's head
    group: str                  # for --only
    env: tuple = ()             # (name, value) pairs, beside seed 0 on one thread
    python: str = sys.executable


def variations(
    seeds=range(10), # values of MPCOURSE_SEED
    pythons=(),      # paths of other interpreters
) -> list: # of `Variation`
    "Seeds, threads, instruction sets, interpreters"
    found = [Variation(f'seed {n}', 'seeds', (('MPCOURSE_SEED', str(n)),)) for n in seeds]
    found.append(Variation('2 threads', 'threads', (('OMP_NUM_THREADS', '2'), ('MKL_NUM_THREADS', '2'))))
    sets = {'aten default': ('ATEN_CPU_CAPABILITY', 'default'), 'aten avx2': ('ATEN_CPU_CAPABILITY', 'avx2'),
            'onednn sse41': ('ONEDNN_MAX_CPU_ISA', 'SSE41'), 'onednn avx2': ('ONEDNN_MAX_CPU_ISA', 'AVX2'),
            'mkl compatible': ('MKL_CBWR', 'COMPATIBLE')}
    found += [Variation(name, 'instructions', (pair,)) for name, pair in sets.items()]
    return found + [Variation(versions(p), 'pythons', (), str(p)) for p in pythons]


@cache
def versions(
    python: str, # path of an interpreter that has torch
) -> str: # 'Python 3.11.7, torch 2.13.0+cpu'
    "Python and torch of an interpreter"
    code = 'import platform, torch; print(f"Python {platform.python_version()}, torch {torch.__version__}")'
    return subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.strip()


@cache
def machine() -> str: # the processor
    "The machine in a few words, without its name"
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    cpus = [x.partition(':')[2].strip() for x in lines if x.startswith('model name')]
    return f'{cpus[0] if cpus else "unknown processor"}, {os.cpu_count()} cores, {sys.platform}'


# --- what a run depends on ---

def chapters(
    nbs: Path,   # the folder of notebooks
    wanted=(),   # numbers, names or stems; () for all
) -> list: # paths: the numbered chapters but the appendix, and the index
    "The notebooks whose claims are tried"
    found = [p for p in sorted(Path(nbs).glob('*.ipynb')) if re.match(r'[0-8]\d_|index\.', p.name)]
    names = {p: {p.stem, p.stem[:2], p.stem[:2].lstrip('0'), p.stem.partition('_')[2]} for p in found}
    for w in wanted:
        if not any(w in names[p] for p in found): raise SystemExit(f'There is no chapter {w!r} in {nbs}.')
    return [p for p in found if not wanted or names[p] & set(wanted)]


def claims_hash(
    path: Path, # of a notebook
    root: Path=ROOT, # the folder that holds mpcourse/ and studies/
) -> str: # twelve hexadecimal digits
    "A fingerprint of what its claims depend on: not the checkers of its exercises, nor figures that move"
    sources = [source for _, _, source in code_cells(path)]
    return code_hash([s for s in sources if not re.search(r'^def check_', s, re.M)], root, figures=False)


def key_of(code, v): return digest(code, str(v.env), versions(v.python), machine())


# --- one run ---

# Runs before a chapter: the threads are the variation's, the first losses are noted, a failed assert shows its values
BEFORE = '''
def _before():
    import ast, linecache, os, torch
    torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))
    torch.set_num_threads = lambda n: None
    losses, backward, grad = [], torch.Tensor.backward, torch.autograd.grad
    def note(t):
        if len(losses) < 5 and isinstance(t, torch.Tensor) and t.dim() == 0 and t != 0: losses.append(t.data)  # zeros tell no seed
    def noted_backward(self, *a, **k): note(self); return backward(self, *a, **k)
    def noted_grad(outputs, *a, **k): note(outputs); return grad(outputs, *a, **k)
    torch.Tensor.backward, torch.autograd.grad = noted_backward, noted_grad

    def value(node, frame):
        try: return f'{ast.unparse(node)} = {eval(ast.unparse(node), {**frame.f_globals, **frame.f_locals})!r}'[:160]
        except Exception: return ''
    def show_values(shell, kind, e, tb, tb_offset=None):
        at = tb
        while at.tb_next: at = at.tb_next
        tree = ast.parse(''.join(linecache.getlines(at.tb_frame.f_code.co_filename)))
        found = [n for n in ast.walk(tree) if isinstance(n, ast.Assert) and n.lineno <= at.tb_lineno <= n.end_lineno]
        sides = [s for n in found for c in ast.walk(n.test) if isinstance(c, ast.Compare) for s in (c.left, *c.comparators)]
        said = [value(s, at.tb_frame) for s in sides if not isinstance(s, ast.Constant)]
        e.args = ('; '.join([*map(str, e.args), *filter(None, said)]),)
        shell.showtraceback((kind, e, tb), tb_offset=tb_offset)
    get_ipython().set_custom_exc((AssertionError,), show_values)
    get_ipython()._first_losses = losses
_before(); del _before
'''
AFTER = "print('first losses', [float(t) for t in get_ipython()._first_losses])"


class ThisPython(KernelSpecManager):
    "One kernel: IPython of a given interpreter"
    python = sys.executable

    def get_kernel_spec(self, kernel_name):
        argv = [self.python, '-m', 'ipykernel_launcher', '-f', '{connection_file}']
        return KernelSpec(argv=argv, display_name='Python', language='python')


def environment(v: Variation, folder: str) -> dict:
    "The variables of a run: nothing varied is inherited"
    varied = {name for w in variations(range(1)) for name, _ in w.env}
    env = {k: x for k, x in os.environ.items() if k not in varied}
    one = {f'{lib}_NUM_THREADS': '1' for lib in ('OMP', 'MKL', 'OPENBLAS', 'NUMEXPR')}
    return {**env, **one, **dict(v.env), 'PYTHONPATH': str(ROOT), 'IPYTHONDIR': folder, 'TQDM_DISABLE': '1'}


def prepared(path):
    "A copy with the two cells of our own around it; what needs a GPU, or is only to be read, is not run"
    nb = nbformat.read(path, as_version=4)
    for c in nb.cells:
        c.metadata['tags'] = ['skip-execution'] if NOT_RUN.search(c.source) else []
    nb.cells = [nbformat.v4.new_code_cell(BEFORE), *nb.cells, nbformat.v4.new_code_cell(AFTER)]
    return nb


def failures(
    nb, # an executed notebook of `prepared`
) -> list: # dicts: cell (its number from 1), id, line, error
    "All failed cells: which line, which exception"
    found = []
    for i, c in enumerate(nb.cells[1:-1], 1):
        for o in c.get('outputs', []):
            if o.output_type != 'error': continue
            trace = re.sub(r'\x1b\[[0-9;]*m', '', '\n'.join(o.traceback))
            line = re.search(r'^-+> *\d+ (.*)$', trace, re.M)
            error = f'{o.ename}: {o.evalue}'.rstrip(': ')
            found.append(dict(cell=i, id=c.id, line=line[1].strip()[:160] if line else '', error=error[:400]))
    return found


def first_losses(nb):
    "What the last cell printed"
    text = ''.join(o.get('text', '') for o in nb.cells[-1].get('outputs', []))
    said = re.search(r'^first losses \[(.*)\]$', text, re.M)
    return [round(float(x), 6) for x in said[1].split(',') if x] if said else []


def make_client(nb, python, folder, limit):
    "A fresh kernel that goes on after a failed cell"
    specs = ThisPython()
    specs.python = python
    # files as sockets: of two kernels that start at one moment, one may find its port taken
    km = AsyncKernelManager(kernel_spec_manager=specs, transport='ipc', connection_file=f'{folder}/kernel.json')
    def late(cell, cell_index, execute_reply):
        reply = execute_reply['content']
        if reply['ename'] == 'Timeout': cell.outputs = [nbformat.v4.new_output('error', **error)]
    error = dict(ename='Timeout', evalue=f'more than {limit} s', traceback=[])
    return NotebookClient(nb, km=km, timeout_func=lambda cell: LIMIT if cell.source in (BEFORE, AFTER) else limit,
                          allow_errors=True, interrupt_on_timeout=True, error_on_timeout=error, on_cell_error=late,
                          startup_timeout=180, record_timing=False,
                          extra_arguments=['--log-level=ERROR', '--HistoryManager.enabled=False'],
                          resources={'metadata': {'path': folder}})


async def run(
    path: Path,      # a notebook
    v: Variation,
    key: str='',      # from `key_of`
    limit: int=LIMIT, # seconds for one cell
) -> dict: # a row of the table
    "Run a chapter under a variation, in a folder of its own that is gone afterwards"
    start, nb, died = time.perf_counter(), prepared(path), []
    with tempfile.TemporaryDirectory() as folder:
        client = make_client(nb, v.python, folder, limit)
        try: await client.async_execute(env=environment(v, folder), cleanup_kc=True)     # or its kernel would stay
        except Exception as e: died = [dict(cell=0, id='', line='', error=f'{type(e).__name__}: {e}'[:400])]
    return dict(chapter=path.stem, variation=v.name, key=key, on=f'{machine()}, {versions(v.python)}',
                seconds=round(time.perf_counter() - start), first=first_losses(nb), failed=failures(nb) + died)


async def run_all(todo, workers, done):
    "Run (path, variation, key) triples, some at a time; `done` gets each row"
    gate = asyncio.Semaphore(workers)
    async def one(path, v, key):
        async with gate: done(await run(path, v, key))
    await asyncio.gather(*(one(*triple) for triple in todo))


# --- the table ---

def read_rows(store: Path) -> dict: # (chapter, variation) -> row
    "Stored rows, and those of a run that was interrupted"
    rows = json.loads(store.read_text(encoding='utf-8'))['rows'] if store.exists() else []
    partial = store.with_suffix('.partial.jsonl')
    if partial.exists():
        for line in filter(None, partial.read_text(encoding='utf-8').splitlines()):
            try: rows.append(json.loads(line))
            except ValueError: continue         # half written when the run was killed
    return {(r['chapter'], r['variation']): r for r in rows}


def red(rows) -> set: # of (chapter, cell's id)
    "The cells that failed somewhere"
    return {(r['chapter'], f['id']) for r in rows for f in r['failed']}


def missing(rows) -> list:
    "Interpreters and versions of torch that no row was run on"
    return [w for w in WANTED if not any(re.search(rf'\b{re.escape(w)}\b', r['on']) for r in rows)]


def store_rows(store, rows, command):
    "One line a row, sorted, so that a difference can be read; the partial file has done its work"
    rows = sorted(rows, key=lambda r: (r['chapter'], r['variation']))
    lines = ',\n'.join(json.dumps(r, ensure_ascii=False) for r in rows)
    head = json.dumps(dict(command=command, not_run=missing(rows)), ensure_ascii=False)[:-1]
    tmp = store.with_suffix('.tmp')
    tmp.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding='utf-8')
    os.replace(tmp, store)
    store.with_suffix('.partial.jsonl').unlink(missing_ok=True)


def table(
    rows, # of any number of chapters and variations
) -> str: # chapters × variations: a dot, or the number of failed cells; then the failed cells
    "The table as text"
    rows = list(rows)
    heads = list(dict.fromkeys(r['variation'] for r in sorted(rows, key=lambda r: (not r['variation'].startswith('seed'), r['variation']))))
    at = {(r['chapter'], r['variation']): len(r['failed']) for r in rows}
    mark = lambda n: ' ' if n is None else str(n or '·')
    lines = [f'{ch:18}' + ''.join(f'{mark(at.get((ch, h))):>3}' for h in heads) for ch in sorted({r['chapter'] for r in rows})]
    legend = [f'{i:3} {h}' for i, h in enumerate(heads)]
    return '\n'.join([f'{"":18}' + ''.join(f'{i:>3}' for i in range(len(heads))), *lines, '', *legend, *failed_lines(rows),
                      *[f'not run: {w} (not installed here)' for w in missing(rows)]])


def failed_lines(rows):
    "Each failed cell once, with where it failed"
    where = {}
    for r in rows:
        for f in r['failed']: where.setdefault((r['chapter'], f['cell'], f['line']), []).append((r['variation'], f['error']))
    return [f'\n{ch}, cell {cell}: {line}' + ''.join(f'\n    {v}: {e}' for v, e in seen) for (ch, cell, line), seen in sorted(where.items())]


# --- the command ---

def parser():
    "The command line"
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--chapters', nargs='*', default=[], help='numbers or names; by default all')
    p.add_argument('--seeds', default='0-9', help='such as 3 or 0-9 (%(default)s)')
    p.add_argument('--only', nargs='*', default=[], choices=['seeds', 'threads', 'instructions', 'pythons'], help='run these variations alone')
    p.add_argument('--python', action='append', default=[], help='another interpreter that has torch and what the course needs')
    p.add_argument('--workers', type=int, default=os.cpu_count() or 1, help='how many chapters run at a time (%(default)s)')
    p.add_argument('--table', action='store_true', help='print the stored table, and run nothing')
    p.add_argument('--check', action='store_true', help='run and compare, but store nothing')
    p.add_argument('--accept', action='store_true', help='store the table even if cells are newly red')
    p.add_argument('--nbs', type=Path, default=ROOT/'nbs', help='the folder of notebooks')
    p.add_argument('--store', type=Path, default=STORE, help='the file of the table')
    return p


def plan(args) -> list: # of (path, variation)
    "What was asked for, seed by seed, so that an interrupted run has something of every chapter"
    lo, _, hi = args.seeds.partition('-')
    vs = variations(range(int(lo), int(hi or lo) + 1), args.python)
    return [(p, v) for v in vs if not args.only or v.group in args.only for p in chapters(args.nbs, args.chapters)]


def run_missing(args, pairs, rows):
    "Run what is not there, or not of today's code; each row goes to the partial file at once"
    codes = {p: claims_hash(p) for p in dict(pairs)}
    todo = [(p, v, key_of(codes[p], v)) for p, v in pairs]
    todo = [(p, v, key) for p, v, key in todo if rows.get((p.stem, v.name), {}).get('key') != key]
    partial = args.store.with_suffix('.partial.jsonl')
    args.store.parent.mkdir(exist_ok=True)
    with tqdm(total=len(todo), unit='run', mininterval=.3 if sys.stderr.isatty() else 10) as bar:
        def done(row):
            rows[row['chapter'], row['variation']] = row
            with partial.open('a', encoding='utf-8') as f: f.write('\n' + json.dumps(row, ensure_ascii=False))
            bar.set_postfix_str(f'{row["chapter"]}, {row["variation"]}: {len(row["failed"])} red', refresh=False)
            bar.update()
        run_async(run_all(todo, args.workers, done))


def main(argv=None) -> int: # 1 if a cell is red that the stored table does not know
    "Run, print, compare, store"
    args = parser().parse_args(argv)
    stored = json.loads(args.store.read_text(encoding='utf-8'))['rows'] if args.store.exists() else []
    if args.table: print(table(stored)); return 0
    pairs, rows = plan(args), read_rows(args.store)
    run_missing(args, pairs, rows)
    asked = [rows[p.stem, v.name] for p, v in pairs]
    print(table(asked))
    new = red(asked) - red(stored)
    for ch, cell in sorted(new): print(f'newly red: {ch}, cell {cell}')
    if not args.check and (args.accept or not new):
        names = {p.stem for p in chapters(args.nbs)}
        store_rows(args.store, [r for r in rows.values() if r['chapter'] in names], ' '.join(['tools/claims.py', *(argv or sys.argv[1:])]))
    return int(bool(new) and not args.accept)


if __name__ == '__main__': sys.exit(main())
