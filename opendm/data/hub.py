"""Datasets of the Hugging Face hub, as folders."""

from pathlib import Path

from opendm.errors import DataError


def dataset_folder(repo_id: str) -> Path:
    """Download a dataset into the hub's cache; what is there already is not loaded again.

    An interrupted download goes on where it stopped.

    Raises:
        DataError: there is no such dataset, no access or no network.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, repo_type="dataset"))
    except HFValidationError as error:
        raise DataError(
            f"{repo_id!r} is neither a folder nor a dataset id of the hub (owner/name): {error}"
        ) from error
    except OSError as error:  # as all network errors of the hub are
        raise DataError(
            f"dataset {repo_id!r} could not be downloaded ({type(error).__name__}: {error}). "
            "Without a network, download it elsewhere (hf download --repo-type dataset "
            f"{repo_id}), copy the folder here and give its path instead of the id"
        ) from error
