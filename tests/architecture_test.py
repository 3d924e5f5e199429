"""The arrows between rooms point down, and importing the package is free."""

import ast
import pathlib
import subprocess
import sys

from absl.testing import parameterized

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_STOREYS = (
    {'special', 'confidence', 'threefry'},
    {'neighbors', 'samplers'},
    {'embeddings', 'guarantees'},
    {'mechanisms', 'deniability', 'senses', 'auditing', 'attacks',
     'certification', 'models'},
    {'training'},
)
_FLOOR = {room: i for i, rooms in enumerate(_STOREYS) for room in rooms}


def _imports(path):
  """Yields the dotted names that a file imports."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def bent_arrows(root=_ROOT):
  """Imports that a storey does not allow, as 'file: name'."""
  bad = []
  for path in sorted((root / 'jaxdp').rglob('*.py')):
    room = path.relative_to(root / 'jaxdp').parts[0].removesuffix('.py')
    for name in _imports(path):
      parts = name.split('.')
      if parts[0] in ('experiments', 'benchmarks', 'tests'):
        bad.append(f'{path.name}: {name}')
      if parts[0] != 'jaxdp' or room == '__init__' or len(parts) < 2:
        continue
      if parts[1] != room and _FLOOR[parts[1]] >= _FLOOR[room]:
        bad.append(f'{path.name}: {name}')
  return bad


class ArchitectureTest(parameterized.TestCase):

  def test_imports_only_go_down(self):
    self.assertEqual(bent_arrows(), [])

  def test_a_bent_arrow_is_seen(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    (root / 'jaxdp').mkdir()
    (root / 'jaxdp' / 'neighbors.py').write_text(
        'from jaxdp import embeddings\nimport experiments.records\n')
    self.assertLen(bent_arrows(root), 2)

  def test_importing_the_package_loads_nothing_else(self):
    script = ('import sys; before = set(sys.modules); import jaxdp; '
              'new = set(sys.modules) - before - {"jaxdp"}; '
              'heavy = [m for m in new if m.split(".")[0] in '
              '("jax", "numpy", "scipy", "absl", "jaxdp")]; '
              'print(heavy); sys.exit(bool(heavy))')
    done = subprocess.run([sys.executable, '-c', script], cwd=_ROOT,
                          capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

  def test_every_room_is_reachable_by_name(self):
    import jaxdp
    for room in jaxdp.__all__:
      self.assertEqual(getattr(jaxdp, room).__name__, f'jaxdp.{room}')
    with self.assertRaises(AttributeError):
      jaxdp.no_such_room  # pylint: disable=pointless-statement

  def test_the_library_reads_no_flags_and_prints_nothing(self):
    for path in sorted((_ROOT / 'jaxdp').rglob('*.py')):
      names = set(_imports(path))
      self.assertFalse({n for n in names if n.startswith('absl')}, path)
      calls = {node.func.id for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.Call)
               and isinstance(node.func, ast.Name)}
      self.assertNotIn('print', calls, path)
