"""Build a release and try it as a user would: `make release`.

Builds sdist and wheel into dist/, checks their metadata, and installs the wheel with its extra `course` into a fresh
environment, outside of the clone. There every public name is imported and the README's code runs. Nothing is uploaded
and nothing is tagged: the last line says which command does that. A pushed tag starts .github/workflows/release.yml.
"""
import argparse, configparser, os, re, shutil, subprocess, sys, tempfile, venv, zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 1_000_000     # bytes of a wheel: code and JavaScript, no picture and no data

NAMES = '''
import mpcourse
for name in mpcourse.__all__: getattr(mpcourse, name)
print(f'{len(mpcourse.__all__)} public names')
'''


def run(*command, cwd=ROOT):
    "Run a command; its failure ends the release"
    done = subprocess.run([str(c) for c in command], cwd=cwd, env={**os.environ, 'PYTHONPATH': ''})   # nothing of the clone
    if done.returncode: sys.exit(f'{" ".join(str(c) for c in command[:6])} … ended with code {done.returncode}.')


def version() -> str: # as settings.ini has it
    "The version of this tree"
    config = configparser.ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']['version']


def refusals(
    number: str, # the version
    day: str,    # its date, or 'unreleased'
) -> list: # sentences; empty where a release may be made
    "What speaks against a release of this tree"
    found = []
    changes = subprocess.run(['git', 'status', '--porcelain'], cwd=ROOT, capture_output=True, text=True).stdout
    if changes: found.append(f'The working tree has changes: commit them first.\n{changes}')
    if f'version: {number}' not in (ROOT/'CITATION.cff').read_text(encoding='utf-8'):
        found.append(f'CITATION.cff names another version than settings.ini, which has {number}.')
    if not re.fullmatch(r'\d{4}-\d\d-\d\d', day):
        found.append(f'CHANGELOG.md says ({day}) at {number}: write the day of the release there.')
    return found


def day_of(
    number: str, # a version
    text: str,   # of CHANGELOG.md
) -> str: # what stands in parentheses behind it; '' without a section
    "The day of a release"
    found = re.search(rf'^## {re.escape(number)} \((.+)\)$', text, re.M)
    return found[1] if found else ''


def snippets(
    text: str, # of README.md
) -> str: # Python
    "The README's Python, in its order"
    return '\n'.join(re.findall(r'^```python\n(.*?)^```$', text, re.M | re.S))


def build(
    folder: Path, # an empty folder for both files
) -> Path: # the wheel
    "Build sdist and wheel, and check them"
    run(sys.executable, '-m', 'build', '--outdir', folder, ROOT)
    run(sys.executable, '-m', 'twine', 'check', '--strict', *folder.iterdir())
    wheel = next(folder.glob('*.whl'))
    with zipfile.ZipFile(wheel) as z: names = z.namelist()
    strangers = [n for n in names if not re.match(r'mpcourse(/|-[\d.]+\.dist-info/)', n)]
    if strangers: sys.exit(f'The wheel carries {strangers}: it should hold mpcourse alone.')
    if wheel.stat().st_size > LARGEST: sys.exit(f'The wheel has {wheel.stat().st_size:,} bytes, more than {LARGEST:,}.')
    return wheel


def try_wheel(wheel: Path):
    "Install it alone, as a user would, and run what README promises"
    with tempfile.TemporaryDirectory() as tmp:
        venv.create(tmp, with_pip=True)
        python = Path(tmp)/'bin/python'
        index = os.environ.get('TORCH_INDEX')
        if index: run(python, '-m', 'pip', 'install', '-qq', '--index-url', index, 'torch', 'torchvision')
        run(python, '-m', 'pip', 'install', '-qq', f'{wheel}[course]')
        code = Path(tmp)/'readme.py'
        code.write_text(snippets((ROOT/'README.md').read_text(encoding='utf-8')) + '\nprint(fp16, cured, bf16, sep="\\n")\n', encoding='utf-8')
        run(python, '-c', NAMES, cwd=tmp)
        run(python, code, cwd=tmp)
        run(Path(tmp)/'bin/mpcourse', '--help', cwd=tmp)


def main(argv=None):
    "Check, build, try; the tag is for a person"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dry-run', action='store_true', help='build and try, whatever speaks against a release')
    args = parser.parse_args(argv)
    number = version()
    against = refusals(number, day_of(number, (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')))
    if against: print(*against, sep='\n')
    if against and not args.dry_run: return 1
    shutil.rmtree(ROOT/'dist', ignore_errors=True)
    (ROOT/'dist').mkdir()
    wheel = build(ROOT/'dist')
    try_wheel(wheel)
    print(f'\n{wheel.name}: {wheel.stat().st_size:,} bytes. To publish: git tag v{number} && git push origin v{number}')
    return 0


if __name__ == '__main__': sys.exit(main())
