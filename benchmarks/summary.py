r"""One Markdown table of the rows that benchmarks wrote.

  python -m benchmarks.summary results/neighbors.jsonl results/samplers.jsonl

Host; reads row files and nothing else. A line is one case of ours: its rate or
time, how many times as fast it is as the naive form, NumPy and each peer in the
same run, and the share it has of the single-precision matrix product (of the
bfloat16 one, in brackets, where its operands are). Where a device has memory of
its own, also the share of the bandwidth that scores, written and read, take.
Below the table: the machines, and the contestants that were left out.

>>> print(table([{'benchmark': 'neighbors', 'name': 'nearest/V=9,float32',
...               'words_per_s': 2000., 'ratio_to_naive': 2.5,
...               'ratio_to_faiss': 1.04, 'frac_compute': .91}]))
| benchmark | case | ours | to naive | to numpy | to peers | of sgemm |
|---|---|---|---|---|---|---|
| neighbors | nearest/V=9,float32 | 2.00k words/s | 2.50 |  | 1.04 faiss | 91% |
"""

import json
import sys

_KNOWN = ('naive', 'numpy')
_HEAD = ('benchmark', 'case', 'ours', 'to naive', 'to numpy', 'to peers',
         'of sgemm')
_SCORES = 'frac_bandwidth_scores'


def rows_of(paths):
  """The rows of all files; a provenance line is no row."""
  rows = []
  for path in paths:
    with open(path, encoding='utf-8') as file:
      rows += [json.loads(line) for line in file if line.strip()]
  return [row for row in rows if 'benchmark' in row]


def table(rows):
  """The Markdown of the rows of ours, machines and left-outs below."""
  ours = [row for row in rows if row.get('role', 'ours') == 'ours']
  if not ours:
    raise ValueError('no row of ours; give files that a benchmark wrote')
  head, lines = _HEAD, [_line(row) for row in ours]
  if any(_SCORES in row for row in ours):
    head += ('of bandwidth',)
    lines = [line + (_percent(row.get(_SCORES)),)
             for line, row in zip(lines, ours)]
  text = [head, ('---',) * len(head), *lines]
  text = [_bar(line) if line[0] != '---' else '|' + '---|' * len(line)
          for line in text]
  return '\n'.join(text + _below(rows))


def _bar(cells):
  return f'| {" | ".join(cells)} |'


def _line(row):
  peers = [f'{value:.2f} {name}' for name, value in _ratios(row).items()
           if name not in _KNOWN]
  share = _percent(row.get('frac_compute'))
  if row.get('dtype') == 'bfloat16' and 'roof_bfloat16' in row:
    clock = row['clock']
    rate = row['flops'] / row[f'median_{clock}_s']
    share += f' ({_percent(rate / row["roof_bfloat16"][clock])})'
  known = (f'{_ratios(row)[name]:.2f}' if name in _ratios(row) else ''
           for name in _KNOWN)
  return (row['benchmark'], _case(row), _speed(row), *known,
          ', '.join(peers), share)


def _ratios(row):
  """Ratios by whom they compare with; what was not compared is absent."""
  start = 'ratio_to_'
  return {key.removeprefix(start): value for key, value in row.items()
          if key.startswith(start) and isinstance(value, (int, float))}


def _case(row):
  if 'name' in row:
    return row['name']
  return ','.join(f'{key}={row[key]}' for key in ('mechanism', 'n')
                  if key in row)


def _speed(row):
  """The rate of a row, else its time."""
  for key, value in row.items():
    if key.endswith('_per_s') and key not in ('roof_flops_per_s',
                                              'bandwidth_bytes_per_s'):
      return f'{_short(value)} {key.removesuffix("_per_s")}/s'
  for key, value in row.items():
    if key.startswith(('cpu_seconds', 'median_')):
      return f'{_short(value)} s'
  return ''


def _short(value):
  for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if value >= size:
      return f'{value / size:.2f}{letter}'
  return f'{value:.3g}'


def _percent(share):
  return '' if share is None else f'{share:.0%}'


def _below(rows):
  """Lines on machines and on contestants that did not take part."""
  machines, missing = {}, {}
  for row in rows:
    facts = row.get('machine', row)
    if 'device_kind' in facts:
      versions = facts.get('versions', {})
      machines[f'{facts.get("cpu")}, {facts.get("num_cores")} core(s), '
               f'{facts.get("num_devices")} x {facts["device_kind"]}, jax '
               f'{versions.get("jax")}, git {facts.get("git", "?")[:9]}'] = 1
    for name, why in (row.get('skipped') or {}).items():
      missing[f'{name}: {why}'] = 1
  return ([''] * bool(machines) + [f'Machine: {m}.' for m in machines]
          + [f'Left out: {m}.' for m in missing])


def main(argv):
  if len(argv) < 2:
    sys.exit('summary: name the files of rows, e.g. results/neighbors.jsonl')
  try:
    print(table(rows_of(argv[1:])))
  except (OSError, ValueError) as e:
    sys.exit(f'summary: {e}')


if __name__ == '__main__':
  main(sys.argv)
