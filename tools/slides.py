"""Slides of the chapters that `make course` ran: `python -m tools.slides 04 07 --out slides.html`

A figure and its caption, which is its finding as a sentence, make a slide. A cell with the tag
`slide` makes one of the sentence before it, its code and what it printed.
`python -m tools.slides 87 --questions 1 2 3` writes questions of appendix 87, and behind them the
same with their answers. The page needs nothing else. The arrow keys turn the slides, figures that
move work in the page, and a print has one slide on each sheet.
"""
import argparse, re, sys
from html import escape
from pathlib import Path

import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tools.course import ROOT, chapters, executed
from tools.pages import directives, is_hidden, markdown, Renderer

FORMAT = HtmlFormatter(style='xcode', nowrap=True)
STYLE = FORMAT.get_style_defs('pre.code') + '''
html { scroll-snap-type: y mandatory; }
body { margin: 0; font: 1.5rem/1.4 system-ui, sans-serif; color: #1d2530; background: #fff; }
section { box-sizing: border-box; min-height: 100vh; scroll-snap-align: start;
  page-break-after: always; padding: 3vh 4vw;
  display: flex; flex-direction: column; justify-content: center; }
h1 { font-size: 1.1rem; color: #5b6675; font-weight: 400; margin: .5rem 0; }
p { margin: .7rem 0; }
h2 { font-size: 3rem; margin: 0; }
h3 { font-size: 2rem; }
pre { font: 1.2rem/1.35 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; margin: .4rem 0; padding: .6rem .9rem; }
pre.code { background: #f5f6f8; }
pre.out { border-left: .3rem solid #D55E00; }
@page { size: A4 landscape; margin: 0; }
table { border-collapse: collapse; align-self: start; font-size: 1rem; }
td, th { padding: .1rem .5rem; text-align: right; border: 0; border-bottom: 1px solid #c9ced6; }
section > img, .mp-live > img { max-width: 100%; max-height: 62vh; object-fit: contain;
  margin: auto; display: block; width: min(100%, 70rem); }'''
KEYS = '''addEventListener('keydown', e => {
  const step = { ArrowRight: 1, PageDown: 1, ArrowLeft: -1, PageUp: -1 }[e.key];
  if (!step || e.target.matches('input, select, textarea')) return;
  e.preventDefault();
  const all = [...document.querySelectorAll('section')];
  const at = all.filter(s => s.offsetTop <= scrollY + 9).length - 1;
  const next = Math.min(Math.max(at + step, 0), all.length - 1);
  all[next].scrollIntoView();   // some figures are higher than the screen
});'''
UNCLEAR = re.compile(r'\(|(These|Those|That|This|It|They|Some|Both|So|But|Then) ')
SHORT = 250    # characters; so much is said on a slide


def picture(cell, alt):
    "What a cell with a caption shows, as html; '' where it is no picture"
    for out in cell.outputs:
        data = out.get('data', {})
        moves = data.get('text/html', '')
        if 'mp-live' in moves: return moves
        if 'image/png' in data:
            source = f'data:image/png;base64,{data["image/png"].strip()}'
            return f'<img alt="{escape(alt)}" src="{source}">'
    return ''


def ending(text):
    "The last sentence of a paragraph, with those before it that are short or that it points to"
    sentences = re.split(r'(?<=[.?!]) (?=[^a-z])', text)
    kept = sentences.pop()
    while sentences and (UNCLEAR.match(kept) or len(sentences[-1]) + len(kept) < SHORT):
        kept = f'{sentences.pop()} {kept}'
    return kept


def sentence(cells, i):
    "What is said just before a cell, as html; '' where other code that is shown stands between"
    for cell in reversed(cells[:i]):
        if cell.cell_type == 'markdown':
            last = cell.source.strip().split('\n')[-1]
            without_links = re.sub(r'\[([^]]+)\]\([^)]*\)', r'\1', last)
            return markdown(ending(without_links), Renderer(ROOT/'nbs', None), inline=True)
        options = directives(cell.source)[0]
        if not is_hidden(options) and not options.get('code-fold'): break
    return ''


def printed(cell):
    "What a cell printed, as html"
    parts = []
    for out in cell.outputs:
        data = out.get('data', {})
        text = data.get('text/plain')
        if out.get('name') == 'stdout': text = out.text
        if text is not None and 'text/html' not in data:
            parts.append(f'<pre class="out">{escape(text.rstrip())}</pre>')
        parts.append(data.get('text/html', ''))
    return ''.join(parts)


def narrow(code):
    "Code whose comments stand close to it, or above it where the line would be wrapped"
    code = re.sub(r' {3,}#', '  #', code)
    return re.sub(r'^(?=.{96})( *)(\S.*?) +(# [^\'"\n]*)$', r'\1\3\n\1\2', code, flags=re.M)


def code_slide(title, cells, i):
    "The sentence before a cell, its code, and what it printed"
    before = sentence(cells, i)
    if before: before = f'<p>{before}</p>'
    code = directives(cells[i].source)[1].strip()
    shown = highlight(narrow(code), PythonLexer(), FORMAT).rstrip()
    return (f'<section><h1>{escape(title)}</h1>{before}<pre class="code">{shown}</pre>'
            f'{printed(cells[i])}</section>')


def tagged(path):
    "The ids of the cells with the tag `slide`, as the notebook has them now"
    cells = nbformat.read(path, as_version=4).cells
    return {cell.id for cell in cells if 'slide' in cell.metadata.get('tags', ())}


def question_slides(
    nb: dict,     # appendix 87, executed
    wanted: list, # numbers of questions
) -> str: # html
    "A slide for each question, to vote on, and then one for each answer with its reason"
    shown = ''.join(printed(cell) for cell in nb.cells if cell.cell_type == 'code')
    boxes = re.findall(r'<fieldset>(.*?)</fieldset>', shown, re.S)
    votes = []
    answers = []
    for number in wanted:
        if not 1 <= number <= len(boxes):
            sys.exit(f'There is no question {number}: there are {len(boxes)}.')
        box = boxes[number - 1]
        title = f'<h3>{re.search("<legend>(.*?)</legend>", box)[1]}</h3>'
        choices = re.findall(r'<input[^>]*>(.*?)</label>', box)
        right, reason = re.search(r'<b class="no">(.*?)</b>(.*?)\(<a', box).groups()
        votes.append(f'<section>{title}<p>{"</p><p>".join(choices)}</p></section>')
        answers.append(f'<section>{title}<p><b>{right}</b></p><p>{reason}</p></section>')
    return ''.join([*votes, '<section><h2>Answers</h2></section>', *answers])


def document(body):
    "A whole page of slides"
    return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>mpcourse</title>'
            f'<style>{STYLE}</style></head><body>{body}<script>{KEYS}</script></body></html>')


def chapter_slides(ch, nb):
    "A chapter's title, its figures with their captions, and the code of its tagged cells"
    title = f'<h1>{escape(ch.title)}</h1>'
    parts = [f'<section><h1>{escape(ch.number)}</h1><h2>{escape(ch.title)}</h2>'
             f'<p>{escape(ch.promise)}</p></section>']
    chosen = tagged(ch.path)
    for i, cell in enumerate(nb.cells):
        if cell.cell_type != 'code': continue
        if cell.id in chosen: parts.append(code_slide(ch.title, nb.cells, i))
        options = directives(cell.source)[0]
        caption = options.get('fig-cap', '')
        if not caption or caption.startswith('You are here'): continue # it needs the page around it
        shown = picture(cell, options.get('fig-alt', ''))
        if shown: parts.append(f'<section>{title}{shown}<p>{escape(caption)}</p></section>')
    return ''.join(parts)


def slides(
    found: list, # (chapter, executed notebook) pairs
) -> str: # a whole html document
    "The slides of chapters"
    return document(''.join(chapter_slides(ch, nb) for ch, nb in found))


def arguments():
    "What the command was called with"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('chapters', nargs='*', help='their numbers; by default all that were run')
    parser.add_argument('--out', type=Path, help='slides.html, or questions.html with --questions')
    parser.add_argument('--pages', type=Path, default=ROOT/'_course',
                        help='the folder where `make course` left the pages (%(default)s)')
    parser.add_argument('--questions', nargs='+', type=int, help='of appendix 87, by their numbers')
    return parser.parse_args()


def main():
    "The command; returns what went wrong"
    args = arguments()
    found = []
    for ch in chapters(ROOT/'nbs'):
        if args.chapters and ch.number not in args.chapters: continue
        nb = executed(ch, args.pages)
        if nb is not None: found.append((ch, nb))
    if not found:
        return (f'None of these chapters has been run into {args.pages}: '
                'run `make course` first, or name the folder with --pages.')
    if args.questions:
        out = args.out or Path('questions.html')
        page = document(question_slides(found[0][1], args.questions))
    else:
        out = args.out or Path('slides.html')
        page = slides(found)
    out.write_text(page, encoding='utf-8')
    print(f'The slides of {len(found)} chapters are in {out}')


if __name__ == '__main__': sys.exit(main())
