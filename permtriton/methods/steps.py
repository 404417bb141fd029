"""All steps that a recipe may have, in the order in which they run. **Add a method here.**"""

from permtriton.methods.distill import Distill
from permtriton.methods.heuristic import Heuristic
from permtriton.methods.learned import Learned
from permtriton.methods.mask import Mask
from permtriton.methods.reconstruct import Reconstruct
from permtriton.methods.refit import Refit
from permtriton.methods.searched import Searched
from permtriton.methods.sparsegpt import SparseGPT
from permtriton.step import Step

STEPS: tuple[type[Step], ...] = (Heuristic, Learned, Searched, Mask, SparseGPT, Refit, Reconstruct, Distill)
