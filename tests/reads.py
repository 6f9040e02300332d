"""Notes every file of the project that a Python process and its children open, for `suite.py`.

A `.pth` file in the environment runs this in each process where MPCOURSE_READS names the list of notes:
`i` for a module that is imported, `r` for a file that is read, `x` for a program that is not Python."""
import os, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
IMPORT = '<frozen importlib._bootstrap_external>'
NOT_OURS = ('.git/', '.venv', '.hypothesis/', '.matrix/', '.pytest_cache/', '.ruff_cache/', '.green.json')
noted = set()
opened = set()      # since somebody emptied it


def source(path):
    "The file that somebody wrote behind a path, within the project; None for others"
    path = os.path.abspath(os.fsdecode(path))
    if not path.startswith(ROOT + os.sep): return
    path = path[len(ROOT) + 1:].replace(os.sep, '/')
    if '__pycache__/' in path: path = path.replace('__pycache__/', '').split('.')[0] + '.py'
    return None if path.startswith(NOT_OURS) else path


def runs_only(frame):
    "Whether a file is opened to be imported"
    return frame.f_code.co_filename == IMPORT


def is_traced(program, args, env):
    "Whether a child is a Python that will run this, too"
    if env is not None and 'MPCOURSE_READS' not in env or '-S' in args[1:3]: return False
    if program == sys.executable: return True
    if os.path.dirname(program) != os.path.dirname(sys.executable): return False
    with open(program, 'rb') as f: return f.read(2) == b'#!'


def write(kind, what):
    if (kind, what) in noted: return
    noted.add((kind, what))
    notes = os.open(os.environ['MPCOURSE_READS'], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(notes, f'{kind} {what}\n'.encode())
    os.close(notes)


def note(event, args):
    "An audit hook"
    if 'MPCOURSE_READS' not in os.environ: return
    if event in ('open', 'cpython.run_file') and isinstance(args[0], (str, bytes, os.PathLike)):
        path = source(args[0])
        if not path or not os.path.isfile(os.path.join(ROOT, path)): return
        opened.add(path)
        caller = sys._getframe().f_back     # none where Python itself opens a script
        write('i' if caller and runs_only(caller) else 'r', path)
    elif event == 'subprocess.Popen':
        program, argv, _, env = args
        argv = [argv] if isinstance(argv, (str, bytes, os.PathLike)) else list(argv)
        program = os.fsdecode(program or argv[0])
        argv = list(map(os.fsdecode, argv))
        if not is_traced(program, argv, env): write('x', os.path.basename(program) + ' -S'*('-S' in argv[1:3]))
    elif event in ('os.system', 'os.exec', 'os.posix_spawn'): write('x', event)


sys.addaudithook(note)
