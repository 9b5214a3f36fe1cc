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
    """The folder of a model: an alias, an embedded model, a folder, or a Hub id (fetched). Else FileNotFoundError."""
    text = str(name)
    repo, own = ALIASES.get(text, text), EMBEDDED.get(text)
    folder = Path(__file__).parent.parent / own if own else Path(os.path.expanduser(text))
    if text and folder.is_dir():
        return folder
    if repo.count("/") != 1 or text.startswith(("/", ".", "~")):
        raise FileNotFoundError(
            f"{text!r} is neither a folder, nor a Hub id (owner/name), nor one of "
            f"{', '.join(ALIASES | EMBEDDED)}"
        )
    from huggingface_hub import snapshot_download

    problems = list[Exception]()
    for offline in (False, True):  # from the Hub, or else from the local cache
        try:
            found = snapshot_download(
                repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=offline
            )
            if not offline or any(Path(found).glob("*.safetensors")):
                return Path(found)
        except Exception as error:  # of the Hub, its HTTP library or the file system
            problems.append(error)
    said = brief(f"{type(problems[0]).__name__}: {problems[0]}", 200)
    raise FileNotFoundError(
        f"{repo} is not in the cache, and the Hub refuses it ({said}). Check the name; accept"
        f" a gated model's licence at https://huggingface.co/{repo} and run `hf auth login`; go "
        "online once; or give a folder that holds the model"
    )
