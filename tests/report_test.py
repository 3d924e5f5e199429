"""Tests of experiments.report: the page says what the rows say, and no more."""

import html.parser
import json
import os
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

from experiments import report

_VOID = {'meta', 'link', 'img', 'br'}
_PNG = bytes.fromhex(
    '89504e470d0a1a0a0000000d4948445200000001000000010806000000'
    '1f15c4890000000a49444154789c6360000000020001e221bc330000000049454e44'
    'ae426082')


class _Page(html.parser.HTMLParser):
  """Links, ids, tags and text of a page; asserts that tags close in order."""

  def __init__(self, text):
    super().__init__()
    self.links, self.ids, self.tags, self.texts = [], set(), [], []
    self.bold, self._open = [], []
    self.feed(text)
    assert not self._open, self._open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    attrs = dict(attrs)
    self.ids.update(filter(None, [attrs.get('id')]))
    self.links += [attrs[name] for name in ('src', 'href') if name in attrs]
    if tag not in _VOID:
      self._open.append(tag)

  def handle_endtag(self, tag):
    assert self._open.pop() == tag, tag

  def handle_data(self, data):
    self.texts.append(data)
    if self._open and self._open[-1] == 'b':
      self.bold.append(data)


def broken_links(path):
  """src and href of a page that are neither inlined, nor here, nor files."""
  page = _Page(pathlib.Path(path).read_text(encoding='utf-8'))
  folder = os.path.dirname(path)
  return [link for link in page.links if not (
      link.startswith('data:')
      or (link.startswith('#') and link[1:] in page.ids)
      or (not re.match(r'/|[a-z]+:', link)
          and os.path.isfile(os.path.join(folder, link))))]


def _row(**changes):
  return {
      'table': 'toy', 'mechanism': 'stay', 'settings': {}, 'epsilon': 2.,
      'claimed_epsilon': 2., 'status': 'claimed', 'source': 'A paper, Theorem',
      'measured': 5., 'measured_kind': 'exact', 'ratio': 2.5,
      'verdict': 'violated', 'witness': ['a', 'b', 'c']} | changes


_FIGURE = report.Figure('Figure 9', 'fig9.png', ('stay',), '"it stays"')


def _section(**changes):
  section = report.Section(
      'toy', 'toy', 'A toy', (_FIGURE,),
      lambda rows: [f'{len(rows)} rows, status {rows[0]["status"]}'])
  return section._replace(**changes)


class ReportTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = self.create_tempdir().full_path
    self.rows = [_row()]

  def put(self, name, data):
    path = pathlib.Path(self.out, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())

  def page(self, *, runs=(), section=None):
    """Writes the rows and the report; returns the parsed page and its path."""
    provenance = {
        'config': {'seed': 3}, 'git_commit': 'c0ffee', 'cpu': 'a cpu',
        'num_cores': 2, 'num_devices': 1, 'device_kind': 'cpu',
        'versions': {'jax': '9.9'}, 'time': '2030-01-01T00:00:00+00:00'}
    lines = [{'provenance': provenance}, *self.rows]
    self.put('toy/rows.jsonl', ''.join(json.dumps(x) + '\n' for x in lines))
    path = report.write(self.out, [section or _section()], list(runs),
                        title='A title')
    return _Page(pathlib.Path(path).read_text(encoding='utf-8')), path

  @parameterized.parameters(
      ('status', 'proved'), ('status', 'xyzzy'), ('verdict', 'not violated'),
      ('source', 'Another paper'), ('measured', 1.25), ('ratio', .625),
      ('measured_kind', 'lower bound'), ('claimed_epsilon', 77.))
  def test_every_word_about_privacy_follows_its_row(self, field, value):
    before, _ = self.page()
    self.assertNotIn(str(value), before.texts)
    self.rows = [_row(**{field: value})]
    after, _ = self.page()
    shown = f'{value:.4g}' if isinstance(value, float) else value
    # Once among the claims and once under the figure, unless only there.
    expected = 1 if field == 'measured_kind' else 2
    self.assertEqual(after.texts.count(shown), expected)
    old = _row()[field]
    old = f'{old:.4g}' if isinstance(old, float) else old
    self.assertNotIn(old, after.texts)

  def test_no_status_and_no_verdict_is_shown_that_no_row_has(self):
    self.rows = [_row(status='s1', verdict='v1')]
    page, _ = self.page()
    self.assertEqual(set(page.bold), {'s1', 'v1'})

  def test_a_mechanism_without_an_audit_is_said_to_be_not_measured(self):
    self.rows.append({'mechanism': 'other', 'epsilon': 1., 'source': 'Someone',
                      'claimed_epsilon': 1., 'status': 'proved'})
    page, _ = self.page()
    self.assertIn('other', page.texts)
    self.assertIn('not measured', page.bold)

  def test_the_worst_audit_stands_under_the_figure(self):
    self.rows = [_row(ratio=.1, measured=.2, verdict='not violated'),
                 _row(settings={'noise': 'clipped'}, ratio=3., measured=6.)]
    page, _ = self.page()
    self.assertIn('stay, noise=clipped; toy', page.texts)
    self.assertEqual(page.bold.count('not violated'), 1)

  def test_an_audit_of_one_reading_says_nothing_about_another(self):
    self.rows = [_row(source='truncated', verdict='not violated', ratio=.5),
                 _row(source='clipped', settings={'noise': 'clipped'})]
    page, _ = self.page()
    self.assertEqual(page.bold.count('violated'), 2)  # claims, and one line
    self.assertEqual(page.bold.count('not violated'), 2)

  def test_links_resolve_and_a_missing_file_has_none(self):
    self.put('toy/fig9.png', _PNG)
    page, path = self.page()
    self.assertEqual(broken_links(path), [])
    self.assertIn('toy/rows.jsonl', page.links)
    self.assertNotIn('toy/rows.csv', page.links)
    self.put('toy/rows.csv', 'a\n')
    page, path = self.page()
    self.assertIn('toy/rows.csv', page.links)
    os.remove(os.path.join(self.out, 'toy/rows.csv'))
    self.assertEqual(broken_links(path), ['toy/rows.csv'])

  def test_images_are_inlined_and_nothing_needs_a_network_or_a_script(self):
    self.put('toy/fig9.png', _PNG)
    page, path = self.page()
    self.assertIn('img', page.tags)
    self.assertNotIn('script', page.tags)
    text = pathlib.Path(path).read_text(encoding='utf-8')
    self.assertNotRegex(text, r'https?:|@import|url\(')
    self.assertIn('name="viewport"', text)
    os.remove(os.path.join(self.out, 'toy/fig9.png'))
    self.assertNotIn('img', self.page()[0].tags)

  def test_what_rows_hold_is_text_and_never_markup(self):
    bad = '<script>alert("1")</script>&amp;'
    self.put('toy/<b>.txt', 'x')
    self.rows.append(_row(
        mechanism=bad, source=bad, witness=[bad], before=[bad], after=[bad],
        file='<b>.txt'))
    page, path = self.page(runs=[
        {'experiment': 'toy', 'seconds': 1., 'error': bad}])
    self.assertNotIn('script', page.tags)
    self.assertGreaterEqual(page.texts.count(bad), 4)
    self.assertEqual(broken_links(path), [])

  def test_lines_before_and_after_stand_with_their_guarantee(self):
    self.rows.append(_row(before=['he stays'], after=['she goes']))
    page, _ = self.page()
    self.assertIn('he stays', page.texts)
    self.assertIn('she goes', page.texts)

  def test_provenance_and_findings_are_shown(self):
    page, _ = self.page()
    text = ' '.join(page.texts)
    for fact in ('a cpu', 'jax 9.9', 'c0ffee', '2030-01-01', 'seed=3',
                 '"it stays"', '1 rows, status claimed'):
      self.assertIn(fact, text)

  def test_seconds_of_a_resumed_experiment_add_up(self):
    runs = [{'experiment': 'toy', 'seconds': 20., 'error': 'Killed: by hand'},
            {'experiment': 'toy', 'seconds': 1.5, 'error': None}]
    page, _ = self.page(runs=runs[:1])
    self.assertIn('failed', page.texts)
    self.assertIn('failed: Killed: by hand', page.texts)
    page, _ = self.page(runs=runs)
    self.assertIn('21.5', page.texts)
    self.assertNotIn('failed', page.texts)

  def test_an_experiment_without_rows_is_no_error(self):
    section = _section(name='none', directory='nowhere')
    page, path = self.page(section=section)
    self.assertIn('not run', page.texts)
    self.assertEqual(broken_links(path), [])


if __name__ == '__main__':
  absltest.main()
