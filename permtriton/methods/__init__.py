"""The steps of recipes, and the names that a user's own step needs."""

from permtriton.kernels.nm_mask import top_n_mask as top_n_mask
from permtriton.methods.order.heuristic import Heuristic as Heuristic
from permtriton.methods.order.learned import Learned as Learned
from permtriton.methods.order.searched import Searched as Searched
from permtriton.methods.prune.mask import Mask as Mask
from permtriton.methods.prune.refit import Refit as Refit
from permtriton.methods.prune.sparsegpt import SparseGPT as SparseGPT
from permtriton.methods.run import Run as Run
from permtriton.methods.step import Outcome as Outcome
from permtriton.methods.step import Stage as Stage
from permtriton.methods.step import Step as Step
from permtriton.methods.train.distill import Distill as Distill
from permtriton.methods.train.round import Round as Round
from permtriton.passes.plan import linear_module as linear_module
from permtriton.passes.plan import weight_in_out as weight_in_out
from permtriton.util.option import option as option
