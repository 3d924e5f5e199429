"""Tables of words and vectors, and readers of the formats they come in.

An ``EmbeddingTable`` is what every word mechanism is calibrated on. Its words
differ, its vectors differ (two words at distance zero leave no finite epsilon,
and hide behind one another), and every number is finite; ``validate`` holds a
table to that. Everything here runs on the host in NumPy and imports no other
room: ``tables`` holds the table and what may be done to it, ``readers`` the
file formats.

  >>> table = make_table(['cat', 'dog'], [[0., 1.], [3., 5.]])
  >>> table.vectors.shape, table.vectors.dtype.name
  ((2, 2), 'float32')
  >>> word_ids(table)['dog']
  1
  >>> validate(EmbeddingTable(('a', 'b'), [[1.], [1.]]))  # doctest: +ELLIPSIS
  Traceback (most recent call last):
    ...
  ValueError: table: row 1 ('b') has the same vector as row 0 ('a'); ...
"""

from jaxdp.embeddings.readers import FORMATS, load, load_kumo, load_wink
from jaxdp.embeddings.tables import (
    EmbeddingTable,
    digest,
    drop_duplicates,
    make_table,
    normalize,
    save,
    subset,
    validate,
    word_ids,
)

__all__ = (
    'FORMATS', 'EmbeddingTable', 'digest', 'drop_duplicates', 'load',
    'load_kumo', 'load_wink', 'make_table', 'normalize', 'save', 'subset',
    'validate', 'word_ids',
)
