"""Run the benchmarks of this folder, print a table, store it under results/, and fail where a bound is broken.

    python bench/run.py                    all of them
    python bench/run.py emulate            only bench_emulate.py
"""
import argparse, datetime, importlib, json, os, re, sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def functions(
    name: str, # of the module: 'bench_emulate'
) -> list: # its functions named bench_…, in the order of the file
    "The benchmarks of a module"
    mod = importlib.import_module(name)
    return [f for n, f in vars(mod).items() if n.startswith('bench_') and callable(f)
            and f.__module__ == name]


def measure(
    f,            # a benchmark: () -> list of rows
    retries: int, # how often a broken one is measured again
) -> list: # of rows
    "Run a benchmark; a bound counts as broken if no run keeps it, since another program may disturb one"
    rows = f()
    while retries and not all(r.ok for r in rows):
        again, retries = {r.name: r for r in f()}, retries - 1
        rows = [r if r.ok else again[r.name] for r in rows]
    return rows


def show(name, rows):
    "Print the table of one file"
    w = max(len(r.name) for r in rows)
    for r in rows:
        ms = ', '.join(f'{k} {v:.3g} ms' for k, v in r.ms.items())
        verdict = 'BROKEN' if not r.ok else 'ok' if r.bound else ''
        print(f'{name:10} {r.name:{w}} {r.value:8.2f} {r.unit:3} {r.bound:7} {verdict:7} {ms}',
              flush=True)


def store(
    file: Path,  # results/<machine>.json
    head: dict,  # the machine, the date
    found: dict, # name of the benchmark file -> rows
):
    "Write the results; those of files that were not run now stay, if the machine is the same"
    old = json.loads(file.read_text(encoding='utf-8')) if file.exists() else {}
    kept = old.get('results', {}) if old.get('machine') == head['machine'] else {}
    doc = head | dict(results=kept | {k: [r.json() for r in rows] for k, rows in found.items()})
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(doc, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


def main(argv=None):
    "The command"
    p = argparse.ArgumentParser(description='Run the benchmarks and compare them with their bounds.')
    p.add_argument('names', nargs='*',
                   help="which ones: 'emulate' for bench_emulate.py; all if none is given")
    p.add_argument('--threads', type=int, default=1, help='threads of torch (1)')
    p.add_argument('--retries', type=int, default=2,
                   help='how often one with a broken bound is measured again (2)')
    p.add_argument('--out', type=Path, default=HERE/'results', help='folder of the results')
    args = p.parse_args(argv)
    there = sorted(f.stem.removeprefix('bench_') for f in HERE.glob('bench_*.py'))
    if unknown := [n for n in args.names if n not in there]:
        p.error(f'There is no benchmark {unknown[0]!r}: there are {", ".join(there)}.')
    import torch
    from mpcourse.doctor import machine_line
    torch.set_num_threads(args.threads)
    line = machine_line()
    head = dict(machine=line, threads=args.threads, date=datetime.date.today().isoformat())
    print(f'{line}; {args.threads} thread{"s"[:args.threads > 1]}')
    found = {}
    for name in args.names or there:
        found[name] = [r for f in functions(f'bench_{name}') for r in measure(f, args.retries)]
        show(name, found[name])
    short = re.sub(r'\(r\)|\(tm\)|processor|, Python [^,]*', '', line, flags=re.I).lower()
    slug = re.sub(r'[^a-z0-9.]+', '-', short).strip('-')
    store(args.out/f'{slug}.json', head, found)
    broken = [f'{n}: {r.name}' for n, rows in found.items() for r in rows if not r.ok]
    verdict = f'{len(broken)} bounds broken: ' + '; '.join(broken) if broken else 'every bound kept.'
    print(f'{sum(map(len, found.values()))} rows, {verdict}')
    return bool(broken)


STEADY = dict(MALLOC_MMAP_THRESHOLD_='33554432', MALLOC_TRIM_THRESHOLD_='4294967296')

def steady():
    """Start again with a C library that keeps freed memory. Else it now and then returns a megabyte to the system
    and has it faulted in again, which takes ten times as long as filling it, on whichever side it happens."""
    if any(os.environ.get(k) != v for k, v in STEADY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | STEADY)


if __name__ == '__main__':
    steady()
    sys.exit(main())
