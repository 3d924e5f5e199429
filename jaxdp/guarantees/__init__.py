r"""What is promised, how promises add up, and the card beside a file.

In the room: `Guarantee`, which every calibrated mechanism carries; its
composition (`sequential`, `parallel`, `group`, `to_pure`); what a policy for
unknown words does to it (`with_unknown_words`); the guarantee card (`card`,
`card_text`, `card_json`); the accounting of noise on vectors
(`laplace_vector_epsilon`, `sampled_gaussian_epsilon`, ...); and ledgers, as
claimed (`stobatch_claimed`) and standard (`standard`), printed side by
side by `ledger_text`. Everything runs on the host.

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
from jaxdp.guarantees.accounting import best_epsilon  # noqa: F401
from jaxdp.guarantees.accounting import laplace_rdp  # noqa: F401
from jaxdp.guarantees.accounting import laplace_vector_epsilon  # noqa: F401
from jaxdp.guarantees.accounting import laplace_vector_scale  # noqa: F401
from jaxdp.guarantees.accounting import pure_rdp  # noqa: F401
from jaxdp.guarantees.accounting import rdp_epsilon  # noqa: F401
from jaxdp.guarantees.accounting import sampled_gaussian_epsilon  # noqa: F401
from jaxdp.guarantees.accounting import sampled_gaussian_rdp  # noqa: F401
from jaxdp.guarantees.cards import card  # noqa: F401
from jaxdp.guarantees.cards import card_json  # noqa: F401
from jaxdp.guarantees.cards import card_text  # noqa: F401
from jaxdp.guarantees.claims import Party  # noqa: F401
from jaxdp.guarantees.claims import federated  # noqa: F401
from jaxdp.guarantees.claims import noise_scales  # noqa: F401
from jaxdp.guarantees.claims import stobatch_budget  # noqa: F401
from jaxdp.guarantees.claims import stobatch_claimed  # noqa: F401
from jaxdp.guarantees.claims import stobatch_gammas  # noqa: F401
from jaxdp.guarantees.claims import stobatch_sensitivities  # noqa: F401
from jaxdp.guarantees.ledgers import KEY_NOT_SECRET  # noqa: F401
from jaxdp.guarantees.ledgers import KEY_SECRET  # noqa: F401
from jaxdp.guarantees.ledgers import REPLACE_RECORD  # noqa: F401
from jaxdp.guarantees.ledgers import ledger_text  # noqa: F401
from jaxdp.guarantees.ledgers import one_shot_moments  # noqa: F401
from jaxdp.guarantees.ledgers import one_shot_moments_sensitivity  # noqa: F401
from jaxdp.guarantees.ledgers import part_row  # noqa: F401
from jaxdp.guarantees.ledgers import standard  # noqa: F401
from jaxdp.guarantees.ledgers import with_key_condition  # noqa: F401
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
