"""From a name to a model: an alias, an embedded model, a folder, a GGUF, or a Hub id."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from errors import UserError, brief
from settings import refuse_value

ALIASES = {
    "1B": "meta-llama/Llama-3.2-1B-Instruct",
    "3B": "meta-llama/Llama-3.2-3B-Instruct",
    "8B": "meta-llama/Llama-3.1-8B-Instruct",
    "70B": "meta-llama/Llama-3.3-70B-Instruct",
}
EMBEDDED = ("tiny", "tiny-draft", "tiny-eagle")  # in the repository's folder models/
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED = ["original/*.json", "*/*.safetensors", "consolidated*"]  # makers' layouts, adapters
PART = r"-(?!00001)\d{5}-of-\d{5}\.gguf$"  # a file of a split, but the first


def find_model(name: str | Path, others: Iterable[str] = ()) -> Path:
    """A model's folder or its GGUF: an alias, an embedded model, a folder, FILE.gguf, or a Hub id
    (owner/name, owner/name:FILE.gguf), which is fetched. FileNotFoundError for what is none of
    these, or cannot be fetched; UserError for what is no name, and for a folder of several GGUFs.
    others: names that a caller knows, too, for the message."""
    if not isinstance(name, str | Path):
        refuse_value("the name of a model", name, "a text or a Path, or the model, loaded")
    text = str(name)
    folder = Path(os.path.expanduser(text))
    if text in EMBEDDED:
        folder = Path(__file__).parent.parent / "models" / text
    if text and folder.is_dir():
        return gguf_of(folder) or folder
    if is_gguf(folder) and folder.is_file():
        return folder
    repository, _, file = ALIASES.get(text, text).partition(":")
    if repository.count("/") != 1 or text.startswith(("/", ".", "~")):
        names = ", ".join([*ALIASES, *EMBEDDED, *others])
        raise FileNotFoundError(
            f"{text!r} is neither a folder, nor a Hub id (owner/name), nor a GGUF (FILE.gguf, or "
            f"owner/name:FILE.gguf), nor one of {names}"
        )
    if not file:
        return fetch(repository, WANTED, "*.safetensors")
    pattern = re.sub(r"-\d{5}-of-", "-*-of-", file)  # all files of a split
    return fetch(repository, [pattern], pattern) / file


def find_folder(name: str | Path) -> Path:
    """A model's folder, as `find_model` finds it. UserError for a GGUF."""
    path = find_model(name)
    if is_gguf(path):
        raise UserError(f"{path} is a GGUF: name the folder of the model that it was made from")
    return path


def is_gguf(path: Path) -> bool:
    """Whether a path names a file in GGUF, by its suffix or its first bytes."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return True
    return path.suffix == ".gguf"


def gguf_of(folder: Path) -> Path | None:
    """The GGUF of a folder that has no config.json. UserError if there are several."""
    if (folder / "config.json").exists():
        return None
    files = sorted(file for file in folder.glob("*.gguf") if not re.search(PART, file.name))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{folder} holds several models in GGUF: name one of {brief(names)}")
    return files[0] if files else None


def fetch(repository: str, wanted: list[str], weights: str) -> Path:
    """The folder of a Hub repository: up to date if the Hub answers, else from the local cache.

    wanted: patterns of the files to fetch; weights: of those without which a cache is no model.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=wanted, ignore_patterns=UNWANTED))
    except Exception as error:  # of the Hub, its HTTP library or the file system
        problem = brief(f"{type(error).__name__}: {error}", 200)
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
        if any(folder.glob(weights)):
            return folder
    except Exception:  # nothing is cached: the first problem is the one to tell
        pass
    raise FileNotFoundError(
        f"{repository} is not in the cache, and the Hub refuses it ({problem}). Check the name; "
        f"accept a gated model's licence at https://huggingface.co/{repository} and run "
        "`hf auth login`; go online once; or give a folder that holds the model"
    )
