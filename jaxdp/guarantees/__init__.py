r"""What is promised, how promises add up, and the card beside a file.

In the room: `Guarantee`, which every calibrated mechanism carries; its
composition (`sequential`, `parallel`, `group`, `to_pure`); what a policy for
unknown words does to it (`with_unknown_words`); the guarantee card (`card`,
`card_text`, `card_json`) and a ledger row. Everything runs on the host.

Metric DP: ``P(M(x) in S) <= exp(epsilon * distance(x, x')) P(M(x') in S) +
delta``. Pure and approximate DP are the same sentence with ``distance = 1``
between neighbours; there `metric` is `ADJACENCY`.

  >>> word = Guarantee(
  ...     epsilon=10., status='proved', source='Chatzikokolakis et al. (2013)',
  ...     conditions=(REAL_ARITHMETIC, IDEAL_RANDOM_BITS))
  >>> sequential([word, word]).epsilon
  20.0
  >>> to_pure(word, distance=1.5).epsilon
  15.0
  >>> with_unknown_words(word, 'keep', num_unknown=0).status
  'none'

References: Dwork & Roth (2014), The algorithmic foundations of differential
privacy; Chatzikokolakis et al. (2013), Broadening the scope of differential
privacy using metrics; Vadhan (2017), The complexity of differential privacy.
"""

# pylint: disable=unused-import
from jaxdp.guarantees.cards import card  # noqa: F401
from jaxdp.guarantees.cards import card_json  # noqa: F401
from jaxdp.guarantees.cards import card_text  # noqa: F401
from jaxdp.guarantees.statements import ADJACENCY  # noqa: F401
from jaxdp.guarantees.statements import Guarantee  # noqa: F401
from jaxdp.guarantees.statements import IDEAL_RANDOM_BITS  # noqa: F401
from jaxdp.guarantees.statements import INTEGER_GRID  # noqa: F401
from jaxdp.guarantees.statements import LEDGERS  # noqa: F401
from jaxdp.guarantees.statements import NOT_MEASURED  # noqa: F401
from jaxdp.guarantees.statements import REAL_ARITHMETIC  # noqa: F401
from jaxdp.guarantees.statements import STATUSES  # noqa: F401
from jaxdp.guarantees.statements import UNKNOWN_POLICIES  # noqa: F401
from jaxdp.guarantees.statements import group  # noqa: F401
from jaxdp.guarantees.statements import ledger_row  # noqa: F401
from jaxdp.guarantees.statements import parallel  # noqa: F401
from jaxdp.guarantees.statements import sequential  # noqa: F401
from jaxdp.guarantees.statements import to_pure  # noqa: F401
from jaxdp.guarantees.statements import with_unknown_words  # noqa: F401
