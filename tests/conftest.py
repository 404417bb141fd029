import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_small():
    """The models are tiny: a second thread costs more than it brings, above all beside another process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
