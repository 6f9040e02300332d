"""The library under the oldest and the newest Python, torch and fastai that its pins allow: `pytest -m library` in each.

    python tools/matrix.py            both
    python tools/matrix.py oldest     one of them

The environments are made once, in .matrix/. TORCH_INDEX names an index of CPU builds of torch; without it pip takes torch with CUDA, several gigabytes."""
import configparser, os, re, shutil, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT/'.matrix'
TESTERS = 'pytest pytest-timeout pytest-rerunfailures pytest-xdist hypothesis ml_dtypes gfloat tensorboard'.split()


def settings():
    "The section of settings.ini"
    cfg = configparser.ConfigParser()
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    return cfg['DEFAULT']


def interpreters(
    low: str, # '3.10'
) -> list: # (minor version, path), the oldest first
    "Interpreters from a version on, on the PATH or among pyenv's"
    first = int(low.partition('.')[2])
    found = {n: shutil.which(f'python3.{n}') for n in range(first, first + 20)}
    for path in sorted((Path.home()/'.pyenv'/'versions').glob('3.*/bin/python')):
        found[int(path.parent.parent.name.split('.')[1])] = str(path)
    return sorted((n, path) for n, path in found.items() if n >= first and path and works(path))


def works(python):
    "Does it start? pyenv's shims stand on the PATH for versions that are not chosen"
    return subprocess.run([python, '-c', 'import venv'], capture_output=True).returncode == 0


def pinned(
    requirements: str, # of settings.ini
) -> list: # each lower bound as the only version allowed
    "The oldest that the pins allow: torch>=2.6 becomes torch==2.6.*"
    found = [re.fullmatch(r'([\w-]+)(?:>=([\d.]+))?', r) for r in requirements.split()]
    return [f'{m[1]}=={m[2]}.*' if m[2] and m[2].count('.') < 2 else f'{m[1]}=={m[2]}' if m[2] else m[1] for m in found]


def environment(name, python, pins):
    "A virtual environment with the library and what tests it; made once"
    folder = HOME/name
    here = folder/'bin'/'python'
    wanted = ' '.join([str(python), *pins])
    stamp = folder/'.installed'
    if stamp.exists() and stamp.read_text() == wanted: return here
    if folder.exists(): shutil.rmtree(folder)
    subprocess.run([python, '-m', 'venv', folder], check=True)
    index = os.environ.get('TORCH_INDEX')
    if index: subprocess.run([here, '-m', 'pip', 'install', '-qq', '--index-url', index, *(p for p in pins if p.startswith('torch'))], check=True)
    subprocess.run([here, '-m', 'pip', 'install', '-qq', *TESTERS, *pins, '-e', f'{ROOT}[course]'], check=True)
    stamp.write_text(wanted)
    return here


def versions(python):
    "What is in an environment"
    code = ('import platform; from importlib.metadata import version as v; '
            'print(platform.python_version(), *[f"{n} {v(n)}" for n in ("torch", "fastai", "fastcore", "numpy", "pandas")])')
    return subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.strip()


def run(name, python, pins):
    "The tests in one environment; a line about them"
    here = environment(name, python, pins)
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    files = [p for p in sorted((ROOT/'tests').rglob('test_*.py')) if 'mark.library' in p.read_text(encoding='utf-8')]
    done = subprocess.run([here, '-m', 'pytest', '-m', 'library', '-n', '2', '-p', 'no:cacheprovider', '--disable-warnings', *files],
                          cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode: print(done.stdout[-6000:], done.stderr[-2000:])
    return done.returncode, f'{name:7} Python {versions(here)}: {done.stdout.strip().splitlines()[-1]}'


def main(wanted):
    cfg = settings()
    found = interpreters(cfg['min_python'])
    if not found: sys.exit(f'There is no Python from {cfg["min_python"]} on: install one, or put it on the PATH.')
    rows = dict(oldest=(found[0][1], pinned(cfg['requirements'])), newest=(found[-1][1], ['torch', 'fastai']))
    unknown = set(wanted) - set(rows)
    if unknown: sys.exit(f'There is no environment {", ".join(unknown)}: take {" or ".join(rows)}.')
    told = [run(name, *row) for name, row in rows.items() if not wanted or name in wanted]
    for _, line in told: print(line)
    sys.exit(max(code for code, _ in told))


if __name__ == '__main__': main(sys.argv[1:])
