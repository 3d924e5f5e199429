"""The report of a set of experiments: one HTML file made of their rows. Host.

``DIR/report.html`` needs no network and no script: images are inlined, tables
scroll inside their box, the width of a telephone is enough. Every number,
status, source and verdict is read from ``DIR/<experiment>/rows.jsonl``; none is
typed here, so a changed row changes the report. Rows and CSV are linked by
relative path.

>>> section = Section('demo', 'demo', 'A demonstration', (), lambda rows: [])
>>> page = render('.', [section], [], title='No rows yet')
>>> 'No rows yet' in page
True
"""

import base64
import html
import math
import os
from typing import Callable, NamedTuple

from experiments import records

# What the library calls an epsilon that nobody has measured.
_NOT_MEASURED = 'not measured'
_CSS = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
       max-width: 66rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.5rem;
     border-top: 2px solid var(--line); padding-top: 1rem; }
img { max-width: 100%; min-width: 34rem; height: auto; background: #fff; }
figure { margin: 1rem 0; overflow-x: auto; }
blockquote { margin: .5rem 0; padding-left: .8rem;
             border-left: 3px solid var(--line); }
.box { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem;
         text-align: left; vertical-align: top; overflow-wrap: normal; }
td.number { text-align: right; white-space: nowrap;
            font-variant-numeric: tabular-nums; }
td.text { min-width: 8rem; overflow-wrap: break-word; }
td b { white-space: nowrap; }
th { background: var(--soft); }
.small { font-size: .85rem; opacity: .8; }
.failed { border: 2px solid; padding: .5rem; }
"""


class Figure(NamedTuple):
  """One image of an experiment and the paper's words about it."""
  title: str
  image: str  # file name in the experiment's directory
  mechanisms: tuple[str, ...]  # whose guarantees and audits stand below it
  paper: str  # the paper's statement, quoted briefly


class Section(NamedTuple):
  """One experiment of the report."""
  name: str
  directory: str  # of its rows, below the report's
  title: str
  figures: tuple[Figure, ...]
  findings: Callable[[list], list[str]]


def guarantee_fields(guarantee):
  """The fields by which a row carries the guarantee of what it measured."""
  return {'claimed_epsilon': guarantee.epsilon, 'delta': guarantee.delta,
          'status': guarantee.status, 'source': guarantee.source,
          'metric': guarantee.metric, 'unit': guarantee.unit,
          'conditions': list(guarantee.conditions)}


def write(out, sections, runs, *, title):
  """Writes OUT/report.html from the rows below OUT.

  Args:
    out: directory.
    sections: list of `Section`, in the order of the page.
    runs: rows (``experiment``, ``seconds``, ``error``) of the job that ran
      them; an experiment may have several.
    title: of the page.

  Returns:
    The path of the report.
  """
  path = os.path.join(out, 'report.html')
  records.write_atomic(path, render(out, sections, runs, title=title))
  return path


def render(out, sections, runs, *, title):
  """Returns the page as text; arguments as for `write`."""
  loaded = {s.name: _load(os.path.join(out, s.directory)) for s in sections}
  every_row = [row for _, rows in loaded.values() for row in rows]
  # Two figures may stand on the same rows; a claim is listed once.
  audits = list({_identity(row): row for row in every_row
                 if 'verdict' in row}.values())
  body = [f'<h1>{_text(title)}</h1>', _summary(sections, runs, loaded),
          _claims(every_row, audits), _samples(out, sections, loaded)]
  body += [_section(out, s, runs, *loaded[s.name], audits) for s in sections]
  return (
      '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
      '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
      '<link rel="icon" href="data:,">\n'
      f'<title>{_text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n'
      + '\n'.join(filter(None, body)) + '\n</body>\n</html>\n')


def _load(directory):
  """(provenance, rows) of an experiment; (None, []) where it made none."""
  try:
    return records.read(os.path.join(directory, 'rows.jsonl'))
  except (OSError, ValueError):
    return None, []


def _identity(row):
  return tuple(str(row.get(name)) for name in (
      'mechanism', 'settings', 'table', 'claimed_epsilon'))


# --- Parts of the page


def _summary(sections, runs, loaded):
  lines = []
  for section in sections:
    mine = [run for run in runs if run['experiment'] == section.name]
    seconds = sum(run['seconds'] for run in mine)
    rows = len(loaded[section.name][1])
    state = 'not run' if not mine and not rows else (
        'failed' if mine and mine[-1]['error'] else 'done')
    lines.append([_link(f'#{section.name}', section.name), _text(state), rows,
                  f'{seconds:.1f}' if mine else ''])
  return ('<p>A measurement is not a guarantee. What a mechanism promises, and '
          'who says so, stands in the column <i>status</i>; an audit compares '
          'the claim with the epsilon that the exact law has.</p>'
          + _table(['experiment', 'state', 'rows', 'seconds'], lines))


def _claims(rows, audits):
  """Every audit, worst first, then every mechanism in the rows without one."""
  audits = sorted(audits, key=lambda row: -row['ratio'])
  audited = {row['mechanism'] for row in audits}
  others = {row['mechanism']: row for row in rows
            if 'status' in row and row['mechanism'] not in audited}
  lines = [_claim_line(row) for row in [*audits, *others.values()]]
  return '<h2 id="claims">Claims and audits</h2>' + _table(
      ['mechanism', 'table', 'claimed epsilon', 'status', 'measured', 'how',
       'measured / claimed', 'verdict', 'source of the claim',
       'witness w, w\', u'], lines)


def _claim_line(row):
  return [_text(_mechanism(row)), _text(row.get('table', '')),
          row['claimed_epsilon'], _bold(row['status']),
          row.get('measured', _NOT_MEASURED),
          _text(row.get('measured_kind', '')), row.get('ratio', ''),
          _bold(row.get('verdict', _NOT_MEASURED)), _text(row['source']),
          _text(', '.join(row.get('witness', ())))]


def _samples(out, sections, loaded):
  """Lines before and after each mechanism, of the rows that hold any."""
  parts = []
  for section in sections:
    for row in loaded[section.name][1]:
      if 'after' not in row:
        continue
      links = ' '.join(
          _file_link(out, section.directory, row[name])
          for name in ('file', 'card') if name in row)
      parts.append(
          f'<h3>{_text(row["mechanism"])}, epsilon '
          f'{_number(row["epsilon"])}, status {_bold(row["status"])}</h3>'
          f'<p class="small">{_text(row["source"])}. {links}</p>'
          + _table(['before', 'after'], [
              [_text(a), _text(b)] for a, b in zip(row['before'],
                                                   row['after'])], 'text'))
  if not parts:
    return ''
  return '<h2 id="samples">Lines before and after</h2>' + ''.join(parts)


def _section(out, section, runs, provenance, rows, audits):
  parts = [f'<h2 id="{section.name}">{_text(section.title)}</h2>']
  mine = [run for run in runs if run['experiment'] == section.name]
  if mine and mine[-1]['error']:
    parts.append(f'<p class="failed">failed: {_text(mine[-1]["error"])}</p>')
  parts += [_figure(out, section, figure, rows, audits)
            for figure in section.figures] if rows else []
  if rows:
    found = ''.join(f'<li>{_text(line)}</li>'
                    for line in section.findings(rows))
    parts.append(f'<h3>Ours</h3><ul>{found}</ul>')
  parts.append(_provenance(out, section, provenance))
  return ''.join(parts)


def _figure(out, section, figure, rows, audits):
  path = os.path.join(out, section.directory, figure.image)
  image = ''
  if os.path.exists(path):
    with open(path, 'rb') as file:
      data = base64.b64encode(file.read()).decode('ascii')
    image = (f'<img alt="{_text(figure.title)}" '
             f'src="data:image/png;base64,{data}">')
  return (f'<h3>{_text(figure.title)}</h3><figure>{image}</figure>'
          f'<p>The paper:</p><blockquote>{_text(figure.paper)}</blockquote>'
          + _standing(figure.mechanisms, rows, audits))


def _standing(names, rows, audits):
  """Status, source and worst audit of each mechanism under a figure.

  A paper that reads several ways makes several claims, one a source: each has
  the audits of its own reading and no other.
  """
  lines = []
  for name in names:
    if not any(row['mechanism'] == name for row in rows):
      continue
    claims = dict.fromkeys((row['status'], row['source'])
                           for row in [*rows, *audits]
                           if row['mechanism'] == name)
    for status, source in claims:
      worst = max((row for row in audits if row['mechanism'] == name
                   and (row['status'], row['source']) == (status, source)),
                  key=lambda row: row['ratio'], default={})
      lines.append([
          _text(name), _bold(status), worst.get('measured', _NOT_MEASURED),
          worst.get('claimed_epsilon', ''), worst.get('ratio', ''),
          _bold(worst.get('verdict', _NOT_MEASURED)), _text(source),
          _text(f'{_mechanism(worst)}; {worst["table"]}' if worst else '')])
  return _table(['mechanism', 'status', 'measured epsilon', 'claimed there',
                 'ratio', 'verdict', 'source of the claim', 'worst audit'],
                lines)


def _provenance(out, section, provenance):
  links = [_file_link(out, section.directory, name)
           for name in ('rows.jsonl', 'rows.csv')]
  if provenance is None:
    return '<p class="small">No rows.</p>'
  versions = ', '.join(f'{k} {v}' for k, v in provenance['versions'].items())
  facts = {
      'machine': f'{provenance["cpu"]}, {provenance["num_cores"]} cores; '
                 f'{provenance["num_devices"]} x {provenance["device_kind"]}',
      'versions': versions, 'commit': provenance['git_commit'],
      'time': provenance['time'],
      'resumed': ', '.join(
          run['time'] for run in provenance.get('resumed', ())),
      'config': ', '.join(
          f'{k}={v}' for k, v in provenance['config'].items())}
  lines = ''.join(f'<li>{k}: {_text(v)}</li>' for k, v in facts.items() if v)
  return (f'<p>Rows: {" ".join(links)}</p>'
          '<details class="small"><summary>Provenance: '
          f'{_text(facts["time"])}, commit {_text(facts["commit"][:12])}'
          f'</summary><ul>{lines}</ul></details>')


# --- Pieces


def _mechanism(row):
  settings = row.get('settings') or {}
  return ', '.join([row['mechanism']] + [f'{k}={v}'
                                         for k, v in settings.items()])


def _table(header, lines, kind=''):
  """A table in a box of its own; numbers as they are, text as HTML."""
  if not lines:
    return ''
  head = ''.join(f'<th>{_text(name)}</th>' for name in header)
  body = ''.join(
      '<tr>' + ''.join(_cell(value, kind) for value in line) + '</tr>\n'
      for line in lines)
  return (f'<div class="box"><table><thead><tr>{head}</tr></thead>\n'
          f'<tbody>{body}</tbody></table></div>')


def _cell(value, kind):
  if isinstance(value, (int, float)):
    return f'<td class="number">{_number(value)}</td>'
  return f'<td class="{kind}">{value}</td>' if kind else f'<td>{value}</td>'


def _number(value):
  if isinstance(value, int):
    return f'{value:,}'
  return 'infinite' if math.isinf(value) else f'{value:.5g}'


def _text(value):
  return html.escape(str(value))


def _bold(value):
  return f'<b>{_text(value)}</b>'


def _link(href, label):
  return f'<a href="{_text(href)}">{_text(label)}</a>'


def _file_link(out, directory, name):
  """A relative link to a file that exists, or nothing."""
  path = f'{directory}/{name}'
  return _link(path, path) if os.path.exists(os.path.join(out, path)) else ''
