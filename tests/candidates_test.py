"""Neighbour tables kept on disk: the same table, or a refusal."""

import os
import pathlib

from absl.testing import parameterized
import numpy as np

from jaxdp import embeddings
from jaxdp import neighbors
from jaxdp.mechanisms import candidates


def _table(seed=0):
  vectors = np.random.default_rng(seed).normal(size=(40, 3))
  return embeddings.make_table([f'w{i}' for i in range(40)], vectors)


class CacheTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _files(self):
    return sorted(os.listdir(self.folder))

  def test_a_second_call_reads_what_the_first_one_wrote(self):
    made = candidates.geometry(_table(), cache_dir=self.folder)
    measure = neighbors.distance_range
    self.addCleanup(setattr, neighbors, 'distance_range', measure)
    neighbors.distance_range = None  # a call would raise
    read = candidates.geometry(_table(), cache_dir=str(self.folder))
    self.assertLen(self._files(), 1)
    for name in made._fields:
      np.testing.assert_array_equal(getattr(made, name), getattr(read, name))
      self.assertEqual(np.asarray(getattr(made, name)).dtype,
                       np.asarray(getattr(read, name)).dtype)

  def test_another_table_or_width_is_another_file(self):
    candidates.geometry(_table(), cache_dir=self.folder)
    candidates.geometry(_table(1), cache_dir=self.folder)
    candidates.geometry(_table(), max_candidates=3, cache_dir=self.folder)
    self.assertLen(self._files(), 3)

  def test_without_a_folder_nothing_is_written(self):
    before = set(os.listdir('.'))
    candidates.geometry(_table())
    self.assertEqual(set(os.listdir('.')), before)

  @parameterized.parameters('cut', 'empty', 'changed', 'text', 'other')
  def test_a_damaged_file_is_refused(self, damage):
    candidates.geometry(_table(), cache_dir=self.folder)
    path = self.folder / self._files()[0]
    if damage == 'cut':
      path.write_bytes(path.read_bytes()[:200])
    elif damage == 'empty':
      path.write_bytes(b'')
    elif damage == 'text':
      path.write_text('not a zip')
    else:
      held = dict(np.load(path))
      if damage == 'changed':
        held['ids'][3, 1] = 0
      else:
        held['digest'] = np.array('0')
      np.savez(path, **held)
    with self.assertRaisesRegex(ValueError, 'remove it'):
      candidates.geometry(_table(), cache_dir=self.folder)

  def test_a_folder_that_is_not_there_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'cache_dir=.*make it first'):
      candidates.geometry(_table(), cache_dir=self.folder / 'missing')
