"""The exercises: `python -m tools.exercises check 09 mine.py` for a learner,
`list | strip OUT | mark FILE | self` for a teacher.

`mark FOLDER --csv marks.csv` marks all notebooks and Python files of a folder, several at a time,
and sums up what the class knows. `--only 01.2 02.2` marks what was asked, `--notebook my_85.ipynb`
marks by your own copy of a chapter.

An answer counts as not tried if its functions are the course's own, whatever its comments and
layout, where these have 60 or more nodes as a syntax tree (five lines, say): shorter ones are
often the same by themselves.

A student's code runs in a separate process with a time limit. It can do whatever you can do, so
mark in a container. It can neither look into the frames of what calls it, where the right results
stand, nor open a notebook. That stops the usual tricks, not an answer that is made to deceive: one
that starts other programs, changes torch or the checker, reads closures, or returns objects that
equal everything.
"""
import argparse, ast, csv, importlib, inspect, json, os, re, secrets, select, signal, sys, tokenize
import traceback
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
NOT_UTF8 = 'The file is not UTF-8: save it again, in this encoding.'
COPIED = "Only the course's own solution stands there."
MOODLE = r'(?:.*_assignsubmission_file_)?'  # what it puts before the name that the student gave
HEAD = re.compile(r'^\*\*(\d+) ([●○]{3}) ([^*]+?)\*\* *(.*)', re.M | re.S)
STUB = re.compile(r'your turn.*^# ?check_(\w+)\((\w+)\)', re.M | re.S)
IMPORTS = re.compile(r'(?!#\| *export)(#\|.*\n)?(from|import) ')
HIDDEN = re.compile(r'(^|/)(\.|__)')        # what a computer puts into a folder by itself
NUMBER = re.compile(r'-?(0x[0-9a-f]+|[\d.]*\d(e[-+]?\d+)?)(\*\*?-?\d+)*')
NO_CODE = 'No notebook and no Python file: it was not read.'
STATES = 'not tried', 'wrong', 'right'      # from the worst to the best
SHORT = 60 # nodes of a syntax tree: with fewer an answer may be the course's by itself
PEEPED = 'An answer may look neither at what calls it nor into a notebook'
FRAMES = ('sys._getframe', 'sys._current_frames', 'sys._current_exceptions', 'gc.get_objects',
          'gc.get_referrers', 'sys.settrace', 'sys.setprofile', 'sys.monitoring.register_callback')
HELPERS = inspect.__file__, traceback.__file__   # hand frames on


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
    def id(self) -> str: # '08.2'
        "The number of the chapter, or of a copy of it such as my_08.ipynb, and the exercise's own"
        return f'{chapter_number(self.notebook)}.{self.number}'


# --- the chapters ---

def notebooks():
    "The notebooks that may have exercises"
    return sorted(path for path in (ROOT/'nbs').glob('[0-9]*.ipynb') if path.name < '88')


def notebook_of(number):
    "The notebook of a chapter; None where there is no such chapter"
    for path in notebooks():
        if path.name.startswith(f'{number:0>2}_'): return path


def chapter_number(notebook):
    "The first two digits in a notebook's name"
    return re.search('[0-9][0-9]', notebook.name)[0]


def read(path):
    "The cells of a notebook, without nbformat, which takes a second or two to import"
    try: cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    except (KeyError, TypeError, json.JSONDecodeError):
        fault = f'{path.name} is empty or no notebook of format 4: save it again in Jupyter.'
        raise ValueError(fault) from None
    for cell in cells: cell['source'] = ''.join(cell['source'])
    return [SimpleNamespace(**cell) for cell in cells]


def code_cells(path):
    "The sources of a notebook's code cells"
    return [cell.source for cell in read(path) if cell.cell_type == 'code']


def opens_solution(cell):
    "Whether a folded solution begins in a cell"
    title = r'^:::+ *\{.*callout.*\n+#+ Solution'
    return cell.cell_type == 'markdown' and re.search(title, cell.source, re.M)


def closes_solution(cell):
    "Whether a cell begins with the end of what is folded"
    return cell.cell_type == 'markdown' and re.match(r':::\s*$', cell.source, re.M)


def make_exercise(notebook, head, stub, code):
    "An exercise from the matches of `HEAD` and `STUB`, and the cells of its solution"
    number, circles, title, task = head.groups()
    check, name = stub.groups()
    return Exercise(notebook, int(number), circles.count('●'), title.strip(' .'), task.strip(),
                    name, check, '\n'.join(code))


def exercises(
    notebook: Path, # of a chapter
) -> list: # of `Exercise`, in order
    "What a chapter asks for: a head, a stub that says `your turn`, a folded solution"
    found = []
    head = stub = code = None
    for cell in read(notebook):
        if code is not None and closes_solution(cell):
            found.append(make_exercise(notebook, head, stub, code))
            stub = code = None
        if cell.cell_type == 'markdown': head = HEAD.search(cell.source) or head
        elif code is not None: code.append(cell.source)
        else: stub = STUB.search(cell.source) or stub
        if stub and opens_solution(cell): code = []
    return found


def all_exercises():
    "The exercises of the course, in order"
    return sum(map(exercises, notebooks()), [])


def checkers(
    notebook: Path, # of a chapter
) -> dict: # name of a solution -> its checker
    "The checkers of a chapter's exercises, in the namespace of its module"
    cells = code_cells(notebook)
    names = module_names(cells)
    for code in cells:
        imports = IMPORTS.match(code) and not re.search(r'^def ', code, re.M)
        if imports or re.search(r'^def check_', code, re.M): exec(code, names)
    return {name.removeprefix('check_'): value for name, value in names.items()
            if name.startswith('check_')}


def module_names(
    cells: list, # sources of a chapter's code
) -> dict: # what its module defines; empty without a module
    "The namespace in which a chapter's answers run"
    for code in cells:
        exported = re.match(r'#\| *default_exp +(\w+)', code)
        if exported: return dict(vars(importlib.import_module(f'mpcourse.{exported[1]}')))
    return {}


# --- a learner's file ---

def python_text(path):
    "A Python file in the encoding that it declares; by default UTF-8"
    with tokenize.open(path) as f: return f.read()


def learners_text(file):
    "The text of a learner's file, or an exit that says what to do"
    try: return python_text(file)
    except OSError as e:
        raise SystemExit(f'{file} cannot be read ({e.strerror}): give another file.') from None
    except (UnicodeDecodeError, SyntaxError): raise SystemExit(f'{file}: {NOT_UTF8}') from None


def verdict(checker, answer):
    "'right', or 'no' with the reason"
    try: checker(answer)
    except AssertionError as e: return f'no: {e}'
    except Exception as e: return f'no: {type(e).__name__}: {e}'
    return 'right'


def check(
    chapter: str, # its number
    file: Path,   # Python with solutions
) -> int: # 0 if every solution is right, else 1
    "Run the solutions of a file against the checkers of a chapter"
    notebook = notebook_of(chapter)
    if not notebook: raise SystemExit(f'There is no chapter {chapter} with exercises.')
    code = compile(learners_text(file), str(file), 'exec')
    checker_of = checkers(notebook)
    asked = exercises(notebook)
    given = module_names(code_cells(notebook))
    names = {**given, '__name__': '__main__'} # with what the chapter imports, as in its notebook
    exec(code, names)
    verdicts = []
    for ex in asked:
        answer = names.get(ex.name)
        if not callable(answer) or answer is given.get(ex.name): continue
        verdicts.append(verdict(checker_of[ex.check], answer))
        print(f'{ex.name}: {verdicts[-1]}')
    if not verdicts:
        raise SystemExit(f'{file} has no function that chapter {chapter} asks for.')
    return int(set(verdicts) != {'right'})


# --- notebooks without solutions ---

def strip(
    notebook: Path, # of a chapter
    out: Path,      # a folder
):
    "Write the notebook without its folded solutions"
    import nbformat
    nb = nbformat.read(notebook, as_version=4)
    kept = []
    inside = False
    for cell in nb.cells:
        opens = opens_solution(cell)
        if inside and closes_solution(cell):
            inside = False
            cell.source = re.sub(r'^:::\s*', '', cell.source)
        if opens:
            inside = True
            cell.source = re.split('^:::', cell.source, maxsplit=1, flags=re.M)[0].rstrip()
        if cell.source and (opens or not inside): kept.append(cell)
    nb.cells = kept
    nbformat.write(nb, out/notebook.name)


# --- what a cell defines ---

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
BLOCKS = ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AugAssign
IMPORTING = ast.Import, ast.ImportFrom
ASSIGNING = ast.Assign, ast.AnnAssign


def parsed(code):
    "The syntax tree of a cell; lines of IPython's own are left out of it"
    try: return ast.parse(code)
    except SyntaxError as error:
        plain = re.sub(r'^\s*[%!].*$', '', code, flags=re.M)
        try: return ast.parse(plain)
        except SyntaxError: raise error from None


def statements(node):
    "A node and the statements in it, not those within functions and classes"
    yield node
    if isinstance(node, FUNCTIONS): return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler)): yield from statements(child)


def names_of(node):
    "The names that a statement defines or imports"
    if isinstance(node, FUNCTIONS): return {node.name}
    if isinstance(node, IMPORTING):
        return {(name.asname or name.name).split('.')[0] for name in node.names}
    if not isinstance(node, (*ASSIGNING, ast.For, ast.With)): return set()
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store): found.add(inner.id)
    return found


def defined(code):
    "Names that a cell defines or imports outside of functions"
    return set().union(*map(names_of, statements(parsed(code))))


def by_star(code):
    "Names that a cell's `from … import *` brings"
    names = {}
    for node in statements(parsed(code)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == '*':
            with suppress(Exception): exec(f'from {node.module} import *', names)
    return set(names)


def definitions(code, loops=False):
    "A cell without what it tries out; with its loops, which may fill a table, if asked"
    kept = []
    for node in parsed(code).body:
        wanted = loops or any(isinstance(inner, FUNCTIONS) for inner in statements(node))
        if isinstance(node, (*FUNCTIONS, *IMPORTING, *ASSIGNING)): kept.append(node)
        elif isinstance(node, BLOCKS) and wanted: kept.append(node)
    return compile(ast.Module(kept, []), 'answer', 'exec')


class WithoutDocstrings(ast.NodeTransformer):
    "Leaves out constants that stand alone"
    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant): return node


def functions(cells):
    "The functions and classes of cells, the last of each name, as syntax trees without docstrings"
    found = {}
    for code in cells:
        with suppress(SyntaxError):
            for node in statements(WithoutDocstrings().visit(parsed(code))):
                if isinstance(node, FUNCTIONS): found[node.name] = node
    return found


def is_copy(ex, cells):
    "Whether cells define what an exercise asks for as the course does; not if that is short"
    known = functions(cells)
    size = 0
    for name, tree in functions([ex.solution]).items():
        if name not in known or ast.dump(known[name]) != ast.dump(tree): return False
        size += len(list(ast.walk(tree)))
        if name == ex.name: return size >= SHORT


def defining(name, cells):
    "Those cells that define a name, each as often as it does"
    found = []
    for code in cells: found += [code]*count(name, code)
    return found


def count(name, code):
    "How many definitions of a name a cell has"
    try: nodes = list(statements(parsed(code)))
    except SyntaxError:
        definition = rf'^\s*(?:def|class) {name}\b|^{name} *='
        return len(re.findall(definition, code, re.M))
    return sum(name in names_of(node) for node in nodes if not isinstance(node, BLOCKS))


# --- the verdict on an answer ---

@dataclass
class Workspace:
    "Where an answer runs, and the cells that may define what it misses"
    own: list     # the student's cells
    chapter: list # the chapter's
    names: dict   # the namespace
    tries = 12    # as many names may be missing in one piece of code

    def provide(self, name):
        "Run the first cell that defines a name; whether there is one"
        for code in (*self.own, *self.chapter):
            with suppress(SyntaxError):
                if 'your turn' in code or name not in defined(code) | by_star(code): continue
                self.run(code)
                return True
        return False

    def run(self, code):
        "What a cell defines; a loop that fails is taken for one that tries things out"
        if code in self.own:
            with suppress(Exception): return self.complete(definitions(code, loops=True))
        self.complete(definitions(code))

    def complete(self, code):
        "Execute code; what it misses comes from other cells"
        for _ in range(self.tries):
            try: return exec(code, self.names)
            except NameError as e:
                if not self.provide(e.name): raise

    def ask(self, checker, name, code):
        "Run an answer and its checker, which raises what is wrong"
        for _ in range(self.tries):
            self.run(code)
            try: return checker(self.names[name])
            except NameError as e:  # in the body of the answer
                if not self.provide(e.name): raise
        raise AssertionError('It needs more names than its notebook and the chapter can supply.')


def wrong(says, **more):
    "The verdict on an answer that is not right"
    return dict(state='wrong', says=says, **more)


def prepare(notebook, others):
    "Where the answers to a chapter run, with the student's cells, and the chapter's checkers"
    cells = code_cells(notebook)
    names = {**module_names(cells), '__name__': '__main__'}
    importlib.import_module('torch._dynamo')    # as optimizers do, in a second: not in each child
    return Workspace(others, cells, names), checkers(notebook)


def judge(
    space: Workspace, # where the answer runs
    checker,          # the course's, not the student's copy of it
    name: str,        # of what was to be written
    code: str,        # a cell that defines it
) -> dict: # state: 'right' or 'wrong', says: why
    "The verdict on one answer"
    try: space.ask(checker, name, code)
    except SyntaxError as e: says = f'SyntaxError: {e.msg}: {(e.text or "").strip()}'
    except AssertionError as e: says = str(e)
    except Exception as e: says = f'{type(e).__name__}: {e}.'
    else: return dict(state='right', says='')
    return wrong(says[:300])


def refuse_peeping():
    """From now on no answer gets at frames, of which one may hold the right result

    What is compiled from no file is an answer's; libraries may go on asking for frames.
    """
    asking = False
    def hook(event, args):
        nonlocal asking
        if asking: return
        if event == 'open' and str(args[0]).endswith('.ipynb'): raise PermissionError(PEEPED)
        by_attribute = event == 'object.__getattr__' and args[1].endswith('_frame')
        if not by_attribute and event not in FRAMES: return
        asking = True
        frame = sys._getframe(1)
        asking = False
        while frame.f_code.co_filename in HELPERS: frame = frame.f_back
        if not os.path.exists(frame.f_code.co_filename): raise PermissionError(PEEPED)
    sys.addaudithook(hook)


def work_into(pipe, word, work, seconds):
    "In the child: write what work returns into a pipe; what it prints goes nowhere"
    import resource, torch   # Windows has no resource, and marks nothing
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3): os.dup2(null, standard)
    try: os.write(pipe, (word + json.dumps(work())).encode())
    finally: os._exit(0)


def in_child(work, seconds):
    """What work returns, a dict, from a child of this process; the verdict if that fails

    The limit is the child's own time on a processor, so a mark does not depend on what else runs;
    what sleeps has three times as long. The result follows a secret word, which keeps out
    accidents, not who reads this.
    """
    word = secrets.token_hex(16)
    reader, writer = os.pipe()
    child = os.fork()
    if not child: work_into(writer, word, work, seconds)
    os.close(writer)
    written = None
    if select.select([reader], [], [], 3*seconds)[0]:
        written = os.read(reader, 2**16).decode(errors='replace')
    os.close(reader)
    with suppress(OSError): os.killpg(child, signal.SIGKILL)    # it, and what it has started
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])   # its own, where it had ended
    if written is None or code == -signal.SIGXCPU:
        return wrong(f'It takes longer than {seconds} s, or waits.', late=True)
    if not written:
        return wrong(f'The answer ended its process (exit code {code}) '
                     'before the checker was done.')
    if not written.startswith(word): return wrong('It wrote where only the checker writes.')
    return json.loads(written.removeprefix(word))


def judge_all(space, known, jobs, seconds):
    "Verdicts on a submission's answers, each from a child of this process"
    refuse_peeping()
    verdicts = {}
    for id, (ex, code) in jobs.items():
        work = partial(judge, space, known[ex.check], ex.name, code)
        verdicts[id] = in_child(work, seconds)
    return verdicts


def in_process(notebook, others, jobs, seconds):
    "`judge_all` in a process that dies with whatever the answers did to it"
    if not jobs: return {}
    work = partial(judge_all, *prepare(notebook, others), jobs, seconds)
    verdicts = in_child(work, 4*seconds*len(jobs))
    if 'state' in verdicts: return dict.fromkeys(jobs, verdicts)
    return verdicts


# --- marks of a file ---

def sources(notebooks):
    "The code of chapters as handed out: a cell that equals one of these nobody has written"
    return set(map(str.strip, sum(map(code_cells, notebooks), [])))


def is_code(path):
    "Whether a file is a notebook or Python"
    return path.suffix.lower() in ('.py', '.ipynb')


def handed_in(path):
    "The cells of a student's file, and why it cannot be read; '' if it can"
    try:
        if path.suffix.lower() == '.py': return [python_text(path)], ''
        return code_cells(path), ''
    except (UnicodeDecodeError, SyntaxError): return [path.read_text(encoding='latin-1')], NOT_UTF8
    except (OSError, ValueError) as e: return [], f'{type(e).__name__}: {e}'[:200]


def number_of(path):
    "The chapter's number, with which a file's name begins; '' if it does not"
    found = re.match(rf'{MOODLE}(\d\d)(?!\d)', path.name)
    return found[1] if found else ''


def asked(path, chapter, only, notebook):
    "The notebook that a file belongs to, and the exercises to be marked"
    notebook = notebook or notebook_of(chapter or number_of(path))
    todo = exercises(notebook) if notebook else []
    if not todo:
        raise SystemExit(f'{path.name} names no chapter with exercises: give --chapter 08, '
                         'or begin its name with the number, as in 08_mine.py.')
    if only: todo = [exercise for exercise in todo if exercise.id in only]
    return notebook, todo


def points(rows):
    "The points of the right answers"
    return sum(row['points'] for row in rows if row['state'] == 'right')


def mark(
    path: Path,               # a student's notebook or Python file
    seconds: int=60,          # of a processor's time for each answer
    chapter: str|None=None,   # its number; by default the file's name begins with it: 08_mine.py
    only=(),                  # exercises, such as '08.2'; by default all of the chapter
    notebook: Path|None=None, # a copy of a chapter with other numbers, by which to mark
) -> dict: # points, of how many, a row for each exercise; for a file that cannot be read, why
    "Marks for one chapter"
    notebook, todo = asked(path, chapter, only, notebook)
    course = sources({notebook, notebook_of(chapter_number(notebook))} - {None})
    cells, fault = handed_in(path)
    written = [code for code in cells if code.strip() not in course]
    rows = []
    jobs = {}
    for ex in todo:
        answers = []
        if not is_copy(ex, written): answers = defining(ex.name, written)
        row = dict(id=ex.id, points=ex.level, name=ex.name, state='not tried', says='')
        rows.append(row)
        if not answers: row['says'] = missing(ex.name, cells, path, chapter)
        elif fault: row.update(wrong(fault))
        else: jobs[ex.id] = ex, answers[-1]
    add_verdicts(rows, in_process(notebook, written, jobs, seconds), written)
    marks = dict(points=points(rows), of=sum(row['points'] for row in rows), exercises=rows)
    if fault: marks['says'] = fault
    return marks


def add_verdicts(rows, verdicts, written):
    "Enter the verdicts into the rows of marks"
    for row in rows:
        if row['id'] not in verdicts: continue
        row.update(verdicts[row['id']])
        number = len(defining(row['name'], written))
        if number > 1:
            row['says'] = f'{row["says"]} The last of {number} definitions was marked.'.strip()


def similar(name, cells):
    "A name that a file defines instead: in other letters, or nearly the same; '' if there is none"
    def plain(name): return name.lower().replace('_', '')
    found = set()
    for code in cells:
        with suppress(SyntaxError): found |= defined(code)
    for other in found:
        if plain(other) == plain(name): return other
    return ''.join(get_close_matches(name, found, n=1, cutoff=.8))


def missing(name, cells, path, chapter):
    "Why an exercise counts as not tried, as far as the file shows it"
    if defining(name, cells): return COPIED
    if not ''.join(cells).strip(): return 'The file has no code.'
    number = number_of(path)
    if chapter and number not in ('', f'{chapter:0>2}'):
        return f'It is marked as chapter {chapter}, and its name begins with {number}.'
    other = similar(name, cells)
    if other: return f'It defines {other}, not {name}.'
    if any('your turn' in code and name in code for code in cells):
        return 'The stub is as it was.'
    return f'Nothing defines {name}.'


# --- marks of a class ---

def is_late(marks):
    "Whether an answer took longer than it may"
    return any(row.get('late') for row in marks['exercises'])


def unread(says):
    "The marks of a file that gets none, with the reason"
    return dict(points=0, of=0, exercises=[], says=says)


def mark_one(path, **choice):
    "Marks of a submission; one whose chapter is not known gets none, and says why"
    try: return mark(path, **choice)
    except SystemExit as e: return unread(str(e))


def submissions(folder):
    "All files of a folder and its folders, by their names"
    files = {}
    for path in sorted(folder.rglob('*')):
        name = str(path.relative_to(folder))
        if path.is_file() and not HIDDEN.search(name): files[name] = path
    return files


def mark_folder(
    folder: Path,                # of notebooks and Python files, with any names
    seconds: int=60,             # for each answer
    workers: int=os.cpu_count(), # submissions at a time
    patience: int=10,            # what takes longer than these seconds waits for all others
    table: Path|None=None,       # written anew after each submission, so that no mark is lost
    **choice,                    # chapter, only and notebook, as for `mark`
) -> dict: # file's name -> marks
    "Marks for a class"
    files = submissions(folder)
    todo = {name: path for name, path in files.items() if is_code(path)}
    if not todo: raise SystemExit(f'{folder} holds no notebook and no Python file.')
    marks = {}
    pool = ProcessPoolExecutor(workers, get_context('fork'))
    try:
        for limit in sorted({min(patience, seconds), seconds}):
            one = partial(mark_one, seconds=limit, **choice)
            names = {pool.submit(one, path): name for name, path in todo.items()}
            for done in as_completed(names):
                name = names[done]
                marks[name] = done.result()
                result = f"{marks[name]['points']} of {marks[name]['of']}"
                if is_late(marks[name]) and limit < seconds: result = 'waits'
                print(f'{name}: {result}', file=sys.stderr)
                if table: write_csv(marks, table)
            todo = {name: path for name, path in todo.items() if is_late(marks[name])}
    finally: pool.shutdown(cancel_futures=True)
    if not any(result['exercises'] for result in marks.values()):
        says = 'Nothing of what was asked is in these chapters.'
        raise SystemExit(marks[min(marks)].get('says', says))
    marks = {name: marks.get(name, unread(NO_CODE)) for name in files}
    if table: write_csv(marks, table)
    return marks


@dataclass
class Student:
    "All files of a student together"
    name: str
    numbers: list = field(default_factory=list) # Moodle's, which differ between tasks
    rows: dict = field(default_factory=dict)    # exercise -> the best row
    remarks: list = field(default_factory=list) # on files

    def handed_in(self, name, number, rows):
        "Whether a file is this student's; two of a name with the same exercises are two students"
        return name == self.name and (number in self.numbers or not rows.keys() & self.rows.keys())

    def add(self, number, rows):
        "Take the better of two answers to an exercise"
        if number and number not in self.numbers: self.numbers.append(number)
        for id, row in rows.items():
            old = self.rows.setdefault(id, row)
            if STATES.index(row['state']) > STATES.index(old['state']): self.rows[id] = row


def name_and_number(file):
    "Who handed it in: from Moodle's name, the folder, or the name behind the chapter's number"
    first, *rest = Path(file).parts
    moodle = re.match(r'(.*)_(\d+)_assignsubmission_file', first)
    if moodle: return moodle.groups()
    if rest: return first, ''
    return re.sub(r'(?i)^\d\d(\.\d+)?[_ -]|\.(py|ipynb|zip|txt|pdf)$', '', first), ''


def by_student(
    marks: dict, # from `mark_folder`
) -> list: # of `Student`
    "Marks of a class, a student each"
    found = []
    for file, result in marks.items():
        name, number = name_and_number(file)
        rows = {row['id']: row for row in result['exercises']}
        owners = [student for student in found if student.handed_in(name, number, rows)]
        if not owners:
            owners = [Student(name)]
            found += owners
        student = owners[0]
        student.add(number, rows)
        says = result.get('says', '')
        if says and Path(file).name not in says: says = f'{Path(file).name}: {says}'
        if says: student.remarks.append(says)
    return found


def in_order(id):
    "For sorting: 85.2 stands before 85.10"
    return list(map(int, id.split('.')))


def exercise_line(id, rows):
    "How many have an exercise, and what most of the others were told; numbers in it do not count"
    states = Counter(row['state'] for row in rows)
    line = f'{id}  ' + ', '.join(f'{state} {states[state]}' for state in reversed(STATES))
    sentences = defaultdict(list)
    for row in rows:
        if row['state'] == 'wrong': sentences[NUMBER.sub('#', row['says'])].append(row['says'])
    most = max(sentences.values(), key=len, default=[])
    if len(most) < 2: return line
    return f'{line}; most often ({len(most)}), such as: {most[0][:120]}'


def summary(
    marks: dict, # from `mark_folder`
) -> list: # lines: the points, a line for each exercise, and the files without marks
    "What a class knows"
    rows = [student.rows for student in by_student(marks) if student.rows]
    got = sorted(points(answers.values()) for answers in rows)
    lines = [f'{len(got)} students, points {got[0]} to {got[-1]}, median {got[len(got)//2]}']
    for id in sorted(set().union(*rows), key=in_order):
        lines.append(exercise_line(id, [answers[id] for answers in rows if id in answers]))
    lost = [name for name, result in marks.items() if not result['exercises']]
    for fault, known in (('Not marked, since no chapter is known (give --chapter)', True),
                         ('Not read, since no notebook and no Python file', False)):
        names = [name for name in lost if is_code(Path(name)) == known]
        if names: lines.append(f'{fault}: {", ".join(names)}')
    return lines


def table_row(student):
    "What stands in the table about a student, by its columns"
    rows = student.rows
    remarks = list(student.remarks)
    for id in sorted(rows, key=in_order):
        if rows[id]['says']: remarks.append(f"{id}: {rows[id]['says']}")
    row = {id: answer['state'] for id, answer in rows.items()}
    if rows: row['points'] = points(rows.values())
    numbers = ' '.join(student.numbers)
    return dict(row, student=student.name, number=numbers, remarks=' | '.join(remarks))


def write_csv(
    marks: dict, # from `mark_folder`
    path: Path,  # of the table: a row for each student
):
    "Marks for a spreadsheet; the points are of all that the class was asked, handed in or not"
    worth = {}
    for result in marks.values():
        for row in result['exercises']: worth[row['id']] = row['points']
    columns = ['student', 'number', 'points', 'of', *sorted(worth, key=in_order), 'remarks']
    with path.open('w', newline='', encoding='utf-8-sig') as f: # else Excel misreads umlauts
        table = csv.DictWriter(f, columns)
        table.writeheader()
        for student in by_student(marks):
            table.writerow(dict(table_row(student), of=sum(worth.values())))


# --- the command ---

def own(todo):
    "Lines about solutions of the course that fail, and stubs that pass"
    found = []
    for ex in todo:
        stub = f'def {ex.name}(*args, **kwargs): pass'
        for what, code, expected in (('the solution', ex.solution, 'right'),
                                     ('a stub', stub, 'wrong')):
            result = in_process(ex.notebook, (), {ex.id: (ex, code)}, 60)[ex.id]
            if result['state'] == expected: continue
            found.append(f'{ex.id} {ex.name}: {what} is {result["state"]}. {result["says"]}')
    return found


def chosen_exercises(chapters):
    "Exercises of copies of chapters, or of the chapters with these numbers; by default all"
    copies = [Path(name) for name in chapters if name.endswith('.ipynb')]
    if copies: return sum(map(exercises, copies), [])
    if not chapters: return all_exercises()
    return [each for each in all_exercises() if each.id[:2] in chapters]


def print_marks(args):
    "The marks of a file as JSON, or what a folder's class knows; the exit code"
    if not hasattr(os, 'fork'):
        raise SystemExit('Marking forks processes, which Windows cannot: '
                         'mark in a container with Linux.')
    if args.notebook and not re.search(r'\d\d', args.notebook.name):
        raise SystemExit(f'{args.notebook.name} has no number: name it my_85.ipynb, say.')
    known = exercises(args.notebook) if args.notebook else all_exercises()
    unknown = set(args.only) - {exercise.id for exercise in known}
    if unknown:
        raise SystemExit(f'There is no exercise {", ".join(sorted(unknown))}: '
                         '`list` names them all.')
    choice = dict(chapter=args.chapter, only=args.only, notebook=args.notebook)
    if args.file.is_dir():
        marks = mark_folder(args.file, args.seconds, args.workers, table=args.csv, **choice)
        print(*summary(marks), sep='\n')
        return 0
    marks = mark(args.file, args.seconds, **choice)
    print(json.dumps(marks, indent=1, ensure_ascii=False))
    return int(any(row['state'] == 'wrong' for row in marks['exercises']))


def print_self(chapters):
    "What is wrong with the course's own solutions; the exit code"
    todo = chosen_exercises(chapters)
    found = own(todo)
    worth = sum(exercise.level for exercise in todo)
    print(*found, f'{len(todo)} exercises, {worth} points, {len(found)} problems', sep='\n')
    return int(bool(found))


def add_mark(commands):
    "The grammar of `mark`"
    mark = commands.add_parser(
        'mark', help="mark a student's file, as JSON (exit code 1 if an answer is wrong), "
                     'or a folder of them')
    mark.add_argument('file', type=Path, help='08_scaler.ipynb, 08_mine.py, or a folder')
    mark.add_argument('--chapter', help="its number, such as 08, where the files' names do not "
                                        'begin with it')
    mark.add_argument('--only', nargs='+', default=(), metavar='NN.N',
                      help='exercises that were asked, such as 01.2 02.2')
    mark.add_argument('--notebook', type=Path,
                      help='your own copy of a chapter, with its number in the name and other '
                           'numbers in it, such as my_85.ipynb')
    mark.add_argument('--csv', type=Path, help='where to write a table of a folder')
    mark.add_argument('--workers', type=int, default=os.cpu_count(),
                      help='submissions of a folder at a time (%(default)s)')
    mark.add_argument('--seconds', type=int, default=60,
                      help="the limit for each answer, in seconds of a processor's time "
                           '(%(default)s); what only waits has three times as long')


def make_parser():
    "The grammar of the command"
    parser = argparse.ArgumentParser(prog='python -m tools.exercises', description=__doc__)
    commands = parser.add_subparsers(dest='what', required=True)
    add = commands.add_parser
    command = add('check', help='run your solutions of a chapter')
    command.add_argument('chapter', help='its number, such as 11')
    command.add_argument('file', type=Path, help='Python with your solutions')
    add('list', help='list all exercises with their points')
    command = add('strip', help='write notebooks without solutions')
    command.add_argument('out', type=Path, help='a folder')
    add_mark(commands)
    command = add('self', help='check that every solution passes and no stub does')
    command.add_argument('chapters', nargs='*', help='numbers, or a copy of a chapter such as '
                                                     'my_85.ipynb; by default all')
    return parser


def main(argv=None) -> int: # the exit code
    "The command"
    args = make_parser().parse_args(argv)
    if args.what == 'check': return check(args.chapter, args.file)
    if args.what == 'mark': return print_marks(args)
    if args.what == 'self': return print_self(args.chapters)
    if args.what == 'list':
        for ex in all_exercises():
            print(f'{ex.id}  {"●"*ex.level:3}  {ex.name:26}  {ex.title}')
    elif args.what == 'strip':
        args.out.mkdir(parents=True, exist_ok=True)
        for notebook in notebooks(): strip(notebook, args.out)
    return 0


if __name__ == '__main__': sys.exit(main())
