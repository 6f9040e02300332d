"""Build a release and try it as a user would: `make release`.

Builds sdist and wheel into dist/, checks their metadata, and installs the wheel with its extra
`course` into a fresh environment, outside of the clone. There every public name is imported and the
README's code runs. Nothing is uploaded and nothing is tagged: the last line says which command does
that. A pushed tag starts .github/workflows/release.yml.
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
SHOW_RESULTS = '\nprint(fp16, cured, bf16, sep="\\n")\n'    # of README's code


def run(*command, cwd=ROOT):
    "Run a command; its failure ends the release"
    words = list(map(str, command))
    env = {**os.environ, 'PYTHONPATH': ''}   # nothing of the clone
    code = subprocess.run(words, cwd=cwd, env=env).returncode
    if code: sys.exit(f'{" ".join(words[:6])} … ended with code {code}.')


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
    reasons = []
    command = ['git', 'status', '--porcelain']
    changes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    if changes: reasons.append(f'The working tree has changes: commit them first.\n{changes}')
    if f'version: {number}' not in (ROOT/'CITATION.cff').read_text(encoding='utf-8'):
        reasons.append(f'CITATION.cff names another version than settings.ini, which has {number}.')
    if not re.fullmatch(r'\d{4}-\d\d-\d\d', day):
        reasons.append(f'CHANGELOG.md says ({day}) at {number}: '
                       'write the day of the release there.')
    return reasons


def day_of(
    number: str, # a version
    text: str,   # of CHANGELOG.md
) -> str: # what stands in parentheses behind it; '' without a section
    "The day of a release"
    heading = re.search(rf'^## {re.escape(number)} \((.+)\)$', text, re.M)
    return heading[1] if heading else ''


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
    with zipfile.ZipFile(wheel) as archive: names = archive.namelist()
    strangers = [name for name in names if not re.match(r'mpcourse(/|-[\d.]+\.dist-info/)', name)]
    if strangers: sys.exit(f'The wheel carries {strangers}: it should hold mpcourse alone.')
    size = wheel.stat().st_size
    if size > LARGEST: sys.exit(f'The wheel has {size:,} bytes, more than {LARGEST:,}.')
    return wheel


def try_wheel(wheel: Path):
    "Install it alone, as a user would, and run what README promises"
    with tempfile.TemporaryDirectory() as tmp:
        venv.create(tmp, with_pip=True)
        python = Path(tmp)/'bin/python'
        install = [python, '-m', 'pip', 'install', '-qq']
        index = os.environ.get('TORCH_INDEX')
        if index: run(*install, '--index-url', index, 'torch', 'torchvision')
        run(*install, f'{wheel}[course]')
        script = Path(tmp)/'readme.py'
        code = snippets((ROOT/'README.md').read_text(encoding='utf-8'))
        script.write_text(code + SHOW_RESULTS, encoding='utf-8')
        run(python, '-c', NAMES, cwd=tmp)
        run(python, script, cwd=tmp)
        run(Path(tmp)/'bin/mpcourse', '--help', cwd=tmp)


def main(argv=None):
    "Check, build, try; the tag is for a person"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dry-run', action='store_true',
                        help='build and try, whatever speaks against a release')
    args = parser.parse_args(argv)
    number = version()
    changelog = (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')
    against = refusals(number, day_of(number, changelog))
    if against: print(*against, sep='\n')
    if against and not args.dry_run: return 1
    shutil.rmtree(ROOT/'dist', ignore_errors=True)
    (ROOT/'dist').mkdir()
    wheel = build(ROOT/'dist')
    try_wheel(wheel)
    print(f'\n{wheel.name}: {wheel.stat().st_size:,} bytes. '
          f'To publish: git tag v{number} && git push origin v{number}')
    return 0


if __name__ == '__main__': sys.exit(main())
