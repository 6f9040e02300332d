"""Run a study over its rows and seeds and store what it returns.

    python studies/NAME.py                    all of it, on all cores; ends with studies/NAME.json
    python studies/NAME.py --rows fp16 fp32   a part; it is kept until the rest has been run
"""
import argparse, json, multiprocessing, os, threading, time
from concurrent.futures import ProcessPoolExecutor, as_completed
from inspect import unwrap
from pathlib import Path

import torch
from tqdm import tqdm

from mpcourse.doctor import machine_line


def timed(run, row, seed):
    "One result with its time; a failure names its row and seed"
    start = time.perf_counter()
    try: value = {k: float(v) for k, v in run(row, seed).items()}
    except Exception as e:
        raise RuntimeError(f'Row {row!r}, seed {seed}: {type(e).__name__}: {e}') from e
    return dict(row=row, seed=seed, seconds=round(time.perf_counter() - start, 2), value=value)


def start_worker():
    "One torch thread, and no life after the parent's"
    torch.set_num_threads(1)
    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=follow, daemon=True).start()


def store(path, doc):
    "Write a file as a whole or not at all"
    tmp = path.with_suffix('.tmp')
    tmp.write_text(json.dumps(doc, indent=1) + '\n', encoding='utf-8')
    os.replace(tmp, path)


def results(run, tasks, workers):
    "The results of the tasks as they come"
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), start_worker)
    try:
        for job in as_completed([pool.submit(timed, run, *t) for t in tasks]): yield job.result()
    finally: pool.shutdown(cancel_futures=True)


def arguments(rows, seeds, argv):
    "What to run, and with how many processes"
    p = argparse.ArgumentParser(description='Run a study. What was interrupted goes on where it stopped.')
    p.add_argument('--rows', nargs='+', choices=list(rows), metavar='ROW', default=list(rows),
                   help='all')
    p.add_argument('--seeds', nargs='+', type=int, choices=list(seeds), default=list(seeds),
                   help='all')
    p.add_argument('--workers', type=int, default=os.cpu_count(), help='processes; one a core')
    args = p.parse_args(argv)
    if 'MPCOURSE_SEED' in os.environ:
        p.error('MPCOURSE_SEED shifts every seed, and a stored result names its seeds: unset it.')
    return args


def main(run, rows, seeds, argv=None):
    "The command line of a study: run what is missing, and store the whole when it is there"
    args, script = arguments(rows, seeds, argv), Path(unwrap(run).__code__.co_filename)
    name, part = script.stem, script.with_suffix('.partial.json')
    order = {(row, seed): i for i, (seed, row) in enumerate((s, r) for s in seeds for r in rows)}
    doc = dict(study=name, command=f'python studies/{name}.py', rows=list(rows), seeds=list(seeds),
               machine=machine_line(), results=[])
    old = json.loads(part.read_text(encoding='utf-8')) if part.exists() else doc
    if old['machine'] == doc['machine']:
        doc['results'] = [r for r in old['results'] if (r['row'], r['seed']) in order]
    have = {(r['row'], r['seed']) for r in doc['results']}
    todo = [(row, seed) for seed in args.seeds for row in args.rows if (row, seed) not in have]
    for result in tqdm(results(run, todo, args.workers), name, len(todo)):
        doc['results'].append(result)
        store(part, doc)
    doc['results'].sort(key=lambda r: order[r['row'], r['seed']])
    if len(doc['results']) < len(order): return print(f'{part.name} waits for the rest.')
    store(script.with_suffix('.json'), doc)
    part.unlink(missing_ok=True)
