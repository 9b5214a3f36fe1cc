"""From a name to a model folder: an alias, an embedded model, a folder, or a Hub id."""

import os
from pathlib import Path

from errors import brief

ALIASES = {
    "1B": "meta-llama/Llama-3.2-1B-Instruct",
    "3B": "meta-llama/Llama-3.2-3B-Instruct",
    "8B": "meta-llama/Llama-3.1-8B-Instruct",
    "70B": "meta-llama/Llama-3.3-70B-Instruct",
}
EMBEDDED = {"tiny": "models/tiny", "tiny-draft": "models/tiny-draft"}  # in the repository
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED = ["original/*.json", "*/*.safetensors"]  # Meta's own layout, adapters


def find_folder(name: str | Path) -> Path:
    """The folder of a model: an alias, an embedded model, a folder, or a Hub id, which is fetched.
    FileNotFoundError for what is none of these, or cannot be fetched."""
    text = str(name)
    folder = Path(os.path.expanduser(text))
    if text in EMBEDDED:
        folder = Path(__file__).parent.parent / EMBEDDED[text]
    if text and folder.is_dir():
        return folder
    repository = ALIASES.get(text, text)
    if repository.count("/") != 1 or text.startswith(("/", ".", "~")):
        names = ", ".join(ALIASES | EMBEDDED)
        raise FileNotFoundError(
            f"{text!r} is neither a folder, nor a Hub id (owner/name), nor one of {names}"
        )
    return fetch(repository)


def fetch(repository: str) -> Path:
    """The folder of a Hub repository: up to date if the Hub answers, else from the local cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:  # of the Hub, its HTTP library or the file system
        problem = brief(f"{type(error).__name__}: {error}", 200)
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    except Exception:  # nothing is cached: the first problem is the one to tell
        pass
    raise FileNotFoundError(
        f"{repository} is not in the cache, and the Hub refuses it ({problem}). Check the name; "
        f"accept a gated model's licence at https://huggingface.co/{repository} and run "
        "`hf auth login`; go online once; or give a folder that holds the model"
    )
