"""All steps that a recipe may have, in the order in which they run. **Add a method here.**"""

from permtriton.driver.step import Step
from permtriton.methods.order.heuristic import Heuristic
from permtriton.methods.order.learned import Learned
from permtriton.methods.order.searched import Searched
from permtriton.methods.prune.mask import Mask
from permtriton.methods.prune.refit import Refit
from permtriton.methods.prune.sparsegpt import SparseGPT
from permtriton.methods.train.distill import Distill
from permtriton.methods.train.reconstruct import Reconstruct
from permtriton.methods.train.tune import Tune

STEPS: tuple[type[Step], ...] = (Heuristic, Learned, Searched, Mask, SparseGPT, Refit, Reconstruct, Tune, Distill)
