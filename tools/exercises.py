"""The exercises: `python -m tools.exercises check 09 mine.py` for a learner, `list | strip OUT | mark FILE | self` for a teacher.

`mark FOLDER --csv marks.csv` marks all notebooks and Python files of a folder, several at a time, and sums up what the class knows.

A student's code runs in a separate process with a time limit. It can do whatever you can do, so mark in a container.
"""
import argparse, ast, contextlib, csv, importlib, json, os, re, secrets, select, signal, subprocess, sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
MOODLE = r'(?:.*_assignsubmission_file_)?'  # what it puts before the name that the student gave
HEAD = re.compile(r'^\*\*(\d+) ([●○]{3}) ([^*]+?)\*\* *(.*)', re.M | re.S)


@dataclass(frozen=True)
class Exercise:
    "One exercise of a chapter"
    notebook: Path # of the chapter
    number: int    # within it
    level: int     # 1 to 3: as many points
    title: str     # without a full stop
    task: str      # Markdown
    name: str      # of what is to be written
    check: str     # of its checker, without check_
    solution: str  # the course's own, as Python

    @property
    def id(self): return f'{self.notebook.name[:2]}.{self.number}' # '08.2'


def notebooks(): return sorted(p for p in (ROOT/'nbs').glob('[0-9]*.ipynb') if p.name < '88')


def read(path):
    "The cells of a notebook, without nbformat, which takes a second or two to import"
    try: cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    except (KeyError, TypeError): raise ValueError(f'{path.name} is no notebook of format 4: save it again in Jupyter.') from None
    for c in cells: c['source'] = ''.join(c['source'])
    return [SimpleNamespace(**{'metadata': {}, **c}) for c in cells]


def opens_solution(c): return c.cell_type == 'markdown' and re.search(r'^:::+ *\{.*callout.*\n+#+ Solution', c.source, re.M)
def closes_solution(c): return c.cell_type == 'markdown' and re.match(r':::\s*$', c.source, re.M)


def exercises(
    notebook: Path, # of a chapter
) -> list: # of `Exercise`, in order
    "What a chapter asks for: a head, a stub that says `your turn`, a folded solution"
    found, head, stub, code = [], None, None, None
    for c in read(notebook):
        if code is not None and closes_solution(c):
            what = int(head[1]), head[2].count('●'), head[3].strip(' .'), head[4].strip()
            found.append(Exercise(notebook, *what, *stub, '\n'.join(code)))
            code = stub = None
        if c.cell_type == 'markdown': head = HEAD.search(c.source) or head
        elif code is not None: code.append(c.source)
        elif m := re.search(r'your turn.*^# ?check_(\w+)\((\w+)\)', c.source, re.M | re.S): stub = m[2], m[1]
        if stub and opens_solution(c): code = []
    return found


def all_exercises(): return [e for p in notebooks() for e in exercises(p)]


def checkers(
    notebook: Path, # of a chapter
) -> dict: # name of a solution -> its checker
    "The checkers of a chapter's exercises, in the namespace of its module"
    cells = [c.source for c in read(notebook) if c.cell_type == 'code']
    names = module_names(cells)
    for code in cells:
        imports = re.match(r'(?!#\| *export)(#\|.*\n)?(from|import) ', code) and not re.search(r'^def ', code, re.M)
        if imports or re.search(r'^def check_', code, re.M): exec(code, names)
    return {n.removeprefix('check_'): f for n, f in names.items() if n.startswith('check_')}


def module_names(
    cells: list, # sources of a chapter's code
) -> dict: # what its module defines; empty without a module
    "The namespace in which a chapter's answers run"
    for code in cells:
        exported = re.match(r'#\| *default_exp +(\w+)', code)
        if exported: return dict(vars(importlib.import_module(f'mpcourse.{exported[1]}')))
    return {}


# --- a learner's file ---

def check(
    chapter: str, # its number
    file: Path,   # Python with solutions
) -> int: # 0 if every solution is right, else 1
    "Run the solutions of a file against the checkers of a chapter"
    found = [n for n in notebooks() if n.name.startswith(f'{chapter:0>2}_')]
    if not found: raise SystemExit(f'There is no chapter {chapter} with exercises.')
    try: text = file.read_text(encoding='utf-8')
    except OSError as e: raise SystemExit(f'{file} cannot be read ({e.strerror}): give another file.') from None
    known, answers = checkers(found[0]), {}
    exec(compile(text, str(file), 'exec'), answers)
    solved = [name for name in known if callable(answers.get(name))]
    if not solved: raise SystemExit(f'{file} has no function of these names: {", ".join(known)}.')
    wrong = 0
    for name in solved:
        verdict = 'right'
        try: known[name](answers[name])
        except AssertionError as e: verdict = f'no: {e}'
        except Exception as e: verdict = f'no: {type(e).__name__}: {e}'
        wrong += verdict != 'right'
        print(f'{name}: {verdict}')
    return int(wrong > 0)


# --- notebooks without solutions ---

def strip(
    notebook: Path, # of a chapter
    out: Path,      # a folder
):
    "Write the notebook without its folded solutions"
    import nbformat
    nb, kept, inside = nbformat.read(notebook, as_version=4), [], False
    for c in nb.cells:
        if inside and closes_solution(c):
            inside, c.source = False, re.sub(r'^:::\s*', '', c.source)
        if opens_solution(c):
            inside, c.source = True, c.source[:re.search(r'^:::', c.source, re.M).start()].rstrip()
            if c.source: kept.append(c)
        elif not inside and c.source: kept.append(c)
    nb.cells = kept
    nbformat.write(nb, out/notebook.name)


# --- marks ---

def parsed(code):
    "The syntax tree of a cell; lines of IPython's own are left out of it"
    try: return ast.parse(code)
    except SyntaxError as e:
        plain = re.sub(r'^\s*[%!].*$', '', code, flags=re.M)
        try: return ast.parse(plain)
        except SyntaxError: raise e from None


def defined(code):
    "Names that a cell defines or imports at its top level"
    names = set()
    for node in parsed(code).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)): names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)): names |= {(a.asname or a.name).split('.')[0] for a in node.names}
        elif isinstance(node, ast.Assign): names |= {t.id for t in ast.walk(node) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
    return names


def definitions(code):
    "A cell without what it tries out"
    keep = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign
    return compile(ast.Module([n for n in parsed(code).body if isinstance(n, keep)], []), 'answer', 'exec')


def provide(name, cells, names):
    "Run the first cell that defines a name; whether there is one"
    for code in cells:
        with contextlib.suppress(SyntaxError):
            if name not in defined(code) or 'your turn' in code: continue
            run(definitions(code), cells, names)
            return True
    return False


def run(code, cells, names, tries=12):
    "Execute code; what it misses comes from other cells"
    for _ in range(tries):
        try: return exec(code, names)
        except NameError as e:
            if not provide(e.name, cells, names): raise


def judge(
    notebook: Path, # of the chapter
    name: str,      # of what was to be written
    check: str,     # of its checker
    code: str,      # a cell that defines it
    others=(),      # the student's cells, of which it may use what they define
) -> dict: # state: 'right' or 'wrong', says: why
    "The checker of the course, not the student's copy of it, on one answer"
    cells = [c.source for c in read(notebook) if c.cell_type == 'code']
    names, check = module_names(cells), checkers(notebook)[check]
    cells = [*others, *cells]
    try:
        for _ in range(12):
            run(definitions(code), cells, names)
            try: check(names[name])
            except NameError as e:                      # in the body of the answer
                if not provide(e.name, cells, names): raise
            else: return dict(state='right', says='')
    except Exception as e: return dict(state='wrong', says=f'{type(e).__name__}: {e}'[:300])
    return dict(state='wrong', says='It needs more names than its notebook and the chapter can supply.')


def answers(path):
    "The cells of a student's file"
    return [path.read_text(encoding='utf-8')] if path.suffix == '.py' else [c.source for c in read(path) if c.cell_type == 'code']


def judge_into(pipe, word, job):
    "In the child: write the verdict on an answer into a pipe. What the answer prints goes nowhere"
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3): os.dup2(null, fd)
    try: os.write(pipe, (word + json.dumps(judge(**job))).encode())
    finally: os._exit(0)


def in_child(job, seconds):
    "`judge` in a child of this process; the verdict follows a secret word, so that an answer cannot write one"
    word = secrets.token_hex(16)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child: judge_into(theirs, word, job)
    os.close(theirs)
    ended = select.select([ours], [], [], seconds)[0]
    verdict = os.read(ours, 2**16).decode(errors='replace') if ended else ''
    os.close(ours)
    if not verdict and ended: code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError): os.killpg(child, signal.SIGKILL)         # it, and what it has started
    with contextlib.suppress(OSError): os.waitpid(child, 0)
    if not ended: return dict(state='wrong', says=f'It takes longer than {seconds} s.', late=True)
    if not verdict: return dict(state='wrong', says=f'Its process ended with exit code {code}.')
    if not verdict.startswith(word): return dict(state='wrong', says='It wrote where only the checker writes.')
    return json.loads(verdict.removeprefix(word))


def judge_all(number, others, jobs, seconds):
    "Verdicts on a submission's answers: the chapter is imported once, each answer runs in a child of this process"
    notebook = next(n for n in notebooks() if n.name.startswith(number))
    checkers(notebook)
    return [in_child(dict(notebook=notebook, others=others, **job), seconds) for job in jobs]


def in_process(number, others, jobs, seconds):
    "`judge_all` in a process that dies with whatever the answers did to it"
    if not jobs: return []
    call = [sys.executable, '-m', 'tools.exercises', 'judge', number, '--seconds', str(seconds)]
    one = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    r = subprocess.run(call, input=json.dumps([others, jobs]), capture_output=True, text=True, cwd=ROOT, env=one)
    if r.returncode == 0: return json.loads(r.stdout.splitlines()[-1])
    return [dict(state='wrong', says=f'The process that judges it ended with exit code {r.returncode}.')]*len(jobs)


def handed_out(notebook, todo):
    "The chapter's own cells, solutions left out: some of them use a name that an exercise asks for"
    cells = {c.source.strip() for c in read(notebook) if c.cell_type == 'code'}
    return {c for c in cells if not any(c in e.solution for e in todo)}


def number_of(path):
    "The chapter's number, with which a file's name begins; '' if it does not"
    found = re.match(rf'{MOODLE}(\d\d)(?!\d)', path.name)
    return found[1] if found else ''


def mark(
    path: Path,           # a student's notebook or Python file
    seconds: int=60,      # for each answer
    chapter: str|None=None, # its number; by default the file's name begins with it: 08_scaler.ipynb, 08_mine.py
) -> dict: # points, of how many, and a row for each exercise; for a file that cannot be read, why
    "Marks for one chapter"
    number = f'{chapter or number_of(path):0>2}'
    todo = [e for n in notebooks() if n.name.startswith(f'{number}_') for e in exercises(n)]
    if not todo: raise SystemExit(f'{path.name} names no chapter with exercises: give --chapter 08, or begin its name with the number, as in 08_mine.py.')
    codes, why = [], {}
    try: codes = answers(path)
    except (OSError, ValueError) as e: why = dict(says=f'{type(e).__name__}: {e}'[:200])
    rows, jobs, given = [], [], handed_out(todo[0].notebook, todo)
    written = [code for code in codes if code.strip() not in given]
    for e in todo:
        mine = [code for code in written if re.search(rf'^(def|class) {e.name}\b|^{e.name} *=', code, re.M)]
        rows.append(dict(id=e.id, points=e.level, name=e.name, state='not tried', says=''))
        if mine: jobs.append((rows[-1], dict(name=e.name, check=e.check, code=mine[-1])))
    verdicts = in_process(number, codes, [job for _, job in jobs], seconds)
    for (row, _), verdict in zip(jobs, verdicts): row.update(verdict)
    return dict(points=sum(r['points'] for r in rows if r['state'] == 'right'), of=sum(r['points'] for r in rows), exercises=rows, **why)


def mark_one(path, seconds, chapter):
    "Marks of a submission; one whose chapter is not known gets none, and says why"
    try: marks = mark(path, seconds, chapter)
    except SystemExit as e: marks = dict(points=0, of=0, exercises=[], says=str(e))
    print(f"{path.name}: {marks['points']} of {marks['of']}", file=sys.stderr)
    return marks


def submissions(folder):
    "Files of a folder and its folders, by their names; not those that a computer puts there by itself"
    found = sorted(p for p in folder.rglob('*') if p.suffix in ('.py', '.ipynb') and p.is_file())
    names = {str(p.relative_to(folder)): p for p in found}
    return {n: p for n, p in names.items() if not re.search(r'(^|[/\\])(\.|__)', n)}


def mark_folder(
    folder: Path,           # of notebooks and Python files, with any names
    seconds: int=60,        # for each answer
    chapter: str|None=None, # as for `mark`
    workers: int=os.cpu_count(), # submissions at a time
    patience: int=10,       # what takes longer than these seconds waits until all others have been marked
) -> dict: # file's name -> marks
    "Marks for a class"
    files, marks = submissions(folder), {}
    if not files: raise SystemExit(f'{folder} holds no notebook and no Python file.')
    def late(name): return any(r.get('late') for r in marks[name]['exercises'])
    todo = list(files)
    with ThreadPoolExecutor(workers) as pool:
        for limit in sorted({min(patience, seconds), seconds}):
            found = pool.map(partial(mark_one, seconds=limit, chapter=chapter), [files[n] for n in todo])
            marks.update(zip(todo, found))
            todo = [n for n in todo if late(n)]
    if not any(m['exercises'] for m in marks.values()): raise SystemExit(marks[min(marks)]['says'])
    return marks


def in_order(id): return [int(n) for n in id.split('.')] # 85.2 before 85.10


def summary(
    marks: dict, # from `mark_folder`
) -> list: # lines: the points, then for each exercise how many have it, and what most of the others were told
    "What a class knows"
    points = sorted(m['points'] for m in marks.values())
    lines = [f'{len(points)} submissions, points {points[0]} to {points[-1]}, median {points[len(points)//2]}']
    rows = [r for m in marks.values() for r in m['exercises']]
    for id in sorted({r['id'] for r in rows}, key=in_order):
        mine = [r for r in rows if r['id'] == id]
        states = Counter(r['state'] for r in mine)
        said = Counter(r['says'] for r in mine if r['state'] == 'wrong').most_common(1)
        line = f"{id}  right {states['right']}, wrong {states['wrong']}, not tried {states['not tried']}"
        if said: line += f'; most often ({said[0][1]}): {said[0][0][:120]}'
        lines.append(line)
    return lines


def write_csv(
    marks: dict, # from `mark_folder`
    path: Path,  # of the table: a row for each file
):
    "Marks for a spreadsheet"
    ids = sorted({r['id'] for m in marks.values() for r in m['exercises']}, key=in_order)
    with path.open('w', newline='', encoding='utf-8-sig') as f:   # Excel reads names with umlauts only so
        table = csv.writer(f)
        table.writerow(['file', 'points', 'of', *ids, 'remarks'])
        for name, m in marks.items():
            states = {r['id']: r['state'] for r in m['exercises']}
            remarks = [m.get('says', ''), *(f"{r['id']}: {r['says']}" for r in m['exercises'] if r['says'])]
            table.writerow([name, m['points'], m['of'], *(states.get(i, '') for i in ids), ' | '.join(filter(None, remarks))])


def own(todo):
    "Lines about solutions of the course that fail, and stubs that pass"
    found = []
    for e in todo:
        for code, wanted in ((e.solution, 'right'), (f'def {e.name}(*args, **kwargs): pass', 'wrong')):
            with contextlib.redirect_stdout(sys.stderr): r = judge(e.notebook, e.name, e.check, code)
            if r['state'] != wanted: found.append(f'{e.id} {e.name}: {"the solution" if wanted == "right" else "a stub"} is {r["state"]}. {r["says"]}')
    return found


def print_marks(a):
    "The marks of a file as JSON, or what a folder's class knows; the exit code"
    if not hasattr(os, 'fork'): raise SystemExit('Marking forks processes, which Windows cannot: mark in a container with Linux.')
    if a.file.is_dir():
        marks = mark_folder(a.file, a.seconds, a.chapter, a.workers)
        if a.csv: write_csv(marks, a.csv)
        print(*summary(marks), sep='\n')
        return 0
    marks = mark(a.file, a.seconds, a.chapter)
    print(json.dumps(marks, indent=1, ensure_ascii=False))
    return int(any(r['state'] == 'wrong' for r in marks['exercises']))


def make_parser():
    "The grammar of the command"
    p = argparse.ArgumentParser(prog='python -m tools.exercises', description=__doc__)
    sub = p.add_subparsers(dest='what', required=True)
    c = sub.add_parser('check', help='run your solutions of a chapter')
    c.add_argument('chapter', help='its number, such as 11')
    c.add_argument('file', type=Path, help='Python with your solutions')
    sub.add_parser('list', help='list all exercises with their points')
    sub.add_parser('strip', help='write notebooks without solutions').add_argument('out', type=Path, help='a folder')
    m = sub.add_parser('mark', help="mark a student's file, as JSON (exit code 1 if an answer is wrong), or a folder of them")
    m.add_argument('file', type=Path, help='08_scaler.ipynb, 08_mine.py, or a folder')
    m.add_argument('--chapter', help="its number, such as 08, where the files' names do not begin with it")
    m.add_argument('--csv', type=Path, help='where to write a table of a folder')
    m.add_argument('--workers', type=int, default=os.cpu_count(), help='submissions of a folder at a time (%(default)s)')
    m.add_argument('--seconds', type=int, default=60, help='the limit for each answer, in seconds (%(default)s)')
    sub.add_parser('self', help='check that every solution passes and no stub does').add_argument('chapters', nargs='*', help='by default all')
    j = sub.add_parser('judge', help='judge the answers in the standard input, for `mark`')
    j.add_argument('chapter')
    j.add_argument('--seconds', type=int)
    return p


def main(argv=None) -> int: # the exit code
    "The command"
    a = make_parser().parse_args(argv)
    if a.what == 'check': return check(a.chapter, a.file)
    if a.what == 'list':
        for e in all_exercises(): print(f'{e.id}  {"●"*e.level:3}  {e.name:26}  {e.title}')
    elif a.what == 'strip':
        a.out.mkdir(parents=True, exist_ok=True)
        for n in notebooks(): strip(n, a.out)
    elif a.what == 'mark': return print_marks(a)
    elif a.what == 'self':
        todo = [e for e in all_exercises() if not a.chapters or e.id[:2] in a.chapters]
        found = own(todo)
        print(*found, f'{len(todo)} exercises, {sum(e.level for e in todo)} points, {len(found)} problems', sep='\n')
        return int(bool(found))
    else:
        others, jobs = json.load(sys.stdin)
        print(json.dumps(judge_all(a.chapter, others, jobs, a.seconds)))
    return 0


if __name__ == '__main__': sys.exit(main())
