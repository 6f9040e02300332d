"How answers are marked: a learner's file, a student's submission, a class"
import io, json
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context

import pytest
from conftest import each
from nbformat.v4 import new_code_cell, new_notebook, writes

from tools import exercises
from tools.exercises import all_exercises, COPIED, PEEPED, main, notebooks, summary, write_csv


@pytest.fixture(scope='module')
def pool():
    "A process that imports chapters once for all tests; what it forks must not have the threads of this one"
    with ProcessPoolExecutor(1, get_context('spawn')) as pool: yield pool


@pytest.fixture
def mark(pool):
    "Mark a file in that process"
    return lambda *args, **choice: pool.submit(exercises.mark, *args, **choice).result()


@pytest.fixture
def mark_folder(pool):
    "Mark a class in that process"
    return lambda *args, **choice: pool.submit(exercises.mark_folder, *args, **choice).result()


def printed(argv):
    "The command's exit code, and what it prints"
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err): code = main(argv)
    return code, out.getvalue(), err.getvalue()


# --- a learner's file ---

def test_check_runs_solutions_and_says_what_is_wrong(capsys, tmp_path):
    mine = tmp_path/'mine.py'
    right = 'def to_master(g, scale):\n    m = g.float()/scale\n    return m, bool(m.isfinite().all())\n'
    for code, exit_code, said in ((right, 0, 'to_master: right'), (right.replace('.float()', ''), 1, 'to_master: no: The gradient came back'),
                                  ('def to_master(): pass', 1, 'to_master: no: TypeError')):
        mine.write_text(code)
        assert main(['check', '09', str(mine)]) == exit_code and capsys.readouterr().out.startswith(said)
    for argv, said in ((['77', str(mine)], 'no chapter 77'), (['09', 'nowhere.py'], 'nowhere.py'), (['12', str(mine)], 'no function that chapter 12')):
        with pytest.raises(SystemExit, match=said): main(['check', *argv])


# --- for teachers ---

def test_marks(mark, tmp_path):
    mine = tmp_path/'01_mine.py'
    mine.write_text('def stuck_at(man_bits): return 2**(man_bits + 1)\n')
    marks = mark(mine)
    assert [r['state'] for r in marks['exercises']] == ['right', 'not tried', 'not tried'] and (marks['points'], marks['of']) == (1, 6)
    mine.write_text('def encode_half(x):\n    while True: pass\n')
    endless = mark(mine, seconds=1)['exercises'][1]
    assert endless['state'] == 'wrong' and '1 s' in endless['says']


def test_a_submission_that_leaves_by_itself_gets_nothing(mark, tmp_path):
    mine = tmp_path/'01_mine.py'
    mine.write_text('import os\ndef stuck_at(man_bits): os._exit(3)\n')
    assert 'exit code 3' in mark(mine)['exercises'][0]['says']
    cheat = 'import os\ndef stuck_at(man_bits):\n    print(\'{{"state": "right", "says": ""}}\', flush=True)\n    {}\n'
    for leaves in ('os._exit(0)', 'raise SystemExit(0)', 'pass'):
        mine.write_text(cheat.format(leaves))
        row = mark(mine)['exercises'][0]
        assert row['state'] == 'wrong' and row['says'], leaves


def test_marks_of_a_class(mark_folder, tmp_path):
    right = 'def stuck_at(man_bits): return 2**(man_bits + 1)\n'
    wrong = 'def stuck_at(man_bits): return 2**man_bits\n'
    codes = dict(anna=right, ben=wrong, cleo=wrong, dora="def stuck_at(:")
    for name, code in codes.items(): (tmp_path/f"{name}_file_1.py").write_text(code)
    marks = mark_folder(tmp_path, chapter='01', workers=2)
    assert [m['points'] for m in marks.values()] == [1, 0, 0, 0] and marks['dora_file_1.py']['exercises'][0]['state'] == 'wrong'
    lines = summary(marks)
    assert lines[0].startswith('4 students') and lines[1].startswith('01.1  right 1, wrong 3, not tried 0; most often (2)')
    table = tmp_path/'marks.csv'
    write_csv(marks, table)
    rows = [r.split(',') for r in table.read_text('utf-8-sig').splitlines()]
    assert rows[0][:5] == ['student', 'number', 'points', 'of', '01.1'] and [r[4] for r in rows[1:]] == ['right', 'wrong', 'wrong', 'wrong']
    with pytest.raises(SystemExit, match='chapter'): mark_folder(tmp_path)


def test_submissions_as_they_come(mark_folder, tmp_path):
    "Names and folders as Moodle makes them, helpers in other cells, lines of IPython's, files that are no notebooks, an endless loop"
    said = tmp_path/'Ben Ek_12_assignsubmission_file'
    (tmp_path/'__MACOSX').mkdir()
    (tmp_path/'__MACOSX/._01.py').write_text('')
    said.mkdir()
    cells = 'def twice(n): return 2*n', '%%time\ndef stuck_at(man_bits):\n    return twice(2**man_bits)\n!pip list'
    (tmp_path/'Anna Müller_11_assignsubmission_file_01.ipynb').write_text(writes(new_notebook(cells=[new_code_cell(c) for c in cells])))
    (said/'01_mine.py').write_text('import subprocess, sys\ndef stuck_at(n):\n    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])\n    while True: pass')
    (tmp_path/'Cleo_13_assignsubmission_file_01.ipynb').write_bytes(b'\x00 no notebook')
    (tmp_path/'Dora_14_assignsubmission_file_homework.py').write_text('')
    marks = mark_folder(tmp_path, seconds=2, workers=2, patience=1)
    anna, ben, cleo, dora = (next(m for n, m in marks.items() if n.startswith(who)) for who in ('Anna', 'Ben', 'Cleo', 'Dora'))
    assert len(marks) == 4 and [m['points'] for m in (anna, ben, cleo, dora)] == [1, 0, 0, 0], marks
    assert '2 s' in ben['exercises'][0]['says'] and 'no notebook' in cleo['says'] and cleo['of'] == 6 and '--chapter' in dora['says']


RIGHT = 'def stuck_at(man_bits): return 2**(man_bits + 1)\n'


def notebook(path, *codes):
    "Write a notebook of code cells"
    path.write_text(writes(new_notebook(cells=[new_code_cell(c) for c in codes])))
    return path


def test_what_nobody_wrote_gets_nothing(mark, tmp_path):
    "The whole chapter, as handed out and with an own answer in a stub's place; two own answers"
    for n in notebooks():
        if n.stem in ('01_formats', '85_variants'):
            assert {(r['state'], r['says']) for r in mark(n)['exercises']} == {('not tried', COPIED)}
    course = next(n for n in notebooks() if n.stem == '01_formats')
    for code, state in ((RIGHT, 'right'), ('def stuck_at(man_bits): return 0', 'wrong')):
        nb = json.loads(course.read_text())
        for c in nb['cells']:
            if ''.join(c['source']).startswith('# your turn:\n# def stuck_at'): c['source'] = code
        (tmp_path/course.name).write_text(json.dumps(nb))
        assert [r['state'] for r in mark(tmp_path/course.name)['exercises']] == [state, 'not tried', 'not tried']
    row = mark(notebook(tmp_path/'01_two.ipynb', RIGHT, 'def stuck_at(n): return 1'))['exercises'][0]
    assert row['state'] == 'wrong' and 'last of 2 definitions' in row['says']


WRITTEN = [
    '\ufeff' + RIGHT,
    f'# -*- coding: latin-1 -*-\n# für\n{RIGHT}'.encode('latin-1'),
    'if __name__ == "__main__":\n    ' + RIGHT,
    'BASE: int = 2\ndef stuck_at(n): return BASE**(n + 1)',
    'if True:\n    ' + RIGHT,
    'powers = []\nfor n in range(30): powers.append(2**(n + 1))\ndef stuck_at(n): return powers[n]',
    RIGHT + 'for line in open("data.txt"): print(stuck_at(line))']


def test_a_right_answer_is_right_however_it_is_written(mark_folder, tmp_path):
    files = {f'01_{i}.py': code if isinstance(code, bytes) else code.encode() for i, code in enumerate(WRITTEN)}
    for name, code in files.items(): (tmp_path/name).write_bytes(code)
    marks = mark_folder(tmp_path, workers=2)
    assert {name: m['exercises'][0]['state'] for name, m in marks.items()} == dict.fromkeys(files, 'right')
    assert main(['check', '01', str(tmp_path/'01_0.py')]) == 0


def test_check_knows_an_answer_whose_checker_has_another_name(tmp_path):
    ex = next(ex for ex in all_exercises() if ex.id == '19.1')
    assert ex.name != ex.check
    (tmp_path/'mine.py').write_text(ex.solution.partition('\ncheck_')[0], encoding='utf-8')
    assert main(['check', '19', str(tmp_path/'mine.py')]) == 0


def test_a_star_import_in_another_cell(mark, tmp_path):
    row = mark(notebook(tmp_path/'01_mine.ipynb', 'from math import *', 'def stuck_at(n): return ldexp(2, n)'))['exercises'][0]
    assert row['state'] == 'right', row


@each('name, code, said', [
    ('01_mine.py', RIGHT.replace('stuck_at', 'stuckAt'), 'It defines stuckAt, not stuck_at.'), ('01_mine.py', '', 'no code'),
    ('01_mine.py', '# your turn:\n# def stuck_at(man_bits): ...', 'as it was'), ('01_mine.py', 'x = 1', 'Nothing defines stuck_at.'),
    ('02_mine.py', RIGHT.replace('stuck', 'started'), 'its name begins with 02')])
def test_not_tried_has_a_reason(mark, tmp_path, name, code, said):
    (tmp_path/name).write_text(code)
    row = mark(tmp_path/name, chapter='01')['exercises'][0]
    assert row['state'] == 'not tried' and said in row['says'], row


def test_each_file_is_accounted_for(mark_folder, tmp_path):
    for name in ('01_anna.PY', '01_ben.zip', '.hidden'): (tmp_path/name).write_text(RIGHT)
    marks = mark_folder(tmp_path, workers=1)
    write_csv(marks, tmp_path/'marks.csv')
    assert marks['01_anna.PY']['points'] == 1 and summary(marks)[-1].startswith('Not read') and '01_ben.zip' in summary(marks)[-1]
    assert [r.split(',')[:3] for r in (tmp_path/'marks.csv').read_text('utf-8-sig').splitlines()[1:]] == [['anna', '', '1'], ['ben', '', '']]


@each('code, said', [
    ('def stuck_at(n): return 2**(n + 1) # für'.encode('latin-1'), 'not UTF-8'), (b'def stuck_at(n): print(2**(n + 1))', 'not print'),
    (b'import os\ndef stuck_at(n): os._exit(0)', 'before the checker was done'), (b'x = 1\ndef stuck_at(n)\n    return 1', 'def stuck_at(n)')])
def test_what_cannot_be_marked_is_wrong_and_says_why(mark, tmp_path, code, said):
    (tmp_path/'01_mine.py').write_bytes(code)
    row = mark(tmp_path/'01_mine.py')['exercises'][0]
    assert row['state'] == 'wrong' and said in row['says'], row


def test_a_class_in_rows_of_students(pool, tmp_path):
    "What was asked, of two chapters, with a file whose chapter is unknown"
    for who, name in (('Anna M_7', '01_a.py'), ('Anna M_17', '02_a.py'), ('Ben_8', '01_b.py'), ('Ben_9', '01_b.py'), ('Cleo_9', 'mine.py')):
        folder = tmp_path/f'{who}_assignsubmission_file_'
        folder.mkdir(exist_ok=True)
        (folder/name).write_text(RIGHT + ('def worst(n): return 1/(2**(n + 1) + 1)' if name == '02_a.py' else ''))
    argv = ['mark', str(tmp_path), '--only', '01.1', '02.1', '--csv', str(tmp_path/'marks.csv'), '--workers', '1']
    code, out, err = pool.submit(printed, argv).result()
    table = [r.split(',')[:6] for r in (tmp_path/'marks.csv').read_text('utf-8-sig').splitlines()]
    assert table[1:3] == [['Anna M', '17 7', '2', '2', 'right', 'right'], ['Ben', '8', '1', '2', 'right', '']]
    assert table[3][:3] == ['Ben', '9', '1'] and table[4][:3] == ['Cleo', '9', '']
    assert out.startswith('3 students, points 1 to 2') and out.splitlines()[-1].startswith('Not marked') and 'mine.py' in out.splitlines()[-1]
    assert 'Ben_8_assignsubmission_file_/01_b.py: 1 of 1' in err
    with pytest.raises(SystemExit, match='01.9'): main(['mark', str(tmp_path), '--only', '01.9'])


def test_a_private_copy_of_the_variants(mark, pool, tmp_path):
    "Middles that a tie rounds down: the published answer is wrong there, and another is right"
    course = next(n for n in notebooks() if n.stem == '85_variants').read_text()
    mine, answers = tmp_path/'my_85.ipynb', tmp_path/'anna.py'
    mine.write_text(course.replace('assert twice > once', 'assert twice < once'))
    for code, state in (('1.5*2**-16 - 2.**-26', 'wrong'), ('2.5*2**-16 + 2.**-26', 'right')):
        answers.write_text(f'def twice_up(): return {code}')
        marks = mark(answers, only=['85.2'], notebook=mine)
        assert marks['of'] == 2 and marks['exercises'][0]['state'] == state, marks
    ex = exercises.exercises(mine)[1]
    assert pool.submit(exercises.own, [ex]).result()[0].startswith('85.2 twice_up: the solution is wrong')


# --- answers that are not a student's ---

WANT = "f_locals['want']"   # in the frame of the checker
PEEPING = [f'import sys\ndef stuck_at(n): return sys._getframe(1).{WANT}',
           f'import inspect\ndef stuck_at(n): return inspect.currentframe().f_back.{WANT}',
           f'import inspect\ndef stuck_at(n): return inspect.stack()[1].frame.{WANT}',
           f'import sys\ndef stuck_at(n): return eval("sys._getframe(1)").f_back.{WANT}',
           f"""
def stuck_at(n):
    try: 1/0
    except ZeroDivisionError as e: return e.__traceback__.tb_frame.f_back.{WANT}""", f"""
def stuck_at(n):
    def look(): yield own.gi_frame.f_back.f_back.{WANT}
    own = look()
    return next(own)""", f"""
import sys
def stuck_at(n):
    frame, = sys._current_frames().values()
    return frame.f_back.{WANT}""", """
def stuck_at(n): return 'def stuck_at(n)' in open('nbs/01_formats.ipynb').read() or 2**(n + 1)"""]


def test_an_answer_that_looks_at_its_checker_is_wrong(mark_folder, tmp_path):
    for i, code in enumerate(PEEPING): (tmp_path/f'01_{i}.py').write_text(code)
    rows = [m['exercises'][0] for m in mark_folder(tmp_path, only=['01.1'], workers=1).values()]
    assert len(rows) == len(PEEPING) and all(r['state'] == 'wrong' and PEEPED in r['says'] for r in rows), rows


def test_libraries_may_look_at_frames(mark, tmp_path):
    "As namedtuple does, and logging"
    (tmp_path/'01_mine.py').write_text("""
import logging, warnings
from collections import namedtuple
def stuck_at(n):
    Format = namedtuple('Format', 'digits')
    logging.info('info'), warnings.warn('warning')
    return 2**Format(n + 1).digits""")
    assert mark(tmp_path/'01_mine.py', only=['01.1'])['points'] == 1


def test_an_answer_that_ends_its_judge_costs_itself_alone(mark_folder, tmp_path):
    (tmp_path/'01_a.py').write_text('import os\ndef stuck_at(n): os.kill(os.getppid(), 9)')
    (tmp_path/'01_b.py').write_text(RIGHT)
    assert [m['points'] for m in mark_folder(tmp_path, only=['01.1'], workers=1).values()] == [0, 1]


def test_the_course_s_solution_counts_for_nothing_in_other_clothes(mark, tmp_path):
    "Unless it is so short that anybody writes it; what is renamed counts, as chapter 96 says"
    solution = {e.id: e.solution for e in exercises.exercises(exercises.notebook_of('85'))}
    dressed = solution['85.1'].replace('(x):', '(x) :\n    "My own"\n    # works').replace(' + steps', '   + steps')
    for codes, states in (((dressed, solution['85.2']), ['not tried', 'right']), ((solution['85.1'].replace('steps', 's'),), ['right', 'not tried']),
                          ((dressed, 'def encode_e4m3(x): return 0'), ['wrong', 'not tried'])):
        (tmp_path/'85_mine.py').write_text('\n'.join(('import math', *codes)).replace('\ncheck_', '\n# check_'))
        rows = mark(tmp_path/'85_mine.py', only=['85.1', '85.2'])['exercises']
        assert [r['state'] for r in rows] == states, rows
        assert (rows[0]['says'] == COPIED) == (states[0] == 'not tried')
