"""Publishes a folder on the hub."""

from pathlib import Path

from huggingface_hub import HfApi

from permtriton.checkpoint.card import name_repository
from permtriton.errors import OutputError, first_line

# Weights of an earlier upload, which would be read in place of the new ones.
WEIGHTS = ("model.safetensors*", "model-?????-of-?????.safetensors")


def make_repository(repo: str, token: str | None, private: bool | None = None) -> str:
    """Creates a repository if there is none, so that a wrong name or token is refused before any work.

    Returns:
        The name with its owner.
    """
    try:
        api = HfApi(token=token, library_name="permtriton")
        if "/" not in repo:
            repo = f"{api.whoami()['name']}/{repo}"
        api.create_repo(repo, private=private, exist_ok=True)
        api.auth_check(repo, write=True)  # create_repo accepts an existing one without write access
        public = bool(private) and not api.repo_info(repo).private  # create_repo keeps an existing one public
    except Exception as error:  # the hub client raises many kinds
        raise _not_pushed(repo, error) from error
    if public:
        raise OutputError(f"{repo} is there already, and is public: name another, or publish without `private=True`")
    return repo


def upload(folder: Path, repo: str, token: str | None, message: str) -> str:
    """Uploads a folder, and deletes the weights of an earlier upload. The folder's card then names the repository.

    Returns:
        The address of the commit.
    """
    api = HfApi(token=token, library_name="permtriton")
    name_repository(folder, repo)
    try:
        return str(
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=[*WEIGHTS])
        )
    except Exception as error:
        raise _not_pushed(repo, error) from error


def _not_pushed(repo: str, error: Exception) -> OutputError:
    return OutputError(
        f"{repo} cannot be written on the hub: {first_line(error)}. Check its name, the network, and the token (from "
        "hf auth login, or HF_TOKEN)"
    )
