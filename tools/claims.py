"""Claims should hold on every machine: run the chapters under other seeds, initial weights,
threads, instruction sets and interpreters, and look at the margins.

    python tools/claims.py              run everything that changed since the stored table
    python tools/claims.py --chapters 10 16 --seeds 0-9 --only seeds
    python tools/claims.py --python ../other/bin/python --only pythons
    python tools/claims.py --table      print the stored table, and run nothing

One run is a chapter in a fresh kernel under one variation. A cell that fails does not stop the run,
and all failed cells are named. A run is repeated when the chapter's code, a module that it imports
or the machine has changed.
Of each comparison in an assert both values are kept. A claim is *thin* if, over the runs, its
median is nearer to its bound than three spreads (1.48 times the median absolute deviation), or its
worst run nearer than a fifth of a spread. What is the same in all runs has no spread, and is not
counted.
The table is studies/claims.json. If a cell is red that the table does not list, the exit code is 1
and the table stays as it is (--accept stores the cell anyway). It is 1, too, where a claim is thin.
"""
import argparse, asyncio, json, math, os, re, subprocess, sys, tempfile, time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean, median

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbconvert.filters.ansi import strip_ansi
from nbformat.v4 import new_output
from traitlets import Unicode

from mpcourse.cli import positive
from tools.asserts import room
from tools.course import THREADS, first_match, make_client, progress_bar, run_async, write_text
from tools.fingerprints import ROOT, NOT_RUN, code_cells, code_hash, digest, read_text
from tools.warm import warm

STORE = ROOT/'studies'/'claims.json'
# oldest and newest; the table names those not run
WANTED = 'Python 3.10', 'Python 3.11', 'Python 3.14', 'torch 2.6', 'torch 2.13'
LIMIT = 600        # seconds for one cell: a slow machine does not miss it
INSTRUCTIONS = {   # name of a variation -> a variable of the environment
    'aten default': ('ATEN_CPU_CAPABILITY', 'default'),
    'aten avx2': ('ATEN_CPU_CAPABILITY', 'avx2'),
    'onednn sse41': ('ONEDNN_MAX_CPU_ISA', 'SSE41'),
    'onednn avx2': ('ONEDNN_MAX_CPU_ISA', 'AVX2'),
    'mkl compatible': ('MKL_CBWR', 'COMPATIBLE'),
    'mkl avx2': ('MKL_ENABLE_INSTRUCTIONS', 'AVX2'),
    'mkl avx512': ('MKL_ENABLE_INSTRUCTIONS', 'AVX512')}
FEWEST_RUNS = 5     # that have a spread
ALONE = '86_checkpoint',    # a part of its training has a process of its own, without the noise
NEIGHBOURS = 3      # of seed 0: its initial weights times 1 + 2⁻²⁰ noise
FEWEST_SPREADS = 3  # between the median and the bound
LEAST_ROOM = .2     # of a spread, between the worst run and the bound

SHOW_VERSIONS = '''
import platform, torch
print(f'Python {platform.python_version()}, torch {torch.__version__}')
'''


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
    "Seeds, neighbours of seed 0, threads, instruction sets, interpreters"
    found = []
    for n in seeds:
        found.append(Variation(f'seed {n}', 'seeds', (('MPCOURSE_SEED', str(n)),)))
    for n in range(1, NEIGHBOURS + 1):
        env = ('MPCOURSE_NEIGHBOUR', str(n)),
        found.append(Variation(f'neighbour {n}', 'neighbours', env))
    two = ('OMP_NUM_THREADS', '2'), ('MKL_NUM_THREADS', '2')
    found.append(Variation('2 threads', 'threads', two))
    for name, variable in INSTRUCTIONS.items():
        if name == 'mkl avx512' and not has_avx512(): continue
        found.append(Variation(name, 'instructions', (variable,)))
    for path in pythons: found.append(Variation(versions(path), 'pythons', (), str(path)))
    return found


@cache
def versions(
    python: str, # path of an interpreter that has torch
) -> str: # 'Python 3.11.7, torch 2.13.0+cpu'
    "Python and torch of an interpreter"
    command = [python, '-c', SHOW_VERSIONS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@cache
def has_avx512():
    "Whether this processor has these instructions; False where it cannot be asked"
    info = Path('/proc/cpuinfo')
    return info.exists() and ' avx512f ' in info.read_text()


@cache
def machine() -> str: # the processor
    "The machine in a few words, without its name"
    info = Path('/proc/cpuinfo')
    text = info.read_text() if info.exists() else ''
    processor = first_match(r'^model name[^:]*:(.*)$', [text], 'unknown processor').strip()
    return f'{processor}, {os.cpu_count()} cores, {sys.platform}'


# --- what a run depends on ---

def names_of(path):
    "What a notebook may be called: '02_rounding', '02', '2', 'rounding'"
    number, _, name = path.stem.partition('_')
    return {path.stem, number, number.lstrip('0'), name} - {''}


def seed_range(text):
    "The seeds in '3' or '0-9'"
    first, _, last = text.partition('-')
    if not (first.isdigit() and (last or first).isdigit() and int(first) <= int(last or first)):
        raise argparse.ArgumentTypeError(f'{text!r} is no range of seeds, such as 3 or 0-9')
    return text


def chapters(
    nbs: Path,   # the folder of notebooks
    wanted=(),   # numbers, names or stems; () for all
) -> list: # paths: the numbered chapters but the appendix, and the index
    "The notebooks whose claims are tried"
    found = sorted([*nbs.glob('[0-8][0-9]_*.ipynb'), *nbs.glob('index.ipynb')])
    if not wanted: return found
    known = set().union(*map(names_of, found))
    for name in wanted:
        if name not in known: raise SystemExit(f'There is no chapter {name!r} in {nbs}.')
    return [path for path in found if names_of(path) & set(wanted)]


def claims_hash(
    path: Path, # of a notebook
    root: Path=ROOT, # the folder that holds mpcourse/ and studies/
) -> str: # twelve hexadecimal digits
    "A fingerprint of what its claims depend on: not checkers of exercises, nor figures that move"
    cells = map(itemgetter(2), code_cells(path))
    sources = [source for source in cells if not re.search(r'^def check_', source, re.M)]
    return code_hash(sources, root, figures=False)


def key_of(
    code: str, # from `claims_hash`
    variation: Variation,
) -> str: # twelve hexadecimal digits
    "What a stored row was made from: a run with the same key would show nothing new"
    return digest(code, str(variation.env), versions(variation.python), machine())


# --- one run ---

class ThisPython(KernelSpecManager):
    "One kernel: IPython of a given interpreter"
    python = Unicode()

    def get_kernel_spec(self, kernel_name):
        "The kernel, whatever its name"
        argv = [self.python, '-m', 'ipykernel_launcher', '-f', '{connection_file}']
        return KernelSpec(argv=argv, display_name='Python', language='python')


def environment(
    variation: Variation,
    folder: str, # for IPython's files
) -> dict: # name -> value
    "The variables of a run: nothing varied is inherited"
    env = dict(os.environ)
    for other in variations(range(1)):
        for name in dict(other.env): env.pop(name, None)
    env.update(dict.fromkeys(THREADS, '1'))
    env.update(variation.env)
    return {**env, 'PYTHONPATH': str(ROOT), 'IPYTHONDIR': folder, 'TQDM_DISABLE': '1',
            'MPCOURSE_RECORD': f'{folder}/record'}


def prepared(
    path: Path, # of a notebook
) -> dict: # a notebook
    "A copy; what needs a GPU, or is to be read, is not run"
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        cell.metadata['tags'] = ['skip-execution'] if NOT_RUN.search(cell.source) else []
    return nb


def failure(number, cell, output):
    "A row's entry for a failed cell: which line, which exception"
    trace = strip_ansi('\n'.join(output.traceback))
    line = first_match(r'^-+> *\d+ (.*)$', [trace]).strip()
    error = f'{output.ename}: {output.evalue}'.rstrip(': ')
    return dict(cell=number, id=cell.id, line=line[:160], error=error[:400])


def failures(
    nb, # an executed notebook of `prepared`
) -> list: # dicts: cell (its number from 1), id, line, error
    "All failed cells"
    found = []
    for number, cell in enumerate(nb.cells, 1):
        for output in cell.get('outputs', []):
            if output.output_type == 'error': found.append(failure(number, cell, output))
    return found


def short(value):
    "Five digits of a number; JSON has no infinities"
    if not math.isfinite(value): return str(value)
    return float(f'{value:.5g}')


def recorded(
    nb,         # an executed notebook of `prepared`
    file: Path, # that `tools.asserts` wrote, a line a cell
): # first losses; cell's id -> text of a comparison -> left, sign, right
    "What the asserts compared"
    if not file.exists(): return [], {}
    ids = dict(map(attrgetter('source', 'id'), nb.cells))
    compared = {}
    entries = list(map(json.loads, read_text(file).splitlines()))
    for entry in entries:
        if not entry['compared'] or entry['source'] not in ids: continue
        sizes = {}
        for text, (left, sign, right) in entry['compared'].items():
            sizes[text] = [short(left), sign, short(right)]
        compared[ids[entry['source']]] = sizes
    first = []
    for loss in entries[-1]['first'] if entries else []: first.append(round(loss, 6))
    return first, compared


def client_of(nb, python, folder, limit, prepare):
    "A client with a fresh kernel of an interpreter"
    # files as sockets: of two kernels that start at one moment, one may find its port taken
    kernel = AsyncKernelManager(kernel_spec_manager=ThisPython(python=python), transport='ipc',
                                connection_file=f'{folder}/kernel.json')
    late = dict(ename='Timeout', evalue=f'more than {limit} s', traceback=[])
    def show_late(cell, cell_index, execute_reply):
        if execute_reply['content']['ename'] != 'Timeout': return
        cell.outputs = [new_output('error', **late)]
    return make_client(nb, prepare(kernel), folder, timeout=limit, error_on_timeout=late,
                       on_cell_error=show_late)


def as_it_is(kernel):
    "A kernel that starts by itself"
    return kernel


async def run(
    path: Path,      # a notebook
    variation: Variation,
    key: str='',      # from `key_of`
    limit: int=LIMIT, # seconds for one cell
    prepare=as_it_is, # of `warm`
) -> dict: # a row of the table
    "Run a chapter under a variation, in a folder of its own that is gone afterwards"
    start = time.perf_counter()
    nb = prepared(path)
    died = []
    with tempfile.TemporaryDirectory() as folder:
        client = client_of(nb, variation.python, folder, limit, prepare)
        # without cleanup_kc its kernel would stay
        try: await client.async_execute(env=environment(variation, folder), cleanup_kc=True)
        except Exception as e:
            died.append(dict(cell=0, id='', line='', error=f'{type(e).__name__}: {e}'[:400]))
        first, compared = recorded(nb, Path(folder)/'record')
    seconds = round(time.perf_counter() - start)
    return dict(chapter=path.stem, variation=variation.name, key=key,
                on=f'{machine()}, {versions(variation.python)}', seconds=seconds,
                first=first, failed=failures(nb) + died, compared=compared)


def can_fork(variation):
    "Whether a run may begin after the imports: libraries read their instructions when they load"
    return variation.group in ('seeds', 'neighbours')


async def run_all(todo, workers, done):
    "Run (path, variation, key) triples, some at a time; `done` gets each row"
    gate = asyncio.Semaphore(workers)
    forked = list(filter(can_fork, map(itemgetter(1), todo)))
    one_thread = environment(variations(range(1))[0], '')
    with warm(len(forked), one_thread) as prepare:
        async def run_one(path, variation, key):
            how = as_it_is
            if can_fork(variation): how = prepare
            async with gate: done(await run(path, variation, key, prepare=how))
        await asyncio.gather(*starmap(run_one, todo))


# --- the table ---

place_of = itemgetter('chapter', 'variation')    # of a row


def partial_file(store):
    "Where rows are kept until all runs are done"
    return store.with_suffix('.partial.jsonl')


def stored_rows(store):
    "The rows of the last run that reached its end"
    if not store.exists(): return []
    return json.loads(read_text(store))['rows']


def read_rows(store: Path) -> dict: # (chapter, variation) -> row
    "Stored rows, and those of a run that was interrupted"
    rows = {place_of(row): row for row in stored_rows(store)}
    if not partial_file(store).exists(): return rows
    for line in read_text(partial_file(store)).splitlines():
        try: row = json.loads(line)
        except ValueError: continue         # empty, or half written when the run was killed
        rows[place_of(row)] = row
    return rows


def red(rows) -> set: # of (chapter, cell's id)
    "The cells that failed somewhere"
    return {(row['chapter'], failed['id']) for row in rows for failed in row['failed']}


def missing(rows) -> list:
    "Interpreters and versions of torch that no row was run on"
    seen = '\n'.join(map(itemgetter('on'), rows))
    return [wanted for wanted in WANTED if not re.search(rf'\b{re.escape(wanted)}\b', seen)]


def varying(rows):
    "The rows without comparisons whose values are the same in all runs of a chapter"
    seen = defaultdict(set)
    for row in rows:
        for cell, found in row.get('compared', {}).items():
            for claim, values in found.items():
                seen[row['chapter'], cell, claim].add(tuple(values))
    out = []
    for row in rows:
        kept = {}
        for cell, found in row.get('compared', {}).items():
            for claim, values in found.items():
                if len(seen[row['chapter'], cell, claim]) == 1: continue    # no spread
                kept.setdefault(cell, {})[claim] = values
        out.append({**row, 'compared': kept})
    return out


def store_rows(store, rows, command):
    "One line a row, sorted, so that a difference can be read; the partial file has done its work"
    lines = [json.dumps(row, ensure_ascii=False) for row in sorted(varying(rows), key=place_of)]
    head = json.dumps(dict(command=command, not_run=missing(rows)), ensure_ascii=False)
    text = head.removesuffix('}') + ', "rows": [\n' + ',\n'.join(lines) + '\n]}\n'
    write_text(store, text)
    partial_file(store).unlink(missing_ok=True)


def table_line(chapter, cells):
    "A chapter and its narrow columns"
    return f'{chapter:18}' + ''.join(f'{cell:>3}' for cell in cells)


def table(
    rows, # of any number of chapters and variations
) -> str: # chapters × variations: a dot, or the number of failed cells; then the failed cells
    "The table as text"
    marks = {place_of(row): len(row['failed']) or '·' for row in rows}
    names = sorted(set(map(itemgetter('variation'), rows)))
    names.sort(key=lambda name: not name.startswith('seed'))
    lines = [table_line('', range(len(names)))]
    for chapter in sorted(set(map(itemgetter('chapter'), rows))):
        lines.append(table_line(chapter, [marks.get((chapter, name), '') for name in names]))
    lines.append('')
    for number, name in enumerate(names): lines.append(f'{number:3} {name}')
    lines += failed_lines(rows) + thin_lines(rows)
    lines.append(f'{len(margins(rows))} claims with a margin, {len(thin_lines(rows))} of them thin')
    for wanted in missing(rows): lines.append(f'not run: {wanted} (not installed here)')
    return '\n'.join(lines)


def failed_lines(rows):
    "Each failed cell once, with where it failed"
    where = {}
    for row in rows:
        for failed in row['failed']:
            place = row['chapter'], failed['cell'], failed['line']
            where.setdefault(place, []).append(f'    {row["variation"]}: {failed["error"]}')
    lines = []
    for (chapter, cell, line), errors in sorted(where.items()):
        lines += [f'\n{chapter}, cell {cell}: {line}', *errors]
    return lines


# --- margins ---

def spread(values):
    "Of some numbers: robust, and not zero where they differ"
    middle = median(values)
    distances = []
    for value in values: distances.append(abs(value - middle))
    return 1.48*median(distances) or 1.25*fmean(distances)


def in_spreads(rooms):
    "The median's distance from the bound, and the worst run's"
    unit = spread(rooms)
    return median(rooms)/unit, min(rooms)/unit


def is_thin(middle, worst):
    "Whether another processor could break it"
    return middle < FEWEST_SPREADS or worst < LEAST_ROOM


def margin(pairs):
    """Median and worst distance from the bound in spreads, of [left, sign, right] of several runs

    Of positive sizes the logarithms count, if these have the wider margin: losses and scales
    differ by factors. None where all runs are the same, or fewer than five are there.
    """
    rooms = []
    logs = []
    for left, sign, right in pairs:
        left = float(left)
        right = float(right)
        if not math.isfinite(room(left, sign, right)): continue
        rooms.append(room(left, sign, right))
        if min(left, right) > 0: logs.append(room(math.log2(left), sign, math.log2(right)))
    if len(rooms) < FEWEST_RUNS or spread(rooms) == 0: return None
    found = [in_spreads(rooms)]
    if len(logs) == len(rooms) and spread(logs): found.append(in_spreads(logs))
    return max(found, key=lambda one: (not is_thin(*one), one))


def compared_by_claim(rows):
    "(chapter, cell's id, text of the comparison) -> variation -> left, sign, right"
    found = {}
    for row in rows:
        for cell, sizes in row.get('compared', {}).items():
            for text, pair in sizes.items():
                found.setdefault((row['chapter'], cell, text), {})[row['variation']] = pair
    return found


def of_seeds(pairs):
    "Of variation -> pair, those of seeds if these are enough, since neighbours all lie at seed 0"
    found = []
    for variation, pair in pairs.items():
        if variation.startswith('seed'): found.append(pair)
    if len(found) < FEWEST_RUNS: return list(pairs.values())
    return found


def margins(rows) -> list: # (median, worst, claim, pairs by variation), the thinnest first
    "How far each claim is from its bound"
    found = []
    for claim, pairs in compared_by_claim(rows).items():
        measured = margin(of_seeds(pairs))
        if measured: found.append((*measured, claim, pairs))
    return sorted(found, key=lambda one: min(one[0]/FEWEST_SPREADS, one[1]/LEAST_ROOM))


def room_of(pair):
    "`room` of a stored pair, whose infinities are words"
    left, sign, right = pair
    return room(float(left), sign, float(right))


def thin_lines(rows):
    "Each thin claim, with the run that is nearest to its bound"
    lines = []
    for middle, worst, (chapter, cell, text), pairs in margins(rows):
        if not is_thin(middle, worst): continue
        nearest = min(pairs, key=lambda name: room_of(pairs[name]))
        left, sign, right = pairs[nearest]
        lines.append(f'thin: {chapter}, cell {cell}: {text}\n    median {middle:.1f} spreads from '
                     f'its bound, worst {worst:.1f} ({nearest}: {left} {sign} {right})')
    return lines


# --- the command ---

def parser():
    "The command line"
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--chapters', nargs='*', default=[], help='numbers or names; by default all')
    p.add_argument('--seeds', type=seed_range, default='0-9', help='such as 3 or 0-9 (%(default)s)')
    p.add_argument('--only', nargs='*', default=[],
                   choices=['seeds', 'neighbours', 'threads', 'instructions', 'pythons',
                            *INSTRUCTIONS],
                   help='run these variations alone')
    p.add_argument('--python', action='append', default=[],
                   help='another interpreter that has torch and what the course needs')
    p.add_argument('--workers', type=positive, default=os.cpu_count() or 1,
                   help='how many chapters run at a time (%(default)s)')
    p.add_argument('--table', action='store_true', help='print the stored table, and run nothing')
    p.add_argument('--check', action='store_true', help='run and compare, but store nothing')
    p.add_argument('--accept', action='store_true',
                   help='store the table even if cells are newly red')
    p.add_argument('--nbs', type=Path, default=ROOT/'nbs', help='the folder of notebooks')
    p.add_argument('--store', type=Path, default=STORE, help='the file of the table')
    return p


def plan(args) -> list: # of (path, variation)
    "What was asked for, seed by seed, so that an interrupted run has something of every chapter"
    first, _, last = args.seeds.partition('-')
    seeds = range(int(first), int(last or first) + 1)
    paths = chapters(args.nbs, args.chapters)
    pairs = []
    for variation in variations(seeds, args.python):
        if args.only and not {variation.group, variation.name} & {*args.only}: continue
        for path in paths:
            if variation.group == 'neighbours' and path.stem in ALONE: continue
            pairs.append((path, variation))
    return pairs


def outdated(pairs, rows):
    "(path, variation, key) of each run that has no row, or one of other code"
    codes = {path: claims_hash(path) for path in dict(pairs)}
    todo = []
    for path, variation in pairs:
        key = key_of(codes[path], variation)
        row = rows.get((path.stem, variation.name), {})
        if row.get('key') != key: todo.append((path, variation, key))
    return todo


def run_missing(args, pairs, rows):
    "Run what is not there, or not of today's code; each row goes to the partial file at once"
    todo = outdated(pairs, rows)
    args.store.parent.mkdir(exist_ok=True)
    with progress_bar(len(todo), 'run') as bar:
        def done(row):
            rows[place_of(row)] = row
            if args.check: return bar.update()
            with partial_file(args.store).open('a', encoding='utf-8') as f:
                f.write('\n' + json.dumps(row, ensure_ascii=False))
            red_cells = len(row['failed'])
            bar.set_postfix_str(f'{", ".join(place_of(row))}: {red_cells} red', refresh=False)
            bar.update()
        run_async(run_all(todo, args.workers, done))


def main(argv=None) -> int: # 1 if a cell is red that the stored table does not know
    "Run, print, compare, store"
    args = parser().parse_args(argv)
    stored = stored_rows(args.store)
    if args.table:
        print(table(stored))
        return 0
    pairs = plan(args)
    rows = read_rows(args.store)
    run_missing(args, pairs, rows)
    asked = [rows[path.stem, variation.name] for path, variation in pairs]
    print(table(asked))
    new = red(asked) - red(stored)
    for chapter, cell in sorted(new): print(f'newly red: {chapter}, cell {cell}')
    if new and not args.accept: return 1
    if not args.check:
        stems = {path.stem for path in chapters(args.nbs)}
        present = [row for row in rows.values() if row['chapter'] in stems]
        store_rows(args.store, present, ' '.join(['tools/claims.py', *(argv or sys.argv[1:])]))
    return int(bool(thin_lines(asked)))


if __name__ == '__main__': sys.exit(main())
