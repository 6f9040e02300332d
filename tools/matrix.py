"""The library under the oldest and the newest Python, torch and fastai that its pins allow:
`pytest -m library` in each.

    python tools/matrix.py            both
    python tools/matrix.py oldest     one of them

The environments are made once, in .matrix/. TORCH_INDEX names an index of CPU builds of torch;
without it pip takes torch with CUDA, several gigabytes."""
import configparser, os, shutil, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT/'.matrix'
TESTERS = ['pytest', 'pytest-timeout', 'pytest-rerunfailures', 'pytest-xdist', 'hypothesis',
           'ml_dtypes', 'gfloat', 'tensorboard']
PYTEST = ['-m', 'pytest', '-m', 'library', '-n', '2', '-p', 'no:cacheprovider',
          '--disable-warnings']
VERSIONS = '''
import platform
from importlib.metadata import version
names = 'torch', 'fastai', 'fastcore', 'numpy', 'pandas'
print(platform.python_version(), *[f'{name} {version(name)}' for name in names])'''


def settings():
    "The section of settings.ini"
    config = configparser.ConfigParser()
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']


def works(python):
    "Does it start? pyenv's shims stand on the PATH for versions that are not chosen"
    return subprocess.run([python, '-c', 'import venv'], capture_output=True).returncode == 0


def interpreters(
    low: str, # '3.10'
) -> list: # (minor version, path), the oldest first
    "Interpreters from a version on, on the PATH or among pyenv's"
    first = int(low.partition('.')[2])
    candidates = {}
    for minor in range(first, first + 20): candidates[minor] = shutil.which(f'python3.{minor}')
    for path in sorted((Path.home()/'.pyenv'/'versions').glob('3.*/bin/python')):
        minor = int(path.parts[-3].split('.')[1])
        if minor >= first: candidates[minor] = str(path)
    return sorted((minor, path) for minor, path in candidates.items() if path and works(path))


def pinned(
    requirements: str, # of settings.ini
) -> list: # each lower bound as the only version allowed
    "The oldest that the pins allow: torch>=2.6 becomes torch==2.6.*"
    pins = []
    for requirement in requirements.split():
        name, _, version = requirement.partition('>=')
        if version and version.count('.') < 2: version += '.*'
        pins.append(f'{name}=={version}' if version else name)
    return pins


def environment(name, python, pins):
    "A virtual environment with the library and what tests it; made once"
    folder = HOME/name
    own_python = folder/'bin'/'python'
    wanted = ' '.join([str(python), *pins])
    stamp = folder/'.installed'
    if stamp.exists() and stamp.read_text() == wanted: return own_python
    subprocess.run([python, '-m', 'venv', '--clear', folder], check=True)
    install = [own_python, '-m', 'pip', 'install', '-qq']
    index = os.environ.get('TORCH_INDEX')
    if index:
        torch = [pin for pin in pins if pin.startswith('torch')]
        subprocess.run([*install, '--index-url', index, *torch], check=True)
    subprocess.run([*install, *TESTERS, *pins, '-e', f'{ROOT}[course]'], check=True)
    stamp.write_text(wanted)
    return own_python


def versions(python):
    "What is in an environment"
    done = subprocess.run([python, '-c', VERSIONS], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(name, python, pins):
    "The tests in one environment; the exit code, and a line about them"
    python = environment(name, python, pins)
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    files = []
    for path in sorted((ROOT/'tests').rglob('test_*.py')):
        if 'mark.library' in path.read_text(encoding='utf-8'): files.append(path)
    done = subprocess.run([python, *PYTEST, *files], cwd=ROOT, env=env, capture_output=True,
                          text=True)
    if done.returncode: print(done.stdout[-6000:], done.stderr[-2000:])
    last = done.stdout.strip().splitlines()[-1]
    return done.returncode, f'{name:7} Python {versions(python)}: {last}'


def main(wanted):
    "Test in the environments named, or in both"
    config = settings()
    found = interpreters(config['min_python'])
    if not found:
        sys.exit(f'There is no Python from {config["min_python"]} on: install one, '
                 'or put it on the PATH.')
    oldest = pinned(f"{config['requirements']} {config['fastai_requirements']}")
    rows = dict(oldest=(found[0][1], oldest),
                newest=(found[-1][1], ['torch', 'fastai']))
    unknown = set(wanted) - set(rows)
    if unknown:
        sys.exit(f'There is no environment {", ".join(unknown)}: take {" or ".join(rows)}.')
    results = [run(name, *rows[name]) for name in rows if not wanted or name in wanted]
    for _, line in results: print(line)
    sys.exit(max(code for code, _ in results))


if __name__ == '__main__': main(sys.argv[1:])
